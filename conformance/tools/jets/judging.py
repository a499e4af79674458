"""Special points judged: does each derivative exist, and is it what refgrad says?"""

from __future__ import annotations

import itertools
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from refgrad.conformance.oracles.program import ComplexProgram
from refgrad.conformance.problems.point import in_float64
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.tools.jets.forwards import FORWARDS, call
from refgrad.conformance.tools.jets.planes import EXISTS, ORDERS, STATUSES, Direction, Plane, Sampled, SurfaceFunction
from refgrad.conformance.tools.jets.point import SpecialPoint
from refgrad.conformance.tools.jets.series import UndefinedError
from refgrad.conformance.tools.jets.values import Derivatives
from refgrad.errors import RefgradError

TOLERANCE = 1e-7  # relative to the largest derivative of that order, or to 1
_SAMPLED = 1e-4  # the same where the derivative is interpolated
_SHORT = 0.25  # the directions in which samples are taken, so that they stay on one piece


@dataclass(frozen=True)
class JetVerdict:
    """The verdict of the series, and refgrad's number, for one order at one point with respect to some inputs.

    `says` is "right" or "wrong" if the derivative exists. Otherwise it names the result of refgrad: "nan", "inf", "zero",
    "one side" (a one-sided derivative), "mean" (of both sides), "asymmetric" (it depends on the order in which the inputs are
    taken), "finite" (another number), "refused".
    """

    operator: str
    where: str
    row: str
    inputs: tuple[str, ...]
    order: int
    status: str
    says: str
    note: str = ""

    def __str__(self) -> str:
        by = "×".join(self.inputs)
        return f"{self.operator} [{self.where}] order {self.order} by {by}: {self.status}, {self.says} {self.note}".rstrip()


def judged(point: SpecialPoint) -> Iterator[JetVerdict]:
    """The verdicts on one point: every input alone, every pair, and all together where there are more."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        problem = ask(point.case())
        function = _function(problem, point.sampled)
        try:
            value = function.along()
        except UndefinedError:
            value = None
        known: dict[tuple[tuple[str, ...], int], str] = {}
        for inputs in _groups(problem.wrt):
            bases = _bases(problem, inputs, _SHORT if point.sampled else 1.0)
            planes = [Plane(function, value, *pair, seed=n) for n, pair in enumerate(bases)]
            derivatives = Derivatives(problem.model, inputs, problem.at, problem.wide_cotangents)
            for order in ORDERS:
                said = [plane.statuses[order] for plane in planes]
                said += [known[name, order] for name in _within(inputs) if (name, order) in known]
                status = known[inputs, order] = max(said, key=STATUSES.index)
                telling = [p for p in planes if p.statuses[order] == status] or planes
                found = [_compared(plane, status, derivatives, order) for plane in telling]
                says, note = next((f for f in found if f[0] == "wrong"), found[0])
                yield JetVerdict(point.operator, point.where, point.row, inputs, order, status, says, note)


def _within(inputs: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The smaller groups of the same inputs: what does not exist for them does not exist for all."""
    return [part for size in range(1, len(inputs)) for part in itertools.combinations(inputs, size)]


def _function(problem: Problem, sampled: bool) -> SurfaceFunction | Sampled:
    at, cotangents = problem.at, problem.wide_cotangents
    if not sampled:
        return SurfaceFunction(ComplexProgram(problem, FORWARDS, call), at, cotangents)
    prepared = in_float64(problem.model, problem.wrt)
    return Sampled(lambda moved: prepared.run(moved, tuple(cotangents)), at, cotangents)


def _groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = [(name,) for name in names]
    groups += itertools.combinations(names, 2)
    return [*groups, tuple(names)] if len(names) > 2 else groups


def _bases(problem: Problem, inputs: Sequence[str], length: float) -> list[tuple[Direction, Direction | None]]:
    """Pairs of directions: dense ones, and a dense one with one that moves a single element of each input."""
    rng = np.random.default_rng(zlib.crc32("|".join((problem.case, *inputs)).encode()))
    shapes = {name: np.shape(problem.at[name]) for name in inputs}
    sizes = [int(np.prod(shape)) for shape in shapes.values()]

    def dense(names: Sequence[str]) -> dict[str, np.ndarray]:
        return {
            name: length
            * np.asarray(np.round(rng.uniform(0.25, 2, shapes[name]) * rng.choice((-1, 1), shapes[name]), 3))
            for name in names
        }

    def sparse(names: Sequence[str]) -> dict[str, np.ndarray]:
        made = {}
        for name in names:
            made[name] = np.zeros(shapes[name])
            if made[name].size:
                made[name].flat[rng.integers(made[name].size)] = 1.25 * length
        return made

    if len(inputs) == 2:
        one, other = inputs[:1], inputs[1:]
        pairs: list[tuple[Direction, Direction | None]] = [(dense(one), dense(other))]
        return pairs if max(sizes) == 1 else [*pairs, (dense(one), sparse(other)), (sparse(one), dense(other))]
    if sum(sizes) == 1:
        return [(dense(inputs), None)]
    return [(dense(inputs), dense(inputs)), (dense(inputs), sparse(inputs))]


def _compared(plane: Plane, status: str, derivatives: Derivatives, order: int) -> tuple[str, str]:
    """The name of refgrad's answer on a plane (`JetVerdict.says`), and a note with the numbers."""
    try:
        said = derivatives.forms(order, plane.u, plane.v)
    except RefgradError as error:
        return "refused", " ".join(str(error).split())[:200]
    values = list(said.values())
    text = ", ".join(f"{x:.6g}" for x in values)
    if status == EXISTS:
        form = plane.form(order)
        assert form is not None
        right = {chosen: form[chosen.count(0) if plane.v is not None else 0] for chosen in said}
        sampled = isinstance(plane.function, Sampled)
        size = max(_SHORT**order if sampled else 1.0, *(abs(x) for x in right.values()))
        slack = (_SAMPLED if sampled else TOLERANCE) * size
        wrong = [c for c, x in said.items() if not abs(x - right[c]) <= slack]
        if not wrong:
            return "right", ""
        worst = wrong[0]
        return "wrong", f"D{worst} is {right[worst]:.9g}, refgrad says {said[worst]:.9g}"
    if any(np.isnan(values)):
        return "nan", text
    if any(np.isinf(values)):
        return "inf", text
    if all(abs(x) <= TOLERANCE for x in values):
        return "zero", ""
    return _side(plane, said, order), text


def _side(plane: Plane, said: Mapping[tuple[int, ...], float], order: int) -> str:
    """The name of a finite answer, by the sides that it belongs to."""

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= TOLERANCE * max(1.0, abs(a), abs(b))

    if not all(close(x, said[tuple(sorted(chosen))]) for chosen, x in said.items()):
        return "asymmetric"
    factorial = (1, 1, 2, 6)[order]
    own = {
        pair: sum(x * math.prod(pair[k] for k in chosen) for chosen, x in said.items()) / factorial
        for pair in plane.lines
    }
    there = {pair: plane.coefficient(pair, order) for pair in plane.lines}
    both = [p for p in plane.lines if (-p[0], -p[1]) in plane.lines]
    if both and all(close(own[p], (there[p] + (-1) ** order * there[-p[0], -p[1]]) / 2) for p in both):
        return "mean"
    return "one side" if any(close(own[p], there[p]) for p in plane.lines) else "finite"
