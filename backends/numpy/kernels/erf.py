"""erf and erfc in NumPy, to about one unit in the last place of their type, and the Gelu of float32.

A double: the rational approximations of FreeBSD's msun, s_erf.c (Copyright 1993 Sun Microsystems, Inc., freely granted
for use, copy and distribution provided that this notice is preserved), evaluated on each of their four intervals at once.

A float32: a straight line for each of some ten thousand short pieces, in double; tables hold them. Their relative error is
at most 1e-8, a sixth of a float32's last place. Each block stays in the cache from the first operation to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from refgrad.backends.numpy.memory import need

_ERX = 8.45062911510467529297e-01  # erf(1) rounded to single precision
# Numerators and denominators, ascending powers. PP/QQ: |x| < 0.84375; PA/QA: up to 1.25; RA/SA: up to 1/0.35; RB/SB.
_PP = (
    1.28379167095512558561e-01,
    -3.25042107247001499370e-01,
    -2.84817495755985104766e-02,
    -5.77027029648944159157e-03,
    -2.37630166566501626084e-05,
)
_QQ = (
    1.0,
    3.97917223959155352819e-01,
    6.50222499887672944485e-02,
    5.08130628187576562776e-03,
    1.32494738004321644526e-04,
    -3.96022827877536812320e-06,
)
_PA = (
    -2.36211856075265944077e-03,
    4.14856118683748331666e-01,
    -3.72207876035701323847e-01,
    3.18346619901161753674e-01,
    -1.10894694282396677476e-01,
    3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)
_QA = (
    1.0,
    1.06420880400844228286e-01,
    5.40397917702171048937e-01,
    7.18286544141962662868e-02,
    1.26171219808761642112e-01,
    1.36370839120290507362e-02,
    1.19844998467991074170e-02,
)
_RA = (
    -9.86494403484714822705e-03,
    -6.93858572707181764372e-01,
    -1.05586262253232909814e01,
    -6.23753324503260060396e01,
    -1.62396669462573470355e02,
    -1.84605092906711035994e02,
    -8.12874355063065934246e01,
    -9.81432934416914548592e00,
)
_SA = (
    1.0,
    1.96512716674392571292e01,
    1.37657754143519042600e02,
    4.34565877475229228821e02,
    6.45387271733267880336e02,
    4.29008140027567833386e02,
    1.08635005541779435134e02,
    6.57024977031928170135e00,
    -6.04244152148580987438e-02,
)
_RB = (
    -9.86494292470009928597e-03,
    -7.99283237680523006574e-01,
    -1.77579549177547519889e01,
    -1.60636384855821916062e02,
    -6.37566443368389627722e02,
    -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)
_SB = (
    1.0,
    3.03380607434824582924e01,
    3.25792512996573918826e02,
    1.53672958608443695994e03,
    3.19985821950859553908e03,
    2.55305040643316442583e03,
    4.74528541206955367215e02,
    -2.24409524465858183362e01,
)
_LARGEST = 4  # erf rounds to 1 there
_PER_UNIT = 4096  # lines of erf, with an error of (1/4096)²/16 of its second derivative
_SHIFT = 11  # a line of the tail is for all 1 + a that differ in this many bits: 4096 between two powers of 2
_FIRST, _LAST = (int(x.view(np.int32)) >> _SHIFT for x in (np.float32(1), np.float32(16)))  # Φ(−15) rounds to 0
# Φ(−a)·e^(a²/2) in a, for 0 ≤ a ≤ 14.5, where a difference cancels.
_FINE_TAIL = (
    224.83111908181155,
    228.1030156151561,
    112.56839597417404,
    32.020539227767806,
    5.225533774607968,
    0.39894177523601326,
)
_FINE_HEAD = (
    449.66223820004075,
    814.9845851567976,
    650.5693449588848,
    295.2205462143733,
    81.26612340890767,
    13.09838580926512,
    1.0,
)

_BLOCK = 16384  # elements that are computed at a time: the doubles of all intermediate results fit in a core's cache
_LINE = 8  # doubles of a cache line: reading them at once is slower where they lie in two


def erf(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Error function; any float dtype, computed in double. `out` may be x."""
    if x.dtype == np.float32:
        return _blockwise(_erf_single, x, out)
    return _blockwise(lambda out, block, _: np.copyto(out, _both(block, complement=False), "unsafe"), x, out)


def erfc(x: np.ndarray) -> np.ndarray:
    """1 − erf(x) without cancellation for large x; any float dtype, computed in double."""
    return _blockwise(lambda out, block, _: np.copyto(out, _both(block, complement=True), "unsafe"), x)


def single_gelu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x·Φ(x) of float32, exact to one unit in the last place, where Φ is tiny too. `out` may be x."""
    return _blockwise(_gelu_single, x, out)


def single_gelu_slope(x: np.ndarray) -> np.ndarray:
    """Φ(x) + x·φ(x) of a float32: the derivative of `single_gelu`."""
    return _blockwise(_gelu_slope_single, x)


def blockwise_memory(x: np.ndarray, into: np.ndarray | None) -> np.ndarray:
    """The result of `_blockwise` for an array without data. A block needs `work` and a row of places in a table."""
    if x.flags.f_contiguous and not x.flags.c_contiguous:
        return blockwise_memory(x.T, None if into is None else into.T).T
    need((0 if x.flags.c_contiguous else x.nbytes) + 8 * 4 * min(x.size, _BLOCK))
    return into if into is not None and into.flags.c_contiguous else x.copy()


@np.errstate(invalid="ignore")  # NaN becomes some place of a table
def _blockwise(
    function: Callable[[np.ndarray, np.ndarray, np.ndarray], None], x: np.ndarray, into: np.ndarray | None = None
) -> np.ndarray:
    """An array of the shape and order of `x`, `into` if it lies in one piece, filled by `function(out, block, work)`.

    `work` are three rows of doubles as long as a block.
    """
    if x.flags.f_contiguous and not x.flags.c_contiguous:
        return _blockwise(function, x.T, None if into is None else into.T).T
    result = into if into is not None and into.flags.c_contiguous else np.empty(np.shape(x), x.dtype)
    flat, source = result.reshape(-1), np.ascontiguousarray(x).reshape(-1)
    work = _aligned(3, min(x.size, _BLOCK))
    for start in range(0, x.size, _BLOCK):
        block = source[start : start + _BLOCK]
        function(flat[start : start + _BLOCK], block, work[:, : block.size])
    return result


def _aligned(rows: int, size: int) -> np.ndarray:
    """(rows, at least `size`) doubles; every row starts where a cache line does."""
    size = -(-size // _LINE) * _LINE
    memory = np.empty(rows * size + _LINE)
    first = -memory.ctypes.data % (8 * _LINE) // 8
    return memory[first : first + rows * size].reshape(rows, size)


def _erf_single(out: np.ndarray, x: np.ndarray, work: np.ndarray) -> None:
    """The value of its line at each x."""
    argument, value, slope = work
    places = value.view(np.float32)[: x.size]
    np.clip(x, np.float32(-_LARGEST), np.float32(_LARGEST), out=out)
    np.multiply(out, np.float32(_PER_UNIT), out=places)
    places += np.float32(_LARGEST * _PER_UNIT)
    np.copyto(argument, out)
    _on_lines(_erf_lines(), places, argument, value, slope)
    np.copyto(out, value, "same_kind")


def _gelu_single(out: np.ndarray, x: np.ndarray, work: np.ndarray) -> None:
    """x·Φ(x) = max(x, 0) − |x|·Φ(−|x|). Φ(−∞)·∞ would be NaN; the result at ∞ is ∞."""
    a, value, other = work
    single = value.view(np.float32)[: x.size]
    np.abs(x, out=single)
    if not single.max() < math.inf:
        np.maximum(np.minimum(x, np.float32(20), out=single), np.negative(x), out=single)
    np.copyto(a, single)
    single += np.float32(1)
    places = single.view(np.int32)
    places >>= _SHIFT
    places -= _FIRST
    _on_lines(_tail_lines(), places, a, value, other)
    value *= _bell(a, other)
    value *= a
    np.maximum(x, np.float32(0), out=out)
    np.copyto(a, out)
    a -= value
    np.copyto(out, a, "same_kind")


def _on_lines(
    lines: tuple[np.ndarray, np.ndarray], places: np.ndarray, x: np.ndarray, value: np.ndarray, slope: np.ndarray
) -> None:
    """Put into `value` the values at x of the lines number `places`; the last line counts beyond. NaN gives NaN.

    `places` may lie in the memory of `value`.
    """
    numbers = places.astype(np.intp)
    for table, into in zip(lines, (value, slope), strict=True):
        table.take(numbers, out=into, mode="clip")
    slope *= x
    value += slope


@cache
def _erf_lines() -> tuple[np.ndarray, np.ndarray]:
    """The lines of erf over equal pieces from −4 to 4. Those that meet in 0 go through it, and −0 stays −0."""
    edges = np.arange(-_LARGEST * _PER_UNIT, _LARGEST * _PER_UNIT + 1) / _PER_UNIT
    base, slope = _lines(erf, edges)
    middle = slice(base.size // 2 - 1, base.size // 2 + 1)
    base[middle] = -0.0
    slope[middle] = (erf(edges[middle][1:] + 1 / _PER_UNIT) * _PER_UNIT + 2 / math.sqrt(math.pi)) / 2
    return base, slope


@cache
def _tail_lines() -> tuple[np.ndarray, np.ndarray]:
    """The lines of Φ(−a)·e^(a²/2) over pieces that grow with 1 + a."""
    bits = np.arange(_FIRST, _LAST + 1, dtype=np.int32) << _SHIFT
    return _lines(
        lambda a: 0.5 * erfc(a * math.sqrt(0.5)) * np.exp(a * a / 2), bits.view(np.float32).astype(np.float64) - 1
    )


def _lines(function: Callable[[np.ndarray], np.ndarray], edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lines b + s·x nearest to `function` between each two edges, as all b and all s.

    On a short piece the function is a parabola: halfway between its chord and the tangent at the middle the error is least.
    """
    left, right = edges[:-1], edges[1:]
    at = function(edges)
    slope = (at[1:] - at[:-1]) / (right - left)
    base = at[:-1] - slope * left
    middle = (left + right) / 2
    base += (function(middle) - (base + slope * middle)) / 2
    return base, slope


def _gelu_slope_single(out: np.ndarray, x: np.ndarray, work: np.ndarray) -> None:
    """h = Φ(−|x|) − |x|·φ(x) where x < 0, and 1 − h elsewhere"""
    a, value, other = work
    positive = np.greater_equal(x, 0)
    np.abs(x, out=out)
    np.copyto(a, out)
    _ratio(a, _FINE_TAIL, _FINE_HEAD, value, other)
    bell = _bell(a, other)
    a *= 1 / math.sqrt(2 * math.pi)
    value -= a
    value *= bell
    np.copyto(a, positive)
    np.multiply(a, -2, out=other)
    other += 1
    value *= other
    value += a
    np.copyto(out, value, "same_kind")


def _bell(a: np.ndarray, out: np.ndarray) -> np.ndarray:
    """e^(−a²/2)"""
    np.square(a, out=out)
    out *= -0.5
    np.exp(out, out=out)
    return out


def _both(x: np.ndarray, complement: bool) -> np.ndarray:
    flat = np.asarray(x, np.float64)
    size = np.abs(flat)
    result = np.full_like(flat, np.nan)
    near, middle, far = size < 0.84375, (size >= 0.84375) & (size < 1.25), size >= 1.25
    if near.any():
        z = flat[near]
        value = z + z * _ratio(z * z, _PP, _QQ)
        result[near] = 1 - value if complement else value
    if middle.any():
        value = _ERX + _ratio(size[middle] - 1, _PA, _QA)
        tail = 1 - _ERX - _ratio(size[middle] - 1, _PA, _QA)
        result[middle] = _signed(flat[middle], value, tail, complement)
    if far.any():
        tail = _far_tail(size[far])
        result[far] = _signed(flat[far], 1 - tail, tail, complement)
    return result


def _signed(x: np.ndarray, value: np.ndarray, tail: np.ndarray, complement: bool) -> np.ndarray:
    """Erf or erfc at `x` from erf = `value` and erfc = `tail` at |x|."""
    if complement:
        return np.where(x > 0, tail, 1 + value)
    return np.asarray(np.copysign(value, x))


def _far_tail(size: np.ndarray) -> np.ndarray:
    """Erfc for arguments from 1.25 on: exp(−z² − 9/16)·exp((z − x)(z + x) + R/S)/x, with z = x cut to 32 bits."""
    bounded = np.minimum(size, 30)
    s = 1 / (bounded * bounded)
    correction = np.where(bounded < 1 / 0.35, _ratio(s, _RA, _SA), _ratio(s, _RB, _SB))
    z = (bounded.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    return np.asarray(np.exp(-z * z - 0.5625) * np.exp((z - bounded) * (z + bounded) + correction) / bounded)


def _ratio(
    x: np.ndarray,
    numerator: Sequence[float],
    denominator: Sequence[float],
    out: np.ndarray | None = None,
    divisor: np.ndarray | None = None,
) -> np.ndarray:
    """A rational function of x, in `out`; the denominator in `divisor`."""
    value = _polynomial(x, numerator, out)
    value /= _polynomial(x, denominator, divisor)
    return value


def _polynomial(x: np.ndarray, coefficients: Sequence[float], out: np.ndarray | None = None) -> np.ndarray:
    """By Horner's rule, in `out` or a new array."""
    *rest, second, first = coefficients
    value: np.ndarray
    if first == 1:
        value = np.add(x, second, out=out)
    else:
        value = np.multiply(x, first, out=out)
        value += second
    for coefficient in reversed(rest):
        value *= x
        value += coefficient
    return value
