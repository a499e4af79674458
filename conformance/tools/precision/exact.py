"""Derivatives of mpmath functions, by differences with enough bits that cancellation loses nothing. They use no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpmath import mp, mpf

_STEP = 100  # bits: the distance of the points is 2^-100 of |x|, at most 2^-100
_GUARD = 280  # bits beyond those that differences cancel
_ALIKE = mpf(2) ** -60  # one-sided slopes that differ by less are equal

Forward = Callable[..., Any]


class OneSidedError(Exception):
    """The one-sided derivatives differ."""


def precision(numbers: Sequence[float], least: int) -> int:
    """Bits that keep the third difference around these numbers; `least` is the exponent of the type's smallest number."""
    widest = max((abs(mp.mag(mpf(x))) for x in numbers if x), default=0)
    return 3 * (_STEP + int(widest)) + abs(least) + _GUARD


def _step(x: Any) -> Any:
    return mp.ldexp(min(abs(x), mpf(1)) if x else mpf(1), -_STEP)


def slope(f: Forward, point: Sequence[Any], k: int) -> Any:
    """The derivative by the number `k`.

    :raises KinkError: the one-sided derivatives differ.
    :raises OutsideError: the function is not defined on both sides.
    """
    h = _step(point[k])
    below, above, apart = _sides(f, point, k, h)
    if apart > _ALIKE * max(abs(below), abs(above)) and _sides(f, point, k, h / 2**20)[2] > apart / 2:
        raise OneSidedError
    return (below + above) / 2


def _sides(f: Forward, point: Sequence[Any], k: int, h: Any) -> tuple[Any, Any, Any]:
    """The slopes below and above the number `k`, and how far they differ."""
    below, here, above = (f(*point[:k], point[k] + move, *point[k + 1 :]) for move in (-h, 0, h))
    left, right = (here - below) / h, (above - here) / h
    return left, right, abs(right - left)


def moves(f: Forward, point: Sequence[Any], k: int, sizes: Sequence[Any]) -> Any:
    """Σ |∂²f/∂xₖ∂xⱼ|·sizes[j]: how far the derivative by `k` moves with the numbers."""
    total = mpf(0)
    for j, size in enumerate(sizes):
        h = _step(point[j])
        ends = [_at(f, point, k, j, move) for move in (-h, h)]
        total += abs(ends[1] - ends[0]) / (2 * h) * size
    return total


def _at(f: Forward, point: Sequence[Any], k: int, j: int, move: Any) -> Any:
    moved = [*point[:j], point[j] + move, *point[j + 1 :]]
    h = _step(point[k])
    return (f(*moved[:k], moved[k] + h, *moved[k + 1 :]) - f(*moved[:k], moved[k] - h, *moved[k + 1 :])) / (2 * h)


def second(f: Forward, x: Any) -> tuple[Any, Any]:
    """The second and the third derivative of a function of one number.

    :raises KinkError: the one-sided second derivatives differ.
    :raises OutsideError: the function is not defined on both sides.
    """
    h = _step(x)
    ends = [f(x + move * h) for move in (-2, -1, 0, 1, 2)]
    left, right = (ends[0] - 2 * ends[1] + ends[2]) / h**2, (ends[2] - 2 * ends[3] + ends[4]) / h**2
    apart = abs(right - left)
    if apart > _ALIKE * max(abs(left), abs(right)):
        h /= 2**20
        near = [f(x + move * h) for move in (-2, -1, 0, 1, 2)]
        if abs((near[4] - 2 * near[3]) - (near[0] - 2 * near[1])) / h**2 > apart / 2:
            raise OneSidedError
        h *= 2**20
    return (ends[1] - 2 * ends[2] + ends[3]) / h**2, (ends[4] - 2 * ends[3] + 2 * ends[1] - ends[0]) / (2 * h**3)
