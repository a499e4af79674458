"""Dialect "ort" against ONNX Runtime's builder: every case comes out as docs/parity.md says, and for a reason it gives."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sampling import sampled, share

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.known.differences import KINDS, known_differences
from refgrad.conformance.tools import parity
from refgrad.derivatives import ortbuilder
from refgrad.derivatives.ortbuilder import Builders
from refgrad.errors import BuilderError
from refgrad.worker import Worker

pytestmark = [
    pytest.mark.training,
    pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training"),
]

RESULTS = json.loads((Path(__file__).parents[3] / "reports" / "results" / "parity.json").read_text())
MODELS = os.environ.get("REFGRAD_TORCH_MODELS")
KEPT = os.environ.get(
    "REFGRAD_PARITY"
)  # a folder: what is equal is written there, and tests/lowering/test_lowered.py reads it


def test_the_page_has_every_registered_operator_that_has_cases():
    assert set(RESULTS["operators"]) == set(parity.by_operator())


@pytest.fixture(scope="module")
def processes():
    with Builders() as builders, Worker() as runner:
        yield builders, runner


@pytest.mark.parametrize("operator", RESULTS["operators"])
def test_every_case_comes_out_as_the_page_says(processes, operator):
    """One of so many cases of each operator; its counts are the page's where all are asked."""
    cases = sampled(parity.by_operator()[operator], operator)
    rows = parity.survey(operator, cases, *processes, Path(KEPT) if KEPT else None)
    assert [f"{row.case}: {row.kind} {row.values} {row.detail}" for row in parity.unexplained(rows)] == []
    found, told = Counter(parity.counts(rows)[operator]), Counter(RESULTS["operators"][operator])
    assert found == told if share() == 1 else found <= told


def test_every_known_difference_explains_a_case():
    written = {(ground["kind"], ground["reason"]) for ground in RESULTS["departures"]}
    assert {(d.kind, d.reason) for d in known_differences()} == written
    assert {d.kind for d in known_differences()} <= set(KINDS)


def test_whole_models_come_out_as_the_page_says():
    found = []
    with Builders() as builders, Worker() as runner:
        for case in parity.whole_models(Path(MODELS) if MODELS else None).values():
            found += list(parity.measure_model(case, builders, runner))
    assert parity.unexplained([model.row for model in found]) == []
    expected = {(m["name"], m["builder"]): m["row"] for m in RESULTS["models"]}
    for model in found:
        known = expected[model.name, model.builder]
        assert model.row.same_operators, model
        assert model.row.same_names, model
        assert (model.row.verdict, model.row.values) == (known["verdict"], known["values"]), model


# The judge itself


def exp() -> Case:
    return node_case("Exp", np.ones((2, 3), np.float32), opset=21)


def test_a_wrong_gradient_of_theirs_is_called_wrong():
    with Builders() as builders, Worker() as runner:
        pair = parity.build(exp(), builders)
        assert parity.compare_values(pair, runner)[0] == "equal"
        last = next(node for node in pair.theirs.graph.node if "input_grad" in node.output)
        last.input[:] = [last.input[0], last.input[0]]
        values, proof, _ = parity.compare_values(pair, runner)
        assert values == "theirs are wrong"
        assert "differences" in proof


def test_a_wrong_gradient_of_ours_is_called_wrong():
    with Builders() as builders, Worker() as runner:
        pair = parity.build(exp(), builders)
        last = next(node for node in pair.ours.graph.node if "input_grad" in node.output)
        last.input[:] = [last.input[0], last.input[0]]
        assert parity.compare_values(pair, runner)[0] == "ours are wrong"
    row = parity.ParityRow("Exp", "Exp", "isomorphic", values="ours are wrong")
    assert parity.unexplained([row]) == [row]


def test_a_graph_that_does_not_run_is_told_from_one_that_does():
    with Builders() as builders, Worker() as runner:
        pair = parity.build(exp(), builders)
        pair.theirs.graph.node[0].op_type = "Nothing"
        assert parity.compare_values(pair, runner)[0] == "theirs fail"
        pair.ours.graph.node[0].op_type = "Nothing"
        assert parity.compare_values(pair, runner)[0] == "both fail"


def test_a_refusal_is_a_row():
    case = node_case("Softplus", np.ones(3, np.float32), opset=21)
    with Builders() as builders:
        row = parity.measure("Softplus", case, builders)
        assert (row.verdict, row.kind) == ("refused", "refused")
        assert "has not been registered" in row.detail
        with pytest.raises(BuilderError):
            parity.build(case, builders)


def test_a_difference_without_a_reason_is_found():
    row = parity.ParityRow("Exp", "Exp-2x3", "different", values="equal")
    assert row.kind == "form"
    assert parity.reason(row) is None
    assert parity.unexplained([row]) == [row]
    assert parity.ParityRow("Exp", "Exp-2x3", "isomorphic", same_names=False).kind == "form"
