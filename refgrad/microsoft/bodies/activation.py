"""ONNX Runtime's activations and dropouts, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Emitter, UnsupportedFormError, body, form, rule
from refgrad.formulas.types import widened
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import like
from refgrad.tables.definitions import FLOATS

D = TypeVar("D", float, None)

_SIGMOID_GELU = 1.702  # QuickGelu: x·σ(1.702·x)


@body("Gelu", "Y", domain=MICROSOFT)
def gelu_body(op: FunctionEmitter, X: str) -> str:
    """x·Φ(x)"""
    return gelu_formula(op, X, "none")


@body("FastGelu", "Y", domain=MICROSOFT)
def fast_gelu_body(op: FunctionEmitter, X: str, bias: str | None = None) -> str:
    """The tanh form of Gelu at X + bias"""
    return gelu_formula(op, plus(op, X, bias), "tanh")


@body("BiasGelu", "C", domain=MICROSOFT)
def bias_gelu_body(op: FunctionEmitter, A: str, B: str) -> str:
    """x·Φ(x) at A + B"""
    return gelu_formula(op, op.Add(A, B), "none")


@body("QuickGelu", "Y", domain=MICROSOFT)
def quick_gelu_body(op: FunctionEmitter, X: str, *, alpha: float = _SIGMOID_GELU) -> str:
    """x·σ(α·x)"""
    return op.Mul(X, op.Sigmoid(op.Mul(X, alpha)))


def gelu_formula(op: FunctionEmitter, x: str, approximate: str) -> str:
    if op.opset >= 20:
        return op.Gelu(x, approximate=approximate)
    if approximate == "tanh":
        cubic = op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)
        u = op.Tanh(op.Mul(op.Add(x, cubic), math.sqrt(2 / math.pi)))
    else:
        u = op.Erf(op.Mul(x, math.sqrt(0.5)))
    return op.Mul(x, op.Add(op.Mul(u, 0.5), 0.5))


@rule("Gelu", domain=MICROSOFT)
def gelu(op: Emitter, d_Y: str, X: str) -> str:
    """dx = dy·(Φ(x) + x·φ(x))"""
    return op.grad.GeluGrad(d_Y, X, approximate="none")


@rule("FastGelu", domain=MICROSOFT)
def fast_gelu(op: Emitter, d_Y: str, X: str, bias: str | None) -> tuple[str, str | None]:
    """dx = dy·g'(x + bias) with g the tanh form of Gelu, dbias the same summed over the axes of x that it lacks"""
    _lay_bias(op, X, bias)
    d_X = op.grad.GeluGrad(d_Y, X, bias, approximate="tanh")
    return d_X, None if bias is None else op.grad.BroadcastGradient(d_X, bias, (bias, X))


@rule("BiasGelu", domain=MICROSOFT)
def bias_gelu(op: Emitter, d_C: str, A: str, B: str) -> tuple[str, str]:
    """dA = dC·(Φ(x) + x·φ(x)) at x = A + B, dB the same summed over the axes of A that it lacks"""
    _lay_bias(op, A, B)
    d_A = op.grad.GeluGrad(d_C, A, B, approximate="none")
    return d_A, op.grad.BroadcastGradient(d_A, B, (B, A))


def _lay_bias(op: Emitter, x: str, bias: str | None) -> None:
    """By the definition of these operators a bias has one axis, the last one of x."""
    shape = op.shape(x)
    if bias is not None and shape and op.static(bias) is None:
        op.assume(bias, shape[-1:])


@rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(op: Emitter, d_Y: str, X: str, alpha: float) -> str:
    """dx = dy·s·(1 + α·x·(1 − s)) with s = σ(α·x)"""
    return op.grad.QuickGeluGrad(d_Y, X, alpha=alpha)


@body("BiasSoftmax", "output", domain=MICROSOFT)
def bias_softmax(op: FunctionEmitter, data: str, bias: str, *, axis: int = 1, is_inner_broadcast: int) -> str:
    """softmax(data + bias) over all axes from `axis` on, as one"""
    x = op.Add(data, bias)
    rank = op.rank(data)
    if axis == -1 or axis + 1 == rank:
        return op.Softmax(x, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(x, axis=axis), axis=1), op.Shape(x), allowzero=1)


@body("BiasDropout", "output", optional=["mask"], others=("mask", "training_mode"), domain=MICROSOFT)
def bias_dropout(
    op: FunctionEmitter,
    data: str,
    bias: str,
    residual: str | None = None,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> tuple[str, str]:
    """dropout(data + bias) + residual"""
    y, mask = op.Dropout(op.Add(data, bias), ratio, training_mode, outputs=2, seed=seed)
    return plus(op, y, residual), mask


@body("BiasSplitGelu", "Y", domain=MICROSOFT)
def bias_split_gelu(op: FunctionEmitter, X: str, bias: str) -> str:
    """left·(right·Φ(right)), the halves of X + bias"""
    left, right = halves(op, op.Add(X, bias))
    return op.Mul(left, gelu_formula(op, right, "none"))


@body("ScaledSiLU", "Y", types={"scale": FLOATS}, domain=MICROSOFT)
def scaled_silu_body(op: FunctionEmitter, X: str, scale: str | None = None, *, alpha: float = 1.0) -> str:
    """z·σ(z), z = scale·X; alpha is the scale where it is left out"""
    if scale is None:
        return scaled_silu(op, X, alpha)
    x, number = (op.wide(v) for v in (X, op.Reshape(scale, op.const(np.zeros(0, np.int64)))))
    z = op.Mul(x, op.CastLike(number, x))
    return scaled_silu(op, op.CastLike(z, X), 1.0)


def scaled_silu(op: FunctionEmitter, x: str, alpha: float) -> str:
    """z·σ(z), z = α·x"""
    if alpha != 1:
        x = op.CastLike(op.Mul(op.wide(x), alpha), x)
    return op.Mul(x, op.Sigmoid(x))


def halves(op: FunctionEmitter, x: str) -> tuple[str, str]:
    """The first and the second half of the last axis."""
    count = {"num_outputs": 2} if op.opset >= 18 else {}
    first, second = op.Split(x, outputs=2, axis=-1, **count)
    return first, second


@body(
    "BitmaskDropout",
    "output",
    optional=["mask"],
    others=("training_mode",),
    types={"mask": ["tensor(uint32)"]},
    domain=MICROSOFT,
)
def bitmask_dropout(
    op: FunctionEmitter,
    data: str,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> tuple[str, str]:
    """dropout(data); the mask has a bit for each element"""
    y, mask = op.Dropout(data, ratio, training_mode, outputs=2, seed=seed)
    return y, _packed(op, mask)


@body(
    "BitmaskBiasDropout",
    "output",
    optional=["mask"],
    others=("training_mode",),
    types={"mask": ["tensor(uint32)"]},
    domain=MICROSOFT,
)
def bitmask_bias_dropout(
    op: FunctionEmitter,
    data: str,
    bias: str,
    residual: str | None = None,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> tuple[str, str]:
    """dropout(data + bias) + residual; the mask has a bit for each element"""
    y, mask = bias_dropout(op, data, bias, residual, ratio, training_mode, seed=seed)
    return y, _packed(op, mask)


_BITS = 2 ** np.arange(32, dtype=np.int64)  # of a number of the mask, the lowest first


def _packed(op: FunctionEmitter, mask: str) -> str:
    """The elements of a mask in order as the bits of numbers of 32"""
    bits = op.Cast(op.Reshape(mask, [-1]), to=TensorProto.INT64)
    added = op.Mod(op.Neg(op.Shape(bits)), op.const([32]))
    words = op.Reshape(op.Concat(bits, op.Expand(op.const([0]), added), axis=0), [-1, 32])
    return op.Cast(op.ReduceSum(op.Mul(words, _BITS), [1], keepdims=0), to=TensorProto.UINT32)


def plus(op: FunctionEmitter, x: str, bias: str | None) -> str:
    return x if bias is None else op.Add(x, bias)


def activated(op: FunctionEmitter, x: str, activation: str | None, parameters: Sequence[float | None]) -> str:
    """The activation of a fused operator: by name, with its parameters in order where it has any."""
    if not activation:
        return x
    if activation in ("Relu", "Tanh", "Sigmoid", "Softplus", "Softsign", "HardSwish"):
        return str(op.emit(activation, "", (x,), 1, {}))
    if activation == "Gelu":
        return op.com_microsoft("Gelu", x)
    if activation == "QuickGelu":
        return op.com_microsoft("QuickGelu", x, alpha=_or(parameters, 0, _SIGMOID_GELU))
    if activation == "LeakyRelu":
        return op.LeakyRelu(x, alpha=_or(parameters, 0, 0.01))
    if activation == "Elu":
        return op.Elu(x, alpha=_or(parameters, 0, 1.0))
    if activation in ("ThresholdedRelu", "Celu"):
        return str(op.emit(activation, "", (x,), 1, {"alpha": _or(parameters, 0, 1.0)}))
    if activation == "Selu":  # its gamma is the third parameter of a FusedGemm
        return op.Selu(x, alpha=_or(parameters, 0, None), gamma=_or(parameters, 2, None))
    if activation == "HardSigmoid":
        return op.HardSigmoid(x, alpha=_or(parameters, 0, 0.2), beta=_or(parameters, 1, 0.5))
    if activation == "Clip":
        low, high = (parameters[k] if k < len(parameters) else None for k in (0, 1))
        return op.Clip(x, *(None if v is None else op.const(v, like=x) for v in (low, high)))
    raise UnsupportedFormError(f"its activation {activation!r} is not known here")


def _or(parameters: Sequence[float | None], position: int, default: D) -> float | D:
    value = parameters[position] if position < len(parameters) else None
    return default if value is None else value


@form("ReluGrad", results=[like("dY")])
def relu_grad(op: Emitter, dY: str, Y: str) -> str:
    """The kernel asks for Y > 0, so X will do in its place"""
    return op.Where(op.Greater(Y, 0.0), dY, 0.0)


@form("LeakyReluGrad", results=[like("dY")])
def leaky_relu_grad(op: Emitter, dY: str, X: str, *, alpha: float = 0.01) -> str:
    return op.grad.LeakyReluGrad(dY, X, alpha=alpha)


@form("SigmoidGrad", results=[like("dY")])
def sigmoid_grad(op: Emitter, dY: str, Y: str) -> str:
    return op.grad.SigmoidGrad(dY, Y)


@form("TanhGrad", results=[like("dY")])
def tanh_grad(op: Emitter, dY: str, Y: str) -> str:
    return op.grad.TanhGrad(dY, Y)


@form("GeluGrad", "BiasGeluGrad_dX", results=[like("dY")])
def gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None) -> str:
    return op.grad.GeluGrad(dY, X, B, approximate="none")


@form("FastGeluGrad", "BiasFastGeluGrad_dX", results=[like("dY")])
def fast_gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None) -> str:
    return op.grad.GeluGrad(dY, X, B, approximate="tanh")


@form("QuickGeluGrad", results=[like("dY")])
def quick_gelu_grad(op: Emitter, dY: str, X: str, *, alpha: float = 1.702) -> str:
    return op.grad.QuickGeluGrad(dY, X, alpha=alpha)


@form("SoftmaxGrad_13", results=[like("dY")])
def softmax_grad(op: Emitter, dY: str, Y: str, *, axis: int = -1) -> str:
    return _along_axis(op, "SoftmaxGrad", dY, Y, axis)


@form("LogSoftmaxGrad_13", results=[like("dY")])
def log_softmax_grad(op: Emitter, dY: str, Y: str, *, axis: int = -1) -> str:
    return _along_axis(op, "LogSoftmaxGrad", dY, Y, axis)


def _along_axis(op: Emitter, primitive: str, dY: str, Y: str, axis: int) -> str:
    """The sum is not one of 16 bits"""
    d, y = widened(op, dY, Y)
    return op.as_type(getattr(op.grad, primitive)(d, y, axis=axis), op.type(dY))


@form("SoftmaxGrad", results=[like("dY")])
def softmax_grad_1(op: Emitter, dY: str, Y: str, *, axis: int = 1) -> str:
    """The axes from `axis` on are one"""
    rows = _along_axis(op, "SoftmaxGrad", op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), 1)
    return op.reshape_like(rows, dY)


@form("LogSoftmaxGrad", results=[like("dY")])
def log_softmax_grad_1(op: Emitter, dY: str, Y: str, *, axis: int = 1) -> str:
    """The axes from `axis` on are one"""
    rows = _along_axis(op, "LogSoftmaxGrad", op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), 1)
    return op.reshape_like(rows, dY)


@form("DropoutGrad", results=[like("dY")])
def dropout_grad(
    op: Emitter,
    dY: str,
    mask: str,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> str:
    return op.grad.DropoutGrad(dY, mask, ratio, training_mode)


@form("BitmaskDropoutGrad", results=[like("dY")])
def bitmask_dropout_grad(
    op: Emitter,
    dY: str,
    mask: str,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> str:
    """DropoutGrad with a bit of the mask for each element"""
    words = op.Cast(op.Reshape(mask, [-1, 1]), to=TensorProto.INT64)
    bits = op.Reshape(op.Mod(op.Div(words, op.const(_BITS)), op.const([2])), [-1])
    kept = op.Cast(op.Slice(bits, [0], op.Reshape(op.Size(dY), [1])), to=TensorProto.BOOL)
    return op.grad.DropoutGrad(dY, op.reshape_like(kept, dY), ratio, training_mode)


@form("SoftmaxDropoutGrad", results=[like("dY")])
def softmax_dropout_grad(
    op: Emitter, dY: str, mask: str, softmax_y: str, ratio: str | None = None, *, axis: int, seed: int | None = None
) -> str:
    """The gradient of Softmax and Dropout, always in training"""
    d = op.grad.DropoutGrad(dY, mask, ratio, op.const(np.array(True)))
    return softmax_grad_1(op, op.declare(d, like=dY), softmax_y, axis=axis)
