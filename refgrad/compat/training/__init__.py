"""The training of onnxcustom, under the names of its modules."""

from refgrad.compat.training.excs import ConvergenceError

__all__ = ["ConvergenceError"]
