"""The judge of a comparison: refgrad's gradient in double, and how far rounding and kinks move it.

The judge runs on the interpreter. Central differences, which know no rule, confirm its gradient in the disputed tensors. To see
which errors rounding explains, the interpreter rounds every intermediate result: to the nearest number, and then several times
up or down by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.conformance.judge.elementwise import Effects, allowed_error
from refgrad.conformance.locating.recordings import Match
from refgrad.conformance.oracles.comparison import EXACT, FLOAT64_BITS, against_directions, outside_of_both
from refgrad.conformance.oracles.differences import estimates
from refgrad.conformance.oracles.joint import contradiction
from refgrad.conformance.problems.feeds import SIZE
from refgrad.conformance.problems.kinked import is_at_kink, kinked, kinked_among, kinks_of
from refgrad.conformance.problems.observation import Directional
from refgrad.conformance.problems.point import Point, Truth, by_name, fed_alone, in_float64, largest
from refgrad.conformance.problems.rounding import limits
from refgrad.conformance.verdicts import RIGHT, UNDECIDED, WRONG
from refgrad.errors import BackendError, choices
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient as differentiate

# The elements of a tensor that are looked at one by one, if there are more. `Judge.outside` takes so many that are furthest
# off, and as many by chance; `Judge.at_kinks` takes so many by chance.
LOOKED = 64
# The disputed tensors in which central differences check the judge. Any further ones count as confirmed.
_CONFIRMED = 4
# The elements of an input that are sorted into those at a kink and others. If there are more, LOOKED of them stand for all.
# `kinked_among` needs up to 511 tests for 256 elements, and gives up after 512.
_TOLD_APART = 256
# No more roundings are tried if an error is this many times larger than the effect of the roundings so far. In `is_far` the
# factor for a tensor of n elements is at least √n. It was 100, and came down in the commit that cut the time of a comparison of
# twelve layers to a third (benchmarks/locating_scale.py measures such a model).
_BEYOND = 10.0
# The same factor for the norm of the error of at least _MANY elements. It is smaller because chance evens out over them.
_TOGETHER, _MANY = 3.0, 16


class Judge:
    """The gradient by refgrad in double, with the differences that confirm or contradict it.

    :param report: called with the step in progress, how far it is, and how far it goes, None if nobody knows.
    """

    def __init__(
        self,
        point: Point,
        gradient: ModelProto,
        seed: int,
        report: Callable[[str, int, int | None], None] = lambda *_: None,
    ) -> None:
        self.point, self.gradient, self.seed, self.report = point, gradient, seed, report
        feeds = point.wide | point.seeds
        results = in_float64(fed_alone(gradient, feeds)).run(feeds)
        self.truth = Truth(point, gradient, by_name(results, point.names))
        self.outputs = {name: np.asarray(value) for name, value in point.forward.run(point.wide).items()}
        self._confirmed: dict[str, str] = {}
        self._kinked: dict[str, np.ndarray | None] = {}
        self.has_kinks = bool(kinks_of(point.model))

    @property
    def said(self) -> str:
        """A text about the judge: how many of the disputed tensors differences confirm or contradict."""
        if not self._confirmed:
            return "refgrad in double"
        bad = sorted(name for name, verdict in self._confirmed.items() if verdict == WRONG)
        if bad:
            return f"refgrad in double; central differences contradict it in {choices(bad)}"
        agreed = sum(verdict == RIGHT for verdict in self._confirmed.values())
        return f"refgrad in double; central differences confirm {agreed} of {len(self._confirmed)} disputed tensors"

    def forget(self) -> None:
        """Give back the gradients and what rounding makes of them."""
        self.truth = replace(self.truth, gradients={}, _moved={}, _spread={}, _apart=None)
        self.outputs, self._kinked = {}, {}

    def confirmed(self, name: str) -> str:
        """The verdict of central differences on the judge's own gradient."""
        if name not in self._confirmed and len(self._confirmed) >= _CONFIRMED:
            return RIGHT
        if name not in self._confirmed:
            self.report(f"differences by {name!r}", len(self._confirmed), None)
            point = self.point
            rng = np.random.default_rng([self.seed, 1])
            mask = self.kinked(name)
            still = {} if mask is None else {name: mask}
            said = estimates(point.evaluate, point.wide, [name], point.cotangent_of, rng, directions=1, still=still)
            found = [one for one in said if isinstance(one, Directional)]
            got = self.truth.gradients[name]
            if mask is not None:
                got = np.where(mask, 0.0, got)
            self._confirmed[name] = (
                against_directions(self.truth, name, got, found, EXACT, exact=True).verdict if found else UNDECIDED
            )
        return self._confirmed[name]

    def kinked(self, name: str) -> np.ndarray | None:
        """A mask of the elements of an input that are at a kink; None if there are none."""
        if not self.has_kinks:
            return None
        if name not in self._kinked:
            self.report(f"kinks of {name!r}", 0, None)
            point = self.point
            found = kinked(point.model, point.forward, point.wide, [name], list(point.seeds_of))
            self._kinked[name] = found.get(name)
        return self._kinked[name]

    def at_kinks(self, name: str, where: np.ndarray) -> np.ndarray:
        """A mask of the elements in `where` that are at a kink. If too many, some stand for all, by chance."""
        nowhere = np.zeros(where.shape, bool)
        if not self.has_kinks or where.shape != self.point.wide[name].shape:
            return nowhere
        point = self.point
        few = np.count_nonzero(where) <= _TOLD_APART
        for looked in (where, self._looked(where)) if few else (self._looked(where),):
            try:
                found = kinked_among(point.model, point.forward, point.wide, name, list(point.seeds_of), looked)
            except (BackendError, ValueError):  # the model does not run beside the point
                return nowhere
            if found is not None:
                return where if np.array_equal(found, looked) else found
        return nowhere

    def outside(self, name: str, got: np.ndarray, tolerance: float, where: np.ndarray) -> str:
        """A text about an element at a kink that is not between the derivatives of both sides; "" if all are.

        If there are too many, it looks at the ones that are furthest off, and at others by chance.
        """
        self.report(f"both sides of the kinks of {name!r}", 0, None)
        rng = np.random.default_rng([self.seed, 4])
        off = np.where(where, np.abs(got - self.truth.gradients[name]), -1.0)
        furthest = np.zeros(where.shape, bool)
        furthest.flat[np.argsort(-off, axis=None, kind="stable")[:LOOKED]] = True
        return outside_of_both(self.truth, name, got, tolerance, rng, (furthest | self._looked(where)) & where)

    def contradicted(self, got: Mapping[str, np.ndarray], tolerance: float) -> str:
        """A text about a direction along which these gradients are no derivative all together; "" if there is none.

        Element by element they may still lie between the derivatives of both sides (`contradiction`).
        """
        if not self.has_kinks or not (self.contradicts_itself or self.differing(got)):
            return ""
        found = self._contradiction(got, tolerance)
        if found is None:
            return ""
        direction, due, slope = found
        return f"along {direction} the derivative is {due:.6g}, but the gradients together give {slope:.6g}"

    @cached_property
    def contradicts_itself(self) -> bool:
        """True if the point is at a kink of operators, and what their usual conventions make together is no derivative."""
        point = self.point
        if not self.has_kinks:
            return False
        outputs = list(point.seeds_of)
        if not any(is_at_kink(point.model, point.forward, point.wide, name, outputs) for name in self.truth.gradients):
            return False
        return self._contradiction(self.truth.gradients, EXACT) is not None

    def _contradiction(self, got: Mapping[str, np.ndarray], tolerance: float) -> tuple[str, float, float] | None:
        point, expected = self.point, self.truth.gradients
        rng = np.random.default_rng([self.seed, 6])
        arrays = {name: np.asarray(got[name], np.float64) for name in expected if name in got}
        prepared = in_float64(fed_alone(self.gradient, point.wide | point.seeds))

        def nearby(moved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            there = point.wide | {name: point.wide[name] + step for name, step in moved.items()}
            return by_name(prepared.run(there | point.seeds), point.names)

        function = point.evaluate, point.wide, point.cotangent_of
        return contradiction(*function, arrays, tolerance, rng, expected, nearby)

    def differing(self, got: Mapping[str, np.ndarray]) -> list[str]:
        """The names of the gradients that differ from the judge's by more than rounding in double."""
        pairs = {
            name: (np.asarray(got[name], np.float64), due) for name, due in self.truth.gradients.items() if name in got
        }
        with np.errstate(invalid="ignore"):
            return [
                name
                for name, (value, due) in pairs.items()
                if value.shape == due.shape and float(np.max(np.abs(value - due), initial=0.0)) > EXACT * largest(due)
            ]

    def _looked(self, where: np.ndarray) -> np.ndarray:
        looked = np.zeros(where.shape, bool)
        looked.flat[np.random.default_rng([self.seed, 5]).permutation(np.flatnonzero(where))[:LOOKED]] = True
        return looked

    def effects(self, match: Match, left_out: np.ndarray) -> Effects:
        """How far rounding moves the elements of a matched tensor; 0 for those that are left out."""

        def combined(sizes: Callable[[str], np.ndarray]) -> np.ndarray:
            return np.where(left_out, 0.0, match.made_of({name: sizes(name) for name in match.names}, sizes=True))

        return Effects.of(self.truth, combined)

    def tolerated(self, match: Match, tolerance: float) -> float:
        """The error that is allowed in every element of a matched tensor, by a tolerance of the largest finite element."""
        gradients = {name: self.truth.gradients[name] for name in match.names}
        size = max((largest(value[np.isfinite(value)]) for value in gradients.values()), default=0.0)
        # Results below the smallest normal number of the type are not accurate.
        floor = max(limits(self.point.dtype(name))[1] * value.size**0.5 for name, value in gradients.items())
        return float(max(tolerance * size, floor))


def is_far(error: np.ndarray, drawn: np.ndarray) -> bool:
    """True if more draws of rounding will not explain an error: an element is far off, or all of them together are.

    :param error: the part of it that is not explained without them.
    """
    left = np.maximum(error, 0.0)
    together = left.size >= _MANY and np.linalg.norm(left) > _TOGETHER * np.linalg.norm(drawn)
    return bool(together or np.any(left > max(_BEYOND, left.size**0.5) * drawn))


def by_output(point: Point) -> dict[str, np.ndarray]:
    """The cotangents of a point, by the names of the outputs."""
    return {output: point.cotangents[name] for output, name in point.seeds_of.items()}


def is_exact(judge: Judge, name: str, found: np.ndarray | None) -> bool:
    """True if a gradient computed in double is right."""
    due = judge.truth.gradients[name]
    got = np.zeros_like(due) if found is None else np.asarray(found, np.float64)
    if got.shape != due.shape:
        return False
    with np.errstate(all="ignore"):
        error = np.where((got == due) | (np.isnan(got) & np.isnan(due)), 0.0, np.abs(got - due))
    size = largest(due[np.isfinite(due)])
    if bool(np.all(error <= EXACT * max(size, largest(got[np.isfinite(got)])))):
        return True
    plain = np.full(error.shape, EXACT * size)
    allowed, _ = allowed_error(error, plain, Effects.on(judge.truth, name), FLOAT64_BITS, gives_up=is_far)
    if np.all(error <= allowed):
        return True
    beyond = ~(error <= allowed)
    if not np.array_equal(judge.at_kinks(name, beyond), beyond):
        return False
    return not judge.outside(name, got, EXACT, beyond)


def recast(judge: Judge, model: ModelProto, feeds: Mapping[str, Any]) -> Judge:
    """The judge of the model in another float type: weights and feeds are those that the type can hold."""
    point = judge.point
    gradient = differentiate(model, list(point.names), list(point.seeds_of))
    there = Point.choose(model, gradient, feeds, judge.seed, SIZE, None)
    seeds_of, _ = names_in(gradient)
    kinds = {value.name: value.type.tensor_type.elem_type for value in gradient.graph.input}
    cotangents = {
        seeds_of[output]: value.astype(helper.tensor_dtype_to_np_dtype(kinds[seeds_of[output]] or TensorProto.FLOAT))
        for output, value in by_output(point).items()
    }
    return Judge(replace(there, cotangents=cotangents), gradient, judge.seed, judge.report)
