"""The judge finds no fault in the gradients of control flow and sequences, whose cases no test of a family of rules asks."""

from __future__ import annotations

import pytest

from refgrad.conformance import verdicts
from refgrad.conformance.case import Case
from refgrad.conformance.cases.control_flow import cases as of_control_flow
from refgrad.conformance.cases.sequence import cases as of_sequences
from refgrad.conformance.judge.judge import Candidate, judge
from refgrad.conformance.judge.running import runner
from refgrad.conformance.oracles import Observation
from refgrad.conformance.problems.point import in_float64
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

CASES = [case for case in (*of_control_flow(), *of_sequences()) if case.values == "smooth"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_gradient_is_right(case: Case) -> None:
    problem = ask(case)
    observations: list[Observation] = [said for oracle in runner.ORACLES for said in runner.observe(oracle, problem)]
    built = build("refgrad", problem)
    gradients = built.named(in_float64(built.model).run(built.feeds(problem.at, problem.wide_cotangents)))
    [row] = judge(problem, observations, [Candidate("refgrad", "numpy", len(built.model.graph.node), gradients)])
    assert row.verdict == verdicts.RIGHT, row.note
