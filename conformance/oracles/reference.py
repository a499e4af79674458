"""Central differences in float64 on onnx.reference: a forward that shares no kernel with the interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from refgrad.conformance.oracles.differences import along
from refgrad.conformance.oracles.program import ROUNDED, SAME, ComplexProgram, departure, truth_of
from refgrad.conformance.questions.evidence import Directional, Evidence, Oracle, Silent
from refgrad.conformance.questions.point import ShapeMovedError
from refgrad.conformance.questions.question import Question
from refgrad.errors import RefgradError

NAME = "reference"

# The model as it is; with bodies in the place of operators; converted to a newer opset: what onnx.reference does not know in
# one form it may in another.
_FORMS: tuple[dict[str, Any], ...] = ({}, {"kept": ()}, {"upgraded": True}, {"upgraded": True, "kept": ()})


def _testify(question: Question) -> Sequence[Evidence]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of onnx.reference, about NumPy
        try:
            truth = truth_of(question)
        except RefgradError as error:
            return [Silent(NAME, str(error))]
        reasons: list[str] = []
        nearest, chosen = ROUNDED, None
        for form in _FORMS:
            try:
                program = ComplexProgram(question, **form)
                apart, why = departure(question, program.run(question.at), truth)
            except (RefgradError, ShapeMovedError) as error:
                reasons.append(str(error))
                continue
            reasons.append(why)
            if apart <= nearest:
                nearest, chosen = apart, program
            if apart <= SAME:
                break
        if chosen is None:
            return [Silent(NAME, "; ".join(dict.fromkeys(filter(None, reasons))))]
        found = along(question, chosen.run, NAME, 2)
        return found if nearest <= SAME else [_blurred(evidence, nearest) for evidence in found]


def _blurred(evidence: Evidence, apart: float) -> Evidence:
    """The evidence of a forward that works in float32 somewhere: the error of a difference grows by apart·Σ|v·f|/h."""
    if not isinstance(evidence, Directional):
        return evidence
    return replace(evidence, error=evidence.error + apart * evidence.scale / (evidence.step or 1.0))


ORACLE = Oracle(
    NAME,
    "the same differences on onnx.reference, whose kernels are not the interpreter's; trusted where both compute the same "
    "outputs, up to the error that the extrapolation and rounding leave",
    testify=_testify,
)
