"""The types and shapes of values."""
