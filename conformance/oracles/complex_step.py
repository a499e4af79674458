"""Complex step: f(x + i·h·u) = f(x) + i·h·f′(x)·u + O(h²), so that no difference cancels (Squire & Trapp 1998)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from refgrad.conformance.oracles.analytic import KNOWN, STEP, KinkError, NotAnalyticError, OtherForwardError, call
from refgrad.conformance.oracles.differences import DIRECTIONS, KINKED, STILL, direction_at
from refgrad.conformance.oracles.program import ROUNDED, SAME, ComplexProgram, departure, truth_of
from refgrad.conformance.questions.evidence import COMPLEX_STEP, Directional, Evidence, Oracle, Silent
from refgrad.conformance.questions.point import ShapeMovedError, without
from refgrad.conformance.questions.question import Question
from refgrad.errors import RefgradError

NAME = COMPLEX_STEP
UNKNOWN = (KinkError, NotAnalyticError)  # why there is no complex step
_ROUNDINGS = 16  # of each number that is added up, and of each node


class Tangent:
    """J·u of a question: the outputs' derivatives along a direction, by complex step.

    :raises BackendError: the interpreter does not run the model.
    """

    def __init__(self, question: Question) -> None:
        self._question, self._at, self._truth = question, question.at, truth_of(question)
        self._programs: dict[bool, ComplexProgram] = {}
        self._upgraded = False  # whether the last one that knew the model was of a newer opset
        self.apart = 0.0  # how far its outputs are from the interpreter's

    @property
    def rounding(self) -> float:
        """The relative error of the terms of the sum."""
        size = sum(v.size for v in self._question.cotangents.values())
        size += sum(self._at[name].size for name in self._question.wrt)
        nodes = max((program.length for program in self._programs.values()), default=1)
        return float(np.finfo(np.float64).eps * (_ROUNDINGS * nodes + np.sqrt(size)) + _ROUNDINGS * self.apart)

    def along(self, direction: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The derivative of every output along `direction`, which names what moves.

        :raises KinkError: there is none.
        :raises NotAnalyticError: an operator on the way has no complex forward.
        :raises OtherForwardError: the forwards compute another function than the interpreter.
        :raises BackendError: onnx.reference fails.
        """
        reasons: list[Exception] = []
        for upgraded in (self._upgraded, not self._upgraded):
            try:
                made = self._moved(direction, upgraded)
            except (RefgradError, ShapeMovedError, NotAnalyticError) as error:
                reasons.append(error)
                continue
            self._upgraded = upgraded
            return made
        departed = any(isinstance(reason, OtherForwardError) for reason in reasons)
        raise (OtherForwardError if departed else NotAnalyticError)("; ".join(dict.fromkeys(map(str, reasons))))

    def _moved(self, direction: Mapping[str, np.ndarray], upgraded: bool) -> dict[str, np.ndarray]:
        if upgraded not in self._programs:
            self._programs[upgraded] = ComplexProgram(self._question, KNOWN, upgraded)
        at = dict(self._at)
        for name, u in direction.items():
            moved = np.empty(u.shape, np.complex128)
            moved.real, moved.imag = at[name], STEP * u
            at[name] = moved
        results = self._programs[upgraded].through(at, call)
        apart, why = departure(self._question, {n: np.real(y) for n, y in results.items()}, self._truth)
        if apart > ROUNDED:
            raise OtherForwardError(why)
        self.apart = max(self.apart, apart if apart > SAME else 0.0)
        return {name: np.imag(y) / STEP for name, y in results.items()}


def _testify(question: Question) -> Sequence[Evidence]:
    rng = np.random.default_rng([question.seed, 3])
    found: list[Evidence] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of onnx.reference, about NumPy
        try:
            tangent = Tangent(question)
        except (RefgradError, ShapeMovedError) as error:
            return [Silent(NAME, str(error))]
        at, cotangents = question.at, question.wide_cotangents
        for name in question.wrt:
            for _ in range(DIRECTIONS if at[name].size else 1):
                kinked = question.kinked.get(name)
                u = without(direction_at(at[name], rng), kinked)
                if u.size and not np.any(u):
                    found.append(Silent(NAME, STILL if kinked is None else KINKED, name))
                    break
                try:
                    moved = tangent.along({name: u})
                except (RefgradError, ShapeMovedError, *UNKNOWN) as error:
                    found.append(Silent(NAME, str(error), name))
                    break
                terms = [np.where(v == 0, 0.0, v * moved[output]) for output, v in cotangents.items()]
                value = float(sum(np.sum(term) for term in terms))
                if not np.isfinite(value):
                    found.append(Silent(NAME, "the derivative is not finite", name))
                    break
                scale = float(sum(np.sum(np.abs(term)) for term in terms))
                found.append(Directional(NAME, name, u, value, tangent.rounding * scale, scale))
    return found


ORACLE = Oracle(
    NAME,
    "the imaginary part of a forward in complex numbers, which takes no difference; a forward of its own, or onnx.reference's "
    "where the operator is linear; trusted to rounding, where every operator is analytic or decides by the real part",
    testify=_testify,
)
