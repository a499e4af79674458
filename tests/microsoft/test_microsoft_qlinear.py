"""ONNX Runtime's operators of quantized tensors: their derivatives where rounding has one, and what they refuse."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checking import assert_second_derivative
from onnx import parser
from surrogate_checking import STRAIGHT, assert_surrogate

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases.qlinear import cases
from refgrad.microsoft.cases.qordered import cases as ordered
from refgrad.microsoft.cases.quantization import cases as quantizations
from refgrad.microsoft.cases.recurrent import cases as recurrent

pytestmark = [pytest.mark.stock, pytest.mark.slow]

CASES = [
    *(*cases(), *ordered()),
    *(case for case in quantizations() if case.operator != "com.microsoft.FakeQuant"),
    *(case for case in recurrent() if case.operator == "com.microsoft.DynamicQuantizeLSTM"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounding_agrees_with_differences_of_a_surrogate(case: Case) -> None:
    for quantization in STRAIGHT if case.static else ("clipped",):
        assert_surrogate(case, quantization)


@pytest.mark.parametrize("name", ["MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention"])
def test_second_derivative_of_a_result_in_floats(name: str) -> None:
    case = next(case for case in CASES if case.operator == f"com.microsoft.{name}" and case.static)
    assert_second_derivative(case)


def parse(body: str, inputs: str = "int8[2,3] q, float[2,3] x, float s", opset: int = 17) -> onnx.ModelProto:
    """A model of one output y, a float; t scales what comes out of a quantized operator."""
    imports = f'["" : {opset}, "com.microsoft" : 1]'
    text = f"<ir_version: 10, opset_import: {imports}> g ({inputs}, float t) => (float[a,b] y) {{ {body} }}"
    return parser.parse_model(text)


BEHIND = " f = Cast<to=1>(o) y = Mul(f, t)"
QUANTIZED = "q = com.microsoft.QuantizeLinear(x, s, z) "


@pytest.mark.parametrize("op_type", ["QLinearSigmoid", "QLinearLeakyRelu"])
def test_a_result_without_a_zero_point_has_the_zero_point_0(op_type: str) -> None:
    """ONNX Runtime ends the process."""
    zero = "int8 z = {0}"
    inputs = f"float[2,3] x, float s) => (float[2,3] y) <{zero}, float t = {{1}}> {{"
    text = f"""<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> g ({inputs}
        {QUANTIZED} o = com.microsoft.{op_type}(q, s, z, s) f = Cast<to=1>(o) y = Mul(f, t) }}"""
    x = np.array([[0.3, -1.1, 2.7], [1.2, -2.2, 0.9]], np.float32)
    model = parser.parse_model(text)
    y = get_backend("numpy").prepare(model).run({"x": x, "s": np.array(0.25, np.float32)})["y"]
    real = np.rint(x / 0.25) * 0.25
    expected = 1 / (1 + np.exp(-real)) if op_type == "QLinearSigmoid" else np.where(real < 0, 0.01 * real, real)
    np.testing.assert_array_equal(y, np.rint(expected / 0.25))
    assert refgrad.preflight(model, ["x"], quantization="clipped").ok


def test_by_default_a_quantized_operator_has_the_derivative_zero_and_says_why() -> None:
    model = parse(
        "q = com.microsoft.QuantizeLinear(x, s, z) o = com.microsoft.QLinearAdd(q, s, z, q, s, z, s, z)" + BEHIND,
        "float[2,3] x, float s, int8 z",
    )
    rows = {row.operator: row for row in refgrad.preflight(model, ["x"]).rows}
    assert rows["com.microsoft.QuantizeLinear"].verdict == "zero"
    assert rows["com.microsoft.QuantizeLinear"].reason == "rounding is piecewise constant"
    model = refgrad.gradient(model, ["x", "s"])
    feeds = {"x": np.ones((2, 3), np.float32), "s": np.array(0.3, np.float32), "z": np.array(1, np.int8)}
    results = (
        get_backend("numpy")
        .prepare(model)
        .run(feeds | {"t": np.array(1, np.float32), "y_grad": np.ones((2, 3), np.float32)})
    )
    assert not results["x_grad"].any()
    assert not results["s_grad"].any()


def test_a_zero_point_on_the_path_is_refused() -> None:
    model = parse(
        f"z = com.microsoft.QuantizeLinear(s, t) {QUANTIZED} y = com.microsoft.DequantizeLinear(q, s, z)",
        "float[2,3] x, float s",
    )
    with pytest.raises(NoGradientError, match="a zero point is a number of the quantised type"):
        refgrad.gradient(model, ["s"], quantization="straight-through")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("o = com.microsoft.QLinearConcat<axis=0>(s, z, q, s)", "give each tensor its scale and its zero point"),
        ("o = com.microsoft.QOrderedMatMul<order_A=2, order_B=3, order_Y=2>(q, s, q, s, s)", "use ORDER_ROW"),
        (
            "o = com.microsoft.QOrderedLongformerAttention<num_heads=1, window=1, order_input=2, order_weight=0, "
            "order_global_weight=0, order_output=1>(q, s, q, s, v, s, s, m, q, s, v, s, g, s)",
            "order_input=2, order_output=1, .* use ORDER_ROW",
        ),
        ("o = com.microsoft.QOrderedGelu<order_X=1, order_Y=2>(q, s, s)", "they are the same"),
        (
            "o = com.microsoft.QOrderedLayerNormalization<order_X=7, order_Y=7>(q, s, v, , s)",
            "the order 7 is not known",
        ),
        ("o = com.microsoft.QuantizeWithOrder<order_input=1, order_output=9>(x, s)", "there are ORDER_COL"),
        ("o, a, b = com.microsoft.QuantizeBFP<bfp_type=1>(x)", "in whose bytes no derivative is written"),
    ],
)
def test_a_form_that_is_not_covered_is_refused_with_the_reason(body: str, said: str) -> None:
    inputs = "float[2,3] x, float s, float[3] v, int8 z, float16[1,2] m, int32[1,2] g"
    model = parse(QUANTIZED + body + BEHIND, inputs)
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model, ["x", "s"], quantization="straight-through")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("o = com.microsoft.QLinearAdd(q, v, z, q, s, z, s, z)", r"a scale has the shape \[3\]; it is a scalar"),
        ("y = com.microsoft.MatMulIntegerToFloat(q, w, s, v)", r"b_scale has the shape \[3\]; .* each of 2 columns"),
        ("y = com.microsoft.MatMulIntegerToFloat(q, w, s, s, , , v)", r"bias has the shape \[3\]; \[2\] is needed"),
        ("y = com.microsoft.DynamicQuantizeMatMul(x, w, v)", "b_scale has the shape"),
        (
            "y = com.microsoft.QGemm(q, s, z, w, s, z, c)",
            r"C has the shape \[5\], which does not broadcast to \[2, 2\]",
        ),
        ("o = com.microsoft.QuantizeWithOrder<order_input=1, order_output=2>(x, s)", "do not fit the order 2"),
        ("o = com.microsoft.QuantizeLinear<axis=1>(x, v, z)", "y_zero_point has the shape"),
        ("o = com.microsoft.MatMulInteger16(k, k)", "a product of matrices has no scalars"),
        (
            "o = com.microsoft.QOrderedMatMul<order_A=1, order_B=0, order_Y=1>(q, s, w, s, s, , q)",
            "it needs C and scale_C",
        ),
    ],
)
def test_bad_input_is_refused_by_name(body: str, said: str) -> None:
    inputs = "int8[2,3] q, float[2,3] x, int8[3,2] w, float s, float[3] v, int8 z, int32[5] c, int16 k"
    model = parse(body + (BEHIND if body.startswith("o") else ""), inputs)
    feeds = {
        "q": np.ones((2, 3), np.int8),
        "x": np.ones((2, 3), np.float32),
        "w": np.ones((3, 2), np.int8),
        "v": np.ones(3, np.float32),
        "z": np.array(0, np.int8),
        "c": np.ones(5, np.int32),
        "k": np.array(1, np.int16),
    }
    feeds |= {"s": np.array(1, np.float32), "t": np.array(1, np.float32)}
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(model).run(feeds)


def test_the_layouts_of_cublaslt() -> None:
    """Where some elements of a matrix of 32 rows and 64 columns lie, by the documentation's formulas."""
    x = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    for order, row, column, place in (
        (0, 3, 5, 5 * 32 + 3),
        (2, 3, 37, 32 * 32 + 3 * 32 + 5),
        (3, 3, 37, 32 * 32 + 128 + 4 * 4 + 1 * 4 + 1),
        (4, 11, 37, 32 * 32 + ((1 * 4 + 1) * 2 + 1) * 32 + 5),
    ):
        model = parse(
            f"o = com.microsoft.QuantizeWithOrder<order_input=1, order_output={order}>(x, s)" + BEHIND,
            "float[32,64] x, float s",
        )
        chosen = (x == x[row, column]).astype(np.float32)
        feeds = {"x": chosen, "s": np.array(1, np.float32), "t": np.array(1, np.float32)}
        assert get_backend("numpy").prepare(model).run(feeds)["y"].ravel().nonzero()[0].tolist() == [place]


WEIGHTS = "float[2,1,3] x, uint8[1,3,8] w, uint8[1,2,8] r, float[1] s, uint8[1] z, float[1,8] eight, float[2] two"


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (
            "DynamicQuantizeLSTM<hidden_size=3>(x, w, r, , , , , , s, z, s, z)",
            "hidden_size is 3, and R .* 2 hidden units",
        ),
        ("DynamicQuantizeLSTM(x, r, r, , , , , , s, z, s, z)", r"W has the shape \[1, 2, 8\]; it is \[1, 3, 8\]"),
        ("DynamicQuantizeLSTM(x, w, r, eight, , , , , s, z, s, z)", r"B has the shape \[1, 8\]; it is \[1, 16\]"),
        (
            "DynamicQuantizeLSTM(x, w, r, , , , , , two, z, s, z)",
            r"W_scale has the shape \[2\]; it is \[1\] or \[1, 8\]",
        ),
        (
            "DynamicQuantizeLSTM(x, w, r, , three, , , , s, z, s, z)",
            r"sequence_lens is \[3\]; its numbers are from 1 to 2",
        ),
        ("DynamicQuantizeLSTM(eight, w, r, , , , , , s, z, s, z)", r"X has the shape \[1, 8\]; it is \[\?, \?, \?\]"),
    ],
)
def test_an_lstm_refuses_bad_input_by_name(node: str, said: str) -> None:
    model = parse(f"y = com.microsoft.{node}", f"{WEIGHTS}, int32[1] three")
    feeds = {
        "x": np.ones((2, 1, 3), np.float32),
        "w": np.ones((1, 3, 8), np.uint8),
        "r": np.ones((1, 2, 8), np.uint8),
        "s": np.ones(1, np.float32),
        "z": np.zeros(1, np.uint8),
        "eight": np.ones((1, 8), np.float32),
        "two": np.ones(2, np.float32),
        "three": np.array([3], np.int32),
        "t": np.array(1, np.float32),
    }
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(model).run(feeds)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('direction="backward"', "its direction 'backward' is not known; there are forward, reverse, bidirectional"),
        ('activations=["Tanh"]', "it has 1 activations; direction=forward has three for each way"),
    ],
)
def test_an_lstm_that_is_not_covered_is_refused_with_the_reason(settings: str, said: str) -> None:
    model = parse(f"y = com.microsoft.DynamicQuantizeLSTM<{settings}>(x, w, r, , , , , , s, z, s, z)", WEIGHTS)
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model, ["x"])


@pytest.mark.parametrize("quantization", ["zero", *STRAIGHT])
def test_an_lstm_of_zeros_has_a_finite_gradient(quantization: str) -> None:
    """Neither X nor H has a range."""
    model = parse("y = com.microsoft.DynamicQuantizeLSTM(x, w, r, , , , , , s, z, s, z)", WEIGHTS)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {
        "x": np.zeros((2, 1, 3), np.float32),
        "w": np.full((1, 3, 8), 3, np.uint8),
        "r": np.full((1, 2, 8), 5, np.uint8),
        "s": np.full(1, 0.1, np.float32),
        "z": np.zeros(1, np.uint8),
    }
    feeds |= {"eight": np.zeros((1, 8), np.float32), "two": np.zeros(2, np.float32), "t": np.array(1, np.float32)}
    gradient = refgrad.gradient(model, ["x", "s"], outputs=["y"], quantization=quantization)
    results = get_backend("numpy").prepare(gradient).run(feeds | {"y_grad": np.ones((2, 1, 1, 2), np.float32)})
    assert all(np.isfinite(value).all() for value in results.values())
    assert results["x_grad"].any() == (quantization != "zero")


def test_a_scan_stacks_bytes_that_have_a_derivative_as_bytes() -> None:
    inner = """(float h, float[2] v) => (float k, float[2] u)
        { q = QuantizeLinear(v, t, z) d = DequantizeLinear(q, t, z) u = Mul(d, h) k = Add(h, t) }"""
    text = f"""<ir_version: 10, opset_import: ["": 17]> g (float h, float[3,2] x, float t) => (float[3,2] y)
        <uint8 z = {{3}}> {{ last, y = Scan<num_scan_inputs=1, body = b {inner}>(h, x) }}"""
    model = refgrad.gradient(parser.parse_model(text), ["x"], outputs=["y"], quantization="straight-through")
    onnx.checker.check_model(model, full_check=True)
    x, d_y = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((3, 2), np.float32)
    feeds = {"h": np.array(2, np.float32), "x": x, "t": np.array(0.5, np.float32), "y_grad": d_y}
    for backend in ("numpy", "ort-cpu"):
        got = get_backend(backend).prepare(model).run(feeds)["x_grad"]
        np.testing.assert_allclose(got, [[2, 2], [2.5, 2.5], [3, 3]], rtol=1e-6)
