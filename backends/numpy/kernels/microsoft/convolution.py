"""ONNX Runtime's convolution with an activation."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.convolution import conv
from refgrad.backends.numpy.kernels.microsoft.activation import activated, plus
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("FusedConv", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_conv(
    X: Array,
    W: Array,
    B: Array | None = None,
    Z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    """An activation of Conv + Z"""
    window: dict[str, Any] = {"kernel_shape": kernel_shape, "pads": pads, "strides": strides, "dilations": dilations}
    y = plus(conv(X, W, B, auto_pad=auto_pad, group=group, **window), Z)
    return activated(y, activation, activation_params or ()).astype(X.dtype, copy=False)
