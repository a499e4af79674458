"""What is asked about a case, and what counts as an answer."""
