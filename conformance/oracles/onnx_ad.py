"""onnx-ad: another package that differentiates ONNX models, its graph in float64 on the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.conformance.questions.evidence import Evidence, Oracle, Silent, elements
from refgrad.conformance.questions.point import in_float64
from refgrad.conformance.questions.question import Question
from refgrad.conformance.systems.builders import build, get_builder

NAME = "onnx-ad"
_TRUSTED = 1e-6  # relative: its constants are in the model's type


def _testify(question: Question) -> Sequence[Evidence]:
    try:
        built = build(NAME, question)
        prepared = in_float64(built.model)
        results = prepared.run(built.feeds(question.at, question.wide_cotangents))
    except Exception as error:  # it raises classes of its own, and any other where it does not know a form
        return [Silent(NAME, " ".join(str(error).split()) or type(error).__name__)]
    return elements(NAME, question, built.named(results), _TRUSTED)


ORACLE = Oracle(
    NAME,
    "onnx-ad's reverse mode, its graph in float64 on the interpreter: rules that know nothing of refgrad's, trusted up to the "
    "rounding of their constants to the model's type",
    testify=_testify,
    missing=get_builder(NAME).missing,
)
