"""What the emitter offers besides nodes: subgraphs, and forward nodes that become operators which return more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import RuleError
from refgrad.tables.registry import RULES, rule

X = np.array([[0.5, -1.0], [0.25, 2.0], [-0.75, 1.5]], np.float32)
SEED = np.array([[1.0, 3.0], [-2.0, 0.5], [0.25, -1.0]], np.float32)


def chain() -> onnx.ModelProto:
    """Around Neg, so that its cotangent is computed in the gradient graph and has a name there."""
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> chain (float[3, 2] x) => (float[3, 2] y)
        { a = Exp(x) b = Neg(a) y = Exp(b) }"""
    )


def with_neg(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> onnx.ModelProto:
    monkeypatch.setitem(RULES, ("", "Neg"), RULES["", "Neg"])
    rule("Neg", replace=True)(function)
    gradient = refgrad.gradient(chain(), **options)
    onnx.checker.check_model(gradient, full_check=all(not node.domain for node in gradient.graph.node))
    return gradient


def assert_right(gradient: onnx.ModelProto) -> None:
    """The derivative of exp(−exp x) is −exp(−exp x)·exp x."""
    expected = -SEED * np.exp(-np.exp(X)) * np.exp(X)
    for backend in [name for name in ("numpy", "ort-cpu") if name in available()]:
        [got] = get_backend(backend).prepare(gradient).run({"x": X, "y_grad": SEED}).values()
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def body_of(gradient: onnx.ModelProto) -> onnx.GraphProto:
    [scan] = [node for node in gradient.graph.node if node.op_type == "Scan"]
    [body] = [attribute.g for attribute in scan.attribute if attribute.name == "body"]
    return body


def test_a_subgraph_reads_values_outside_by_their_final_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def neg(op: Any, d_Y: str) -> Any:
        largest = op.ReduceMax(op.Abs(d_Y), keepdims=0)

        def body(row: str) -> list[str]:
            near_zero = op.Mul(op.Mul(largest, 0.0), op.ReduceSum(d_Y, keepdims=0))
            assert op.Mul(largest, 0.0) == op.Mul(largest, 0.0)
            negated = op.Neg(op.Add(row, near_zero))
            op.Tanh(negated)  # nobody reads it
            op.assume(negated, (None,))
            return [negated]

        graph = op.subgraph(body, d_Y)
        return op.Scan(d_Y, body=graph, num_scan_inputs=1)

    gradient = with_neg(neg, monkeypatch)
    assert_right(gradient)
    body = body_of(gradient)
    inner = {name for node in body.node for name in node.input} - {name for node in body.node for name in node.output}
    assert "b_grad" in inner  # the cotangent, which had another name when the body was made
    assert "Tanh" not in {node.op_type for node in body.node}
    assert len(body.node) == len({node.output[0] for node in body.node})
    assert [len(value.type.tensor_type.shape.dim) for value in body.output] == [1]


def test_what_is_computed_outside_is_not_computed_again_and_nothing_within_is_read_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def neg(op: Any, d_Y: str) -> Any:
        outside = op.Mul(d_Y, -1.0)
        reads: list[str] = []

        def body(row: str) -> list[str]:
            reads.append(row)
            assert op.Mul(d_Y, -1.0) == outside
            within = op.Mul(op.ReduceSum(outside, keepdims=0), 0.0)
            negated = op.Add(op.Neg(row), within)
            op.assume(negated, (None,))
            return [negated]

        result = op.Scan(d_Y, body=op.subgraph(body, d_Y), num_scan_inputs=1)
        within = op.Mul(op.ReduceSum(outside, keepdims=0), 0.0)  # emitted anew: that in the body cannot be read here
        return op.Add(result, within)

    gradient = with_neg(neg, monkeypatch)
    assert_right(gradient)
    body = body_of(gradient)
    operators = [node.op_type for node in body.node]
    assert operators.count("Mul") == 1
    outer = {name for node in gradient.graph.node for name in node.input}
    assert outer.isdisjoint(name for node in body.node for name in node.output)


def test_a_training_form_that_nobody_uses_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def neg(op: Any, d_Y: str) -> Any:
        [saved] = op.training_form("NegTraining", ("saved",))
        op.Mul(saved, d_Y)  # nobody reads it
        return op.Neg(d_Y)

    gradient = with_neg(neg, monkeypatch)
    assert_right(gradient)
    assert [node.output for node in gradient.graph.node if node.name == "Neg_1"] == [["b"]]
    assert {o.domain for o in gradient.opset_import} == {""}


def test_a_training_form_returns_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def neg(op: Any, d_Y: str) -> Any:
        [saved] = op.training_form("NegTraining", ("saved",))
        return op.Mul(saved, d_Y)

    model = chain()
    monkeypatch.setitem(RULES, ("", "Neg"), RULES["", "Neg"])
    rule("Neg", replace=True)(neg)
    gradient = refgrad.gradient(model, dialect="ort")
    [node] = [node for node in gradient.graph.node if node.op_type == "NegTraining"]
    assert node.domain == "com.microsoft"
    assert list(node.output) == ["b", "Neg_1_saved"]
    assert any("Neg_1_saved" in node.input for node in gradient.graph.node)
    assert [node.op_type for node in model.graph.node] == ["Exp", "Neg", "Exp"]


def test_a_training_form_needs_a_forward_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        refgrad.builder.op.Emitter, "full", lambda op, *_, **__: op.training_form("OnesTraining", ("saved",))
    )
    with pytest.raises(RuleError, match=r"'cotangent' belongs to no forward node that could become OnesTraining"):
        refgrad.gradient(chain(), cotangent="ones")


WRITTEN = {
    "op.const of a NumPy scalar": (lambda op: op.const(np.float32(1.05)), np.float32, 1.05),
    "op.const of a double": (lambda op: op.const(np.float64(1.05)), np.float64, 1.05),
    "a NumPy scalar": (lambda op: op.Neg(np.float16(1.5)), np.float16, 1.5),
    "an integer of NumPy": (lambda op: op.Neg(np.int32(-3)), np.int32, -3),
    "a list of them": (lambda op: op.const([np.int64(3), np.int64(4)]), np.int64, [3, 4]),
    "a tuple of both": (lambda op: op.Neg((np.int32(3), 4)), np.int64, [3, 4]),
    "an integer": (lambda op: op.const(3), np.int64, 3),
    "an empty list": (lambda op: op.const([]), np.int64, []),
    "True": (lambda op: op.Not(True), np.bool_, True),
    "True of NumPy": (lambda op: op.Not(np.True_), np.bool_, True),
    "op.const of True": (lambda op: op.const(True), np.bool_, True),
    "op.const of a list": (lambda op: op.const([True, False]), np.bool_, [True, False]),
    "op.const beside 1": (lambda op: (op.const(1), op.const(True))[1], np.bool_, True),
    "op.const like another": (
        lambda op: op.const(np.float32(0.5), like=op.const(np.zeros(1, np.float64))),
        np.float64,
        0.5,
    ),
}


@pytest.mark.parametrize("which", WRITTEN)
def test_a_constant_keeps_its_type(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, dtype, value = WRITTEN[which]
    found: list[np.ndarray] = []

    def neg(op: Any, d_Y: str) -> Any:
        made = write(op)
        nodes = {node.outputs[0]: node.inputs[0] for node in op.emission.nodes}
        found.append(op.constant(nodes.get(made, made)))
        return op.Neg(d_Y)

    with_neg(neg, monkeypatch)
    assert found[0].dtype == dtype
    assert found[0].tolist() == np.asarray(value, dtype).tolist()


@pytest.mark.parametrize("number", [1.05, np.float32(1.05), np.float64(1.05)])
def test_a_number_of_numpy_is_as_good_as_one_of_python(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = with_neg(lambda op, d_Y: op.Mul(op.Mul(d_Y, -1 / 1.05), number), monkeypatch)
    assert_right(gradient)
    wide = get_backend("numpy").prepare(gradient, precision="float64").run({"x": X, "y_grad": SEED})["x_grad"]
    assert wide.dtype == np.float64


LOST = {
    "op.const of a float": (lambda op, d_Y: op.const(1.05), r"makes a constant of 1\.05, .*op\.const\(\.\.\., like="),
    "op.const of 1.0": (lambda op, d_Y: op.const(1.0), r"makes a constant of 1\.0, which could be of any float type"),
    "a list of floats": (lambda op, d_Y: op.Mul(d_Y, [0.5, 1.0]), r"makes a constant of \[0\.5, 1\.0\]"),
    "half beside integers": (lambda op, d_Y: op.Mul(op.Shape(d_Y), 0.5), r"gives 0\.5; expected int64.*cast that"),
    "half like integers": (lambda op, d_Y: op.const([0.5], like=op.Shape(d_Y)), r"gives \[0\.5\]; expected int64"),
    "infinity": (lambda op, d_Y: op.Max(op.Shape(d_Y), -np.inf), r"gives -inf; expected int64"),
}


@pytest.mark.parametrize("which", LOST)
def test_a_number_that_would_become_another_is_refused(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, message = LOST[which]
    with pytest.raises(RuleError, match=f"The rule for Neg of node 'Neg_1' {message}"):
        with_neg(write, monkeypatch)


def test_each_output_of_an_emitted_node_has_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def neg(op: Any, d_Y: str, X: str) -> str:
        for made in (op.TopK(X, [1], outputs=2), op.Dropout(X, outputs=2), op.DynamicQuantizeLinear(X, outputs=3)):
            found.append([onnx.TensorProto.DataType.Name(op.type(name)) for name in made])
        largest, place = op.TopK(X, [1], outputs=2)
        zero = op.Mul(op.Sub(largest, op.GatherElements(X, op.Add(place, 0), axis=-1)), 0.0)
        return op.Sub(op.Mul(zero, 1.0), d_Y)

    assert_right(with_neg(neg, monkeypatch))
    assert found == [["FLOAT", "INT64"], ["FLOAT", "BOOL"], ["UINT8", "FLOAT", "UINT8"]]
