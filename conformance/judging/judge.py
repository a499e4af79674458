"""The judge: is a gradient right? It weighs what the oracles say, rounding, and the points without a derivative.

refgrad's own gradient in float64 helps. Where an oracle confirms it and no oracle contradicts it, other gradients are compared
with it, element by element. Where it is not confirmed, because refgrad is wrong or refuses, gradients are compared with the
oracles alone. An error is compared with its explanations: the error of the oracle, the rounding of the type, and how far the
float64 gradient itself moves when each intermediate result is rounded. Elements at a kink are judged apart from the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from onnx import ModelProto

import refgrad
from refgrad.conformance.judging import verdicts
from refgrad.conformance.judging.verdicts import ResultRow
from refgrad.conformance.oracles import Built, Directional, Evidence, Property, Silent
from refgrad.conformance.oracles.comparison import (
    AGREED,
    DISAGREED,
    EXACT,
    INCONCLUSIVE,
    KINK,
    Judged,
    against_directions,
    against_elements,
    against_float64,
    bent,
    gravest,
    outside_of_both,
    told_by_the_neighbour,
)
from refgrad.conformance.oracles.differences import NAME as DIFFERENCES
from refgrad.conformance.oracles.differences import STEPS
from refgrad.conformance.questions.evidence import COMPLEX_STEP
from refgrad.conformance.questions.kinked import kinks_of
from refgrad.conformance.questions.point import Point, Truth, in_float64, rounding, without
from refgrad.conformance.questions.question import Question
from refgrad.errors import RefgradError, abridged, choices
from refgrad.notices import quiet
from refgrad.tables.kinks import CONVENTIONS

FLOAT64 = "float64"  # the witness that refgrad's own gradient is, once it is confirmed
ENOUGH = 2  # witnesses against a gradient that make it wrong


@dataclass(frozen=True)
class Candidate:
    """A gradient as an executor computed it, by the names in the question's `wrt`; `nodes` is the size of its model.

    A name that is missing has the gradient zero. `properties` are what was found of the builder's model.
    """

    builder: str
    executor: str
    nodes: int
    gradients: Mapping[str, np.ndarray]
    properties: Sequence[Property] = ()


def judge(question: Question, evidence: Sequence[Evidence], candidates: Sequence[Candidate]) -> list[ResultRow]:
    """The verdict on every candidate."""
    trial = Trial(question, tuple(evidence))
    return [trial.verdict(candidate) for candidate in candidates]


@dataclass
class Trial:
    """One question with what the oracles said of it."""

    question: Question
    evidence: tuple[Evidence, ...]
    _conventions: dict[str, Truth] = field(default_factory=dict)
    _sound: dict[str, bool] = field(default_factory=dict)

    @cached_property
    def truth(self) -> Truth:
        """The point, with refgrad's gradient there in float64: no gradients where it refuses, 0 for elements at a kink."""
        question = self.question
        built, gradients = _in_float64(question)
        rest = {name: without(value, question.kinked.get(name)) for name, value in gradients.items()}
        prepared = in_float64(question.model, question.wrt)
        seeds = built.cotangents
        cotangents = {seeds[output]: value for output, value in question.cotangents.items()}
        names, feeds = built.gradients, dict(question.feeds)
        point = Point(question.model, prepared, names, seeds, feeds, cotangents, question.at, question.case)
        return Truth(point, built.model, rest, kinked=question.kinked)

    @cached_property
    def of_refgrad(self) -> dict[str, dict[str, Judged]]:
        """The comparison of refgrad's float64 gradient with each oracle, by the input."""
        return {
            name: dict(self._testimony(name, gradient, self.question.tolerance or EXACT, exact=True))
            for name, gradient in self.truth.gradients.items()
        }

    def confirmed(self, name: str) -> tuple[str, ...]:
        """The oracles that confirm refgrad's float64 gradient by one input; empty where another oracle contradicts it."""
        said = self.of_refgrad.get(name, {})
        if any(judged.verdict in (DISAGREED, KINK) for judged in said.values()):
            return ()
        return tuple(oracle for oracle, judged in said.items() if judged.verdict == AGREED)

    @cached_property
    def kinks(self) -> frozenset[str]:
        """The inputs that have no derivative at this point, as far as the question does not know their elements at a kink."""
        found = {name for name, said in self.of_refgrad.items() if any(j.verdict == KINK for j in said.values())}
        doubtful = {
            name
            for name, said in self.of_refgrad.items()
            if name not in found
            and name not in self.question.kinked  # its other elements are not at a kink
            and said.get(DIFFERENCES, Judged(AGREED)).verdict == DISAGREED
            and np.all(np.isfinite(self.truth.gradients[name]))
        }
        told = told_by_the_neighbour(self.truth, doubtful, self.question.seed, EXACT) if doubtful else set()
        return frozenset(found | told | self._unseen(found | told))

    def _unseen(self, known: Collection[str]) -> set[str]:
        """Further inputs at a kink where the gradient is the mean of both sides, as central differences are: |x| at 0.

        A complex step crosses no kink: where it has a derivative, there is one.
        """
        if not kinks_of(self.question.model):
            return set()
        rng = np.random.default_rng([self.question.seed, 4])
        return {
            name
            for name, said in self.of_refgrad.items()
            if name not in known
            and name not in self.question.kinked
            and COMPLEX_STEP not in said
            and said.get(DIFFERENCES, Judged(DISAGREED)).verdict == AGREED
            and bent(self.truth.point, name, rng, STEPS[-1])
        }

    def verdict(self, candidate: Candidate) -> ResultRow:
        """Return the verdict on one candidate: the gravest over its gradients, with every input that has it in the note."""
        rows = [self._verdict(candidate, name) for name in self.question.wrt]
        rows += [self._of_property(candidate, tested) for tested in candidate.properties if not tested.holds]
        worst = max(rows, key=_gravity)
        others = [
            name for name, row in zip(self.question.wrt, rows, strict=False) if row is not worst and _as_bad(row, worst)
        ]
        if others:
            worst = replace(worst, note=f"{worst.note}; also {worst.verdict} by {abridged(others)}")
        held = tuple(p.oracle for p in candidate.properties if p.holds)
        return replace(worst, witnesses=(*worst.witnesses, *held)) if worst.verdict == verdicts.AGREED else worst

    def _of_property(self, candidate: Candidate, tested: Property) -> ResultRow:
        note = f"{tested.oracle}: {tested.note}"
        return self._row(
            candidate, verdicts.WRONG, (tested.oracle,), (), Judged(DISAGREED, None, tested.error, tested.allowed, note)
        )

    def _verdict(self, candidate: Candidate, name: str) -> ResultRow:
        shape = np.shape(self.question.at[name])
        kind = self.truth.point.dtype(name)
        got = candidate.gradients.get(name, np.zeros(shape, kind))
        if got.shape != shape:
            note = f"{name}: shape {got.shape}, the input has {shape}"
            return self._row(candidate, verdicts.WRONG, ("shape",), (), Judged(DISAGREED, note=note))
        if got.dtype not in (kind, np.dtype(np.float64)):
            note = f"{name}: dtype {got.dtype}, the input has {kind}"
            return self._row(candidate, verdicts.WRONG, ("dtype",), (), Judged(DISAGREED, note=note))
        tolerance = self.question.tolerance or rounding(candidate.nodes, self.question.model)
        kinked = self.question.kinked.get(name)
        if kinked is None:
            return self._of_elements(candidate, name, got, tolerance)
        rows = [self._of_kinks(candidate, name, got, tolerance, kinked)]
        if not kinked.all():
            rows.append(self._of_elements(candidate, name, without(got, kinked), tolerance))
        return max(rows, key=_gravity)

    def _of_elements(self, candidate: Candidate, name: str, got: np.ndarray, tolerance: float) -> ResultRow:
        """The verdict on the elements that are not known to be at a kink; the others are 0 in `got`."""
        if name in self.kinks:
            return self._at_a_kink(candidate, name, got, tolerance)
        confirmed = self.confirmed(name)
        own_draws = candidate.executor != "numpy"
        near = against_float64(self.truth, name, got, tolerance, own_draws) if confirmed else None
        if near is not None and near.verdict == AGREED:
            return self._row(candidate, verdicts.AGREED, confirmed, (), near)
        if self.truth.point.draws and own_draws:
            note = f"{name}: {choices(self.truth.point.draws)}: no two executors draw the same random numbers"
            return self._row(candidate, verdicts.INCONCLUSIVE, (), (), Judged(INCONCLUSIVE, note=note))
        said = dict(self._testimony(name, got.astype(np.float64), tolerance))
        if near is not None:
            said[FLOAT64] = near
        for_, against = (
            tuple(oracle for oracle, judged in said.items() if judged.verdict == verdict)
            for verdict in (AGREED, DISAGREED)
        )
        worst = gravest(said.values()) if said else Judged(INCONCLUSIVE, note=self._silence(name))
        if near is not None and near.verdict == DISAGREED:
            worst = near  # it names the element
        worst = replace(worst, note=f"{name}: {worst.note}" if worst.note else name)
        if for_ and not against:
            return self._row(candidate, verdicts.AGREED, for_, (), worst)
        if len(against) >= ENOUGH and not for_:
            return self._row(candidate, verdicts.WRONG, against, (), worst)
        if against and not for_:
            worst = replace(worst, note=f"{worst.note}; {against[0]} alone says that it is wrong")
        return self._row(candidate, verdicts.INCONCLUSIVE, for_, against, worst)

    def _silence(self, name: str) -> str:
        """Why no oracle speaks of `name`."""
        reasons = [
            f"{one.oracle}: {one.why}" for one in self.evidence if isinstance(one, Silent) and one.name in ("", name)
        ]
        return f"no oracle applies ({'; '.join(dict.fromkeys(reasons))})" if reasons else "no oracle applies"

    def _testimony(
        self, name: str, got: np.ndarray, tolerance: float, exact: bool = False
    ) -> Iterator[tuple[str, Judged]]:
        """The comparison of a gradient with each oracle that speaks of `name`. `exact`: it was computed in float64."""
        directions: dict[str, list[Directional]] = {}
        for said in self.evidence:
            if isinstance(said, Silent) or said.name != name:
                continue
            if isinstance(said, Directional):
                directions.setdefault(said.oracle, []).append(said)
            else:
                rest = replace(said, gradient=self.truth.rest(name, said.gradient))
                yield said.oracle, against_elements(self.truth, rest, got, tolerance, exact)
        for oracle, found in directions.items():
            sided = oracle == DIFFERENCES
            yield oracle, against_directions(self.truth, name, got, found, tolerance, exact=exact, sided=sided)

    def _at_a_kink(self, candidate: Candidate, name: str, got: np.ndarray, tolerance: float) -> ResultRow:
        """Whose convention an answer follows, by the table of kinks; wrong where it follows none."""
        followed = [one for one in CONVENTIONS if self._follows(one, name, got, tolerance)]
        if followed:
            note = f"{name}: as {choices(followed)}, where {choices(kinks_of(self.question.model))} has no derivative"
            return self._row(candidate, verdicts.CONVENTION, tuple(followed), (), Judged(AGREED, note=note))
        outside = outside_of_both(self.truth, name, got, tolerance, np.random.default_rng([self.question.seed, 5]))
        if not outside:
            note = f"{name}: a convention of its own, between the derivatives of both sides in each element"
            return self._row(candidate, verdicts.CONVENTION, (DIFFERENCES,), (), Judged(AGREED, note=note))
        note = f"{name}: at a kink, and no known convention; {outside}"
        return self._row(candidate, verdicts.INCONCLUSIVE, (), (), Judged(INCONCLUSIVE, note=note))

    def _of_kinks(
        self, candidate: Candidate, name: str, got: np.ndarray, tolerance: float, kinked: np.ndarray
    ) -> ResultRow:
        """The verdict on the elements at a kink alone."""
        operators = choices(kinks_of(self.question.model))
        followed = [one for one in CONVENTIONS if self._follows(one, name, got, tolerance, kinked)]
        if followed and self._is_sound(name, kinked):
            note = f"{name}: as {choices(followed)}, where {operators} has no derivative"
            return self._row(candidate, verdicts.CONVENTION, tuple(followed), (), Judged(AGREED, note=note))
        rng = np.random.default_rng([self.question.seed, 5])
        outside = outside_of_both(self.truth, name, got, tolerance, rng, kinked)
        if not outside:
            note = f"{name}: a convention of its own, between the derivatives of both sides in each element"
            return self._row(candidate, verdicts.CONVENTION, (DIFFERENCES,), (), Judged(AGREED, note=note))
        note = f"{name}: at a kink of {operators}, and no known convention; {outside}"
        return self._row(candidate, verdicts.INCONCLUSIVE, (), (), Judged(INCONCLUSIVE, note=note))

    def _is_sound(self, name: str, kinked: np.ndarray) -> bool:
        """True if refgrad's own gradient makes sense at the elements at a kink, or is right beside the point.

        Conventions are gradients by refgrad's rules: where a rule is wrong, they are no excuse.
        """
        if name not in self._sound:
            here = self._by_convention("refgrad")
            rng = np.random.default_rng([self.question.seed, 5])
            self._sound[name] = not outside_of_both(self.truth, name, here.gradients[name], EXACT, rng, kinked) or bool(
                told_by_the_neighbour(here, [name], self.question.seed, EXACT)
            )
        return self._sound[name]

    def _follows(
        self, convention: str, name: str, got: np.ndarray, tolerance: float, kinked: np.ndarray | None = None
    ) -> bool:
        """True if a gradient, or its elements at a kink alone, follow a convention."""
        truth = self._by_convention(convention)
        if name not in truth.gradients:
            return False
        expected = truth.gradients[name]
        if kinked is not None:
            alike = ~kinked | ((got == expected) & ~np.isfinite(expected))
            got, truth = (
                without(got, alike),
                replace(truth, gradients={name: without(expected, alike)}, kinked={name: alike}),
            )
        return against_float64(truth, name, got, tolerance).verdict == AGREED

    def _by_convention(self, convention: str) -> Truth:
        """refgrad's gradient by a convention: the elements at a kink too."""
        if convention not in self._conventions:
            built, gradients = _in_float64(self.question, convention)
            self._conventions[convention] = Truth(self.truth.point, built.model, gradients)
        return self._conventions[convention]

    def _row(
        self, candidate: Candidate, verdict: str, witnesses: tuple[str, ...], against: tuple[str, ...], judged: Judged
    ) -> ResultRow:
        return ResultRow(
            self.question.case,
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
    """The graver of two verdicts on a gradient has the larger one."""
    order = (verdicts.AGREED, verdicts.CONVENTION, verdicts.INCONCLUSIVE, verdicts.WRONG)
    return order.index(row.verdict), (row.relative or 0.0) / (row.allowed or 1.0)


def _as_bad(row: ResultRow, worst: ResultRow) -> bool:
    return row.verdict == worst.verdict and row.verdict in (verdicts.INCONCLUSIVE, verdicts.WRONG)


def _in_float64(question: Question, kinks: str = "refgrad") -> tuple[Built, dict[str, np.ndarray]]:
    """refgrad's gradient and what the interpreter computes of it in float64: no gradients where either refuses."""
    outputs = list(question.cotangents)
    built = Built(ModelProto(), {name: f"{name}_grad" for name in outputs}, {name: name for name in question.wrt})
    try:
        with quiet():
            built = Built.of(refgrad.gradient(question.model, question.wrt, outputs, kinks=kinks))
        prepared = in_float64(built.model)
        gradients = built.named(prepared.run(built.feeds(question.at, question.wide_cotangents)))
    except RefgradError:
        return built, {}
    at = question.at
    return built, {name: value for name, value in gradients.items() if value.shape == np.shape(at[name])}
