"""Central differences in float64 on onnx.reference: a forward that shares no kernel with the interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from refgrad.conformance.oracles.differences import along
from refgrad.conformance.oracles.program import ROUNDED, SAME, ComplexProgram, distance_from_interpreter, truth_of
from refgrad.conformance.problems.observation import Directional, NotApplicable, Observation, Oracle
from refgrad.conformance.problems.point import ShapeMovedError
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import RefgradError

NAME = "reference"

# The model as it is; with bodies in the place of operators; converted to a newer opset: what onnx.reference does not know in
# one form it may in another.
_FORMS: tuple[dict[str, Any], ...] = ({}, {"kept": ()}, {"upgraded": True}, {"upgraded": True, "kept": ()})


def _observe(problem: Problem) -> Sequence[Observation]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx.reference makes NumPy warn
        try:
            truth = truth_of(problem)
        except RefgradError as error:
            return [NotApplicable(NAME, str(error))]
        reasons: list[str] = []
        nearest, chosen = ROUNDED, None
        for form in _FORMS:
            try:
                program = ComplexProgram(problem, **form)
                distance, reason = distance_from_interpreter(problem, program.run(problem.at), truth)
            except (RefgradError, ShapeMovedError) as error:
                reasons.append(str(error))
                continue
            reasons.append(reason)
            if distance <= nearest:
                nearest, chosen = distance, program
            if distance <= SAME:
                break
        if chosen is None:
            return [NotApplicable(NAME, "; ".join(dict.fromkeys(filter(None, reasons))))]
        observations = along(problem, chosen.run, NAME, 2)
        return observations if nearest <= SAME else [_blurred(observation, nearest) for observation in observations]


def _blurred(observation: Observation, distance: float) -> Observation:
    """The observation of a forward that works in float32 somewhere: the error of a difference grows by apart·Σ|v·f|/h."""
    if not isinstance(observation, Directional):
        return observation
    return replace(observation, error=observation.error + distance * observation.scale / (observation.step or 1.0))


ORACLE = Oracle(
    NAME,
    "the same differences on onnx.reference, whose kernels are not the interpreter's; trusted where both compute the same "
    "outputs, up to the error that the extrapolation and rounding leave",
    observe=_observe,
)
