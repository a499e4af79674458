"""Complex step: f(x + i·h·u) = f(x) + i·h·f′(x)·u + O(h²), so that no difference cancels (Squire & Trapp 1998)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.oracles.analytic import KNOWN, STEP, KinkError, NotAnalyticError, call
from refgrad.conformance.oracles.differences import DIRECTIONS, direction_at
from refgrad.conformance.oracles.evidence import Directional, Evidence, Oracle, Silent
from refgrad.conformance.oracles.program import SAME, Program, departure, truth_of
from refgrad.conformance.point import ShapeMovedError
from refgrad.conformance.question import Question
from refgrad.errors import BackendError, RefgradError

NAME = "complex-step"
UNKNOWN = (KinkError, NotAnalyticError)  # why there is no complex step
_ROUNDINGS = 16  # of each number that is added up, and of each node


class Tangent:
    """J·u of a question: the outputs' derivatives along a direction, by complex step.

    :raises BackendError: onnx.reference does not know the model.
    """

    def __init__(self, question: Question) -> None:
        try:
            self._program = Program(question, KNOWN)
        except BackendError:  # it may know the operators of a newer opset
            self._program = Program(question, KNOWN, upgraded=True)
        self._question, self._truth = question, truth_of(question)
        self._checked = False
        at = question.at
        size = sum(at[name].size for name in question.wrt) + sum(v.size for v in question.cotangents.values())
        self.rounding = float(np.finfo(np.float64).eps * (_ROUNDINGS * self._program.length + np.sqrt(size)))

    def along(self, direction: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The derivative of every output along `direction`, which names what moves.

        :raises KinkError: there is none.
        :raises NotAnalyticError: an operator on the way has no complex forward, or it computes another function.
        :raises BackendError: onnx.reference fails.
        """
        at: dict[str, Any] = dict(self._question.at)
        for name, u in direction.items():
            moved = np.empty(u.shape, np.complex128)
            moved.real, moved.imag = at[name], STEP * u
            at[name] = moved
        results = self._program.through(at, call)
        if not self._checked:
            apart, why = departure(self._question, {n: np.real(y) for n, y in results.items()}, self._truth)
            if apart > SAME:
                raise NotAnalyticError(why)
            self._checked = True
            self.rounding += apart
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
        at, weights = question.at, question.weights
        for name in question.wrt:
            for _ in range(DIRECTIONS if at[name].size else 1):
                u = direction_at(at[name], rng)
                try:
                    moved = tangent.along({name: u})
                except (RefgradError, ShapeMovedError, *UNKNOWN) as error:
                    found.append(Silent(NAME, str(error), name))
                    break
                terms = [np.where(v == 0, 0.0, v * moved[output]) for output, v in weights.items()]
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
