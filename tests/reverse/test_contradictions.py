"""Models that declare shapes which their results do not have. ONNX Runtime runs them, and so it does their gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.cli import main
from refgrad.conformance.oracles.central import directional
from refgrad.errors import ModelWarning

HEAD = '<ir_version: 9, opset_import: ["": 20]> g'
MODELS = {
    "an output of another rank": ("(float[2,5,1] x) => (float[2,5] y) { y = DFT(x) }", (2, 5, 1)),
    "an output of another size": ("(float[2,5] x) => (float[2,4] y) { h = Exp(x) y = Sin(h) }", (2, 5)),
    "a result of another rank": (
        "(float[2,5,1] x) => (float[] y) <float[2,5] h> { h = DFT(x) s = Sin(h) y = ReduceSum<keepdims=0>(s) }",
        (2, 5, 1),
    ),
    "a result of another size": (
        "(float[2,5] x) => (float[] y) <float[2,4] h> { h = Exp(x) s = Sin(h) y = ReduceMean<keepdims=0>(s) }",
        (2, 5),
    ),
    "a result in a branch": (
        "(float[2,5] x) => (float[2,5] y) { c = Constant<value = bool {1}>() y = If(c)<then_branch = a () => (float[2,5] p) "
        "<float[3] q> { q = Sin(x) m = ReduceMean(q) p = Mul(q, m) }, else_branch = b () => (float[2,4] r) { r = Cos(x) }> }",
        (2, 5),
    ),
    "results that contradict each other": (
        "(float[2,5] x) => (float[5,2] y) <float[2,5] h> { t = Shape(x) k = Constant<value_ints=[1,0]>() e = Exp(x) "
        "s = Gather(t, k) n = Cast<to=1>(s) o = Cast<to=7>(n) h = Reshape(e, o) y = Sin(h) }",
        (2, 5),
    ),
}


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_what_inference_finds_is_taken(what: str, dialect: str) -> None:
    text, sizes = MODELS[what]
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    with pytest.warns(ModelWarning, match="contradict each other|shape inference finds"):
        gradient = refgrad.gradient(model, dialect=dialect)
    rng = np.random.default_rng(2)
    feeds = {"x": rng.uniform(0.1, 1, sizes)}
    forward = get_backend("numpy").prepare(model, precision="float64")
    seeds = {"y": rng.standard_normal(forward.run(feeds)["y"].shape)}
    if dialect == "onnx":
        found = (
            get_backend("numpy").prepare(gradient, precision="float64").run(feeds | {"y_grad": seeds["y"]})["x_grad"]
        )
        direction = {"x": rng.standard_normal(sizes)}
        slope = directional(forward.run, feeds, direction, seeds)
        assert abs(np.sum(found * direction["x"]) - slope.value) <= 1e-6 * np.linalg.norm(found) + slope.error
        if "ort-cpu" in available():
            single = {"x": feeds["x"].astype(np.float32), "y_grad": seeds["y"].astype(np.float32)}
            got = get_backend("ort-cpu").prepare(gradient).run(single)["x_grad"]
            np.testing.assert_allclose(got, found, rtol=1e-4, atol=1e-5)


def test_the_notice_names_both_shapes() -> None:
    model = onnx.parser.parse_model(f"{HEAD} {MODELS['an output of another rank'][0]}")
    with pytest.warns(ModelWarning, match=r"declares 'y' as float\[2, 5\], and shape inference finds float\[2, 5, 2\]"):
        gradient = refgrad.gradient(model)
    [cotangent] = [value for value in gradient.graph.input if value.name == "y_grad"]
    assert [dim.dim_value for dim in cotangent.type.tensor_type.shape.dim] == [2, 5, 2]


def test_the_command_line_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.parser.parse_model(f"{HEAD} {MODELS['an output of another rank'][0]}")
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "g.onnx")]) == 0
    said = capsys.readouterr().err.strip().splitlines()
    assert [line for line in said if "notice" in line] == [
        "refgrad: notice: The model declares 'y' as float[2, 5], and shape inference finds float[2, 5, 2], which is taken. "
        "Correct its declaration, or leave it out."
    ]
