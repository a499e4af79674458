"""The steps of training algorithms, in all that they read."""

from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient
from onnx import parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases.optimizer import cases
from refgrad.errors import NoGradientError
from refgrad.protos.domains import TRAINING


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    assert_gradient(case)


@pytest.mark.parametrize("step", ["Adam (r, t, x, g, h, h)", "Adagrad (r, t, x, g, h)"])
@pytest.mark.parametrize("time", [0, 2])
def test_a_gradient_of_zero_is_no_obstacle(step: str, time: int) -> None:
    """An element that nothing has moved yet: the root of its accumulated square, 0, has no derivative."""
    outputs = "y, v, s" if step.startswith("Adam ") else "y, s"
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "{TRAINING}" : 1]>
        g (float r, int64 t, float[3] x, float[3] g, float[3] h) => (float[3] y) {{ {outputs} = {TRAINING}.{step} }}
    """)
    gradient = refgrad.gradient(model)
    feeds = {"r": np.float32(0.1), "t": np.array(time), "x": np.float32([1, 2, 3]), "g": np.float32([0, 1, 0])}
    feeds |= {"h": np.zeros(3, np.float32), "y_grad": np.ones(3, np.float32)}
    results = get_backend("numpy").prepare(gradient).run(feeds)
    assert all(np.all(np.isfinite(value)) for value in results.values())
    np.testing.assert_array_equal(results["x_grad"], [1, 1, 1])


def test_a_learning_rate_is_learned_through_a_step() -> None:
    """The loss after a step of Momentum on the gradient of the loss before it: a gradient is differentiated again."""
    loss = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 17]> loss (float[3] w, float[4,3] x) => (float y) {
            p = MatMul (x, w)  t = Tanh (p)  s = Mul (t, t)  y = ReduceSum <keepdims = 0> (s)
        }
    """)
    gradient = refgrad.gradient(loss, wrt=["w"], cotangent="ones")
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 17, "{TRAINING}" : 1]>
        step (float r, int64 t, float[3] w, float[4,3] x, float[3] v) => (float after) {{
            p = MatMul (x, u)  a = Tanh (p)  s = Mul (a, a)  after = ReduceSum <keepdims = 0> (s)
        }}
    """)
    step = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 17, "{TRAINING}" : 1]>
        step (float r, int64 t, float[3] w, float[3] w_grad, float[3] v) => (float[3] u) {{
            u, m = {TRAINING}.Momentum <alpha = 0.9, beta = 0.5, mode = "nesterov", norm_coefficient = 0.1> (r, t, w, w_grad, v)
        }}
    """)
    for node in gradient.graph.node:  # three graphs in one
        for names in (node.input, node.output):
            names[:] = [name if name in ("w", "x", "w_grad", "") else f"before_{name}" for name in names]
    nodes = [*gradient.graph.node, *step.graph.node, *model.graph.node]
    for tensor in gradient.graph.initializer:
        model.graph.initializer.add().CopyFrom(tensor)
        model.graph.initializer[-1].name = f"before_{tensor.name}"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    rng = np.random.default_rng(0)
    feeds = {
        "r": np.array(0.1),
        "w": rng.standard_normal(3),
        "x": rng.standard_normal((4, 3)),
        "v": rng.standard_normal(3),
    }
    floats = {name: np.asarray(value, np.float32) for name, value in feeds.items()}
    assert_gradient(Case("learned", model, floats | {"t": np.array(1)}, wrt=("r", "w", "x", "v")))


def test_the_operator_gradient_is_refused() -> None:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "{TRAINING}" : 1]>
        g (float[3] x) => (float[3] y) {{ z = Mul (x, x)  y = {TRAINING}.Gradient <xs = ["x"], y = "z"> (x) }}
    """)
    with pytest.raises(NoGradientError, match=r"write that out with refgrad[.]expand_gradients first"):
        refgrad.gradient(model)
