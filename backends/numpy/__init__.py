"""The NumPy interpreter."""

from refgrad.backends.numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
