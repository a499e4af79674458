"""The keys of the metadata that refgrad writes into models."""

from onnx import TensorProto

# A constant that refgrad wrote: it may be a float, but it is not a weight. The value is the number before it was rounded to the
# type of the tensor, or "" where rounding changed nothing.
CONSTANT = "refgrad.constant"


def is_number(tensor: TensorProto) -> bool:
    """True if refgrad added the tensor as a constant of a rule or of a loss. Training does not change these constants."""
    marks = tensor.metadata_props
    return bool(marks) and any(entry.key == CONSTANT for entry in marks)
