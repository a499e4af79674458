"""Elementwise arithmetic, comparison, logic and casts, with NumPy's broadcasting, which is ONNX's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from refgrad.backends.numpy.kernels.operands import summed
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import SMALL, broadcasts, kernel, reuse, reuse_first
from refgrad.protos.domains import MICROSOFT

_UNARY: dict[str, Callable[..., Any]] = {  # the result has the type of the input
    "Abs": np.abs,
    "Acos": np.arccos,
    "Acosh": np.arccosh,
    "Asin": np.arcsin,
    "Asinh": np.arcsinh,
    "Atan": np.arctan,
    "Atanh": np.arctanh,
    "BitwiseNot": np.invert,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Exp": np.exp,
    "Floor": np.floor,
    "Log": np.log,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Reciprocal": np.reciprocal,
    "Round": np.rint,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Sqrt": np.sqrt,
    "Tan": np.tan,
}

_BINARY: dict[str, Callable[..., Any]] = {  # the result has the type of the inputs
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "And": np.logical_and,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
}

_COMPARISON: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
}

_VARIADIC = {"Max": np.maximum, "Min": np.minimum, "Sum": np.add}

_POWER = np.dtype(ml_dtypes.float8_e8m0fnu)
_finfo: Any = ml_dtypes.finfo  # it has no type hints
_FLOAT8 = {  # the least and the greatest number of each
    np.dtype(kind): (np.float32(_finfo(kind).min), np.float32(_finfo(kind).max))
    for kind in (
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
        ml_dtypes.float8_e8m0fnu,
    )
}
_SMALL_FLOATS = frozenset(
    np.dtype(kind)
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn, ml_dtypes.float4_e2m1fn)
)
_SMALL_INTEGERS = frozenset(map(np.dtype, (ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4)))


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    def unary(x: np.ndarray, *, _free: tuple[bool, ...] = ()) -> Any:
        return function(x, out=reuse(_free, x.dtype, x)) if _free and x.size > SMALL else function(x)

    return unary


def _two(function: Callable[..., Any]) -> Callable[..., Any]:
    def binary(a: np.ndarray, b: np.ndarray, *, _free: tuple[bool, ...] = ()) -> Any:
        if _free and (a.size > SMALL or b.size > SMALL):
            return function(a, b, out=reuse(_free, a.dtype, a, b))
        return function(a, b)

    return binary


def _compare(function: Callable[[np.ndarray, np.ndarray], Any]) -> Callable[[np.ndarray, np.ndarray], Any]:
    return lambda a, b: function(a, b)


def _many(function: Callable[..., Any]) -> Callable[..., Any]:
    def fold(first: np.ndarray, *others: np.ndarray, _free: tuple[bool, ...] = ()) -> Any:
        if not others:
            return first.copy()
        total = function(first, others[0], out=_reuse_of_two(first, *others, _free=_free))
        for x in others[1:]:
            total = function(total, x, out=total if total.ndim and broadcasts(x.shape, total.shape) else None)
        return total

    return fold


def _reuse_of_two(first: np.ndarray, *others: np.ndarray, _free: tuple[bool, ...] = ()) -> np.ndarray | None:
    """With a third operand, which may be one of the first two again, those stay as they are."""
    return reuse(_free, first.dtype, first, *others) if _free and len(others) == 1 else None


for _op_type, _unary in _UNARY.items():
    kernel(_op_type, fresh=True)(_one(_unary))
for _op_type, _binary in _BINARY.items():
    kernel(_op_type, since=7, fresh=True)(_two(_binary))
for _op_type, _comparison in _COMPARISON.items():
    kernel(_op_type, since=7, fresh=True)(_compare(_comparison))
for _op_type, _fold in _VARIADIC.items():
    kernel(_op_type, in_float32=True, fresh=True, abstract=_reuse_of_two)(_many(_fold))


@kernel("Identity", view=True)
def identity(x: np.ndarray) -> np.ndarray:
    return x


@kernel("IsNaN", fresh=True)
def is_nan(x: np.ndarray) -> Any:
    return np.isnan(x)


@kernel("Div", since=7, fresh=True)
def div(A: np.ndarray, B: np.ndarray, *, _free: tuple[bool, ...] = ()) -> Any:
    """Quotient; of integers, truncated towards zero."""
    if A.dtype.kind not in "iu":
        return np.divide(A, B, out=reuse(_free, A.dtype, A, B))
    _refuse_zeros(B, "B")
    quotient, remainder = np.divmod(A, B)
    return np.asarray(quotient + ((remainder != 0) & ((A < 0) != (B < 0))), A.dtype)


@kernel("DivGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def div_grad(
    dC: np.ndarray, A: np.ndarray, B: np.ndarray, *, _wanted: tuple[bool, ...]
) -> tuple[np.ndarray | None, ...]:
    """dA = dC/B, dB = −dC·A/B², each summed over the axes it was broadcast along"""
    want_dA, want_dB = (*_wanted, False)[:2]
    share = np.asarray(dC / B)
    dA = sum_to(share, A.shape) if want_dA else None
    return dA, sum_to(np.asarray(-share * (A / B)), B.shape) if want_dB else None


def _pow_memory(X: np.ndarray, Y: Any) -> None:
    """A whole exponent other than 2 takes the absolute value first."""
    if isinstance(Y, np.ndarray) and Y.size == 1 and Y.item() != 2 and Y.item() in (0.5, int(Y.item())):
        need(X.nbytes)


@kernel("Pow", since=7, fresh=True, abstract=_pow_memory)
def pow_(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Xʸ in the type of X."""
    if Y.size == 1 and X.ndim >= Y.ndim and X.dtype.kind == "f" and Y.dtype.kind in "fiu":
        exponent = Y.item()
        if exponent == 2:
            return np.asarray(np.square(X))
        if exponent == 0.5:  # NumPy takes the square root, which has another sign at −0 and is NaN at −∞
            root = np.asarray(np.sqrt(X + X.dtype.type(0)))
            root[np.isneginf(X)] = np.inf
            return root
        if math.isfinite(exponent) and exponent == int(exponent):
            # NumPy raises a negative number fifty times more slowly than a positive one.
            power = np.power(np.abs(X), Y).astype(X.dtype, copy=False)
            return np.asarray(np.copysign(power, X) if exponent % 2 else power)
    if X.dtype.kind in "iu" and Y.dtype.kind in "iu":
        if Y.dtype.kind == "i" and (Y < 0).any():
            _refuse_zeros(np.where(Y < 0, X, 1), "X, where Y is negative,")
            return np.asarray(np.power(X.astype(np.float64), Y).astype(X.dtype))
        Y = Y.astype(np.promote_types(X.dtype, np.uint64 if X.dtype.kind == "u" else np.int64))
    return np.asarray(np.power(X, Y).astype(X.dtype, copy=False))


@kernel("Mean", in_float32=True, fresh=True)
def mean(*data: np.ndarray) -> np.ndarray:
    return np.asarray(reduce(np.add, data) / len(data))


@kernel("Clip", since=11, fresh=True, abstract=reuse_first)
def clip(
    x: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None, *, _free: tuple[bool, ...] = ()
) -> Any:
    """min(max(x, low), high): where low > high the result is high. A bound of NaN is ignored, as in the function body."""
    low, high = (None if bound is None or np.isnan(bound) else bound for bound in (low, high))
    if low is None and high is None:
        return x.copy()
    into = reuse_first(x, _free=_free)
    if low is not None:
        x = np.maximum(x, low, out=into)
        into = x if x.ndim else None
    return x if high is None else np.minimum(x, high, out=into)


@kernel("Clip", fresh=True, abstract=reuse_first)
def clip_1(x: np.ndarray, *, min: float | None = None, max: float | None = None, _free: tuple[bool, ...] = ()) -> Any:
    return clip(x, *(None if bound is None else x.dtype.type(bound) for bound in (min, max)), _free=_free)


def _before_broadcasting(function: Callable[[np.ndarray, np.ndarray], Any]) -> Callable[..., Any]:
    """Before opset 7: B has the shape of A, or with `broadcast` one element, or the sizes of A from `axis` on.

    A size of 1 among these is expanded: the specification does not say so, but onnx's own tests of such models need it.
    """

    def call(A: np.ndarray, B: np.ndarray, *, axis: int | None = None, broadcast: int = 0) -> Any:
        shape = B.shape
        if broadcast and B.size == 1 and B.ndim <= A.ndim:
            return function(A, B.reshape(()))
        first = A.ndim - B.ndim if axis is None else axis + A.ndim if axis < 0 else axis
        part = A.shape[max(first, 0) : first + B.ndim]
        fits = len(part) == B.ndim and all(b in (1, a) for a, b in zip(part, shape, strict=True))
        if not fits or (shape != A.shape and not broadcast):
            rule = f"A's from axis {first} on, or one element" if broadcast else "the same, as broadcast is 0"
            raise ValueError(f"B has the shape {list(shape)} and A {list(A.shape)}; B's must be {rule}")
        return function(A, B.reshape(*shape, *[1] * (A.ndim - first - B.ndim)))

    return call


_OLD = ("Add", "Sub", "Mul", "And", "Or", "Xor", "Equal", "Greater", "Less")
_BROADCASTING = _BINARY | _COMPARISON
for _op_type, _old in {**{name: _BROADCASTING[name] for name in _OLD}, "Div": div, "Pow": pow_}.items():
    kernel(_op_type, fresh=True)(_before_broadcasting(_old))


@kernel("BitShift", fresh=True)
def bit_shift(X: np.ndarray, Y: np.ndarray, *, direction: str) -> np.ndarray:
    """A shift by a negative number of bits, or by the whole width or more, leaves 0 or −1: copies of the sign."""
    if direction not in ("LEFT", "RIGHT"):
        raise ValueError(f"direction={direction!r} is neither 'LEFT' nor 'RIGHT'")
    return np.asarray(np.left_shift(X, Y) if direction == "LEFT" else np.right_shift(X, Y))


@kernel("Mod", in_float32=True, fresh=True)
def mod(A: np.ndarray, B: np.ndarray, *, fmod: int) -> np.ndarray:
    """A − ⌊A/B⌋·B, which has the sign of B; with fmod A − trunc(A/B)·B, which has the sign of A"""
    if A.dtype.kind in "iu":
        _refuse_zeros(B, "B")
    return np.asarray(np.fmod(A, B) if fmod else np.mod(A, B))


def _refuse_zeros(x: np.ndarray, what: str) -> None:
    if np.count_nonzero(x) < x.size:
        first = np.unravel_index(np.argmin(x != 0), x.shape)
        raise ValueError(f"{what} has a 0 at {[int(i) for i in first]}; an integer cannot be divided by 0")


@kernel("IsInf", fresh=True)
def is_inf(X: np.ndarray, *, detect_negative: int, detect_positive: int) -> np.ndarray:
    infinite = np.isinf(X)
    if not detect_negative:
        infinite &= ~np.signbit(X)
    if not detect_positive:
        infinite &= np.signbit(X)
    return np.asarray(infinite)


def _reuse_second(_: np.ndarray, X: np.ndarray, *__: np.ndarray, _free: tuple[bool, ...] = ()) -> np.ndarray | None:
    return reuse(_free[1:2], X.dtype, X)


@kernel("Where", fresh=True, abstract=_reuse_second)
def where(condition: np.ndarray, X: np.ndarray, Y: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    return select(condition, X, Y, _reuse_second(condition, X, _free=_free))


def select(condition: np.ndarray, X: np.ndarray, Y: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
    """X where the condition holds, else Y; both have one type. It takes the bits Y ^ ((X ^ Y)·condition), without a branch.

    `into` is None or X itself, which may then be overwritten.
    """
    dtype, size = X.dtype, max(condition.size, X.size, Y.size)
    if size < 1024 or dtype != Y.dtype or dtype.kind not in "fiu" or dtype.itemsize > 8:
        return np.where(condition, X, Y)
    shape = np.broadcast_shapes(condition.shape, X.shape, Y.shape)
    bits = np.dtype(f"u{dtype.itemsize}")
    x, y = X.view(bits), Y.view(bits)
    result = np.empty(shape, bits) if into is None or into.shape != shape else into.view(bits)
    if Y.size == 1 and not y.any():
        np.multiply(x, condition.view(np.uint8), out=result)
    else:
        np.bitwise_xor(x, y, out=result)
        np.multiply(result, condition.view(np.uint8), out=result)
        np.bitwise_xor(result, y, out=result)
    return result.view(dtype)


@kernel("Scale", domain=MICROSOFT, in_float32=True, fresh=True)
def scale(x: np.ndarray, factor: np.ndarray, *, scale_down: int = 0) -> np.ndarray:
    """x·factor, or x/factor with scale_down; the factor is one number of any type"""
    number = factor.reshape(()).astype(x.dtype)
    return np.asarray(x / number if scale_down else x * number)


@kernel("BatchScale", domain=MICROSOFT, in_float32=True, fresh=True)
def batch_scale(
    x: np.ndarray, *, scale_0: float, scale_1: float, scale_2: float | None = None
) -> tuple[np.ndarray, ...]:
    """x·scale_i for each i: the gradient of ScaledSum"""
    return tuple(x * s for s in (scale_0, scale_1, scale_2) if s is not None)


@kernel("ScaledSum", domain=MICROSOFT, in_float32=True, fresh=True)
def scaled_sum(*xs: np.ndarray, scale_0: float, scale_1: float, scale_2: float = 1.0) -> np.ndarray:
    return reduce(np.add, (x * s for x, s in zip(xs, (scale_0, scale_1, scale_2), strict=False)))


@kernel("ZeroGradient", domain=MICROSOFT, fresh=True)
def zero_gradient(x: np.ndarray, _like: np.ndarray | None = None) -> np.ndarray:
    """Zeros of the shape and type of x"""
    return np.zeros_like(x)


def _cast_memory(x: np.ndarray, *, to: int, **_: Any) -> np.ndarray | None:
    return x if x.dtype == helper.tensor_dtype_to_np_dtype(to) else None


@kernel("Cast", since=6, abstract=_cast_memory)
def cast(x: np.ndarray, *, to: int, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    """Convert to the element type `to`; float8 saturates, bool is x ≠ 0, strings are parsed and printed."""
    return _converted(x, helper.tensor_dtype_to_np_dtype(to), bool(saturate), round_mode)


_TEXT = 512  # bytes of a printed number and of what NumPy makes on the way


def _converted(x: np.ndarray, dtype: np.dtype[Any], saturate: bool, round_mode: str) -> np.ndarray:
    if dtype.kind == "O":
        need(x.size * _TEXT)
        return _as_text(x)
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "O":
        x = _parsed(x, dtype)
    if dtype == _POWER:
        return _as_power(x, saturate, round_mode)
    return narrowed(x, dtype, saturate)


def narrowed(x: np.ndarray, dtype: np.dtype[Any], saturate: bool = True) -> np.ndarray:
    """`x` as `dtype`, rounded once; float8 is held within its range, or is infinite or NaN beyond it"""
    if dtype in _FLOAT8:
        x = _odd(x)
        if saturate:
            low, high = _FLOAT8[dtype]
            x = np.minimum(np.maximum(x, low), high)
    elif dtype in _SMALL_FLOATS:
        x = _odd(x)
    elif x.dtype in _SMALL_INTEGERS:
        x = x.astype(np.int8)
    return x.astype(dtype)


def _odd(x: np.ndarray) -> np.ndarray:
    """`x` in float32, with a last bit of 1 where bits were cut off: rounding that further rounds x (Boldo, Melquiond 2008).

    By itself ml_dtypes rounds doubles and integers twice, by way of float32.
    """
    if x.dtype.kind not in "iuf" or x.dtype.itemsize < 4 or x.dtype == np.float32:
        return x.astype(np.float32, copy=False)
    exact = _double(x)
    near = exact.astype(np.float32)
    near = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    bits = near.view(np.uint32) | ((near != exact) & ~np.isnan(exact))
    return np.asarray(bits.view(np.float32))


def _double(x: np.ndarray) -> np.ndarray:
    """`x` in double, an integer beyond 2⁵³ with a last bit of 1 where bits were cut off."""
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        cut = x.dtype.type(2**11 - 1)
        sticky = ((x & cut) != 0).astype(x.dtype) << x.dtype.type(11)
        x = np.where(np.abs(x.astype(np.float64)) < 2.0**53, x, (x & ~cut) | sticky)
    return x.astype(np.float64)


def _as_power(x: np.ndarray, saturate: bool, round_mode: str) -> np.ndarray:
    """The exponent of |x| in float8e8m0: 2⁻¹²⁷ to 2¹²⁷, beyond them the nearer one or NaN; 0 is below them"""
    mantissa, exponent = np.frexp(np.abs(_double(x)))  # the mantissa is at least 1/2 and below 1
    raised = {"up": mantissa > 0.5, "nearest": mantissa >= 0.75, "down": np.zeros(x.shape, bool)}
    if round_mode not in raised:
        raise ValueError(f"round_mode={round_mode!r} is not known; there are {', '.join(raised)}")
    power = np.where(mantissa == 0, -1e9, np.where(np.isinf(mantissa), 1e9, exponent - 1.0 + raised[round_mode]))
    if not saturate:
        power = np.where(np.abs(power) > 127, np.nan, power)
    bits = np.where(np.isnan(power) | np.isnan(mantissa), 255, np.clip(power, -127, 127) + 127)
    return bits.astype(np.uint8).view(_POWER)


@kernel("Cast")
def cast_1(x: np.ndarray, *, to: str, _wide: bool) -> np.ndarray:
    """The element type is called by its name."""
    wide = _wide and to in ("FLOAT", "FLOAT16")
    return cast(x, to=TensorProto.DOUBLE if wide else TensorProto.DataType.Value(to))


@kernel("BitCast")
def bit_cast(x: np.ndarray, *, to: int, _wide: bool) -> np.ndarray:
    """The same bits as another type of the same width. A float32 that is computed in double has the bits of its float32."""
    dtype = helper.tensor_dtype_to_np_dtype(to)
    if _wide and x.dtype == np.float64 and dtype.itemsize == 4:
        x = x.astype(np.float32)
    if _wide and dtype == np.float64 and x.dtype.itemsize == 4:
        return x.view(np.float32).astype(np.float64)
    if x.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"{x.dtype} cannot be read as {dtype}, which has another width")
    return x.view(dtype)


@kernel("CastLike", since=15, abstract=lambda x, like, **_: x if x.dtype == like.dtype else None)
def cast_like(x: np.ndarray, like: np.ndarray, *, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    return _converted(x, like.dtype, bool(saturate), round_mode)


def _parsed(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers that strings say. Whole numbers become an integer type without a detour through floats."""
    need(4 * x.size * max(map(len, x.flat), default=0))
    text = x.astype(str).astype(object)
    whole = dtype.kind in "iu"
    try:
        if whole:
            return text.astype(dtype)
    except (ValueError, OverflowError):
        pass  # with a fraction, or too large
    try:
        numbers = text.astype(np.float64)
    except ValueError as error:
        raise ValueError(f"{error}; a string must be a number in decimal notation, NaN or INF") from error
    if whole and not ((numbers >= np.iinfo(dtype).min) & (numbers <= np.iinfo(dtype).max)).all():
        raise ValueError(f"{text.tolist()} do not all fit {dtype}")
    return numbers


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
    return summed(x, (*range(leading), *stretched), keepdims=True).reshape(shape)
