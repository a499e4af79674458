"""Elementwise arithmetic. The sweep sums each cotangent over the axes along which its input was broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.op import Emitter
from refgrad.formulas.masks import mask_cotangent
from refgrad.formulas.norms import quotient
from refgrad.formulas.types import in_range
from refgrad.protos.types import smallest_normal
from refgrad.rules.quantization import within_range
from refgrad.rules.squares import is_sum_of_squares
from refgrad.tables.registry import rule


@rule("Add", broadcast=True)
def add(op: Emitter, d_C: str) -> tuple[str, str]:
    """dA = dC, dB = dC"""
    return d_C, d_C


@rule("Sub")
def sub(op: Emitter, d_C: str, A: str, B: str) -> tuple[str, str]:
    """dA = dC, dB = −dC, each summed over the axes along which its input was broadcast"""
    return op.grad.BroadcastGradient(d_C, A, (A, B)), op.Neg(op.grad.BroadcastGradient(d_C, B, (A, B)))


@rule("Mul", broadcast=True)
def mul(op: Emitter, d_C: str, A: str, B: str) -> tuple[str, str]:
    """dA = dC·B, dB = dC·A"""
    return op.Mul(d_C, B), op.Mul(d_C, A)


@rule("Div")
def div(op: Emitter, d_C: str, A: str, B: str, C: str) -> tuple[str, str]:
    """dA = dC/B, dB = −dA·C"""
    return op.grad.DivGrad(d_C, A, B, C)


@rule("Mod", broadcast=True)
def mod(op: Emitter, d_C: str, A: str, B: str, C: str) -> tuple[str, str]:
    """dA = dC, dB = −dC·q, where q = (A − C)/B is the whole quotient

    For an infinite B it is −1 where the signs differ, since C is A + B there, else 0. Where C is NaN, dB is 0.
    """
    quotient = op.Div(op.Sub(A, C), B)
    whole = op.Floor(op.Add(quotient, 0.5))  # Round has no bfloat16 before opset 22
    beyond = op.Where(op.Equal(B, C), op.const(-1.0, like=B), op.const(0.0, like=B))
    return d_C, op.Neg(op.Mul(d_C, op.Where(op.IsNaN(quotient), beyond, whole)))


@rule("Sum", broadcast=True)
def sum_(op: Emitter, d_sum: str, data_0: list[str]) -> list[str]:
    """dx_i = dy"""
    return [d_sum] * len(data_0)


@rule("Mean", broadcast=True)
def mean(op: Emitter, d_mean: str, data_0: list[str]) -> list[str]:
    """dx_i = dy/n"""
    return [op.Mul(d_mean, 1 / len(data_0))] * len(data_0)


_CLAMPS = ("clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor")  # torch's, whose bounds are tensors
_FLAT_AT_THE_ENDS = ("hardtanh", "relu6")


@rule("Max", broadcast=True)
def max_(op: Emitter, d_max: str, data_0: list[str], max: str) -> list[str]:
    """dx_i = dy/k where x_i = y, else 0; k inputs are equal to y there, none where y is NaN: then dx_i is NaN"""
    return _shared(op, d_max, data_0, max)


@rule("Min", broadcast=True)
def min_(op: Emitter, d_min: str, data_0: list[str], min: str) -> list[str]:
    """dx_i = dy/k where x_i = y, else 0; k inputs are equal to y there, none where y is NaN: then dx_i is NaN"""
    return _shared(op, d_min, data_0, min)


def _shared(op: Emitter, d_y: str, inputs: list[str], y: str) -> list[str]:
    if len(inputs) == 1:
        return [d_y]
    if len(inputs) == 2 and op.torch_function in _CLAMPS:
        unchanged = op.Equal(inputs[0], y)
        return [mask_cotangent(op, unchanged, d_y), mask_cotangent(op, unchanged, d_y, unless=True)]
    attained = [op.Equal(x, y) for x in inputs]
    ties = op.Sum(*(op.Cast(hit, to=op.type(d_y)) for hit in attained))
    share = op.Div(d_y, ties)
    # Where y is NaN none is equal to it, and 0/0 is NaN. ONNX Runtime's builder has 0 there.
    none = 0.0 if op.dialect.follows_onnxruntime else op.Div(0.0, ties)
    return [mask_cotangent(op, hit, share, other=none) for hit in attained]


@rule("Clip", broadcast=True)
def clip(
    op: Emitter, d_output: str, input: str, min: str | None, max: str | None
) -> tuple[str, str | None, str | None]:
    """dx = dy where min ≤ x ≤ max and min < max, else 0; dmax = dy where max(x, min) > max; dmin = dy where x < min ≤ max"""
    # The output is not compared with the input: a runtime may have rounded one of them and not the other.
    if min is None and max is None:
        return d_output, None, None
    if max is None:
        return (
            mask_cotangent(op, op.GreaterOrEqual(input, min), d_output),
            mask_cotangent(op, op.Less(input, min), d_output),
            None,
        )
    if min is None:
        return (
            mask_cotangent(op, op.LessOrEqual(input, max), d_output),
            None,
            mask_cotangent(op, op.Less(max, input), d_output),
        )
    if op.torch_function in _FLAT_AT_THE_ENDS:
        inside = op.And(op.Greater(input, min), op.Less(input, max))
    else:
        inside = op.And(op.GreaterOrEqual(input, min), op.LessOrEqual(input, max))
        low, high = op.constant(min), op.constant(max)
        if low is None or high is None or not np.all(low < high):  # where min = max, every x gives the same
            inside = op.And(inside, op.Less(min, max))
    lowered = op.Less(max, op.Max(input, min))
    raised = mask_cotangent(op, op.Less(input, min), d_output)
    return (
        mask_cotangent(op, inside, d_output),
        mask_cotangent(op, lowered, raised, unless=True),
        mask_cotangent(op, lowered, d_output),
    )


@rule("Where", broadcast=True)
def where(op: Emitter, d_output: str, condition: str) -> tuple[str, str]:
    """dX = dy where the condition holds, else 0; dY = dy where it does not, else 0"""
    # Always selected: a Where is what guards a NaN, such as that of a softmax whose scores are all −∞.
    return op.Where(condition, d_output, 0.0), op.Where(condition, 0.0, d_output)


@rule("Pow", broadcast=True)
def pow_(op: Emitter, d_Z: str, X: str, Y: str, Z: str) -> tuple[str | None, str]:
    """dX = dZ·Y·X^(Y − 1), dY = dZ·Z·log X, and 0 where X = 0"""
    log = op.Log(op.Where(op.Equal(X, 0.0), 1.0, X))
    d_base = _d_base(op, d_Z, X, Y, Z)
    if d_base is not None and op.torch_function == "linalg_vector_norm":
        d_base = op.Where(op.Equal(X, 0.0), 0.0, d_base)
    return d_base, op.as_type(op.Mul(d_Z, op.Mul(Z, log)), op.type(Y))


def _d_base(op: Emitter, d_Z: str, X: str, Y: str, Z: str) -> str | None:
    known, guarded = op.constant(Y), op.kinks != "onnxruntime"
    if known is None or known.size != 1 or not (guarded or known.item()):
        exponent = op.as_type(Y, op.type(X))
        lowered = op.Sub(_nonzero_at_zero(op, exponent, X) if guarded else exponent, 1.0)
        return op.Mul(d_Z, op.Mul(op.Pow(X, lowered), exponent))
    y = float(known.item())
    if y in (0, 1):
        return d_Z if y else None
    rest = quotient(op, d_Z, Z) if y == 0.5 else None
    if rest is not None:
        return op.Mul(rest, y)
    if op.strong_zero and 0.5 <= y < 1 and is_sum_of_squares(op.graph, X):
        return _unless_zero(op, X, lambda base: op.Mul(d_Z, op.Mul(op.Pow(base, y - 1), y)))
    return op.Mul(d_Z, op.Mul(X if y == 2 else op.Pow(X, y - 1), y))


def _nonzero_at_zero(op: Emitter, exponent: str, X: str) -> str:
    """The exponent, with 1 for 0 where 1/X is not finite in the type: 0·X⁰ is 0 there, and 0·X⁻¹ would be NaN.

    Elsewhere the exponent stays 0, because the mixed derivative of X^Y at Y = 0 is 1/X.
    """
    tiny = smallest_normal(helper.tensor_dtype_to_np_dtype(op.type(X)))
    alone = op.And(op.Equal(exponent, 0.0), op.Less(op.Abs(X), tiny))
    return op.Where(alone, 1.0, exponent)


@rule("Identity")
def identity(op: Emitter, d_output: str) -> str:
    """dx = dy"""
    return d_output


@rule("Cast")
def cast(op: Emitter, d_output: str, input: str, output: str) -> str:
    """dx = dy in the type of x"""
    return op.as_type(within_range(op, d_output, input, output), op.values.adjoint_type(input))


@rule("CastLike", wrt=["input"])
def cast_like(op: Emitter, d_output: str, input: str, output: str) -> str:
    """dx = dy in the type of x"""
    return op.as_type(within_range(op, d_output, input, output), op.values.adjoint_type(input))


@rule("Neg")
def neg(op: Emitter, d_Y: str) -> str:
    """dx = −dy"""
    return op.Neg(d_Y)


@rule("Abs")
def abs_(op: Emitter, d_Y: str, X: str, Y: str) -> str:
    """dx = dy·sign x; if dy has the factor y, as in the gradient of y², y·sign x is x"""
    rest = quotient(op, d_Y, Y)
    return op.Mul(d_Y, op.Sign(X)) if rest is None else op.Mul(rest, X)


@rule("Sqrt")
def sqrt(op: Emitter, d_Y: str, X: str, Y: str) -> str:
    """dx = dy·(½/y)

    At x = 0 that is ±∞, and NaN for dy = 0, as in torch: put a mask before the root, not after it, or use `strong_zero`.
    With it, the slope of the root of a sum of squares, such as a variance, is 0 at 0: the least subgradient of the norm.
    If dy has the factor y, as in the gradient of y², nothing is divided.
    """
    rest = quotient(op, d_Y, Y)
    if rest is not None:
        return op.Mul(rest, 0.5)
    if op.strong_zero and is_sum_of_squares(op.graph, X):
        return _unless_zero(op, Y, lambda root: op.Mul(d_Y, op.Div(0.5, root)))
    return op.Mul(d_Y, op.Div(0.5, Y))


def _unless_zero(op: Emitter, value: str, slope: Callable[[str], str]) -> str:
    """The slope at `value`, and 0 where `value` is 0."""
    at_zero = op.Equal(value, 0.0)
    return op.Where(at_zero, 0.0, slope(op.Where(at_zero, 1.0, value)))


@rule("Exp")
def exp(op: Emitter, d_output: str, output: str) -> str:
    """dx = dy·y"""
    return op.Mul(d_output, output)


@rule("Log")
def log(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy/x"""
    return op.Div(d_output, input)


@rule("Reciprocal")
def reciprocal(op: Emitter, d_Y: str, Y: str) -> str:
    """dx = −dy·y²"""
    return op.Neg(op.Mul(op.Mul(d_Y, Y), Y))


@rule("Sin")
def sin(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy·cos x"""
    return op.Mul(d_output, op.Cos(input))


@rule("Cos")
def cos(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy·(0 − sin x)"""
    return op.Mul(d_output, op.Sub(0.0, op.Sin(input)))


@rule("Tan")
def tan(op: Emitter, d_output: str, output: str) -> str:
    """dx = dy·(1 + y²)"""
    return op.Mul(d_output, op.Add(op.Mul(output, output), 1.0))


@rule("Asin")
def asin(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy/√((1 − x)·(1 + x))"""
    return op.Div(d_output, op.Sqrt(_one_minus_square(op, input)))


@rule("Acos")
def acos(op: Emitter, d_output: str, input: str) -> str:
    """dx = −dy/√((1 − x)·(1 + x))"""
    return op.Neg(op.Div(d_output, op.Sqrt(_one_minus_square(op, input))))


@rule("Atan")
def atan(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy/(1 + x²), of float16 in float32: there x² overflows from 256 on"""
    kind = op.type(d_output)
    d, x = (_from_half(op, value) for value in (d_output, input))
    return op.as_type(op.Div(d, op.Add(op.Mul(x, x), 1.0)), kind)


@rule("Sinh")
def sinh(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy·cosh x"""
    return op.Mul(d_output, op.Cosh(input))


@rule("Cosh")
def cosh(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy·sinh x; the derivatives of y·tanh x would be ∞·0 where y overflows"""
    return op.Mul(d_output, op.Sinh(input))


@rule("Asinh")
def asinh(op: Emitter, d_output: str, output: str) -> str:
    """dx = dy/cosh y, and cosh y = √(1 + x²), whose square would overflow"""
    return op.Div(d_output, op.Cosh(output))


@rule("Acosh")
def acosh(op: Emitter, d_output: str, output: str) -> str:
    """dx = dy/sinh y, and sinh y = √(x² − 1), which would cancel near 1"""
    return op.Div(d_output, op.Sinh(output))


@rule("Atanh")
def atanh(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy/((1 − x)·(1 + x)), of float16 in float32: there the second derivative is the difference of two infinities"""
    kind = op.type(d_output)
    d, x = (_from_half(op, value) for value in (d_output, input))
    return op.as_type(op.Div(d, _one_minus_square(op, x)), kind)


def _from_half(op: Emitter, value: str) -> str:
    """The value, float16 as float: for what leaves the range of float16 on the way."""
    return op.as_type(value, TensorProto.FLOAT) if op.type(value) == TensorProto.FLOAT16 else value


def _one_minus_square(op: Emitter, x: str) -> str:
    return op.Mul(op.Sub(1.0, x), op.Add(x, 1.0))


@rule("Erf")
def erf(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy·2/√π·exp(−x²)"""
    return op.Mul(d_output, op.Mul(op.Exp(op.Neg(op.Mul(input, input))), 2 / math.sqrt(math.pi)))


@rule("CumSum", wrt=["x"])
def cum_sum(op: Emitter, d_y: str, axis: str, exclusive: int, reverse: int) -> str:
    """dx = dy summed from the other end"""
    return op.CumSum(d_y, axis, exclusive=exclusive, reverse=int(not reverse))


@rule("CumProd", wrt=["x"])
def cum_prod(op: Emitter, d_y: str, x: str, axis: str, exclusive: int, reverse: int) -> str:
    """dx_j = (Π_{k<j} x_k)·s_j, where s_j = dy_j + x_{j+1}·s_{j+1}; exclusive with dy_{j+1}, reverse from the other end

    It does not divide, so any x may be 0. The recurrence is solved by doubling: s_j = b_j + a_j·s_{j+d} holds for d = 1,
    then with b_j + a_j·b_{j+d} and a_j·a_{j+d} for 2·d, until d is at least the size of the axis. Where only the run
    tells that size, it is taken to be below 2³¹.
    """
    known, shape = op.constant(axis), op.shape(x)
    size = None if known is None or shape is None else shape[known.item()]
    places = op.Reshape(op.as_type(axis, TensorProto.INT64), [1]) if known is None else op.const([known.item()])

    def following(value: str, distance: int) -> str:
        """The element `distance` further on along the axis; zeros beyond the end."""
        if isinstance(size, int):
            end = op.const([-distance, distance] if not reverse else [distance, -distance])
        else:
            there = op.Min([distance], op.Gather(op.Shape(x), places, axis=0))
            end = op.Concat(*((op.Neg(there), there) if not reverse else (there, op.Neg(there))), axis=0)
        return op.Pad(value, end, None, places)

    if size == 0:
        return d_y
    terms, factors, distance = following(d_y, 1) if exclusive else d_y, following(x, 1), 1
    while distance < (size if isinstance(size, int) else 2**31):
        terms = op.Add(terms, _product(op, factors, following(terms, distance)))
        factors = _product(op, factors, following(factors, distance))
        distance *= 2
    return _product(op, op.CumProd(x, axis, exclusive=1, reverse=reverse or None), terms)


def _product(op: Emitter, a: str, b: str) -> str:
    """a·b, and 0 where one is 0 and the other has overflowed: the numbers that it is a product of are finite."""

    def held(value: str, other: str) -> str:
        return op.Where(op.Equal(other, 0.0), in_range(op, value), value)

    return op.Mul(held(a, b), held(b, a))


@rule("Dropout", wrt=["data", "ratio"])
def dropout(
    op: Emitter,
    d_output: str,
    output: str,
    mask: str,
    ratio: str | None,
    training_mode: str | None,
    seed: int | None,
) -> tuple[str, str | None]:
    """dx = dy/(1 − ratio) where the mask kept x, else 0; dratio = Σ dy·y/(1 − ratio) for a given mask

    In inference dx = dy and dratio = 0.
    """
    d_data = op.grad.DropoutGrad(d_output, mask, ratio, training_mode, seed=seed)
    training = op.constant(training_mode)
    if not ratio or not training_mode or (training is not None and not training.any()):
        return d_data, None
    products = op.as_type(op.ReduceSum(op.Mul(d_output, output), keepdims=0), op.type(ratio))
    d_ratio = op.Div(products, op.Sub(1.0, ratio))
    return d_data, d_ratio if training is not None else op.Where(training_mode, d_ratio, 0.0)
