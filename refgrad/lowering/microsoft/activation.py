"""ONNX Runtime's training operators for activations, in ai.onnx operators."""

from __future__ import annotations

import numpy as np

from refgrad.formulas.types import widened
from refgrad.lowering.microsoft.forms import form
from refgrad.reverse.emit import Emitter


@form("ReluGrad", results="dY")
def relu_grad(op: Emitter, dY: str, Y: str) -> str:
    """The kernel asks for Y > 0, so X will do in its place"""
    return str(op.Where(op.Greater(Y, 0.0), dY, 0.0))


@form("LeakyReluGrad", results="dY")
def leaky_relu_grad(op: Emitter, dY: str, X: str, *, alpha: float = 0.01) -> str:
    return str(op.grad.LeakyReluGrad(dY, X, alpha=alpha))


@form("SigmoidGrad", results="dY")
def sigmoid_grad(op: Emitter, dY: str, Y: str) -> str:
    return str(op.grad.SigmoidGrad(dY, Y))


@form("TanhGrad", results="dY")
def tanh_grad(op: Emitter, dY: str, Y: str) -> str:
    return str(op.grad.TanhGrad(dY, Y))


@form("GeluGrad", "BiasGeluGrad_dX", results="dY")
def gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None) -> str:
    return str(op.grad.GeluGrad(dY, X, B, approximate="none"))


@form("FastGeluGrad", "BiasFastGeluGrad_dX", results="dY")
def fast_gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None) -> str:
    return str(op.grad.GeluGrad(dY, X, B, approximate="tanh"))


@form("QuickGeluGrad", results="dY")
def quick_gelu_grad(op: Emitter, dY: str, X: str, *, alpha: float = 1.702) -> str:
    return str(op.grad.QuickGeluGrad(dY, X, alpha=alpha))


@form("SoftmaxGrad_13", results="dY")
def softmax_grad(op: Emitter, dY: str, Y: str, *, axis: int = -1) -> str:
    return _along_axis(op, "SoftmaxGrad", dY, Y, axis)


@form("LogSoftmaxGrad_13", results="dY")
def log_softmax_grad(op: Emitter, dY: str, Y: str, *, axis: int = -1) -> str:
    return _along_axis(op, "LogSoftmaxGrad", dY, Y, axis)


def _along_axis(op: Emitter, primitive: str, dY: str, Y: str, axis: int) -> str:
    """The sum is not one of 16 bits"""
    d, y = widened(op, dY, Y)
    return op.as_type(getattr(op.grad, primitive)(d, y, axis=axis), op.type(dY))


@form("SoftmaxGrad", results="dY")
def softmax_grad_1(op: Emitter, dY: str, Y: str, *, axis: int = 1) -> str:
    """The axes from `axis` on are one"""
    rows = _along_axis(op, "SoftmaxGrad", op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), 1)
    return op.reshape_like(rows, dY)


@form("LogSoftmaxGrad", results="dY")
def log_softmax_grad_1(op: Emitter, dY: str, Y: str, *, axis: int = 1) -> str:
    """The axes from `axis` on are one"""
    rows = _along_axis(op, "LogSoftmaxGrad", op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), 1)
    return op.reshape_like(rows, dY)


@form("DropoutGrad", results="dY")
def dropout_grad(
    op: Emitter,
    dY: str,
    mask: str,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> str:
    return str(op.grad.DropoutGrad(dY, mask, ratio, training_mode))


@form("SoftmaxDropoutGrad", results="dY")
def softmax_dropout_grad(
    op: Emitter, dY: str, mask: str, softmax_y: str, ratio: str | None = None, *, axis: int, seed: int | None = None
) -> str:
    """The gradient of Softmax and Dropout, always in training"""
    d = op.grad.DropoutGrad(dY, mask, ratio, op.const(np.array(True)))
    return softmax_grad_1(op, op.declare(d, like=dY), softmax_y, axis=axis)
