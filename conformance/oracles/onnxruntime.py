"""ONNX Runtime's own gradient of a model, on its own training kernels, in the model's types."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.conformance.questions.evidence import Evidence, Oracle, Silent, elements
from refgrad.conformance.questions.point import rounding
from refgrad.conformance.questions.question import Question
from refgrad.conformance.systems.builders import build, get_builder
from refgrad.conformance.systems.executors import run
from refgrad.errors import RefgradError

NAME = "onnxruntime"
_BUILDER = "onnxruntime:raw"


def _testify(question: Question) -> Sequence[Evidence]:
    try:
        built = build(_BUILDER, question)
        results = run("ort-cpu", built.model, built.feeds(question.feeds, question.cotangents))
    except RefgradError as error:  # it refuses, or does not run what it has made
        return [Silent(NAME, str(error))]
    return elements(NAME, question, built.named(results), rounding(len(built.model.graph.node), question.model))


ORACLE = Oracle(
    NAME,
    "GradientGraphBuilder's gradient on ONNX Runtime's training kernels, in the model's own types; trusted up to what their "
    "rounding explains, and known to be wrong for some operators",
    testify=_testify,
    missing=get_builder(_BUILDER).missing,
)
