"""Choices at ties and kinks are judged together: each may be allowed, and all of them be no derivative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx.parser
import pytest

from refgrad.conformance import compare
from refgrad.conformance.case import Case
from refgrad.conformance.judge.judge import Candidate, judge
from refgrad.conformance.judge.running import runner
from refgrad.conformance.judge.running.runner import ORACLES
from refgrad.conformance.oracles.joint import contradiction
from refgrad.conformance.problems.problem import ask

pytestmark = pytest.mark.interpreter

HEAD = '<ir_version: 8, opset_import: ["": 18]> '
TIED = np.ones((1, 1, 2, 2))
POOL = "g (float[1, 1, 2, 2] x) => (float[1, 1, 1, 1] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }"
LARGER = "g (float[2] x, float[2] z) => (float[2] y) { y = Max (x, z) }"
REDUCED = "g (float[2, 2] x) => (float[1, 1] y) { y = ReduceMax (x) }"
IDENTITY = "g (float[2] x) => (float[2] y) { n = Neg (x) p = Relu (x) q = Relu (n) y = Sub (p, q) }"
SIZE = "g (float[2] x) => (float[2] y) { n = Neg (x) p = Relu (x) q = Relu (n) y = Add (p, q) }"
BESIDE = "g (float[2] x, float[2] z) => (float[2] y) { d = Sub (z, x) p = Relu (x) q = Relu (d) y = Sub (p, q) }"

# The model, the point, the gradients for a cotangent of 1, and whether they are a derivative.
CHOICES = [
    pytest.param(POOL, {"x": TIED}, {"x": TIED}, False, id="MaxPool: all to each"),
    pytest.param(POOL, {"x": TIED}, {"x": TIED / 4}, True, id="MaxPool: shares"),
    pytest.param(POOL, {"x": TIED}, {"x": np.eye(4)[0].reshape(1, 1, 2, 2)}, True, id="MaxPool: the first"),
    pytest.param(POOL, {"x": TIED}, {"x": np.eye(4)[3].reshape(1, 1, 2, 2)}, True, id="MaxPool: the last"),
    pytest.param(POOL, {"x": TIED}, {"x": 0 * TIED}, False, id="MaxPool: none"),
    pytest.param(LARGER, {"x": [1, 2], "z": [1, 0]}, {"x": [1, 1], "z": [1, 0]}, False, id="Max: all to each"),
    pytest.param(LARGER, {"x": [1, 2], "z": [1, 0]}, {"x": [0.5, 1], "z": [0.5, 0]}, True, id="Max: halves"),
    pytest.param(LARGER, {"x": [1, 2], "z": [1, 0]}, {"x": [0, 1], "z": [1, 0]}, True, id="Max: the second"),
    pytest.param(REDUCED, {"x": np.ones((2, 2))}, {"x": np.ones((2, 2))}, False, id="ReduceMax: all to each"),
    pytest.param(REDUCED, {"x": np.ones((2, 2))}, {"x": [[0, 0], [0, 1]]}, True, id="ReduceMax: one"),
    pytest.param(IDENTITY, {"x": [0, 2]}, {"x": [1, 1]}, True, id="x: slopes 1 and 1 give 1 − 1·(−1)·0 …"),
    pytest.param(IDENTITY, {"x": [0, 2]}, {"x": [0, 1]}, False, id="x: slopes 0 and 0"),
    pytest.param(SIZE, {"x": [0, 2]}, {"x": [0, 1]}, True, id="|x|: slopes 0 and 0"),
    pytest.param(SIZE, {"x": [0, 2]}, {"x": [-1, 1]}, True, id="|x|: slopes 0 and 1"),
    pytest.param(BESIDE, {"x": [0, 2], "z": [0, 1]}, {"x": [0, 1], "z": [0, 0]}, True, id="0 nearby, and not at 0"),
]


def as_floats(values: dict[str, object]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


@pytest.mark.parametrize(("text", "at", "gradients", "is_derivative"), CHOICES)
def test_choices_of_a_recording(
    text: str, at: dict[str, object], gradients: dict[str, object], is_derivative: bool
) -> None:
    recorded = as_floats({f"{name}_grad": value for name, value in gradients.items()})
    model = onnx.parser.parse_model(HEAD + text)
    found = compare(model, "refgrad@numpy", recorded | as_floats(at), cotangent="ones", search=False)
    verdicts = {tensor.b.verdict for tensor in found.tensors}
    assert verdicts <= {"right", "convention"} if is_derivative else "wrong" in verdicts, found.tensors


@pytest.mark.parametrize(("text", "at", "gradients", "is_derivative"), CHOICES)
def test_choices_of_a_candidate_of_the_suite(
    text: str, at: dict[str, object], gradients: dict[str, object], is_derivative: bool
) -> None:
    case = Case("ties", onnx.parser.parse_model(HEAD + text), as_floats(at), values="kink")
    problem = ask(case)
    ones = {name: np.ones_like(value) for name, value in problem.cotangents.items()}
    [row] = judge(
        problem.__class__(**{**vars(problem), "cotangents": ones}), [], [Candidate("b", "e", 3, as_floats(gradients))]
    )
    assert row.verdict != "wrong" if is_derivative else row.verdict in ("wrong", "undecided"), row
    if row.verdict == "wrong":
        assert "no derivative together" in row.note


ALL_TO_EACH = [
    one for one in CHOICES if one.id in ("MaxPool: all to each", "Max: all to each", "ReduceMax: all to each")
]


@pytest.mark.parametrize(("text", "at", "gradients", "is_derivative"), ALL_TO_EACH)
def test_the_whole_cotangent_for_each_tie_is_wrong_in_the_suite(
    text: str, at: dict[str, object], gradients: dict[str, object], is_derivative: bool
) -> None:
    problem = ask(Case("ties", onnx.parser.parse_model(HEAD + text), as_floats(at), values="kink"))
    [weight] = problem.cotangents.values()
    # The cotangents are random: each gradient has the size of that of its output.
    got = {name: value * np.broadcast_to(weight, value.shape) for name, value in as_floats(gradients).items()}
    observations = [said for name in ORACLES for said in runner.observe(name, problem)]
    [row] = judge(problem, observations, [Candidate("b", "e", 3, got)])
    assert row.verdict == "wrong", row
    assert "conventions at a kink that are no derivative together: along" in row.note


def test_what_few_points_nearby_hide_is_not_taken_for_smooth() -> None:
    """Relu(x) − Relu(z − x) at 0 has the derivatives 0, 1 and 2 nearby: with 4 points one often sees 1 alone."""

    def function(at: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": np.maximum(at["x"], 0) - np.maximum(at["z"] - at["x"], 0)}

    at = {"x": np.zeros(1), "z": np.zeros(1)}
    seen: Sequence[object] = [
        contradiction(function, at, {"y": np.ones(1)}, {"x": np.zeros(1)}, 1e-6, np.random.default_rng(seed))
        for seed in range(40)
    ]
    assert seen == [None] * 40
