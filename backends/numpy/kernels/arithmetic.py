"""Elementwise arithmetic, comparison, logic and casts, with NumPy's broadcasting, which is ONNX's."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from refgrad.backends.numpy.registry import MICROSOFT, kernel

_UNARY: dict[str, Callable[[np.ndarray], Any]] = {
    "Abs": np.abs,
    "Acos": np.arccos,
    "Acosh": np.arccosh,
    "Asin": np.arcsin,
    "Asinh": np.arcsinh,
    "Atan": np.arctan,
    "Atanh": np.arctanh,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Exp": np.exp,
    "Floor": np.floor,
    "Identity": lambda x: x,
    "IsNaN": np.isnan,
    "Log": np.log,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Reciprocal": lambda x: 1 / x,
    "Round": np.rint,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Sqrt": np.sqrt,
    "Tan": np.tan,
}

_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
}

_VARIADIC = {"Max": np.maximum, "Min": np.minimum, "Sum": np.add}


def _one(function: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    return lambda x: function(x)


def _two(function: Callable[[np.ndarray, np.ndarray], Any]) -> Callable[[np.ndarray, np.ndarray], Any]:
    return lambda a, b: function(a, b)


def _many(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *xs: reduce(function, xs)


for _op_type, _unary in _UNARY.items():
    kernel(_op_type)(_one(_unary))
for _op_type, _binary in _BINARY.items():
    # Before opset 7 broadcasting was an attribute; those versions are left to onnx.reference.
    kernel(_op_type, since=7)(_two(_binary))
for _op_type, _fold in _VARIADIC.items():
    kernel(_op_type, since=8, in_float32=True)(_many(_fold))


@kernel("Div", since=7)
def div(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Quotient; of integers, truncated towards zero."""
    if A.dtype.kind not in "iu":
        return np.asarray(np.divide(A, B))
    quotient, remainder = np.divmod(A, B)
    return np.asarray(quotient + ((remainder != 0) & ((A < 0) != (B < 0))), A.dtype)


@kernel("DivGrad", domain=MICROSOFT, in_float32=True)
def div_grad(
    dC: np.ndarray, A: np.ndarray, B: np.ndarray, *, _wanted: tuple[bool, ...]
) -> tuple[np.ndarray | None, ...]:
    """dA = dC/B, dB = −dC·A/B², each summed over the axes it was broadcast along"""
    want_dA, want_dB = (*_wanted, False)[:2]
    share = dC / B
    dA = sum_to(share, A.shape) if want_dA else None
    return dA, sum_to(-share * (A / B), B.shape) if want_dB else None


@kernel("Pow", since=7)
def pow_(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Xʸ in the type of X."""
    if X.dtype.kind in "iu" and Y.dtype.kind == "i" and (Y < 0).any():
        return np.asarray(np.power(X.astype(np.float64), Y).astype(X.dtype))
    return np.asarray(np.power(X, Y).astype(X.dtype, copy=False))


@kernel("Mean", since=8, in_float32=True)
def mean(*data: np.ndarray) -> np.ndarray:
    return np.asarray(reduce(np.add, data) / len(data))


@kernel("Clip", since=11)
def clip(x: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None) -> np.ndarray:
    """min(max(x, low), high): where low > high the result is high"""
    if low is not None:
        x = np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


@kernel("Clip", since=6)
def clip_6(x: np.ndarray, *, min: float, max: float) -> np.ndarray:
    return np.asarray(np.clip(x, x.dtype.type(min), x.dtype.type(max)))


@kernel("Where")
def where(condition: np.ndarray, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    return np.where(condition, X, Y)


@kernel("Scale", domain=MICROSOFT, in_float32=True)
def scale(x: np.ndarray, factor: np.ndarray, *, scale_down: int = 0) -> np.ndarray:
    """x·factor, or x/factor with scale_down; the factor is one number of any type"""
    number = factor.reshape(()).astype(x.dtype)
    return np.asarray(x / number if scale_down else x * number)


@kernel("BatchScale", domain=MICROSOFT, in_float32=True)
def batch_scale(
    x: np.ndarray, *, scale_0: float, scale_1: float, scale_2: float | None = None
) -> tuple[np.ndarray, ...]:
    """x·scale_i for each i: the gradient of ScaledSum"""
    return tuple(x * s for s in (scale_0, scale_1, scale_2) if s is not None)


@kernel("ScaledSum", domain=MICROSOFT, in_float32=True)
def scaled_sum(*xs: np.ndarray, scale_0: float, scale_1: float, scale_2: float = 1.0) -> np.ndarray:
    return reduce(np.add, (x * s for x, s in zip(xs, (scale_0, scale_1, scale_2), strict=False)))


@kernel("ZeroGradient", domain=MICROSOFT)
def zero_gradient(x: np.ndarray, _like: np.ndarray | None = None) -> np.ndarray:
    """Zeros of the shape and type of x"""
    return np.zeros_like(x)


_SATURATING = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
)


@kernel("Cast", since=6)
def cast(x: np.ndarray, *, to: int, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    """Convert to the element type `to`; float8 saturates, bool is x ≠ 0, strings are parsed and printed."""
    if to == TensorProto.STRING:
        return _as_text(x)
    dtype = helper.tensor_dtype_to_np_dtype(to)
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "O":
        x = x.astype(str).astype(np.float64)
    if to in _SATURATING and saturate:
        return numpy_helper.saturate_cast(x, dtype)
    if to == TensorProto.FLOAT8E8M0:
        return numpy_helper.to_float8e8m0(x, bool(saturate), round_mode).astype(dtype)
    return x.astype(dtype)


@kernel("CastLike", since=15)
def cast_like(x: np.ndarray, like: np.ndarray, *, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    return cast(x, to=helper.np_dtype_to_tensor_dtype(like.dtype), saturate=saturate, round_mode=round_mode)


def _as_text(x: np.ndarray) -> np.ndarray:
    if x.dtype in (np.float16, ml_dtypes.bfloat16):
        x = x.astype(np.float32)
    return x.astype(str).astype(object)


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum `x` over the axes that `shape` was broadcast along."""
    leading = x.ndim - len(shape)
    stretched = tuple(i + leading for i, n in enumerate(shape) if n == 1 and x.shape[i + leading] != 1)
    if not leading and not stretched:
        return x
    return np.asarray(x.sum((*range(leading), *stretched), keepdims=True).reshape(shape))
