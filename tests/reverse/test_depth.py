"""Deep models: no recursion, no work that grows faster than the model, no weight stored once per step."""

import cProfile
import inspect
import pstats
import sys
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import get_backend

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name, shape=(3,), kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(nodes, inputs, outputs, constants=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def chain(count):
    """Each node reads the one before it."""
    nodes = [helper.make_node(("Sin", "Tanh")[k % 2], [f"v{k}"], [f"v{k + 1}"]) for k in range(count)]
    return model_of(nodes, [value("v0")], [value(f"v{count}")])


def fan(count):
    """Every node reads x, one reads them all."""
    nodes = [helper.make_node("Sin", ["x"], [f"v{k}"]) for k in range(count)]
    nodes.append(helper.make_node("Sum", [f"v{k}" for k in range(count)], ["y"]))
    return model_of(nodes, [value("x")], [value("y")])


def ladder(count):
    """Each node reads the two before it: there are exponentially many ways back."""
    nodes = [helper.make_node("Mul", [f"v{k}", f"v{k + 1}"], [f"v{k + 2}"]) for k in range(count)]
    return model_of(nodes, [value("v0"), value("v1")], [value(f"v{count + 1}")])


def branches(count):
    """One If after the other."""
    nodes = []
    for k in range(count):
        then = helper.make_graph([helper.make_node("Sin", [f"v{k}"], ["t"])], "t", [], [value("t")])
        other = helper.make_graph([helper.make_node("Cos", [f"v{k}"], ["t"])], "e", [], [value("t")])
        nodes.append(helper.make_node("If", ["c"], [f"v{k + 1}"], then_branch=then, else_branch=other))
    return model_of(nodes, [value("v0"), value("c", (), BOOL)], [value(f"v{count}")])


def nested(depth, kinds):
    """If, Loop and Scan, each within the one before it; the innermost one reads x and the outermost state."""
    nodes, result = [helper.make_node("Mul", ["x", f"s{depth - 1}"], ["u"])], "u"
    for k in range(depth):
        kind = kinds[k % len(kinds)]
        state, made, inputs = f"s{k}", f"t{k}", []
        before = f"s{k + 1}" if k + 1 < depth else "z"
        # A branch has no state of its own: it gives the one of the graph around it its name.
        if kind == "If":
            body = [helper.make_node("Identity", [before], [state]), *nodes, helper.make_node("Sin", [result], [made])]
            then = helper.make_graph(body, "t", [], [value(made)])
            other = helper.make_graph([helper.make_node("Cos", [before], ["e"])], "e", [], [value("e")])
            node = helper.make_node("If", ["c"], [f"r{k}"], then_branch=then, else_branch=other)
        elif kind == "Loop":
            body = [
                *nodes,
                helper.make_node("Add", [state, result], [made]),
                helper.make_node("Identity", [f"c{k}"], [f"d{k}"]),
            ]
            inputs = [value(f"i{k}", (), INT64), value(f"c{k}", (), BOOL), value(state)]
            graph = helper.make_graph(body, "b", inputs, [value(f"d{k}", (), BOOL), value(made)])
            node = helper.make_node("Loop", ["m", "", before], [f"r{k}"], body=graph)
        else:
            body = [*nodes, helper.make_node("Add", [state, result], [made])]
            graph = helper.make_graph(body, "b", [value(state), value(f"q{k}")], [value(made)])
            node = helper.make_node("Scan", [before, "Q"], [f"r{k}"], body=graph, num_scan_inputs=1)
        nodes, result = [node], f"r{k}"
    inputs = [value("x"), value("z"), value("Q", (1, 3)), value("c", (), BOOL)]
    return model_of(nodes, inputs, [value(result)], [numpy_helper.from_array(np.array(1), "m")])


def calls(model):
    """How many functions are called to differentiate a model: a measure of work that no other process disturbs."""
    profile = cProfile.Profile()
    profile.runcall(refgrad.gradient, model)
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize("make", [chain, fan, ladder, branches], ids=lambda make: make.__name__)
def test_the_work_grows_with_the_model(make):
    calls(make(10))  # what is read once
    small, large = calls(make(100)), calls(make(800))
    assert large < 8.5 * small


@pytest.mark.parametrize("kinds", [("If",), ("Loop",), ("Scan",), ("If", "Loop", "Scan")], ids="-".join)
def test_the_work_does_not_double_with_every_level(kinds):
    """What a level stores is returned by those around it, each of which is read with all that is in it: a cube at most."""
    calls(nested(3, kinds))
    assert calls(nested(20, kinds)) < 10 * calls(nested(10, kinds))


@pytest.mark.parametrize(
    "model", [chain(3000), fan(3000), nested(20, ("If", "Loop", "Scan"))], ids=["chain", "fan", "nested"]
)
def test_depth_needs_no_deep_stack(model):
    """Levels of bodies take a few calls each; nodes take none."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 500)
    try:
        gradient = refgrad.gradient(model)
    finally:
        sys.setrecursionlimit(limit)
    onnx.checker.check_model(gradient)


@pytest.mark.parametrize("kinds", [("If",), ("Loop",), ("Scan",), ("If", "Loop", "Scan")], ids="-".join)
def test_twenty_levels_have_the_right_gradient(kinds):
    model = nested(20, kinds)
    rng = np.random.default_rng(1)
    feeds = {"x": rng.uniform(0.5, 1, 3), "z": rng.uniform(0.5, 1, 3), "Q": np.ones((1, 3)), "c": np.array(True)}
    run = get_backend("numpy").prepare(model, precision="float64").run
    gradient = refgrad.gradient(model, ["x", "z"], cotangent="ones")
    found = get_backend("numpy").prepare(gradient, precision="float64").run(feeds)
    step = 1e-6
    for name, adjoint in zip(("x", "z"), found.values(), strict=True):
        up, down = (next(iter(run(feeds | {name: feeds[name] + s}).values())) for s in (step, -step))
        np.testing.assert_allclose(adjoint, (up - down) / (2 * step), rtol=1e-6, atol=1e-9, err_msg=name)


def recurrence(operator, steps, width):
    """s = s W + q for every row q of Q."""
    step = [helper.make_node("MatMul", ["s", "W"], ["p"]), helper.make_node("Add", ["p", "q"], ["t"])]
    s, q, t = (value(name, (width,)) for name in "sqt")
    if operator == "Scan":
        body = helper.make_graph(step, "b", [s, q], [t])
        node = helper.make_node("Scan", ["x", "Q"], ["y"], body=body, num_scan_inputs=1)
    else:
        step = [helper.make_node("Gather", ["Q", "i"], ["q"]), *step, helper.make_node("Identity", ["on"], ["on_"])]
        inputs, outputs = [value("i", (), INT64), value("on", (), BOOL), s], [value("on_", (), BOOL), t]
        body = helper.make_graph(step, "b", inputs, outputs)
        node = helper.make_node("Loop", ["m", "", "x"], ["y"], body=body)
    inputs = [value("x", (width,)), value("Q", (steps, width)), value("W", (width, width))]
    return model_of([node], inputs, [value("y", (width,))], [numpy_helper.from_array(np.array(steps), "m")])


@pytest.mark.parametrize("operator", ["Scan", "Loop"])
def test_ten_thousand_steps(operator):
    """y = a^n x + the sum of a^(n-1-t) q_t, whose derivatives are known."""
    steps, a = 10_000, 0.9998
    rng = np.random.default_rng(2)
    q, x = rng.standard_normal((steps, 2)), rng.standard_normal(2)
    gradient = refgrad.gradient(recurrence(operator, steps, 2), ["x", "Q", "W"], cotangent="ones")
    prepared = get_backend("numpy").prepare(gradient, precision="float64")
    dx, dq, dw = prepared.run({"x": x, "Q": q, "W": np.eye(2) * a}).values()
    powers = a ** np.arange(steps)[::-1]
    np.testing.assert_allclose(dx, np.full(2, a**steps), rtol=1e-9)
    np.testing.assert_allclose(dq, np.repeat(powers[:, None], 2, axis=1), rtol=1e-9)
    states = [x]
    for row in q[:-1]:
        states.append(a * states[-1] + row)
    np.testing.assert_allclose(dw, np.repeat((powers @ np.array(states))[:, None], 2, axis=1), rtol=1e-8)


@pytest.mark.parametrize("operator", ["Scan", "Loop"])
def test_the_gradient_of_a_weight_is_not_stored_per_step(operator):
    """200 steps more take 200 rows more, of what is stored and of the gradient of Q, where a weight has 256 rows."""

    def peak(steps):
        gradient = refgrad.gradient(recurrence(operator, steps, 256), cotangent="ones")
        prepared = get_backend("numpy").prepare(gradient)
        feeds = {"x": (256,), "Q": (steps, 256), "W": (256, 256)}
        arrays = {name: np.full(shape, 0.001, np.float32) for name, shape in feeds.items()}
        prepared.run(arrays)
        tracemalloc.start()
        prepared.run(arrays)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    row = 256 * 4
    assert peak(210) - peak(10) < 200 * row * 6


def test_many_operands_of_sizes_that_only_the_run_tells():
    """Ten are declared alike, and one of them is broadcast all the same."""
    inputs = [helper.make_tensor_value_info(f"x{k}", TensorProto.FLOAT, [None, 2]) for k in range(10)]
    node = helper.make_node("Sum", [value.name for value in inputs], ["y"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 2])
    model = helper.make_model(
        helper.make_graph([node], "many", inputs, [y]), ir_version=8, opset_imports=[helper.make_opsetid("", 18)]
    )
    feeds = {f"x{k}": np.zeros((1 if k == 9 else 3, 2), np.float32) for k in range(10)}
    gradient = (
        get_backend("numpy")
        .prepare(refgrad.gradient(model))
        .run({**feeds, "y_grad": np.arange(6, dtype=np.float32).reshape(3, 2)})
    )
    np.testing.assert_array_equal(gradient["x9_grad"], [[6, 9]])
    np.testing.assert_array_equal(gradient["x0_grad"], [[0, 1], [2, 3], [4, 5]])
