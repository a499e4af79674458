"""Gradients that only leak through rounding: the warning, the models that get it, and the option that cures it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import refgrad
from refgrad import recipes
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.conformance.judge.check import check
from refgrad.errors import ModelWarning
from refgrad.training import SGD, step_model

WEIGHTS = "<int8[6,3] w={1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}, float s={0.1}>"
FAKE = "a = Abs(x)  m = ReduceMax<keepdims=0>(a)  s = Div(m, k)  d = Div(x, s)"
K = "<float k = {127}>"


def model(body: str, inputs: str = "float[2,6] x", outputs: str = "float[2,6] y", weights: str = "") -> ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g ({inputs}) => ({outputs}) {weights} {{ {body} }}'
    )


OF_PRODUCT = {"outputs": "float[2,3] y", "weights": WEIGHTS}
BY_WEIGHTS = {"inputs": "float[2,6] x, float[6,3] v", "outputs": "float[2,3] y"}
# name: the model, the names that leak, the first node that rounds, and whether quantization= helps
LEAKS: dict[str, tuple[ModelProto, tuple[str, ...], str, bool]] = {
    "dynamic product": (
        model("q, t, z = DynamicQuantizeLinear(x)  i = MatMulInteger(q, w, z)  f = Cast<to=1>(i)  u = Mul(t, s)"
              "  y = Mul(f, u)", **OF_PRODUCT),
        ("x",), "DynamicQuantizeLinear", True,
    ),
    "fused product": (
        model("y = com.microsoft.DynamicQuantizeMatMul(x, w, s)", **OF_PRODUCT),
        ("x",), "com.microsoft.DynamicQuantizeMatMul", True,
    ),
    "product that scales": (
        model("q, t, z = DynamicQuantizeLinear(x)  y = com.microsoft.MatMulIntegerToFloat(q, w, t, s, z)", **OF_PRODUCT),
        ("x",), "DynamicQuantizeLinear", True,
    ),
    "a scale of the data": (
        model(f"{FAKE}  zero = Constant<value = int8 {{0}}>()  q = QuantizeLinear(x, s, zero)"
              "  h = DequantizeLinear(q, s, zero)  y = Tanh(h)", weights=K),
        ("x",), "QuantizeLinear", True,
    ),
    "in a function": (
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21, "f": 1]> g (float[2,6] x) => (float[2,6] y) { h = f.dq(x)  y = f.dq(h) }'
            ' <domain: "f", opset_import: ["": 21]> dq (a) => (b)'
            " { q, s, z = DynamicQuantizeLinear(a)  d = DequantizeLinear(q, s, z)  b = Tanh(d) }"
        ),
        ("x",), "DynamicQuantizeLinear", True,
    ),
    "Round": (model(f"{FAKE}  r = Round(d)  y = Mul(r, s)", weights=K), ("x",), "Round", False),
    "Floor": (
        model(f"{FAKE}  c = Constant<value_float=0.5>()  e = Add(d, c)  r = Floor(e)  y = Mul(s, r)", weights=K),
        ("x",), "Floor", False,
    ),
    "rows": (
        model("ax = Constant<value_ints=[1]>()  a = Abs(x)  m = ReduceMax(a, ax)  s = Div(m, k)  d = Div(x, s)"
              "  i = Cast<to=3>(d)  f = Cast<to=1>(i)  y = Mul(f, s)", weights=K),
        ("x",), "Cast", False,
    ),
    "an offset too": (
        model("b = ReduceMax<keepdims=0>(x)  o = ReduceMin<keepdims=0>(x)  g = Sub(b, o)  s = Div(g, k)  c = Sub(x, o)"
              "  d = Div(c, s)  r = Round(d)  e = Mul(r, s)  y = Add(e, o)", weights="<float k = {255}>"),
        ("x",), "Round", False,
    ),
    "ternary weights": (
        model("a = Abs(v)  m = ReduceMean<keepdims=0>(a)  d = Div(v, m)  r = Round(d)  c = Mul(r, m)  y = MatMul(x, c)",
              **BY_WEIGHTS),
        ("v",), "Round", False,
    ),
    "binary weights": (
        model("a = Abs(v)  m = ReduceMean<keepdims=0>(a)  r = Sign(v)  z = MatMul(x, r)  y = Mul(z, m)", **BY_WEIGHTS),
        ("v",), "Sign", False,
    ),
    "what was pooled": (
        model("c = Conv(x, v)  p = GlobalAveragePool(c)  a = Abs(p)  m = ReduceMax<keepdims=0>(a)  s = Div(m, k)"
              "  d = Div(p, s)  r = Round(d)  y = Mul(r, s)",
              "float[2,3,4,4] x, float[3,3,1,1] v", "float[2,3,1,1] y", K),
        ("x", "v"), "Round", False,
    ),
    "a scale as a filter": (
        model("a = Abs(x)  m = ReduceMax(a)  d = Div(x, m)  r = Round(d)  y = DeformConv(r, m, o)",
              "float[1,1,4,4] x, float[1,2,4,4] o", "float[1,1,4,4] y"),
        ("x",), "Round", False,
    ),
}  # fmt: skip

HEALTHY = {
    "beside it": model(f"{FAKE}  r = Round(d)  e = Mul(r, s)  y = Add(e, x)", weights=K),
    "a sign": model("r = Sign(x)  y = Mul(x, r)"),
    "a fraction": model("r = Floor(x)  y = Sub(x, r)"),
    "weights alone": model("d = DequantizeLinear(w, s)  y = MatMul(x, d)", **OF_PRODUCT),
    "an index": model(
        f"{FAKE}  i = Cast<to=7>(d)  e = Gather(t, i)  y = Mul(e, m)", "float[2,6] x, float[10] t", weights="<float k={9}>"
    ),
    "two outputs": model("y = ReduceMax(x)  z = Round(x)", outputs="float[1,1] y, float[2,6] z"),
    "a mask": model("z = Sub(x, x)  b = Greater(x, z)  f = Cast<to=1>(b)  m = ReduceMean<keepdims=0>(x)  y = Mul(f, m)"),
    "a mean": model("r = Round(x)  m = ReduceMean<keepdims=0>(x)  y = Add(r, m)"),
    "features of a mean": model(
        "m = GlobalAveragePool(x)  c = Conv(m, v)  g = Sigmoid(c)  r = Round(x)  y = Mul(r, g)",
        "float[2,3,4,4] x, float[3,3,1,1] v", "float[2,3,4,4] y",
    ),
    "a size": model(
        "m = ReduceMax<keepdims=0>(x)  i = Cast<to=7>(m)  one = Constant<value_ints=[1]>()  n = Reshape(i, one)"
        "  e = Expand(x, n)  y = Mul(e, m)"
    ),
}  # fmt: skip


def said(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        function(*arguments, **options)
    return [str(one.message) for one in met if issubclass(one.category, ModelWarning)]


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_said(name: str) -> None:
    made, names, operator, is_helped = LEAKS[name]
    [text] = said(refgrad.gradient, made, list(names))
    assert text.startswith("The gradient")
    assert all(repr(one) in text for one in names)
    assert f"only what leaks through rounding: {operator} (node " in text
    assert ("Use quantization='straight-through' or" in text) == is_helped
    assert (f"{operator} has the derivative zero in any case" in text) == (not is_helped)
    [leak] = refgrad.preflight(made, list(names)).leaks
    assert (leak.names, str(leak)) == (names, text)
    for quantization in ("straight-through", "clipped"):
        again = said(refgrad.gradient, made, list(names), quantization=quantization)
        assert len(again) == (not is_helped)


@pytest.mark.parametrize("name", HEALTHY)
def test_other_models_are_not_accused(name: str) -> None:
    assert said(refgrad.gradient, HEALTHY[name]) == []
    assert refgrad.preflight(HEALTHY[name]).leaks == ()


# What onnxruntime.quantization makes


def perceptron(layers: int = 2, width: int = 6) -> ModelProto:
    """A network without a bend."""
    text, before = "", "x"
    for k in range(layers):
        text += f"m{k} = MatMul({before}, w{k})  a{k} = Add(m{k}, b{k})  h{k} = Tanh(a{k})  "
        before = f"h{k}"
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[4, {width}] x) => (float[4, {width}] {before}) {{ {text} }}'
    )
    rng = np.random.default_rng(0)
    for k in range(layers):
        w = rng.standard_normal((width, width)) / np.sqrt(width)
        made.graph.initializer.append(numpy_helper.from_array(w.astype(np.float32), f"w{k}"))
        made.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), f"b{k}"))
    return made


def convolution() -> ModelProto:
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2,3,8,8] x) => (float[2,5] y) { h = Conv<pads=[1,1,1,1]>(x, w, b) '
        "r = Tanh(h) p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(r) f = Flatten(p) g = MatMul(f, v) y = Add(g, c) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w": (4, 3, 3, 3), "b": (4,), "v": (64, 5), "c": (5,)}.items():
        made.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return made


def quantised(source: ModelProto, folder: Path, how: str) -> ModelProto:
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(source, folder / "model.onnx")
    files = folder / "model.onnx", folder / "quantised.onnx"
    logging.disable(logging.WARNING)
    try:
        if how == "dynamic":
            quantization.quantize_dynamic(*files)
        else:
            shape = [dim.dim_value for dim in source.graph.input[0].type.tensor_type.shape.dim]
            rng = np.random.default_rng(1)

            class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
                def __init__(self) -> None:
                    self.batches: Iterator[np.ndarray] = iter(rng.standard_normal((8, *shape)).astype(np.float32))

                def get_next(self) -> dict[str, np.ndarray] | None:
                    batch = next(self.batches, None)
                    return None if batch is None else {"x": batch}

            quantization.quantize_static(*files, Reader(), quant_format=quantization.QuantFormat[how])
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(files[1])


def norm(made: ModelProto, quantization: str) -> float:
    """The length of the gradient of the sum of the output by x."""
    gradient = refgrad.gradient(made, ["x"], cotangent="ones", quantization=quantization)
    shape = [dim.dim_value for dim in made.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    return float(np.linalg.norm(get_backend("numpy").prepare(gradient).run({"x": x})["x_grad"]))


@pytest.mark.parametrize(("layers", "most"), [(2, 2e-2), (4, 1e-4)])
def test_a_network_that_is_quantised_dynamically(layers: int, most: float, tmp_path: Path) -> None:
    made = quantised(perceptron(layers, 48), tmp_path, "dynamic")
    by_x, *others = said(refgrad.gradient, made)
    assert "The gradient of 'x' is only what leaks" in by_x
    assert len(others) == layers - 1  # the biases and scales of each layer but the last leak through what follows
    assert not any(repr(f"b{layers - 1}") in text for text in others)
    assert said(refgrad.gradient, made, quantization="straight-through") == []
    with pytest.warns(ModelWarning, match="leaks through rounding"):
        leaked = norm(made, "zero")
    assert 0 < leaked < most * norm(made, "straight-through")  # each layer takes more of it away


def test_a_convolution_that_is_quantised_dynamically(tmp_path: Path) -> None:
    made = quantised(convolution(), tmp_path, "dynamic")
    assert [text.split(" only")[0] for text in said(refgrad.gradient, made)] == [
        "The gradient of 'x' is",
        "The gradients of 'b', 'w_scale' are",
    ]
    assert said(refgrad.gradient, made, quantization="clipped") == []


@pytest.mark.parametrize("how", ["QDQ", "QOperator"])
@pytest.mark.parametrize("source", [perceptron, convolution])
def test_a_network_that_is_quantised_statically_is_flat(
    source: Callable[[], ModelProto], how: str, tmp_path: Path
) -> None:
    made = quantised(source(), tmp_path, how)
    [text] = said(refgrad.gradient, made, ["x"])
    assert "'x' is always 0" in text
    assert "quantization='straight-through'" in text
    assert said(refgrad.gradient, made, ["x"], quantization="straight-through") == []


# Who says it

_LOSS = "y = ReduceSum<keepdims=0>(e)", "float[2,6] x", "float y", "<float[6] v = {1,2,3,4,5,6}>"
LEAKING = model(
    f"q, t, z = DynamicQuantizeLinear(x)  h = DequantizeLinear(q, t, z)  e = Mul(h, v)  {_LOSS[0]}", *_LOSS[1:]
)
BY_V = model(
    f"q, t, z = DynamicQuantizeLinear(v)  h = DequantizeLinear(q, t, z)  e = Mul(h, x)  {_LOSS[0]}", *_LOSS[1:]
)


@pytest.mark.parametrize(
    "call",
    [
        lambda **how: recipes.saliency(LEAKING, "x", "y", **how),
        lambda **how: recipes.sensitivity(BY_V, **how),
        lambda **how: refgrad.jvp(LEAKING, ["x"], **how),
        lambda **how: refgrad.jacobian(LEAKING, ["x"], **how),
        lambda **how: refgrad.split(LEAKING, ["x"], **how),
        lambda **how: step_model(BY_V, None, SGD(), trainable=["v"], **how),
    ],
    ids=["saliency", "sensitivity", "jvp", "jacobian", "split", "step_model"],
)
def test_everything_that_differentiates_says_it(call: Callable[..., Any]) -> None:
    [text] = said(call)
    assert "leaks through rounding" in text
    assert said(call, quantization="straight-through") == []


def test_walk_says_it() -> None:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
    notes = refgrad.walk(LEAKING, {"x": x}, wrt=["x"]).notes
    assert any("leaks through rounding" in note for note in notes)
    assert not any("leaks" in n for n in refgrad.walk(LEAKING, {"x": x}, wrt=["x"], quantization="clipped").notes)


def test_check_says_it() -> None:
    assert any("leaks through rounding" in text for text in said(check, LEAKING, wrt=["x"]))


@pytest.mark.torch
def test_torch_says_it() -> None:
    torch = pytest.importorskip("torch")
    from refgrad.torch import Module

    x = torch.ones(2, 6, requires_grad=True)
    assert any("leaks" in text for text in said(lambda: Module(LEAKING, False, backend="numpy")(x).backward()))
    straight = Module(LEAKING, False, backend="numpy", quantization="straight-through")
    assert said(lambda: straight(x).backward()) == []


def test_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(LEAKING, file)
    assert main(["preflight", str(file), "--wrt", "x"]) == 0
    assert "leaks through rounding" in capsys.readouterr().out.replace("\n", " ")
    assert main(["grad", str(file), "--wrt", "x", "-o", str(tmp_path / "g.onnx")]) == 0
    assert "leaks through rounding" in capsys.readouterr().err.replace("\n", " ")
