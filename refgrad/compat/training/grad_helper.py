"""Names of `onnxcustom.training.grad_helper`."""

from refgrad.compat.derivative import DerivativeOptions, onnx_derivative, random_feed

__all__ = ["DerivativeOptions", "onnx_derivative", "random_feed"]
