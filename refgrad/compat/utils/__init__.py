"""The helpers of onnxcustom, under the names of its modules."""

from refgrad.compat.utils.print_helper import str_ortvalue

__all__ = ["str_ortvalue"]
