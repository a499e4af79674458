"""ONNX Runtime's training operators for convolutions, in ai.onnx operators."""

from __future__ import annotations

from typing import Any

from refgrad.lowering.microsoft.forms import form
from refgrad.reverse.emit import Emitter
from refgrad.rules.convolution import conv_transpose

_CONV: dict[str, Any] = {
    "auto_pad": "NOTSET",
    "dilations": None,
    "group": 1,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}


def _is_empty(op: Emitter, X: str) -> bool:
    """Whether it is known that there are no images: ONNX Runtime's Conv refuses them"""
    return (op.shape(X) or (None,))[0] == 0


def _nothing(op: Emitter, dY: str, X: str, W: str) -> tuple[str, str, str]:
    return op.zeros_like(X), op.zeros_like(W), op.full(op.Shape(dY, start=1, end=2), 0.0, like=W)


def _of_images(op: Emitter, X: str, dW: str) -> str:
    """0 where the run tells that there are no images: ONNX Runtime's Conv then returns what was in the memory before"""
    batch = (op.shape(X) or (None,))[0]
    return dW if isinstance(batch, int) else str(op.Where(op.Equal(op.Shape(X, end=1), 0), 0.0, dW))


@form("ConvGrad", results="X W :W", attributes=_CONV)
def conv_grad(op: Emitter, dY: str, X: str, W: str, **attributes: Any) -> tuple[str, str, str]:
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    dX, dW, dB = op.grad.ConvGrad(dY, X, W, **attributes)
    return dX, _of_images(op, X, dW), dB


@form("ConvTransposeGrad", results="X W :W", attributes=_CONV | {"output_padding": None, "output_shape": None})
def conv_transpose_grad(op: Emitter, dY: str, X: str, W: str, **attributes: Any) -> tuple[str, str, str]:
    """What the rule of ConvTranspose emits"""
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    dX, dW, dB = conv_transpose(op, dY, X, W, **attributes)
    return dX, _of_images(op, X, dW), dB
