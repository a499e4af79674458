"""The questions about a case, and the evidence that answers them."""
