"""Calls that become nodes: bodies that return what no node makes, and functions that double from level to level."""

from __future__ import annotations

import time

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.oracles.central import directional
from refgrad.errors import InvalidModelError, OptionError
from refgrad.model.checks.recursion import LIMIT

HEAD = '<ir_version: 9, opset_import: ["": 18, "l": 1]> g (float[3] x, bool c, int64 m) => (float[3] y)'
FUNCTION = '<opset_import: ["": 18], domain: "l"> f (a, c, m) => (r)'
BODIES = {
    "a Loop that returns its state": "r = Loop<body = b (int64 i, bool d, float[3] s) => (bool d, float[3] s) { }>(m, c, a)",
    "a Loop that returns its condition": (
        "r = Loop<body = b (int64 i, bool d, float[3] s) => (bool d, float[3] n) { n = Sin(s) }>(m, c, a)"
    ),
    "a Scan that returns its slice": (
        "z = Constant<value=int64[1] {0}>() q = Unsqueeze(a, z) r, k = Scan<num_scan_inputs=1, body = b "
        "(float[3] s, float[3] e) => (float[3] n, float[3] e) { n = Mul(s, e) }>(a, q)"
    ),
    "an If that returns an initializer": (
        "p = If(c)<then_branch = t () => (float[3] w) <float[3] w = {1.,2.,3.}> { }, "
        "else_branch = e () => (float[3] v) { v = Sin(a) }> r = Mul(p, a)"
    ),
    "a name that is taken outside": (
        "d_out = Exp(a) n = Loop<body = b (int64 i, bool d, float[3] s) => (bool d, float[3] t) { t = Mul(s, d_out) }>"
        "(m, c, a) r = Mul(n, d_out)"
    ),
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("calls", ["y = l.f(x, c, m)", "h = l.f(x, c, m) y = l.f(h, c, m)"])
def test_a_body_in_a_function_that_returns_what_no_node_makes(what: str, calls: str) -> None:
    model = onnx.parser.parse_model(f"{HEAD} {{ {calls} }} {FUNCTION} {{ {BODIES[what]} }}")
    gradient = refgrad.gradient(model)
    feeds = {"x": np.array([0.3, 0.6, 0.9]), "c": np.array(True), "m": np.array(2)}
    seeds = {"y": np.array([1.0, -2.0, 0.5])}
    found = get_backend("numpy").prepare(gradient, precision="float64").run(feeds | {"y_grad": seeds["y"]})["x_grad"]
    direction = {"x": np.array([0.5, 1.0, -0.7])}
    slope = directional(get_backend("numpy").prepare(model, precision="float64").run, feeds, direction, seeds)
    assert abs(np.sum(found * direction["x"]) - slope.value) <= 1e-6 * np.linalg.norm(found) + slope.error
    if "ort-cpu" in available():
        single = feeds | {"x": feeds["x"].astype(np.float32), "y_grad": seeds["y"].astype(np.float32)}
        got = get_backend("ort-cpu").prepare(gradient).run(single)["x_grad"]
        np.testing.assert_allclose(got, found, rtol=1e-4, atol=1e-5)


def _doubling(levels: int) -> ModelProto:
    """Functions of which each calls the one before it twice."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("l", 1)]
    functions = [helper.make_function("l", "f0", ["u"], ["v"], [helper.make_node("Sin", ["u"], ["v"])], imports)]
    for k in range(1, levels):
        called = f"f{k - 1}"
        nodes = [helper.make_node(called, ["u"], ["t"], domain="l"), helper.make_node(called, ["t"], ["v"], domain="l")]
        functions.append(helper.make_function("l", f"f{k}", ["u"], ["v"], nodes, imports))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    graph = helper.make_graph([helper.make_node(f"f{levels - 1}", ["x"], ["y"], domain="l")], "g", [x], [y])
    return helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)


USES = {"gradient": refgrad.gradient, "preflight": refgrad.preflight}
USES |= {name: get_backend(name).prepare for name in ("numpy", "ort-cpu") if name in available()}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_functions_that_double(use) -> None:  # type: ignore[no-untyped-def]
    start = time.monotonic()
    with pytest.raises(InvalidModelError, match=r"549755813888 nodes.*'l\.f39'; at most 250000"):
        use(_doubling(40))
    assert time.monotonic() - start < 10
    use(_doubling(5))


def test_the_limit_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "20")
    with pytest.raises(InvalidModelError, match="would be 32 nodes"):
        refgrad.gradient(_doubling(6))
    monkeypatch.setenv(LIMIT, "32")
    refgrad.gradient(_doubling(6))
    monkeypatch.setenv(LIMIT, "many")
    with pytest.raises(OptionError, match="REFGRAD_MAX_NODES is 'many'"):
        refgrad.gradient(_doubling(6))


def test_long_texts_in_functions_that_are_called_often_are_refused() -> None:
    """Ten levels that double: 1,024 nodes, each with a text of 60 kB."""
    text = "".join(
        f'<domain: "local", opset_import: ["": 18, "local": 1]> f{k}(x) => (y) '
        f"{{ z = local.f{k + 1}(x) y = local.f{k + 1}(z) }} "
        for k in range(10)
    )
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "local": 1]> m (float[2] x) => (float[2] y) { y = local.f0(x) } '
        f'{text}<domain: "local", opset_import: ["": 18]> f10(x) => (y) {{ y = Tanh(x) }}'
    )
    refgrad.gradient(model)
    model.functions[10].node[0].doc_string = "x" * 60_000
    with pytest.raises(InvalidModelError, match=r"58 MiB of nodes, \d+ times the model"):
        refgrad.gradient(model)
