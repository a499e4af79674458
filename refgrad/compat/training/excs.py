"""The error of a training that does not converge, under the name that onnxcustom gave it."""

from refgrad.errors import ConvergenceError

__all__ = ["ConvergenceError"]
