"""The judge asks every case of the tables, and finds no fault: this notices a wrong rule of any operator."""

from __future__ import annotations

import pytest

from refgrad.conformance.case import Case
from refgrad.conformance.cases import every_case
from refgrad.conformance.judging import verdicts
from refgrad.conformance.judging.judge import Candidate, judge
from refgrad.conformance.oracles import Evidence
from refgrad.conformance.questions.point import in_float64
from refgrad.conformance.questions.question import ask
from refgrad.conformance.running import runner
from refgrad.conformance.systems.builders import build

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]


@pytest.mark.forms
@pytest.mark.parametrize("case", [case for case in every_case() if case.values == "smooth"], ids=str)
def test_its_gradient_is_right(case: Case) -> None:
    question = ask(case)
    evidence: list[Evidence] = [said for oracle in runner.ORACLES for said in runner.testify(oracle, question)]
    built = build("refgrad", question)
    gradients = built.named(in_float64(built.model).run(built.feeds(question.at, question.wide_cotangents)))
    [row] = judge(question, evidence, [Candidate("refgrad", "numpy", len(built.model.graph.node), gradients)])
    assert row.verdict in (verdicts.AGREED, verdicts.INCONCLUSIVE), row.note
