"""The derivatives of Σ <cotangent, output> at a point, on a plane of directions, from series along lines and curves.

On the plane of u and v the coefficient of t^k along x + t·(α·u + β·v) is a function aₖ(α, β). The derivative of order k exists
if aₖ is a homogeneous polynomial of degree k, the same for t > 0 and t < 0, and the derivatives of lower order exist. It is
infinite where a power of t below k is not whole, or comes with log t.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from refgrad.conformance.oracles.program import ComplexProgram
from refgrad.conformance.tools.jets.forwards import series
from refgrad.conformance.tools.jets.series import LostError, Series, UndefinedError, UnknownError, mpf, precision

ORDERS = (1, 2, 3)
EXISTS, KINK, INFINITE, UNDEFINED = STATUSES = ("exists", "kink", "infinite", "undefined")
_LENGTHS = (5, 9, 14)  # of the series: more where leading terms cancel
_REACH, _SAMPLES, _DEGREE = 1 / 16, 12, 8  # of an interpolation
_SAME = 1e-8  # two coefficients are the same: relative to the largest
_ENOUGH, _MOST = 8, 40  # directions of a plane that are looked at, and that are tried
_FIRST = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, -1.0), (0.625, 1.375), (-0.75, 1.625))

Direction = Mapping[str, np.ndarray]
Pair = tuple[float, float]


class SurfaceFunction:
    """The function of a problem: t ↦ Σ <cotangent, output> along x + t·u + t²·v + t³·w, as a series.

    The error of the coefficient of t^k is `noise`·`steepness`^(k − 1).
    """

    noise, steepness = 1e-30, 1.0

    def __init__(self, program: ComplexProgram, at: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]) -> None:
        self._program, self._at, self._cotangents = program, dict(at), cotangents

    def along(self, *path: Direction) -> Series:
        """The series along the curve with the coefficients `path` of t, t² and t³.

        :raises UndefinedError: the function is not real there.
        """
        for length in _LENGTHS:
            try:
                with precision(length):
                    found = self._value(path)
            except LostError:
                continue
            if found.order > max(ORDERS):
                return found
        raise LostError

    def _value(self, path: Sequence[Direction]) -> Series:
        moved = dict(self._at)
        for name, x in moved.items():
            if isinstance(x, np.ndarray) and x.dtype == np.float64:
                moved[name] = _curve(x, [step[name] for step in path if name in step])
        results = self._program.run(moved)
        total = Series({})
        for name, cotangent in self._cotangents.items():
            for c, y in zip(cotangent.flat, np.asarray(results[name], object).flat, strict=True):
                total = total + Series.of(y) * mpf(c)
        return total


class Sampled:
    """The same for a function that is a polynomial of low degree in t on each side of the point, like a bilinear sample.

    Its series is interpolated from values in float64 at small t > 0: exact up to rounding, and refused where it does not fit.

    :param run: the outputs at a point.
    """

    noise, steepness = 1e-10 / _REACH, 2 / _REACH

    def __init__(
        self,
        run: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        at: Mapping[str, Any],
        cotangents: Mapping[str, np.ndarray],
    ) -> None:
        self._run, self._at, self._cotangents = run, dict(at), cotangents

    def along(self, *path: Direction) -> Series:
        """The series along a curve, as `SurfaceFunction.along`.

        :raises UnknownError: the function is not a polynomial of low degree there.
        """
        if not path:
            return Series.of(self._value({}))
        places = (1 - np.cos(np.pi * np.arange(1, _SAMPLES + 1) / _SAMPLES)) / 2  # closer at the ends (Chebyshev)
        values = []
        for t in places * _REACH:
            moves: dict[str, np.ndarray] = {}
            for power, step in enumerate(path, 1):
                for name, x in step.items():
                    moves[name] = moves.get(name, 0.0) + t**power * x
            values.append(self._value(moves))
        powers = places[:, None] ** np.arange(_DEGREE + 1)
        found = np.linalg.lstsq(powers, np.array(values), rcond=None)[0]
        size = max(1.0, float(np.max(np.abs(values))))
        if not np.max(np.abs(powers @ found - values)) <= 1e-12 * size:
            raise UnknownError("the function is not a polynomial beside the point")
        terms = {(k, 0): mpf(c / _REACH**k) for k, c in enumerate(found) if abs(c) > 1e-13 * size}
        return Series(terms, _DEGREE + 1)

    def _value(self, moves: Mapping[str, np.ndarray]) -> float:
        results = self._run({name: x + moves[name] if name in moves else x for name, x in self._at.items()})
        return float(sum(np.sum(c * results[name]) for name, c in self._cotangents.items()))


def _curve(x: np.ndarray, steps: Sequence[np.ndarray]) -> np.ndarray:
    made = series(x)
    for power, step in enumerate(steps, 1):
        for place, move in np.ndenumerate(step):
            if move:
                made[place] = made[place] + Series({(power, 0): mpf(move)})
    return made


@dataclass
class Plane:
    """Judge the series on the plane of u and v, or without v on the line of u."""

    function: SurfaceFunction | Sampled
    value: Series | None  # at the point; None where the function is undefined
    u: Direction
    v: Direction | None = None
    seed: int = 0
    lines: dict[Pair, Series] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pair in self._pairs() if self.value is not None else ():
            if sum(map(_independent(self.lines), self.lines)) >= _ENOUGH and len(self.lines) >= 2 * len(_FIRST):
                break
            try:
                self.lines[pair] = self.function.along(self.direction(pair))
            except UndefinedError:
                continue

    def direction(self, pair: Pair) -> Direction:
        """α·u + β·v."""
        made = {name: pair[0] * x for name, x in self.u.items()}
        for name, x in (self.v or {}).items():
            made[name] = made.get(name, 0.0) + pair[1] * x
        return made

    def _pairs(self) -> Iterator[Pair]:
        """Directions, each with its opposite."""
        if self.v is None:
            yield from ((1.0, 0.0), (-1.0, 0.0))
            return
        for a, b in _FIRST:
            yield from ((a, b), (-a, -b))
        rng = np.random.default_rng(self.seed)
        for _ in range(_MOST):
            a, b = np.round(rng.standard_normal(2), 3)
            yield float(a), float(b)

    @cached_property
    def statuses(self) -> dict[int, str]:
        """Per order: the derivative exists, differs by side or direction, or is infinite; or the function is undefined."""
        found = {}
        before = EXISTS
        for order in ORDERS:
            before = self._status(order) if before == EXISTS else before if before != KINK else self._worse(order)
            found[order] = before
        return found

    def _status(self, order: int) -> str:
        if not self.lines:
            return UNDEFINED
        if self._worse(order) == INFINITE:
            return INFINITE
        if any(self._jumps(line) for line in self.lines.values()):
            return KINK
        return EXISTS if self.form(order) is not None and self._on_curves(order) else KINK

    def _worse(self, order: int) -> str:
        """Infinite if a line is, else a kink."""
        if self.value is not None and (
            self.value.infinite or any(_diverges(line, order) for line in self.lines.values())
        ):
            return INFINITE
        return KINK

    def _jumps(self, line: Series) -> bool:
        value = Series.of(0.0) if self.value is None else self.value
        return bool(abs((line - value).coefficient(0)) > _SAME * max(1, abs(value.coefficient(0))))

    def coefficient(self, pair: Pair, order: int) -> float:
        """The coefficient of t^order along a direction."""
        return float(self.lines[pair].coefficient(order))

    def form(self, order: int) -> tuple[float, ...] | None:
        """D[u, …, v, …] with m times u, for m = 0 to `order`, where the coefficients are a form of that degree; else None."""
        pairs = list(self.lines)
        values = np.array([self.coefficient(pair, order) for pair in pairs])
        if self.v is None:
            powers = np.array([[a**order] for a, _ in pairs])
            counts = [order]
        else:
            powers = np.array([[a**m * b ** (order - m) for m in range(order + 1)] for a, b in pairs])
            counts = list(range(order + 1))
        if np.linalg.matrix_rank(powers) < len(counts):
            return None
        found = np.linalg.lstsq(powers, values, rcond=None)[0]
        if np.max(np.abs(powers @ found - values)) > self._slack(order, float(np.max(np.abs(values)))):
            return None
        scale = math.factorial(order)
        return tuple(float(c) * scale / math.comb(order, m) for c, m in zip(found, counts, strict=True))

    def _on_curves(self, order: int) -> bool:
        """True if the coefficient along curves is the one that the forms up to this order give (Faà di Bruno)."""
        forms = {k: self.form(k) for k in range(1, order + 1)}
        rng = np.random.default_rng(self.seed + 1)
        for _ in range(2):
            drawn = np.round(rng.standard_normal((3, 2)), 3).tolist()
            steps: list[Pair] = [(a, 0.0 if self.v is None else b) for a, b in drawn]
            try:
                line = self.function.along(*map(self.direction, steps))
            except UndefinedError:
                continue
            if _diverges(line, order):
                return False
            known: dict[int, tuple[float, ...]] = {k: form for k, form in forms.items() if form is not None}
            expected = sum(c * _evaluated(known[len(d)], d, self.v is None) for c, d in _parts(steps, order))
            size = max(1.0, *(abs(x) for form in known.values() for x in form))
            if abs(float(line.coefficient(order)) - expected) > self._slack(order, size):
                return False
        return True

    def _slack(self, order: int, size: float) -> float:
        """How far two coefficients of t^order may differ that are the same."""
        return max(_SAME * size, self.function.noise * self.function.steepness ** (order - 1))


def _independent(lines: Mapping[Pair, Series]) -> Callable[[Pair], bool]:
    """A direction counts once if its opposite is there too."""
    return lambda pair: pair > (-pair[0], -pair[1]) or (-pair[0], -pair[1]) not in lines


def _diverges(line: Series, order: int) -> bool:
    """True if the derivative of an order along a line is infinite."""
    return any(e < 0 or (e < order and e != int(e)) or (e <= order and k) for e, k in line.terms) or bool(line.infinite)


def _parts(steps: Sequence[Pair], order: int) -> list[tuple[float, list[Pair]]]:
    """The terms of the coefficient of t^order of f(x + t·d₁ + t²·d₂ + t³·d₃): a factor, and the directions of a form."""
    d1, d2, d3 = steps
    return {
        1: [(1.0, [d1])],
        2: [(1.0, [d2]), (0.5, [d1, d1])],
        3: [(1.0, [d3]), (1.0, [d1, d2]), (1 / 6, [d1, d1, d1])],
    }[order]


def _evaluated(form: Sequence[float], directions: Sequence[Pair], line: bool) -> float:
    """A symmetric form of which D[u, …, v, …] with m times u is known, at directions α·u + β·v."""
    if line:
        return form[0] * math.prod(a for a, _ in directions)
    total = 0.0
    for chosen in itertools.product((0, 1), repeat=len(directions)):
        weight = math.prod(pair[which] for pair, which in zip(directions, chosen, strict=True))
        total += weight * form[chosen.count(0)]
    return total
