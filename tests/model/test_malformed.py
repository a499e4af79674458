"""Models that onnx's checker accepts, or that never reach it, and that no operator can make sense of: a clear refusal."""

from __future__ import annotations

import pytest
from onnx import AttributeProto, ModelProto, TensorProto, checker, parser

import refgrad
from refgrad.errors import InvalidModelError, NoGradientError, RefgradError

pytestmark = pytest.mark.interpreter


def _model(text: str, opset: int = 22) -> ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def _spoilt(model: ModelProto, name: str) -> ModelProto:
    written = model.SerializeToString()
    assert name.encode() in written
    return ModelProto.FromString(written.replace(name.encode(), b"\xff" * len(name)))


REFUSED = {
    "a list of the wrong length": (
        "m (float[1,1,2,2] x, int64[1,1,2,2] i, int64[4] s) => (float[1,1,5,5] y) "
        "{ y = MaxUnpool<kernel_shape = [2, 2], strides = [2]>(x, i, s) }",
        "MaxUnpool.*strides has incorrect size",
    ),
    "a type that the operator does not take": (
        "m (float[2,3] x, int4[3] w) => (float[2,3] y) { y = RMSNormalization(x, w) }",
        "scale.*unsupported type",
    ),
    "more elements than there can be": (
        "m (float[4,9223372036854775807] x, float top) => (float[N] y) { y = Clip(x, , top) }",
        r"'x' is declared with the sizes \[4, 9223372036854775807\], which no tensor has",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")
def test_what_schema_and_inference_forbid_is_said(fault: str) -> None:
    text, message = REFUSED[fault]
    with pytest.raises(InvalidModelError, match=message):
        refgrad.gradient(_model(text, 23))


def test_a_type_that_does_not_exist_is_said() -> None:
    inputs = "float[1,9,4] x, int64[2] size, int64[2] block"
    model = _model(f"m ({inputs}) => (float[1,1,5,5] y) {{ y = Col2Im<strides = [2, 2]>(x, size, block) }}")
    model.graph.input[2].type.tensor_type.elem_type = 1000
    with pytest.raises(InvalidModelError, match="type 1000"):
        refgrad.gradient(model)


@pytest.mark.parametrize("where", ["graph", "value", "axis", "node"])
def test_a_text_that_is_not_utf8_is_said(where: str) -> None:
    model = _spoilt(_model("graph (float[axis] x) => (float[axis] y) { [node] value = Exp(x) y = Neg(value) }"), where)
    for command in (refgrad.gradient, refgrad.preflight, refgrad.jvp):
        with pytest.raises(InvalidModelError, match=r"b'\\xff.*which is not UTF-8"):
            command(model)


def test_an_attribute_that_is_not_utf8_is_passed_on_as_it_is() -> None:
    model = _model(
        'm (float[2,4] x) => (float[2,8] y) { s = Constant<value_floats = [1.0, 2.0]>() y = Resize<mode = "nearest">(x, , s) }'
    )
    spoilt = _spoilt(model, "nearest")
    modes = {a.s for node in refgrad.gradient(spoilt).graph.node for a in node.attribute if a.name == "mode"}
    assert modes == {b"\xff" * 7}


@pytest.mark.parametrize(
    ("location", "why"), [("", "not the name of a file"), ("../w.bin", "leads upwards"), ("/w.bin", "absolute")]
)
def test_a_weight_in_memory_does_not_refer_to_a_file_elsewhere(location: str, why: str) -> None:
    model = _model("m (float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> { y = Mul(x, w) }")
    [weight] = model.graph.initializer
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    if location:
        weight.external_data.add(key="location", value=location)
    with pytest.raises(InvalidModelError, match=f"external data of 'w' at .*{why}"):
        refgrad.gradient(model)


def test_an_attribute_of_an_operator_of_onnxruntime_has_its_type() -> None:
    model = _model("m (float[2,3] a, float[3,2] b) => (float[2,2] y) { y = com.microsoft.FusedMatMul(a, b) }")
    model.opset_import.add(domain="com.microsoft", version=1)
    model.graph.node[0].attribute.add(name="alpha", type=AttributeProto.STRING, s=b"s")
    with pytest.raises(NoGradientError, match="its attribute 'alpha' is of type STRING, not FLOAT"):
        refgrad.gradient(model)


def test_a_further_output_of_a_variadic_operator_is_refused() -> None:
    text = (
        "m (float r, int64 t, float[2] x, float[2] g, float[2] h, float[2] v) => (float[2] y) "
        "{ y, a, b, c, d = ai.onnx.preview.training.Adam(r, t, x, g, h, v) }"
    )
    model = _model(text)
    model.opset_import.add(domain="ai.onnx.preview.training", version=1)
    with pytest.raises(NoGradientError, match="is not computed; leave it out"):
        refgrad.gradient(model)


def test_of_repeated_metadata_the_last_counts() -> None:
    model = _model("m (float[2] x) => (float[2] y) { y = Exp(x) }")
    for value in ("first", "last"):
        model.metadata_props.add(key="author", value=value)
    gradient = refgrad.gradient(model)
    checker.check_model(gradient)
    assert [entry.value for entry in gradient.metadata_props if entry.key == "author"] == ["last"]
    assert len(model.metadata_props) == 2


def test_lower_refuses_a_function_that_loses_its_result() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "local": 1]>
        m (float[2,4] x, float[4] w) => (float[2,4] y) { y = local.f(x, w) }
        <domain: "local", opset_import: ["": 21, "com.microsoft": 1]>
        f (x, w) => (y) { z = com.microsoft.SimplifiedLayerNormalization(x, w) }"""
    )
    with pytest.raises(InvalidModelError, match="returns 'y', which no node of it computes"):
        refgrad.lower(model)


def test_a_product_with_a_scalar_is_refused() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        m (float[2,4] x, float w) => (float[2,4] y) { y = com.microsoft.FusedMatMul<transB = 1>(x, w) }"""
    )
    with pytest.raises(RefgradError, match="'w' is a scalar"):
        refgrad.gradient(model)


@pytest.mark.parametrize("kind", [1000, -1])
def test_a_value_of_a_type_that_does_not_exist_is_refused(kind: int) -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        m (float[2,4] x, float[4] b) => (float[2,4] y) { y = com.microsoft.BiasGelu(x, b) }"""
    )
    model.graph.input[0].type.tensor_type.elem_type = kind
    with pytest.raises(InvalidModelError, match=f"'x' is declared of the type {kind}"):
        refgrad.preflight(model)


def test_ai_onnx_by_both_names_is_one_import() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 21, "ai.onnx": 21, "local": 1]>
        m (float[3,2] x, int64[1] axes) => (float[3,1] y) { y = local.f(x, axes) }
        <domain: "local", opset_import: ["": 21, "ai.onnx": 21]>
        f (x, axes) => (y) { z = ReduceL1<keepdims = 1>(x, axes) y = ai.onnx.Exp(z) }"""
    )
    for made in (refgrad.lower(model), refgrad.expand_gradients(model), refgrad.gradient(model, ["x"])):
        checker.check_model(made)


@pytest.mark.parametrize("kind", ["seq(float)", "optional(float)", "optional(sparse_tensor(float))"])
def test_a_container_where_a_tensor_is_due_is_refused(kind: str) -> None:
    taken = _model(f"m (float[3] x, float min, {kind} max) => (float[3] y) {{ y = Clip(x, min, max) }}", 18)
    made = _model(f"m (float[3] x) => ({kind} y) {{ y = Exp(x) }}", 18)
    for model in (taken, made):
        with pytest.raises(InvalidModelError, match="tensor"):
            refgrad.hvp(model, ["x"])


def test_an_attribute_of_another_type_than_onnxruntime_gives_it() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        m (float[2,3] dY, int64[2] shape, int64[2,3] indices) => (float[4,3] dX)
        { dX = com.microsoft.GatherElementsGrad<axis = [1]>(dY, shape, indices) }"""
    )
    with pytest.raises(RefgradError, match="'axis' is of type INTS, not INT"):
        refgrad.lower(model)
