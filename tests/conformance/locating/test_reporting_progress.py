"""Every phase of a comparison, a search and a reduction says what it does and how far it is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx.parser
import pytest
from planting import Planted, builder_with, network, scaled

import refgrad
from refgrad.conformance import compare, locate, nonfinite
from refgrad.conformance.locating import reducing
from refgrad.conformance.locating.sides import Live

pytestmark = pytest.mark.interpreter


class Steps:
    """The steps that were reported, each with its numbers."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, int | None]]] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        assert total is None or 0 <= done <= total, (what, done, total)
        self.of.setdefault(what, []).append((done, total))

    def has(self, steps: Iterable[str]) -> bool:
        assert set(steps) <= self.of.keys(), self.of.keys()
        return True


def test_every_phase_of_a_comparison_is_reported() -> None:
    model, feeds = network()
    steps = Steps()
    wrong = Live(builder_with(scaled("MatMul_1", 1.01)), Planted("Softmax_2", lambda y: 1.001 * y))
    compare(model, wrong, "refgrad@numpy", feeds, progress=steps)
    own = ["building the gradient", "the gradient in double", "running the gradient, and again"]
    own += ["running the model, and again", "rules, by gradients of parts", "kernels one by one", "repairing nodes"]
    judged = [f"judging {name!r}" for name in ("y", "x", "w1", "b1", "w2", "scale")]
    assert steps.has(["the judge's gradient in double", "differences by 'x'", *judged])
    assert steps.has(f"{wrong}: {step}" for step in own)
    assert [steps.of[name][0] for name in judged] == [(k, 6) for k in range(6)]
    built = [done for done, _ in steps.of[f"{wrong}: rules, by gradients of parts"]]
    assert built == list(range(len(built)))
    kernels = steps.of[f"{wrong}: kernels one by one"]
    assert kernels[-1][0] == kernels[-1][1]


def test_the_parts_of_a_search_and_kinks_are_reported() -> None:
    model, feeds = network()
    gradient = refgrad.gradient(model, ["x"], cotangent="ones", keep_outputs=True)
    steps = Steps()
    locate(gradient, feeds, Planted("Add_1", lambda y: 1.01 * y), steps)
    assert steps.has(["the model as a whole", "running it again", "kernels one by one", "repairing nodes"])
    relu = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Relu (x) }'
    )
    steps = Steps()
    recorded = {"x_grad": np.float32([1, 0.5, 0]), "x": np.float32([1, 0, -1])}
    compare(relu, "refgrad@numpy", recorded, progress=steps)
    assert steps.has(["both sides of the kinks of 'x'", "recorded: conventions together, along directions"])


def test_a_search_for_nan_and_a_reduction_are_reported() -> None:
    model, feeds = network()
    steps = Steps()
    nonfinite(model, feeds, progress=steps)
    assert steps.has(["nodes", "a run of the whole model", "values that leave their types"])
    assert steps.of["nodes"][-1][0] == steps.of["nodes"][-1][1]
    steps = Steps()
    reducing.reduce(model, Live("refgrad", Planted("Tanh_1", lambda y: 2 * y)), feeds, progress=steps)
    assert steps.has(["rules, by gradients of parts", "kernels one by one", "smaller models"])
