"""The checker is checked: assert_gradient has to catch every wrong rule that is planted here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest
from checking import assert_gradient

from refgrad.conformance.case import Case, node_case
from refgrad.tables.registry import RULES, rule


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def square() -> Case:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> square (float[3] x) => (float[3] y) { y = Mul(x, x) }'
    )
    return Case("an input used twice", model, {"x": numbers(3)})


def used_by_two_nodes() -> Case:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> both (float[3] x) => (float[3] y)
        { a = Sin(x) b = Cos(x) y = Add(a, b) }"""
    )
    return Case("an input used by two nodes", model, {"x": numbers(3)})


Planted = tuple[str, dict[str, Any], Callable[..., Any], Case]
MATRIX = numbers(3, 3)
LAST = np.array([1], np.int64)

PLANTED: dict[str, Planted] = {
    "factor 2.001": (
        "ReduceSumSquare",
        {"wrt": ["data"]},
        lambda op, d_reduced, data: op.Mul(d_reduced, op.Mul(data, 2.001)),
        node_case("ReduceSumSquare", MATRIX),
    ),
    "transposed operand": (
        "MatMul",
        {},
        lambda op, d_Y, A, B: (op.MatMul(d_Y, B), op.MatMul(op.Transpose(A), d_Y)),
        node_case("MatMul", MATRIX, numbers(3, 3)),
    ),
    "no sum over a broadcast axis": (
        "Add",
        {},
        lambda op, d_C: (d_C, d_C),
        node_case("Add", MATRIX, numbers(1, 3)),
    ),
    "one row instead of the sum over a broadcast axis": (
        "Add",
        {},
        lambda op, d_C: (d_C, op.Slice(d_C, [0], [1], [0])),
        node_case("Add", MATRIX, numbers(1, 3)),
    ),
    "mean instead of the sum over a broadcast axis": (
        "Add",
        {"broadcast": True},
        lambda op, d_C: (d_C, op.Mul(d_C, 1 / 3)),
        node_case("Add", MATRIX, numbers(1, 3)),
    ),
    "wrong axis of Softmax": (
        "Softmax",
        {},
        lambda op, d_output, output: op.grad.SoftmaxGrad(d_output, output, axis=0),
        node_case("Softmax", MATRIX),
    ),
    "wrong axis of ReduceSum": (
        "ReduceSum",
        {"wrt": ["data"]},
        lambda op, d_reduced, data: op.Expand(op.Unsqueeze(d_reduced, [0]), op.Shape(data)),
        node_case("ReduceSum", MATRIX, LAST, keepdims=0),
    ),
    "wrong sign": (
        "Sub",
        {"broadcast": True},
        lambda op, d_C: (d_C, d_C),
        node_case("Sub", MATRIX, numbers(3, 3)),
    ),
    "one contribution of an input used twice": (
        "Mul",
        {"broadcast": True},
        lambda op, d_C, A, B: (op.Mul(d_C, B), None),
        square(),
    ),
    "no contribution by one of two nodes": ("Cos", {}, lambda op, d_output: None, used_by_two_nodes()),
    "zeros": ("Relu", {}, lambda op, d_Y, X: op.Mul(d_Y, op.Sub(X, X)), node_case("Relu", MATRIX)),
    "no sum over the axis in Softmax": (
        "Softmax",
        {},
        lambda op, d_output, output: op.Mul(d_output, output),
        node_case("Softmax", MATRIX),
    ),
    "wrong slope on one side": (
        "LeakyRelu",
        {},
        lambda op, d_Y, X: op.Where(op.Greater(X, 0.0), d_Y, op.Mul(d_Y, 0.02)),
        node_case("LeakyRelu", MATRIX),
    ),
    "NaN": ("Abs", {}, lambda op, d_Y, X: op.Div(op.Mul(d_Y, 0.0), op.Sub(X, X)), node_case("Abs", MATRIX)),
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_planted_rule_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op_type, settings, function, case = PLANTED[wrong]
    assert_gradient(case)
    monkeypatch.setitem(RULES, ("", op_type), RULES["", op_type])  # so that it is put back
    rule(op_type, replace=True, **settings)(function)
    with pytest.raises(AssertionError):
        assert_gradient(case)


def test_planted_rules_are_gone() -> None:
    for _, _, _, case in PLANTED.values():
        assert_gradient(case)
