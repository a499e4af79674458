"""The executors of refgrad: the NumPy interpreter, ONNX Runtime on CPU and CUDA, and whatever a package registers."""

from refgrad.backends.base import Backend, Prepared, Value
from refgrad.backends.discovery import available, backends, get_backend
from refgrad.backends.wrapped import wrap

__all__ = ["Backend", "Prepared", "Value", "available", "backends", "get_backend", "wrap"]
