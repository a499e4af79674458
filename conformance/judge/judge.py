"""The judge: is a gradient right?

The judge compares a gradient with refgrad's own gradient in float64, element by element, if an oracle confirms that one and no
oracle contradicts it. Otherwise refgrad is wrong or refuses, and the judge compares the gradient with the oracles alone.

A difference is no fault if it has an explanation: the error of the oracle, the rounding of the type, or the rounding of
intermediate results, which may move the float64 gradient itself. Elements at a kink, where no derivative exists, get a verdict
of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from onnx import ModelProto

import refgrad
from refgrad.conformance.judge.elementwise import against_elements, against_float64
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.oracles import Built, Directional, NotApplicable, Observation, Property
from refgrad.conformance.oracles.comparison import (
    EXACT,
    Judged,
    against_directions,
    bent,
    gravest,
    outside_of_both,
    told_by_the_neighbour,
)
from refgrad.conformance.oracles.differences import NAME as DIFFERENCES
from refgrad.conformance.oracles.differences import STEPS
from refgrad.conformance.oracles.joint import contradicted
from refgrad.conformance.problems.kinked import kinks_of
from refgrad.conformance.problems.observation import COMPLEX_STEP
from refgrad.conformance.problems.point import Point, Truth, in_float64, rounding, without
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.verdicts import CONVENTION, RIGHT, UNDECIDED, WRONG
from refgrad.errors import RefgradError, abridged, choices
from refgrad.notices import quiet
from refgrad.tables.kinks import CONVENTIONS

FLOAT64 = "float64"  # the name of refgrad's own gradient as an oracle, once it is confirmed
ENOUGH = 2  # a gradient is wrong if so many oracles contradict it, and none confirms it


@dataclass(frozen=True)
class Candidate:
    """A gradient that an executor computed."""

    builder: str
    executor: str
    nodes: int  # in the gradient model
    gradients: Mapping[str, np.ndarray]  # by the names in the problem's `wrt`; a missing gradient is zero
    properties: Sequence[Property] = ()  # tests of the gradient model that need no other gradient


def judge(problem: Problem, observations: Sequence[Observation], candidates: Sequence[Candidate]) -> list[ResultRow]:
    """The verdict on every candidate."""
    check = GradientCheck(problem, tuple(observations))
    return [check.verdict(candidate) for candidate in candidates]


@dataclass
class GradientCheck:
    """Gives gradients of one problem their verdicts, from the observations of the oracles."""

    problem: Problem
    observations: tuple[Observation, ...]
    _by_conventions: dict[str, Truth] = field(default_factory=dict)  # what `_by_convention` has computed
    _is_sound: dict[str, bool] = field(default_factory=dict)  # by input, what `_has_sound_conventions` has found

    @cached_property
    def own_gradient(self) -> Truth:
        """refgrad's gradient in float64: 0 for elements at a kink, and without gradients if refgrad refuses."""
        problem = self.problem
        built, gradients = _in_float64(problem)
        not_kinked = {name: without(value, problem.kinked.get(name)) for name, value in gradients.items()}
        prepared = in_float64(problem.model, problem.wrt)
        seeds = built.cotangents
        cotangents = {seeds[output]: value for output, value in problem.cotangents.items()}
        names, feeds = built.gradients, dict(problem.feeds)
        point = Point(problem.model, prepared, names, seeds, feeds, cotangents, problem.at, problem.case)
        return Truth(point, built.model, not_kinked, kinked=problem.kinked)

    @cached_property
    def own_comparisons(self) -> dict[str, dict[str, Judged]]:
        """The comparisons of refgrad's float64 gradient with the oracles, by input and oracle."""
        return {
            name: dict(self._comparisons(name, gradient, self.problem.tolerance or EXACT, exact=True))
            for name, gradient in self.own_gradient.gradients.items()
        }

    def confirmed(self, name: str) -> tuple[str, ...]:
        """The oracles that confirm refgrad's float64 gradient by one input. None do if another oracle contradicts it."""
        by_oracle = self.own_comparisons.get(name, {})
        if any(judged.verdict in (WRONG, CONVENTION) for judged in by_oracle.values()):
            return ()
        return tuple(oracle for oracle, judged in by_oracle.items() if judged.verdict == RIGHT)

    @cached_property
    def kinks(self) -> frozenset[str]:
        """The inputs with elements at a kink, other than the elements that the problem knows of."""
        at_kinks = {
            name
            for name, by_oracle in self.own_comparisons.items()
            if any(j.verdict == CONVENTION for j in by_oracle.values())
        }
        doubtful = {
            name
            for name, by_oracle in self.own_comparisons.items()
            if name not in at_kinks
            and name not in self.problem.kinked  # the elements at a kink are known
            and by_oracle.get(DIFFERENCES, Judged(RIGHT)).verdict == WRONG
            and np.all(np.isfinite(self.own_gradient.gradients[name]))
        }
        if doubtful:
            at_kinks |= told_by_the_neighbour(self.own_gradient, doubtful, self.problem.seed, EXACT)
        return frozenset(at_kinks | self._hidden_kinks(at_kinks))

    def _hidden_kinks(self, known: Collection[str]) -> set[str]:
        """Further inputs at a kink, where the gradient agrees with central differences: both are the mean of both sides.

        An example is |x| at 0. If the complex step, which crosses no kink, has a derivative, there is no kink.
        """
        if not kinks_of(self.problem.model):
            return set()
        rng = np.random.default_rng([self.problem.seed, 4])
        return {
            name
            for name, by_oracle in self.own_comparisons.items()
            if name not in known
            and name not in self.problem.kinked
            and COMPLEX_STEP not in by_oracle
            and by_oracle.get(DIFFERENCES, Judged(WRONG)).verdict == RIGHT
            and bent(self.own_gradient.point, name, rng, STEPS[-1])
        }

    def verdict(self, candidate: Candidate) -> ResultRow:
        """The verdict on a candidate: the gravest verdict on its gradients. The note lists all inputs with this verdict."""
        rows = [self._verdict_on(candidate, name) for name in self.problem.wrt]
        if any(row.verdict == CONVENTION for row in rows):
            rows += self._together(candidate, rows)
        rows += [self._broken_property(candidate, each) for each in candidate.properties if not each.holds]
        worst = max(rows, key=_gravity)
        others = [
            name for name, row in zip(self.problem.wrt, rows, strict=False) if row is not worst and _as_bad(row, worst)
        ]
        if others:
            worst = replace(worst, note=f"{worst.note}; also {worst.verdict} by {abridged(others)}")
        confirming = tuple(each.oracle for each in candidate.properties if each.holds)
        return replace(worst, witnesses=(*worst.witnesses, *confirming)) if worst.verdict == RIGHT else worst

    def _broken_property(self, candidate: Candidate, broken: Property) -> ResultRow:
        note = f"{broken.oracle}: {broken.note}"
        return self._row(
            candidate, WRONG, (broken.oracle,), (), Judged(WRONG, None, broken.error, broken.allowed, note)
        )

    def _verdict_on(self, candidate: Candidate, name: str) -> ResultRow:
        shape = np.shape(self.problem.at[name])
        kind = self.own_gradient.point.dtype(name)
        got = candidate.gradients.get(name, np.zeros(shape, kind))
        if got.shape != shape:
            note = f"{name}: shape {got.shape}, the input has {shape}"
            return self._row(candidate, WRONG, ("shape",), (), Judged(WRONG, note=note))
        if got.dtype not in (kind, np.dtype(np.float64)):
            note = f"{name}: dtype {got.dtype}, the input has {kind}"
            return self._row(candidate, WRONG, ("dtype",), (), Judged(WRONG, note=note))
        tolerance = self.problem.tolerance or rounding(candidate.nodes, self.problem.model)
        kinked = self.problem.kinked.get(name)
        if kinked is None:
            return self._off_kinks(candidate, name, got, tolerance)
        rows = [self._at_kinks(candidate, name, got, tolerance, kinked)]
        if not kinked.all():
            rows.append(self._off_kinks(candidate, name, without(got, kinked), tolerance))
        return max(rows, key=_gravity)

    def _off_kinks(self, candidate: Candidate, name: str, got: np.ndarray, tolerance: float) -> ResultRow:
        """The verdict on the elements that are not known to be at a kink.

        :param got: the gradient, with 0 for the elements that are known to be at a kink.
        """
        if name in self.kinks:
            return self._at_kinks(candidate, name, got, tolerance)
        confirmed = self.confirmed(name)
        own_draws = candidate.executor != "numpy"
        with_own = against_float64(self.own_gradient, name, got, tolerance, own_draws) if confirmed else None
        if with_own is not None and with_own.verdict == RIGHT:
            return self._row(candidate, RIGHT, confirmed, (), with_own)
        if self.own_gradient.point.draws and own_draws:
            note = f"{name}: {choices(self.own_gradient.point.draws)}: no two executors draw the same random numbers"
            return self._row(candidate, UNDECIDED, (), (), Judged(UNDECIDED, note=note))
        by_oracle = dict(self._comparisons(name, got.astype(np.float64), tolerance))
        if with_own is not None:
            by_oracle[FLOAT64] = with_own
        confirming, contradicting = (
            tuple(oracle for oracle, judged in by_oracle.items() if judged.verdict == verdict)
            for verdict in (RIGHT, WRONG)
        )
        worst = gravest(by_oracle.values()) if by_oracle else Judged(UNDECIDED, note=self._why_none_applies(name))
        if with_own is not None and with_own.verdict == WRONG:
            worst = with_own  # its note names the element
        worst = replace(worst, note=f"{name}: {worst.note}" if worst.note else name)
        if confirming and not contradicting:
            return self._row(candidate, RIGHT, confirming, (), worst)
        if len(contradicting) >= ENOUGH and not confirming:
            return self._row(candidate, WRONG, contradicting, (), worst)
        if contradicting and not confirming:
            worst = replace(worst, note=f"{worst.note}; {contradicting[0]} alone says that it is wrong")
        return self._row(candidate, UNDECIDED, confirming, contradicting, worst)

    def _why_none_applies(self, name: str) -> str:
        """The reason why no oracle applies to `name`."""
        reasons = [
            f"{observation.oracle}: {observation.why}"
            for observation in self.observations
            if isinstance(observation, NotApplicable) and observation.name in ("", name)
        ]
        return f"no oracle applies ({'; '.join(dict.fromkeys(reasons))})" if reasons else "no oracle applies"

    def _comparisons(
        self, name: str, got: np.ndarray, tolerance: float, exact: bool = False
    ) -> Iterator[tuple[str, Judged]]:
        """The oracles that apply to `name`, each with its comparison with the gradient.

        :param exact: the gradient was computed in float64.
        """
        directions: dict[str, list[Directional]] = {}
        for observation in self.observations:
            if isinstance(observation, NotApplicable) or observation.name != name:
                continue
            if isinstance(observation, Directional):
                directions.setdefault(observation.oracle, []).append(observation)
            else:
                not_kinked = replace(observation, gradient=self.own_gradient.rest(name, observation.gradient))
                yield observation.oracle, against_elements(self.own_gradient, not_kinked, got, tolerance, exact)
        for oracle, along_directions in directions.items():
            sides = oracle == DIFFERENCES
            yield (
                oracle,
                against_directions(
                    self.own_gradient, name, got, along_directions, tolerance, exact=exact, compare_sides=sides
                ),
            )

    def _at_kinks(
        self, candidate: Candidate, name: str, got: np.ndarray, tolerance: float, kinked: np.ndarray | None = None
    ) -> ResultRow:
        """The verdict at a kink: "convention" if the gradient follows one, known or not, else "undecided".

        Never "wrong": `_together` says if conventions are no derivative all together.

        :param kinked: the elements to judge, by default all.
        """
        operators = choices(kinks_of(self.problem.model))
        followed = [convention for convention in CONVENTIONS if self._follows(convention, name, got, tolerance, kinked)]
        if followed and (kinked is None or self._has_sound_conventions(name, kinked)):
            note = f"{name}: as {choices(followed)}, where {operators} has no derivative"
            return self._row(candidate, CONVENTION, tuple(followed), (), Judged(RIGHT, note=note))
        rng = np.random.default_rng([self.problem.seed, 5])
        outside = outside_of_both(self.own_gradient, name, got, tolerance, rng, kinked)
        if not outside:
            note = f"{name}: a convention of its own, between the derivatives of both sides in each element"
            return self._row(candidate, CONVENTION, (DIFFERENCES,), (), Judged(RIGHT, note=note))
        place = f"a kink of {operators}" if operators else "a kink"
        note = f"{name}: at {place}, and no known convention; {outside}"
        return self._row(candidate, UNDECIDED, (), (), Judged(UNDECIDED, note=note))

    def _together(self, candidate: Candidate, rows: Sequence[ResultRow]) -> list[ResultRow]:
        """The verdict on gradients with a convention that are no derivative all together; none if they are one."""
        point, usual = self.own_gradient.point, self._by_convention("refgrad")
        sound = (RIGHT, CONVENTION)
        got = {
            name: np.asarray(candidate.gradients.get(name, np.zeros(np.shape(self.problem.at[name]))), np.float64)
            for name, row in zip(self.problem.wrt, rows, strict=True)
            if row.verdict in sound and name in usual.gradients
        }
        if not got or point.draws:
            return []
        tolerance = self.problem.tolerance or rounding(candidate.nodes, self.problem.model)
        note = contradicted(usual, got, tolerance, np.random.default_rng([self.problem.seed, 6]))
        return [self._row(candidate, WRONG, (DIFFERENCES,), (), Judged(WRONG, note=note))] if note else []

    def _has_sound_conventions(self, name: str, kinked: np.ndarray) -> bool:
        """True if refgrad's rules are right for `name`. Conventions are gradients by these rules, and wrong if a rule is.

        The rules are right if refgrad's gradient at the kinked elements lies between the derivatives of both sides, or if it
        agrees with differences at a point beside this one.
        """
        if name not in self._is_sound:
            own = self._by_convention("refgrad")
            rng = np.random.default_rng([self.problem.seed, 5])
            self._is_sound[name] = not outside_of_both(
                self.own_gradient, name, own.gradients[name], EXACT, rng, kinked
            ) or bool(told_by_the_neighbour(own, [name], self.problem.seed, EXACT))
        return self._is_sound[name]

    def _follows(
        self, convention: str, name: str, got: np.ndarray, tolerance: float, kinked: np.ndarray | None = None
    ) -> bool:
        """True if a gradient follows a convention.

        :param kinked: the elements to compare, by default all.
        """
        by_convention = self._by_convention(convention)
        if name not in by_convention.gradients:
            return False
        expected = by_convention.gradients[name]
        if kinked is not None:
            left_out = ~kinked | ((got == expected) & ~np.isfinite(expected))
            got, by_convention = (
                without(got, left_out),
                replace(
                    by_convention,
                    gradients={name: without(expected, left_out)},
                    kinked={name: left_out},
                    _moved={},  # which has all gradients
                    _spread={},
                    _apart=None,
                ),
            )
        return against_float64(by_convention, name, got, tolerance).verdict == RIGHT

    def _by_convention(self, convention: str) -> Truth:
        """refgrad's gradient by a convention, with the elements at a kink."""
        if convention not in self._by_conventions:
            built, gradients = _in_float64(self.problem, convention)
            self._by_conventions[convention] = Truth(self.own_gradient.point, built.model, gradients)
        return self._by_conventions[convention]

    def _row(
        self, candidate: Candidate, verdict: str, witnesses: tuple[str, ...], against: tuple[str, ...], judged: Judged
    ) -> ResultRow:
        return ResultRow(
            self.problem.case,
            candidate.builder,
            candidate.executor,
            verdict,
            witnesses,
            against,
            judged.relative,
            judged.allowed,
            judged.note,
        )


def _gravity(row: ResultRow) -> tuple[int, float]:
    """A key that orders verdicts on gradients: the gravest is the largest. Equal verdicts are ordered by their error."""
    order = (RIGHT, CONVENTION, UNDECIDED, WRONG)
    return order.index(row.verdict), (row.relative or 0.0) / (row.allowed or 1.0)


def _as_bad(row: ResultRow, worst: ResultRow) -> bool:
    return row.verdict == worst.verdict and row.verdict in (UNDECIDED, WRONG)


def _in_float64(problem: Problem, kinks: str = "refgrad") -> tuple[Built, dict[str, np.ndarray]]:
    """The model of refgrad's gradient and its results on the interpreter in float64; no results if either refuses."""
    outputs = list(problem.cotangents)
    built = Built(ModelProto(), {name: f"{name}_grad" for name in outputs}, {name: name for name in problem.wrt})
    try:
        with quiet():
            built = Built.of(refgrad.gradient(problem.model, problem.wrt, outputs, kinks=kinks))
        prepared = in_float64(built.model)
        gradients = built.named(prepared.run(built.feeds(problem.at, problem.wide_cotangents)))
    except RefgradError:
        return built, {}
    at = problem.at
    return built, {name: value for name, value in gradients.items() if value.shape == np.shape(at[name])}
