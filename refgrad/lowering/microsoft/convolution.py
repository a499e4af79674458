"""ONNX Runtime's training operators for convolutions, in ai.onnx operators."""

from __future__ import annotations

from typing import Any

from refgrad.emit import Emitter
from refgrad.lowering.microsoft.forms import Ints, form
from refgrad.rules.convolution import conv_transpose


def _is_empty(op: Emitter, X: str) -> bool:
    """Whether it is known that there are no images: ONNX Runtime's Conv refuses them"""
    return (op.shape(X) or (None,))[0] == 0


def _nothing(op: Emitter, dY: str, X: str, W: str) -> tuple[str, str, str]:
    return op.zeros_like(X), op.zeros_like(W), op.full(op.Shape(dY, start=1, end=2), 0.0, like=W)


@form("ConvGrad", results="X W :W")
def conv_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> tuple[str, str, str]:
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    window: dict[str, Any] = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    return op.grad.ConvGrad(dY, X, W, auto_pad=auto_pad, group=group, **window)


@form("ConvTransposeGrad", results="X W :W")
def conv_transpose_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> tuple[str, str, str]:
    """What the rule of ConvTranspose emits"""
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    window: Any = auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
    return conv_transpose(op, dY, X, W, *window)
