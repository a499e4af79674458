from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from checking import assert_gradient, widened
from surrogate_checking import STRAIGHT, assert_surrogate

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases.quantization import cases, chain, rounded
from refgrad.errors import NoGradientError, OptionError


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_scale_of_dequantize_agrees_with_differences(case: Case) -> None:
    # ONNX Runtime crashes where there is nothing, and rounds dy to output_dtype.
    runs = all(array.size for array in case.feeds.values()) and "output_dtype" not in case.name
    assert_gradient(case, runtime=runs)


@pytest.mark.parametrize(
    ("case", "quantization"),
    [(case, mode) for case in rounded() for mode in STRAIGHT if mode == "clipped" or "static" in case.name],
    ids=str,
)
def test_rounding_agrees_with_differences_of_a_surrogate(case: Case, quantization: str) -> None:
    assert_surrogate(case, quantization)


@pytest.mark.parametrize("shapes", ["static", "unknown"])
def test_by_default_rounding_has_the_derivative_zero(shapes: str) -> None:
    case = chain(np.int8, (2, 3, 4), (3,), 21, shapes=shapes)
    model = refgrad.gradient(case.model, wrt=["x", "s", "t"])
    results = get_backend("numpy").prepare(model).run(dict(case.feeds) | {"y_row_grad": np.ones(24, np.float32)})
    assert not results["x_grad"].any()
    assert not results["s_grad"].any()
    assert results["t_grad"].all()


@pytest.mark.torch
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_the_scale_has_the_gradient_of_torch(kind: type) -> None:
    """torch looks whether a value is in the range after it rounded; no value here lies within half a step of the end."""
    torch = pytest.importorskip("torch")
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[4,5] x, float s, {np.dtype(kind).name} z) => (float[4,5] y) {{
        q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }}"""
    model = refgrad.gradient(onnx.parser.parse_model(text), wrt=["x", "s"], quantization="clipped")
    rng = np.random.default_rng(0)
    zero = 7
    steps = rng.permutation(np.linspace(low - 30.6, high + 30.4, 20)).reshape(4, 5)
    x, s, dy = (
        ((steps - zero) * 0.1).astype(np.float32),
        np.float32(0.1),
        rng.standard_normal((4, 5)).astype(np.float32),
    )
    feeds = {"x": x, "s": np.asarray(s), "z": np.array(zero, kind), "y_grad": dy}
    got = get_backend("numpy").prepare(model).run(feeds)
    inputs = [torch.tensor(v, requires_grad=True) for v in (x, [s], [float(zero)])]
    quantised = torch._fake_quantize_learnable_per_tensor_affine(*inputs, int(low), int(high), 1.0)
    quantised.backward(torch.tensor(dy))
    np.testing.assert_allclose(got["x_grad"], inputs[0].grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got["s_grad"], inputs[1].grad.numpy()[0], rtol=1e-4)
    again = torch.tensor(x, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(again, float(s), zero, int(low), int(high)).backward(torch.tensor(dy))
    np.testing.assert_allclose(got["x_grad"], again.grad.numpy(), rtol=1e-5)


# Neither Relu nor MaxPool: many quantised values are exactly 0, or the same.
NETWORKS = {
    "convolution": """g (float[N,3,8,8] x) => (float[N,5] y)
        <float[4,3,3,3] w, float[4] b, float[64,5] v, float[5] c> {
        h = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(x, w, b) r = Tanh(h)
        p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(r) f = Flatten(p) y = Gemm(f, v, c) }""",
    "perceptron": """g (float[N,6] x) => (float[N,3] y) <float[6,8] w, float[8] b, float[8,3] v, float[3] c> {
        h = MatMul(x, w) i = Add(h, b) r = Tanh(i) m = MatMul(r, v) y = Add(m, c) }""",
}


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def quantised_network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A network as onnxruntime.quantization writes it: QuantizeLinear and DequantizeLinear, int8 weights per channel."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    text = NETWORKS[request.param]
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text)
    rng = np.random.default_rng(0)
    del model.graph.initializer[:]
    for name, shape in {
        "convolution": {"w": (4, 3, 3, 3), "b": (4,), "v": (64, 5), "c": (5,)},
        "perceptron": {"w": (6, 8), "b": (8,), "v": (8, 3), "c": (3,)},
    }[request.param].items():
        weights = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    shape = (2, 3, 8, 8) if request.param == "convolution" else (2, 6)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.batches: Iterator[np.ndarray] = iter(rng.standard_normal((8, *shape)).astype(np.float32))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"x": batch}

    folder: Path = tmp_path_factory.mktemp(request.param)
    onnx.save(model, folder / "model.onnx")
    quantization.quantize_static(folder / "model.onnx", folder / "quantised.onnx", Reader(), per_channel=True)
    feeds = {"x": rng.standard_normal(shape).astype(np.float32)}
    return Case(request.param, onnx.load(folder / "quantised.onnx"), feeds)


@pytest.mark.parametrize("quantization", STRAIGHT)
def test_a_network_that_onnx_runtime_quantised(quantised_network: Case, quantization: str) -> None:
    report = refgrad.preflight(quantised_network.model, quantization=quantization)
    assert report.ok
    assert {row.verdict for row in report.rows} == {"rule"}
    # Of so many values some round differently in float32.
    assert_surrogate(quantised_network, quantization, runtime=False)


def test_a_quantised_network_by_default(quantised_network: Case) -> None:
    report = refgrad.preflight(quantised_network.model)
    assert report.ok
    [row] = [row for row in report.rows if row.operator == "QuantizeLinear"]
    assert row.verdict == "zero"
    assert row.reason == "rounding is piecewise constant"
    model = refgrad.gradient(quantised_network.model, keep_outputs=True)
    feeds = widened(quantised_network.feeds)
    forward = get_backend("numpy").prepare(quantised_network.model, precision="float64").run(feeds, trace=True)
    results = (
        get_backend("numpy").prepare(model, precision="float64").run(feeds | {"y_grad": np.ones_like(forward["y"])})
    )
    scale = next(t for t in quantised_network.model.graph.initializer if t.name == "y_scale")
    np.testing.assert_allclose(
        results["y_scale_grad"], forward["y"].sum() / onnx.numpy_helper.to_array(scale), rtol=1e-6
    )
    assert not results["x_grad"].any()


def test_a_second_derivative_straight_through() -> None:
    """dx = dy of QuantizeLinear and DequantizeLinear, so dz/dx = 3·y² and its derivative 6·y."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[3] x) => (float[3] z)
        <float s = {0.5}, int8 zero = {3}> {
        q = QuantizeLinear(x, s, zero) y = DequantizeLinear(q, s, zero) y2 = Mul(y, y) z = Mul(y2, y) }"""
    x = np.array([0.4, -1.1, 2.2], np.float32)
    first = refgrad.gradient(onnx.parser.parse_model(text), wrt=["x"], quantization="clipped")
    second = refgrad.gradient(first, wrt=["x"], outputs=["x_grad"], quantization="clipped")
    ones = np.ones(3, np.float32)
    y = np.rint(x / 0.5) * 0.5
    [got] = get_backend("numpy").prepare(second).run({"x": x, "z_grad": ones, "x_grad_grad": ones}).values()
    np.testing.assert_allclose(got, 6 * y, rtol=1e-6)


def model_of(body: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[2,3] x, float s) => (float[2,3] y) {{ {body} }}'
    )


def test_arithmetic_of_quantised_values_without_a_rule_is_refused() -> None:
    model = model_of("q = QuantizeLinear(x, s) i = Cast<to=6>(q) p = Mul(i, i) y = Cast<to=1>(p)")
    assert refgrad.preflight(model).ok  # the derivative is zero
    report = refgrad.preflight(model, quantization="clipped")
    assert [row.operator for row in report.refused] == ["Mul"]
    with pytest.raises(
        NoGradientError, match="Mul cannot be differentiated: its rule is for floats, not for quantised values"
    ) as caught:
        refgrad.gradient(model, quantization="clipped")
    assert caught.value.nodes == ("Mul_2",)


def test_a_zero_point_on_the_path_is_refused() -> None:
    model = model_of("z = Cast<to=17>(s) q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s)")
    assert refgrad.preflight(model).ok
    with pytest.raises(NoGradientError, match="by y_zero_point: a zero point is a number of the quantised type"):
        refgrad.gradient(model, quantization="straight-through")


def test_comparisons_of_quantised_values_have_the_derivative_zero() -> None:
    model = model_of("q = QuantizeLinear(x, s) i = ArgMax<axis=0>(q) p = Cast<to=1>(i) y = Add(x, p)")
    report = refgrad.preflight(model, quantization="clipped")
    assert {row.operator: row.verdict for row in report.rows}["ArgMax"] == "zero"
    refgrad.gradient(model, quantization="clipped")


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(
        OptionError, match="There is no quantization 'ste'; there are 'zero', 'straight-through', 'clipped'"
    ):
        refgrad.preflight(model_of("y = Mul(x, s)"), quantization="ste")
