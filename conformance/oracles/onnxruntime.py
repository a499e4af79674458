"""ONNX Runtime's own gradient of a model, on its own training kernels, in the model's types."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.conformance.problems.observation import NotApplicable, Observation, Oracle, elements
from refgrad.conformance.problems.point import rounding
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.builders import build, get_builder
from refgrad.conformance.problems.systems.executors import run
from refgrad.errors import RefgradError

NAME = "onnxruntime"
_BUILDER = "onnxruntime:raw"


def _observe(problem: Problem) -> Sequence[Observation]:
    try:
        built = build(_BUILDER, problem)
        results = run("ort-cpu", built.model, built.feeds(problem.feeds, problem.cotangents))
    except RefgradError as error:  # it refuses, or does not run what it has made
        return [NotApplicable(NAME, str(error))]
    return elements(NAME, problem, built.named(results), rounding(len(built.model.graph.node), problem.model))


ORACLE = Oracle(
    NAME,
    "GradientGraphBuilder's gradient on ONNX Runtime's training kernels, in the model's own types; trusted up to what their "
    "rounding explains, and known to be wrong for some operators",
    observe=_observe,
    missing=get_builder(_BUILDER).missing,
)
