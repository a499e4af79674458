"""Random graphs of If, Loop and Scan: ONNX Runtime runs every gradient whose model it runs, and all can be lowered."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from control_flow_graphs import RandomGraph

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.oracles.central import directional
from refgrad.errors import BackendError
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import every_node

pytestmark = pytest.mark.slow

HIDDEN = (0.0, 0.4, 0.8)


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("hidden", HIDDEN)
def test_onnx_runtime_runs_the_gradient(hidden: float) -> None:
    ran = 0
    for seed in range(18):
        graph = RandomGraph(seed, hidden)
        model, feeds = graph.model(), graph.feeds()
        try:
            results = get_backend("ort-cpu").prepare(model).run(feeds)
        except BackendError:
            continue
        ran += 1
        seeds = {"y_grad": np.array([1.0, -0.5, 2.0])}
        gradient = refgrad.gradient(model)
        got = get_backend("ort-cpu").prepare(gradient).run(feeds | {"y_grad": seeds["y_grad"].astype(np.float32)})
        wide = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in feeds.items()}
        expected = get_backend("numpy").prepare(gradient, precision="float64").run(wide | seeds)
        forward = get_backend("numpy").prepare(model, precision="float64")
        np.testing.assert_allclose(results["y"], forward.run(wide)["y"], rtol=1e-3, atol=1e-4)
        for name, value in expected.items():
            size = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-3 * size, err_msg=f"{seed}: {name}")
            direction = {name.removesuffix("_grad"): np.random.default_rng(seed).standard_normal(value.shape)}
            slope = directional(forward.run, wide, direction, {"y": seeds["y_grad"]})
            along = float(np.sum(value * next(iter(direction.values()))))
            assert abs(along - slope.value) <= 1e-6 * size + slope.error, (seed, name)
    assert ran >= 10


@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_gradient_in_dialect_ort_is_lowered(hidden: float) -> None:
    for seed in range(100, 110):
        lowered = refgrad.lower(refgrad.gradient(RandomGraph(seed, hidden).model(), dialect="ort"))
        assert all(node.domain != MICROSOFT for node in every_node(lowered))


def test_what_is_known_in_a_body_within_a_body_is_used_for_lowering() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[3] x, bool c, bool d) => (float[3] y) { y = If(c)<then_branch = '
        "a () => (float[3] p) { q = If(d)<then_branch = e () => (float[3] r) { r = Tanh(x) }, else_branch = f () => "
        "(float[3] s) { s = Softmax(x) }> p = Tanh(q) }, else_branch = b () => (float[3] t) { t = Sin(x) }> }"
    )
    lowered = refgrad.lower(refgrad.gradient(model, dialect="ort"))
    feeds = {"x": np.float32([1, 2, 3]), "c": np.array(True), "d": np.array(False), "y_grad": np.float32([1, 2, -1])}
    expected = get_backend("numpy").prepare(refgrad.gradient(model)).run(feeds)
    got = get_backend("numpy").prepare(lowered).run(feeds)
    np.testing.assert_allclose(got["x_grad"], expected["x_grad"], rtol=1e-6)
