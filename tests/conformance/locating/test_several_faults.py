"""Faults of rules beside faults of kernels, and faults that a random direction or a run in double does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from planting import Planted, builder_with, network, scaled

from refgrad.conformance import bisect, compare
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.locating.verdicts import Comparison
from refgrad.conformance.oracles.joint import contradiction
from refgrad.conformance.verdicts import WRONG

pytestmark = pytest.mark.interpreter

LINE = """
    <ir_version: 8, opset_import: ["": 18]> line (float[4, 3] x) => (float[4, 3] y) {
        [tanh] h = Tanh(x)  [sinh] s = Sinh(h)  [atan] y = Atan(s)
    }"""


def rules_of(found: Comparison) -> list[tuple[str, ...]]:
    return [fault.nodes for fault in found.b.rules.faults] if found.b.rules else []


def kernels_of(found: Comparison) -> list[str]:
    return [one.found.name for one in found.b.kernels.culprits] if found.b.kernels else []


def test_a_kernel_is_named_beside_a_rule_that_explains_every_wrong_gradient() -> None:
    model = onnx.parser.parse_model(LINE)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)}
    kernel = Planted("tanh_Grad/Sub_1", lambda y: 1.01 * y)
    found = compare(model, "refgrad@numpy", Live(builder_with(scaled("sinh", 1.5)), kernel), feeds)
    assert rules_of(found) == [("sinh",)]
    assert kernels_of(found) == ["tanh_Grad/Sub_1"]
    found = compare(model, "refgrad@numpy", Live(builder_with(scaled("sinh", 1.5)), "numpy"), feeds)
    assert rules_of(found) == [("sinh",)]
    assert not kernels_of(found)


def after(output: str, make: Callable[[ModelProto, str, str], list[Any]]) -> Callable[[ModelProto], None]:
    """An edit of a gradient: others read what is made of an output, in place of the output."""

    def edit(made: ModelProto) -> None:
        nodes = made.graph.node
        place = next((k for k, node in enumerate(nodes) if output in node.output), None)
        if place is None:
            return
        nodes[place].output[0] = f"{output}_before"
        for node in reversed(make(made, f"{output}_before", output)):
            nodes.insert(place + 1, node)

    return edit


def test_one_wrong_element_of_many_is_found_in_double() -> None:
    """A random direction hardly moves along it."""
    model = onnx.parser.parse_model(LINE.replace("4, 3", "200, 100"))
    feeds = {"x": np.random.default_rng(0).standard_normal((200, 100)).astype(np.float32)}

    def doubled(made: ModelProto, before: str, output: str) -> list[Any]:
        by = np.ones((200, 100), np.float32)
        by[17, 3] = 1.001
        made.graph.initializer.append(numpy_helper.from_array(by, "by"))
        return [helper.make_node("Mul", [before, "by"], [output], "planted")]

    for name, node in (("h_grad", "sinh"), ("s_grad", "atan"), ("x_grad", "tanh")):
        assert [fault.nodes for fault in bisect(model, feeds, builder_with(after(name, doubled))).faults] == [(node,)]


def test_a_rule_that_rounds_to_a_narrower_type_is_named() -> None:
    """In double it rounds nothing, and each of its nodes is right for its inputs."""
    model = onnx.parser.parse_model(LINE)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)}

    def rounded(made: ModelProto, before: str, output: str) -> list[Any]:
        return [
            helper.make_node("Cast", [before], ["narrow"], "narrowing", to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["narrow"], [output], to=TensorProto.FLOAT),
        ]

    found = compare(model, "refgrad@numpy", Live(builder_with(after("h_grad", rounded)), "numpy"), feeds)
    assert [tensor.b.verdict for tensor in found.tensors if tensor.name == "x"] == [WRONG]
    assert rules_of(found) == [("sinh",)]
    assert "rounds to float16" in found.b.rules.faults[0].message
    assert "'narrowing'" in found.b.rules.faults[0].message


def test_a_cast_that_rounds_nothing_is_no_fault() -> None:
    model = onnx.parser.parse_model(LINE)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)}

    def through_whole_numbers(made: ModelProto, before: str, output: str) -> list[Any]:
        made.graph.initializer.append(numpy_helper.from_array(np.int64(1), "whole"))
        return [
            helper.make_node("Cast", ["whole"], ["narrow"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["narrow"], ["one"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [before, "one"], [output]),
        ]

    assert not bisect(model, feeds, builder_with(after("h_grad", through_whole_numbers))).faults


def test_what_is_no_number_in_double_either_is_nobodys_fault() -> None:
    """The derivative of a power by its exponent is NaN where the base is negative; a NaN elsewhere is a fault."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> power (float[3] x, float e) => (float[3] y) {
            [tanh] t = Tanh(x)  [pow] y = Pow(t, e)
        }""")
    feeds = {"x": np.float32([-1, 2, 3]), "e": np.float32(2)}
    nan = Planted("tanh_Grad/Sub_1", lambda y: np.where(np.arange(3) == 1, np.nan, y))
    found = compare(model, "refgrad@numpy", Live("refgrad", nan), feeds)
    assert kernels_of(found) == ["tanh_Grad/Sub_1"]
    assert not any(origin.operator == "Log" for origin in found.b.origins)


def test_rounding_of_the_function_accuses_no_gradient_along_a_direction() -> None:
    """A tiny input among others has a tiny step, in which the differences are rounding."""
    at = {"small": np.full(3, 1e-9), "large": np.linspace(1, 2, 5)}

    def function(point: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": 1e3 * np.tanh(point["large"]).sum() + np.maximum(point["small"], 0)}

    right = {"small": np.ones(3), "large": 3e3 * (1 - np.tanh(at["large"]) ** 2)}
    cotangents = {"y": np.ones(3)}
    assert contradiction(function, at, cotangents, right, 1e-6, np.random.default_rng(0)) is None
    wrong = {**right, "large": 1.5 * right["large"]}
    assert contradiction(function, at, cotangents, wrong, 1e-6, np.random.default_rng(0)) is not None


def test_two_faults_in_a_network_are_named_whatever_their_sides() -> None:
    model, feeds = network()
    side = Live(builder_with(scaled("Tanh_1", 1.5)), Planted("MatMul_1", lambda y: 1.01 * y))
    found = compare(model, "refgrad@numpy", side, feeds)
    assert rules_of(found) == [("Tanh_1",)]
    assert kernels_of(found) == ["MatMul_1"]
