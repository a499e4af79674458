"""The error and the warning of a training that does not converge, under the names that onnxcustom gave them."""

from refgrad.errors import ConvergenceError

__all__ = ["ConvergenceError", "ConvergenceWarning"]


class ConvergenceWarning(RuntimeWarning):
    """The loss is not finite, and the training ends. The optimizer was made with `exc=False`."""
