"""An ONNX model as a layer of torch (the extra `torch`)."""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("refgrad.torch needs torch. Install it: pip install 'refgrad[torch]'.", name="torch") from error

from refgrad.torch.module import Module

__all__ = ["Module"]
