"""ONNX models in torch: `Module` is a layer with the weights of the model as parameters. Needs torch (the extra `torch`)."""

from refgrad.torch.module import Module

__all__ = ["Module"]
