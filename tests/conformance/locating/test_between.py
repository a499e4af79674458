"""A recording cannot be run. A comparison names the nodes that explain its wrong gradients."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.base import graph_inputs
from refgrad.cli import main
from refgrad.conformance.locating.between import between
from refgrad.conformance.locating.comparing import compare
from refgrad.conformance.locating.paths import TracedGraph
from refgrad.conformance.problems.feeds import read_feeds
from refgrad.conformance.reports import comparison_page, comparisons
from refgrad.conformance.reports.advice import ModelCommand, after_comparison
from refgrad.errors import FeedError, ModelWarning

pytestmark = pytest.mark.interpreter

WEIGHTS = {"w": (4, 5), "b": (5,), "v": (5, 3), "u": (3,)}
X = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)


def network():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> network (float[2, 4] x) => (float[2, 3] y) {
        [first] h = MatMul(x, w) [bias] c = Add(h, b) [act] s = Softmax(c)
        shape = Shape(x) [second] m = MatMul(s, v) [last] y = Add(m, u) }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return model


def recorded(*wrong):
    """The gradients of the network, with other numbers for these names."""
    made = refgrad.gradient(network(), cotangent="ones")
    gradients = get_backend("numpy").prepare(made).run({"x": X})
    rng = np.random.default_rng(2)
    for name in wrong:
        off = rng.standard_normal(gradients[f"{name}_grad"].shape).astype(np.float32)
        gradients[f"{name}_grad"] = gradients[f"{name}_grad"] + off
    return {"x": X, **gradients}


@pytest.mark.parametrize(
    ("wrong", "nodes"),
    [
        (("x", "w", "b"), ["bias", "act", "second"]),  # b needs the derivative of Add by it, and both others
        (("x", "w"), ["first", "bias"]),
        (("x",), ["first"]),
        (("v",), ["second"]),
        (("x", "w", "b", "v"), ["second", "last"]),
        (("x", "u"), []),  # no single node has both before it without the others
    ],
)
def test_the_nodes_that_explain_the_verdicts(wrong, nodes):
    right = {"x", *WEIGHTS} - set(wrong)
    found = between(TracedGraph(network(), {"x": X}), set(wrong), right)
    assert [one.split()[1].strip("'") for one in found] == nodes


def test_a_comparison_names_them():
    found = compare(network(), "refgrad@numpy", recorded("v", "x", "w", "b"))
    assert found.b.is_recorded
    assert found.b.between == ("MatMul 'second'", "Add 'last'")
    [line] = [line for line in comparisons.lines_of(found.b) if "cannot be run" in line]
    assert line.endswith("if one node alone is at fault, it is one of MatMul 'second', Add 'last'")
    page = comparison_page.page(found)
    assert "It is wrong in 4 tensors: " in page
    assert "It is right in 5 tensors." in page


def test_a_cause_that_is_known_needs_no_node():
    arrays = recorded()
    doubled = {name: 2 * value if name.endswith("_grad") else value for name, value in arrays.items()}
    found = compare(network(), "refgrad@numpy", doubled)
    assert not found.ok
    assert found.b.between == ()


def test_a_convention_is_not_called_right():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    found = compare(model, "refgrad@numpy", {"x": np.zeros(2, np.float32), "x_grad": np.ones(2, np.float32)})
    assert found.ok
    assert comparisons.sentence(found).endswith("are right in every tensor or, in 1, follow a convention at a kink.")
    steps = after_comparison(found, ModelCommand("g.onnx"), ("refgrad@numpy", "recorded.npz"))
    assert ["--kinks torch" in command for _, command in steps] == [True]


def test_the_next_steps_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "network.onnx")
    np.savez("bad.npz", **recorded("v"))
    assert (
        main(["compare", "network.onnx", "--a", "refgrad@numpy", "--b", "bad.npz", "-o", "r.md", "-o", "r.html"]) == 1
    )
    command = "walk network.onnx --feeds bad.npz"
    assert f"refgrad {command}" in (tmp_path / "r.md").read_text()
    assert f"<pre>refgrad {command}</pre>" in (tmp_path / "r.html").read_text()
    assert main(command.split()) == 0


def test_the_inputs_of_a_recording_are_feeds(tmp_path):
    np.savez(tmp_path / "bad.npz", **recorded())
    with pytest.warns(ModelWarning, match="gradients, which are no feeds and are left out: x_grad"):
        fed = read_feeds(tmp_path / "bad.npz", graph_inputs(network().graph))
    assert fed.keys() == {"x"}
    np.savez(tmp_path / "odd.npz", **recorded(), X=X)
    with pytest.raises(FeedError, match="have 'X', but the model has no such input"), pytest.warns(ModelWarning):
        read_feeds(tmp_path / "odd.npz", graph_inputs(network().graph))


def test_a_gradient_of_a_value_within_is_told_so():
    arrays = {**recorded(), "s_grad": np.ones((2, 5), np.float32), "odd_grad": np.ones((7, 7), np.float32)}
    found = compare(network(), "refgrad@numpy", arrays)
    assert "a value within the model" in found.b.unmatched["s"]
    assert found.b.unmatched["odd"] == "no gradient of the model has its size and its values"
