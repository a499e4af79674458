"""onnx-ad: another package that differentiates ONNX models, its graph in float64 on the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.conformance.problems.observation import NotApplicable, Observation, Oracle, elements
from refgrad.conformance.problems.point import in_float64
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.builders import build, get_builder

NAME = "onnx-ad"
_TRUSTED = 1e-6  # relative: its constants are in the model's type


def _observe(problem: Problem) -> Sequence[Observation]:
    try:
        built = build(NAME, problem)
        prepared = in_float64(built.model)
        results = prepared.run(built.feeds(problem.at, problem.wide_cotangents))
    except Exception as error:  # it raises classes of its own, and any other where it does not know a form
        return [NotApplicable(NAME, " ".join(str(error).split()) or type(error).__name__)]
    return elements(NAME, problem, built.named(results), _TRUSTED)


ORACLE = Oracle(
    NAME,
    "onnx-ad's reverse mode, its graph in float64 on the interpreter: rules that know nothing of refgrad's, trusted up to the "
    "rounding of their constants to the model's type",
    observe=_observe,
    missing=get_builder(NAME).missing,
)
