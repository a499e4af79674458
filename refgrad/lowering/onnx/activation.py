"""Activations. A cotangent that may be infinite is selected away where it does not pass: 0·inf is NaN."""

from __future__ import annotations

import math

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.masks import mask_cotangent
from refgrad.tables.registry import lowering

_CUBIC = 0.044715  # of the tanh form of Gelu


@lowering("ReluGrad")
def relu_grad(op: Emitter, dY: str, Y: str) -> str:
    """Y is never negative: as a truth value it is Y > 0, and a Cast is faster than a comparison."""
    return mask_cotangent(op, op.Cast(Y, to=TensorProto.BOOL), dY)


@lowering("LeakyReluGrad")
def leaky_relu_grad(op: Emitter, dY: str, X: str, alpha: float) -> str:
    if alpha == 0:
        return op.Where(op.Greater(X, 0.0), dY, 0.0)
    return op.Mul(dY, op.Where(op.Greater(X, 0.0), op.const(1.0, like=dY), op.const(alpha, like=dY)))


@lowering("SigmoidGrad")
def sigmoid_grad(op: Emitter, dY: str, Y: str) -> str:
    return op.Mul(op.Mul(dY, Y), op.Sub(1.0, Y))


@lowering("TanhGrad")
def tanh_grad(op: Emitter, dY: str, Y: str) -> str:
    return op.Mul(dY, op.Sub(1.0, op.Mul(Y, Y)))


@lowering("GeluGrad")
def gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None, approximate: str = "none") -> str:
    X = X if B is None else op.Add(X, B)
    if approximate == "tanh":
        # y = x·s, s = sigmoid(2u), u = √(2/π)·(x + 0.044715·x³): y' = s + s·(1 − s)·x·(2u)'. Beyond 22 it is 0 or 1
        # in every type, and x³ would soon overflow.
        X = op.Clip(X, -22.0, 22.0)
        square = op.Mul(X, X)
        scale = 2 * math.sqrt(2 / math.pi)
        s = op.Sigmoid(op.Mul(X, op.Add(op.Mul(square, scale * _CUBIC), scale)))
        slope = op.Mul(X, op.Add(op.Mul(square, 3 * scale * _CUBIC), scale))
        return op.Mul(dY, op.Mul(s, op.Add(op.Mul(op.Sub(1.0, s), slope), 1.0)))
    cdf = op.Add(op.Mul(op.Erf(op.Mul(X, math.sqrt(0.5))), 0.5), 0.5)
    density = op.Mul(op.Exp(op.Mul(op.Mul(X, X), -0.5)), 1 / math.sqrt(2 * math.pi))
    return op.Mul(dY, op.Add(cdf, op.Mul(X, density)))


@lowering("QuickGeluGrad")
def quick_gelu_grad(op: Emitter, dY: str, X: str, alpha: float) -> str:
    """α comes last: α·X may overflow, where the slope is 0 or 1."""
    s = op.Sigmoid(op.Mul(X, alpha))
    return op.Mul(dY, op.Add(s, op.Mul(op.grad.SigmoidGrad(X, s), alpha)))


@lowering("SoftmaxGrad")
def softmax_grad(op: Emitter, dY: str, Y: str, axis: int) -> str:
    return op.Mul(Y, op.Sub(dY, op.ReduceSum(op.Mul(dY, Y), [axis], keepdims=1)))


@lowering("LogSoftmaxGrad")
def log_softmax_grad(op: Emitter, dY: str, Y: str, axis: int) -> str:
    return op.Sub(dY, op.Mul(op.Exp(Y), op.ReduceSum(dY, [axis], keepdims=1)))


@lowering("DropoutGrad")
def dropout_grad(
    op: Emitter, dY: str, mask: str, ratio: str | None, training_mode: str | None, seed: int | None = None
) -> str:
    """In inference the mask keeps everything, so the scale alone tells the modes apart."""
    training = op.constant(training_mode)
    if training_mode is None or (training is not None and not training.any()):
        return dY
    known = op.constant(ratio)
    scale: str | float
    if ratio is not None and known is None:
        scale = op.Cast(op.Reciprocal(op.Sub(1.0, ratio)), to=op.type(dY))
    else:
        scale = 1 / (1 - (0.5 if known is None else float(known.item())))
    if training is None:
        scale = op.Where(
            training_mode, scale if isinstance(scale, str) else op.const(scale, like=dY), op.const(1.0, like=dY)
        )
    return op.Where(mask, op.Mul(dY, scale), 0.0)
