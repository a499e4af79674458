"""The keys of the metadata that refgrad writes into models."""

# A constant that refgrad wrote: it may be a float, but it is not a weight. The value is the number before it was rounded to the
# type of the tensor, or "" where rounding changed nothing.
CONSTANT = "refgrad.constant"
