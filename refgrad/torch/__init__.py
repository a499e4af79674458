"""An ONNX model as a layer of torch (the extra `torch`)."""

from refgrad.installing import install

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"refgrad.torch needs torch. Install it: {install('torch')}.", name="torch") from error

from refgrad.torch.module import Module

__all__ = ["Module"]
