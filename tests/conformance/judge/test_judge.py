"""The judge: planted errors of every kind against observations, and what it takes for a verdict."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx.parser
import pytest

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judge.judge import Candidate, judge
from refgrad.conformance.judge.running import runner
from refgrad.conformance.judge.running.runner import ORACLES
from refgrad.conformance.oracles import Directional, Elementwise, NotApplicable, Property
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build
from refgrad.conformance.problems.systems.executors import run
from refgrad.tables import registry

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

RNG = np.random.default_rng(3)
CASE = node_case("MatMul", *(RNG.standard_normal((3, 3)).astype(np.float32) for _ in "AB"), opset=21)
PROBLEM = ask(CASE)
OBSERVATIONS = [said for name in ORACLES for said in runner.observe(name, PROBLEM)]


def gradients(problem=PROBLEM):
    built = build("refgrad", problem)
    feeds = dict(problem.feeds) | {built.cotangents[o]: v for o, v in problem.cotangents.items()}
    results = run("numpy", built.model, feeds)
    return {name: results[output] for name, output in built.gradients.items()}


def verdict(changed, observations=OBSERVATIONS, problem=PROBLEM, **others):
    [row] = judge(problem, observations, [Candidate("mine", "there", 3, gradients(problem) | changed, **others)])
    return row


RIGHT = gradients()

WRONG = {
    "factor": RIGHT["A"] * 1.01,
    "sign": -RIGHT["A"],
    "zero": np.zeros_like(RIGHT["A"]),
    "transposed": RIGHT["A"].T,
    "swapped": RIGHT["B"],
    "one element": np.where(np.eye(3) * RIGHT["A"] == RIGHT["A"][0, 0], RIGHT["A"] * 1.1, RIGHT["A"]).astype(
        np.float32
    ),
    "rolled": np.roll(RIGHT["A"], 1, 0),
    "NaN": np.full_like(RIGHT["A"], np.nan),
    "shape": RIGHT["A"][:1],
    "dtype": RIGHT["A"].astype(np.float16),
}


@pytest.mark.parametrize("error", WRONG)
def test_an_error_is_wrong_and_has_two_witnesses(error):
    row = verdict({"A": WRONG[error]})
    assert row.verdict == "wrong", row
    assert len(row.witnesses) >= 2 or error in ("shape", "dtype")
    assert row.note.startswith("A")


def test_the_note_names_every_input_that_is_wrong():
    row = verdict({name: 2 * value for name, value in RIGHT.items()})
    assert row.verdict == "wrong"
    assert {row.note[0], row.note[-1]} == {"A", "B"}
    assert "; also wrong by " in row.note
    assert "also" not in verdict({"A": 2 * RIGHT["A"]}).note


def test_an_error_by_the_float64_gradient_alone_gives_its_size():
    note = verdict({"A": np.where(RIGHT["A"] == RIGHT["A"].max(), RIGHT["A"] + 1, RIGHT["A"])}, OBSERVATIONS).note
    assert note.removeprefix("A").removeprefix(": "), note


def test_what_is_right_agrees():
    row = verdict({})
    assert (row.verdict, set(row.witnesses)) == ("right", set(ORACLES))
    assert row.relative <= row.allowed


def test_a_gradient_that_is_left_out_is_zero():
    [row] = judge(PROBLEM, OBSERVATIONS, [Candidate("mine", "there", 3, {"A": RIGHT["A"]})])
    assert row.verdict == "wrong"
    assert row.note.startswith("B")


def test_rounding_of_the_type_is_no_error():
    wide = {name: value.astype(np.float16).astype(np.float32) for name, value in RIGHT.items()}
    assert verdict(wide).verdict == "wrong"
    halves = {name: np.asarray(value, np.float16) for name, value in CASE.feeds.items()}
    half = ask(node_case("MatMul", *halves.values(), opset=21))
    observations = [said for name in ORACLES for said in runner.observe(name, half)]
    assert verdict({}, observations, half).verdict == "right"


def test_a_tolerance_is_relative_to_the_gradient():
    tolerant = dataclasses.replace(PROBLEM, tolerance=0.05)
    assert verdict({"A": WRONG["factor"]}, problem=tolerant).verdict == "right"
    assert verdict({"A": WRONG["sign"]}, problem=tolerant).verdict == "wrong"


def test_nobody_asked_settles_nothing():
    row = verdict({}, observations=[NotApplicable("differences", "it does not apply")])
    assert (row.verdict, row.witnesses) == ("undecided", ())


def test_oracles_that_disagree_with_each_other_settle_nothing():
    lying = [
        dataclasses.replace(said, value=said.value * 2)
        if isinstance(said, Directional) and said.oracle == "reference"
        else said
        for said in OBSERVATIONS
    ]
    row = verdict({}, observations=lying)
    assert row.verdict == "undecided"
    assert ("reference" in row.against, "differences" in row.witnesses) == (True, True)


def test_one_oracle_alone_makes_no_gradient_wrong_where_refgrad_does_not_agree_with_it():
    lying = [
        dataclasses.replace(said, value=said.value * 2)
        for said in OBSERVATIONS
        if isinstance(said, Directional) and said.oracle == "reference"
    ]
    row = verdict({}, observations=lying)
    assert row.verdict == "undecided"
    assert "reference alone says that it is wrong" in row.note


@pytest.mark.parametrize("error", ["factor", "sign", "transposed"])
def test_another_autodiff_is_a_witness_element_by_element(error):
    wide = gradients()
    said = [
        Elementwise(name, key, value.astype(np.float64), 1e-6)
        for name in ("torch", "onnx-ad")
        for key, value in wide.items()
    ]
    assert verdict({}, observations=said).verdict == "right"
    row = verdict({"A": WRONG[error]}, observations=said)
    assert (row.verdict, {"torch", "onnx-ad"} <= set(row.witnesses)) == ("wrong", True)


def test_a_property_that_does_not_hold_is_wrong():
    row = verdict({}, properties=(Property("adjoint", 0.5, 1e-6, "off"),))
    assert (row.verdict, row.witnesses) == ("wrong", ("adjoint",))
    assert "adjoint" in verdict({}, properties=(Property("adjoint", 1e-9, 1e-6),)).witnesses


KINKS = {
    "refgrad": (0.0, "convention"),
    "one": (1.0, "convention"),
    "half": (0.5, "convention"),
    "outside": (2.0, "undecided"),
}


@pytest.mark.parametrize("answer", KINKS)
def test_at_a_kink_an_answer_between_both_sides_is_a_convention(answer):
    slope, expected = KINKS[answer]
    problem = ask(node_case("Relu", np.zeros((1,), np.float32), opset=21))
    observations = [said for name in ORACLES for said in runner.observe(name, problem)]
    row = verdict({"X": (slope * problem.cotangents["Y"]).astype(np.float32)}, observations, problem)
    assert row.verdict == expected, row
    assert ("refgrad" in row.witnesses) == (answer == "refgrad")


TIES = {
    "Abs": (node_case("Abs", np.zeros(3, np.float32), opset=21), lambda v: {"X": v}),
    "Max": (
        node_case("Max", np.ones(3, np.float32), np.ones(3, np.float32), opset=21),
        lambda v: {"data_0_0": v, "data_0_1": 0 * v},
    ),
    "ReduceMax": (
        node_case("ReduceMax", np.array([1, 1, 0], np.float32), opset=21, keepdims=0),
        lambda v: {"data": v * np.float32([1, 0, 0])},
    ),
}


@pytest.mark.parametrize("tie", TIES)
def test_a_kink_is_seen_where_the_mean_of_both_sides_is_the_gradient(tie):
    case, other = TIES[tie]
    problem = ask(case)
    observations = [said for oracle in ORACLES for said in runner.observe(oracle, problem)]
    [cotangent] = problem.cotangents.values()
    assert verdict({}, observations, problem).verdict == "convention"
    assert verdict(other(cotangent), observations, problem).verdict == "convention"
    too_large = {name: 3 * value for name, value in other(cotangent).items()}
    assert verdict(too_large, observations, problem).verdict == "undecided"


def test_a_convention_at_one_element_covers_no_error_at_another():
    problem = ask(node_case("Relu", np.array([0, 1, 2, -3, 4, 5], np.float32), opset=21))
    observations = [said for name in ORACLES for said in runner.observe(name, problem)]
    own = gradients(problem)["X"]
    own[0] = problem.cotangents["Y"][0] / 2
    assert verdict({"X": own}, observations, problem).verdict == "convention"
    own[1] *= 1.1
    row = verdict({"X": own}, observations, problem)
    assert (row.verdict, "element (1,) is" in row.note) == ("wrong", True), row
    assert {"differences", "reference"} <= set(row.witnesses)


KINKED = {  # element 0 is at a kink, element 3 is not
    "Relu": (node_case("Relu", np.array([0, 1, 2, 3, -4], np.float32), opset=21), "X"),
    "Abs": (node_case("Abs", np.array([[0, 1], [2, 3]], np.float32), opset=21), "X"),
    "Max": (
        node_case("Max", np.array([1, 2, 0, 3], np.float32), np.array([1, 0, 5, 2], np.float32), opset=21),
        "data_0_0",
    ),
    "MaxPool": (
        node_case("MaxPool", np.array([[[1, 1, 2, 3]]], np.float32), opset=21, kernel_shape=[2], strides=[2]),
        "X",
    ),
}
SPOILT = {"factor": lambda g: 1.01 * g, "sign": lambda g: -g, "zero": lambda g: 0 * g, "NaN": lambda g: np.nan * g}


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("kink", KINKED)
def test_a_kink_in_one_element_hides_no_fault_in_another(kink, spoilt):
    case, name = KINKED[kink]
    problem = ask(case)
    assert np.flatnonzero(problem.kinked[name]).tolist() == ([0, 1] if kink == "MaxPool" else [0])
    observations = [said for oracle in ORACLES for said in runner.observe(oracle, problem)]
    assert verdict({}, observations, problem).verdict == "convention"
    wrong = gradients(problem)[name].copy()
    wrong.flat[3] = SPOILT[spoilt](wrong.flat[3])
    row = verdict({name: wrong}, observations, problem)
    assert (row.verdict, len(row.witnesses) >= 2) == ("wrong", True), row


@pytest.mark.parametrize("factor", [1.01, -1.0, 0.0])
def test_a_rule_that_is_wrong_in_one_element_is_not_hidden_by_a_kink_in_another(factor, monkeypatch):
    """Even though the gradient that refgrad gives the judge is wrong as well."""
    case, _ = KINKED["Relu"]

    def wrong(op, d_Y, X):
        slope = op.Where(op.Equal(X, 3.0), op.const(np.array(factor, np.float32)), op.const(np.array(1, np.float32)))
        return op.Where(op.Greater(X, 0.0), op.Mul(d_Y, slope), 0.0)

    monkeypatch.setitem(registry.RULES, ("", "Relu"), dataclasses.replace(registry.RULES["", "Relu"], function=wrong))
    problem = ask(case)
    observations = [said for oracle in ORACLES for said in runner.observe(oracle, problem)]
    row = verdict({}, observations, problem)
    assert row.verdict == "wrong", row
    assert {"differences", "reference"} <= set(row.witnesses)


def test_a_rule_that_is_wrong_everywhere_is_no_convention_at_a_kink(monkeypatch):
    case, name = KINKED["Relu"]
    wrong = dataclasses.replace(registry.RULES["", "Relu"], function=lambda op, d_Y, X: op.Mul(d_Y, 2.0))
    monkeypatch.setitem(registry.RULES, ("", "Relu"), wrong)
    alone = dataclasses.replace(case, feeds={name: np.zeros(5, np.float32)})
    for one, expected in ((case, "wrong"), (alone, "undecided")):
        problem = ask(one)
        observations = [said for oracle in ORACLES for said in runner.observe(oracle, problem)]
        assert verdict({}, observations, problem).verdict == expected


def test_two_draws_are_not_compared():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[8] x) => (float[8] y)
        { t = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() y = Dropout(x, r, t) }"""
    )
    problem = ask(Case("dropout", model, {"x": np.ones(8, np.float32)}))
    observations = [said for name in ORACLES for said in runner.observe(name, problem)]
    row = verdict({"x": np.ones(8, np.float32)}, observations, problem)
    assert (row.verdict, "no two executors draw the same" in row.note) == ("undecided", True)
