"""The shape of models, not of operators: what is used twice, nested, captured, named alike, left out or stored elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from checking import assert_gradient, assert_second_derivative, names_of
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.derivatives import ortbuilder
from refgrad.errors import InvalidModelError, NoGradientError, OptionError, UnknownNameError
from refgrad.protos.traverse import tensors_without_initializers
from refgrad.reverse.ranks import of_any_rank
from refgrad.tables.conventions import QUANTIZATION
from refgrad.tables.dialects import DIALECTS

X = np.array([[0.5, -1.25, 2.25], [1.5, 0.75, -0.5]], np.float32)
W = np.array([[1.0, -0.5], [0.25, 2.0], [-1.5, 0.125]], np.float32)


def model_of(text: str, opset: int = 21, ir_version: int = 10, extra: str = "") -> ModelProto:
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}{extra}]> {text}')


def with_initializers(model: ModelProto, **arrays: np.ndarray) -> ModelProto:
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def check(model: ModelProto, feeds: Mapping[str, np.ndarray], **options: Any) -> None:
    for dialect in DIALECTS:
        assert_gradient(Case("model", model, feeds, **options), dialect)


def run(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(get_backend("numpy").prepare(model).run(feeds))


def inputs_of(model: ModelProto) -> list[str]:
    return [value.name for value in model.graph.input]


def outputs_of(model: ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def defined_names(model: ModelProto) -> list[str]:
    """Every name that the graph gives to a value; an initializer that is an input as well counts once."""
    inputs = inputs_of(model)
    initializers = [tensor.name for tensor in model.graph.initializer if tensor.name not in inputs]
    return inputs + initializers + [name for node in model.graph.node for name in node.output if name]


# What is differentiated

STRUCTURES = {
    "an input used twice": "g (float[2,3] x) => (float[2,3] y) { a = Sin(x) y = Mul(a, x) }",
    "an input used twice by one node": "g (float[2,3] x) => (float[2,3] y) { y = Mul(x, x) }",
    "an output that is an inner value": "g (float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Sin(x) z = Mul(y, x) }",
    "several outputs": "g (float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Sin(x) z = Cos(x) }",
    "an output that is an input": "g (float[2,3] x) => (float[2,3] x, float[2,3] y) { y = Sin(x) }",
    "symbolic shapes": "g (float[N,M] x) => (float[N,M] y) { a = Sin(x) y = Mul(a, x) }",
    "a diamond": "g (float[2,3] x) => (float[2,3] y) { a = Sin(x) b = Exp(a) c = Cos(a) d = Mul(b, c) y = Add(d, a) }",
    "a dead branch": "g (float[2,3] x) => (float[2,3] y) { a = Sin(x) b = Exp(a) y = Mul(a, x) }",
    "an integer path": "g (float[2,3] x) => (float[2,3] y) "
    "{ i = Cast<to=7>(x) j = Neg(i) k = CastLike(j, x) y = Mul(k, x) }",
}


@pytest.mark.parametrize("text", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_agree_with_differences(text: str) -> None:
    check(model_of(text), {"x": X})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", ["2,3", "N,M"])
def test_gradient_of_what_no_output_depends_on_is_zero_of_its_shape(shape: str, dialect: str) -> None:
    model = model_of(f"g (float[{shape}] x, float[{shape}] z) => (float[{shape}] y) {{ y = Sin(x) }}")
    gradient = refgrad.gradient(model, wrt=["z", "x"], dialect=dialect)
    result = run(gradient, {"x": X, "z": X, "y_grad": X})
    assert list(result) == ["z_grad", "x_grad"]
    np.testing.assert_array_equal(result["z_grad"], np.zeros((2, 3), np.float32))


def test_two_names_with_the_same_gradient_have_two_outputs() -> None:
    model = model_of("g (float[2,3] a, float[2,3] b) => (float[2,3] y) { y = Add(a, b) }")
    gradient = refgrad.gradient(model)
    assert outputs_of(gradient) == ["a_grad", "b_grad"]
    check(model, {"a": X, "b": X})


def test_the_order_of_wrt_is_the_order_of_the_outputs() -> None:
    model = model_of("g (float[2,3] a, float[2,3] b, float[2,3] c) => (float[2,3] y) { d = Mul(a, b) y = Mul(c, d) }")
    assert outputs_of(refgrad.gradient(model, wrt=["c", "a", "b"])) == ["c_grad", "a_grad", "b_grad"]
    check(model, {"a": X, "b": X[::-1], "c": 2 * X}, wrt=("b", "c"))


def test_by_default_float_inputs_and_initializers_on_the_path_are_differentiated() -> None:
    text = "g (float[2,3] x, int64[2] n, float[2,3] z) => (float[2,2] y) { y = MatMul(x, w) unused = Neg(v) }"
    model = with_initializers(model_of(text), w=W, v=W)
    assert outputs_of(refgrad.gradient(model)) == ["x_grad", "z_grad", "w_grad"]


def test_some_outputs_only() -> None:
    model = model_of(
        "g (float[2,3] x) => (float[2,3] y, float[2,3] z, int64[2] n) { y = Sin(x) z = Cos(x) n = Shape(x) }"
    )
    assert inputs_of(refgrad.gradient(model)) == ["x", "y_grad", "z_grad"]
    assert inputs_of(refgrad.gradient(model, outputs=["z"])) == ["x", "z_grad"]
    check(model, {"x": X}, outputs=("z",))


# Names

NAMES = {
    "an input": "g (float[2,3] x, float[2,3] x_grad) => (float[2,3] y) { y = Mul(x, x_grad) }",
    "an inner value": "g (float[2,3] x) => (float[2,3] y) { x_grad = Sin(x) y = Mul(x_grad, x) }",
    "an output": "g (float[2,3] x) => (float[2,3] x_grad) { x_grad = Sin(x) }",
    "a cotangent": "g (float[2,3] x, float[2,3] y_grad) => (float[2,3] y) { y = Mul(x, y_grad) }",
    "a partial sum": "g (float[2,3] x, float[2,3] x_grad_0) => (float[2,3] y) { y = Mul(x, x) }",
}


@pytest.mark.parametrize("text", NAMES.values(), ids=NAMES)
def test_a_taken_name_becomes_the_next_free_one(text: str) -> None:
    model = model_of(text)
    feeds = dict.fromkeys(inputs_of(model), X)
    gradient = refgrad.gradient(model)
    names = defined_names(gradient)
    assert len(names) == len(set(names))
    assert set(inputs_of(model)) <= set(inputs_of(gradient))
    check(model, feeds)


def test_a_name_that_a_node_has_is_taken() -> None:
    model = model_of("g (float[2,3] x) => (float[2,3] y) { y = Sin(x) }")
    model.graph.node[0].name = "x_grad"
    assert outputs_of(refgrad.gradient(model)) == ["x_grad_1"]


def test_nodes_without_names_and_of_the_same_name_are_told_apart() -> None:
    model = model_of("g (float[2,3] x) => (float[2,3] y) { a = Sin(x) b = Sin(a) y = Sin(b) }")
    for name in ("", "same"):
        for node in model.graph.node:
            node.name = name
        names = [node.name for node in refgrad.gradient(model).graph.node]
        assert all(names)
        assert len(names) == len(set(names))
    check(model, {"x": X})


def test_metadata_tells_what_belongs_to_what() -> None:
    model = model_of("g (float[2,3] x, float[2,3] x_grad) => (float[2,3] y) { y = Mul(x, x_grad) }")
    model.metadata_props.add(key="author", value="somebody")
    model.graph.node[0].name = "product"
    gradient = refgrad.gradient(model)
    assert names_of(gradient, "gradients") == {"x": "x_grad_1", "x_grad": "x_grad_grad"}
    assert names_of(gradient, "cotangents") == {"y": "y_grad"}
    assert ("author", "somebody") in [(p.key, p.value) for p in gradient.metadata_props]
    emitted = {node.name: {p.key: p.value for p in node.metadata_props} for node in gradient.graph.node}
    assert {frozenset(properties.items()) for properties in emitted.values()} == {
        frozenset({("refgrad.rule", "Mul"), ("refgrad.node", "product"), ("namespace", "backward")})
    }
    assert all(name.startswith("product_Grad/") for name in emitted)


# Initializers


def test_an_initializer_in_wrt_becomes_an_input_with_its_value_as_default() -> None:
    model = with_initializers(model_of("g (float[2,3] x) => (float[2,2] y) { y = MatMul(x, w) }"), w=W)
    gradient = refgrad.gradient(model, wrt=["w"])
    assert inputs_of(gradient) == ["x", "w", "y_grad"]
    cotangent = np.ones((2, 2), np.float32)
    np.testing.assert_allclose(run(gradient, {"x": X, "y_grad": cotangent})["w_grad"], X.T @ cotangent)
    check(model, {"x": X})


def test_an_initializer_that_is_an_input_too_stays_one() -> None:
    model = with_initializers(model_of("g (float[2,3] x, float[3,2] w) => (float[2,2] y) { y = MatMul(x, w) }"), w=W)
    gradient = refgrad.gradient(model, wrt=["w", "x"])
    assert inputs_of(gradient) == ["x", "w", "y_grad"]
    check(model, {"x": X})
    check(model, {"x": X, "w": 2 * W})


def test_before_ir_version_4_every_initializer_is_listed_as_an_input() -> None:
    text = "g (float[2,3] x, float[3,2] w, int64[2] axes) => (float[2,2,1,1] y) { a = MatMul(x, w) y = Unsqueeze(a, axes) }"
    model = with_initializers(model_of(text, opset=13, ir_version=3), w=W, axes=np.array([2, 3]))
    gradient = refgrad.gradient(model)
    assert outputs_of(gradient) == ["x_grad", "w_grad"]
    onnx.checker.check_model(gradient, full_check=True)
    result = run(gradient, {"x": X, "y_grad": np.ones((2, 2, 1, 1), np.float32)})
    np.testing.assert_allclose(result["w_grad"], np.repeat(X.sum(0)[:, None], 2, 1), rtol=1e-6)


def test_a_fed_default_is_no_constant() -> None:
    model = with_initializers(
        model_of("g (float[2,3] x, int64[1] starts, int64[1] ends) => (float[M,3] y) { y = Slice(x, starts, ends) }"),
        starts=np.array([0]),
        ends=np.array([2]),
    )
    check(model, {"x": X, "starts": np.array([1])})


def test_a_fed_default_may_have_another_shape() -> None:
    text = "g (float[M,3] x, float[N,3] b) => (float[P,3] y) { y = Mul(x, b) }"
    rows = np.repeat(X, 2, axis=0)
    for default, x, b in ((X[:1], X[:1], rows), (rows, rows, X[:1])):
        check(with_initializers(model_of(text), b=default), {"x": x, "b": b})
    wide = np.ones((1, 300), np.float32)
    model = with_initializers(model_of(text.replace("3]", "300]")), b=wide)
    check(model, {"x": wide, "b": np.repeat(wide, 4, axis=0)})


def test_no_shape_is_inferred_from_a_fed_default() -> None:
    text = "g (float[1,3] x, float[1,3] b, int64[2] s) => (float[P,Q] y) { e = Expand(x, s) y = Add(e, b) }"
    model = with_initializers(model_of(text), s=np.array([1, 3]))
    check(model, {"x": X[:1], "b": X[1:], "s": np.array([4, 3])})


def test_an_initializer_in_wrt_is_no_constant() -> None:
    model = with_initializers(model_of("g (float[2,3] x) => (float[2,3] y) { y = Pow(x, e) }"), e=np.float32(2))
    ones = np.ones((2, 3), np.float32)
    result = run(refgrad.gradient(model), {"x": X, "e": np.float32(3), "y_grad": ones})
    np.testing.assert_allclose(result["x_grad"], 3 * X**2, rtol=1e-6)
    operators = [node.op_type for node in refgrad.gradient(model, wrt=["x"]).graph.node]
    assert "Pow" not in operators


def test_a_dimension_below_0_is_unknown() -> None:
    model = model_of("g (float[2,3] x, float[2,3] b) => (float[2,3] y) { y = Mul(x, b) }")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    gradient = refgrad.gradient(model, wrt=["x"])
    np.testing.assert_allclose(run(gradient, {"x": X, "b": W.T, "y_grad": X})["x_grad"], X * W.T)
    one_row = {"x": X[:1], "b": W.T, "y_grad": X}
    np.testing.assert_allclose(run(gradient, one_row)["x_grad"], (X * W.T).sum(0, keepdims=True))


def without_shape(model: ModelProto, *names: str) -> ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        if value.name in names:
            value.type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("opset", [11, 21])
def test_an_output_without_a_shape_gets_the_inferred_one(opset: int) -> None:
    text = "g (float[N,3] x, float[3,2] w, float[?,2] b) => (float y, float z) { y = MatMul(x, w) z = Add(y, b) }"
    model = without_shape(model_of(text, opset, ir_version=7), "y", "z")
    assert refgrad.preflight(model).outputs == ("y", "z")
    for dialect in DIALECTS:
        gradient = refgrad.gradient(model, dialect=dialect, keep_outputs=True)
        declared = {value.name: value for value in (*gradient.graph.input, *gradient.graph.output)}
        for name, batch in (("y", "N"), ("y_grad", "N"), ("z", ""), ("z_grad", "")):
            first, second = declared[name].type.tensor_type.shape.dim
            assert (first.dim_param, second.dim_value) == (batch, 2)
            assert not first.HasField("dim_value")
    check(model, {"x": X, "w": W, "b": X[:, :2]})


def test_an_output_whose_shape_cannot_be_inferred_has_to_declare_it() -> None:
    model = model_of("g (float[2,3] x, int64[K] s) => (float[2,3] y) { y = Reshape(x, s) }")
    feeds = {"x": X, "s": np.array([2, 3])}
    check(model, feeds)
    with pytest.raises(InvalidModelError, match=r"Output 'y' declares no shape, .* Declare its axes, by names"):
        refgrad.gradient(without_shape(model, "y"))


@pytest.mark.parametrize("opset", [11, 21])
def test_where_nobody_checks_the_gradient_an_input_may_have_any_shape(opset: int) -> None:
    text = "g (float x, float[3,2] w) => (float[A,B] y) { p = MatMul(x, w) e = Tanh(p) y = Reshape(e, s) }"
    model = with_initializers(without_shape(model_of(text, opset, ir_version=7), "x"), s=np.array([-1, 2]))
    with pytest.raises(InvalidModelError, match="'x' declares no shape"):  # nor could the gradient
        refgrad.gradient(model, wrt=["x", "w"])
    with of_any_rank():
        gradient = refgrad.gradient(model, wrt=["x", "w"])
    for x in (X, np.stack([X, 2 * X])):  # a matrix, a batch of them
        grad = 1 - np.tanh(x @ W) ** 2
        results = run(gradient, {"x": x, "w": W, "y_grad": np.ones((x.size // 3, 2), np.float32)})
        np.testing.assert_allclose(results["x_grad"], grad @ W.T, rtol=1e-5)
        np.testing.assert_allclose(results["w_grad"], x.reshape(-1, 3).T @ grad.reshape(-1, 2), rtol=1e-5)


def test_the_axes_of_an_input_without_a_shape_follow_from_its_operators() -> None:
    text = "g (float x, float[3,2] w) => (float[A,B] y) { p = Gemm(x, w) y = Tanh(p) }"
    gradient = refgrad.gradient(without_shape(model_of(text), "x"), wrt=["x"])
    onnx.checker.check_model(gradient, full_check=True)
    got = run(gradient, {"x": X, "w": W, "y_grad": np.ones((2, 2), np.float32)})["x_grad"]
    np.testing.assert_allclose(got, (1 - np.tanh(X @ W) ** 2) @ W.T, rtol=1e-5)


# Other models than a flat graph of the newest opset


def test_old_opsets_are_converted() -> None:
    for opset, text in {
        9: "g (float[2,3] x) => (float[2,1] y) { a = Relu(x) y = ReduceSum<axes=[1], keepdims=1>(a) }",
        11: "g (float[2,3] x) => (float[2,3,1] y) { a = Softmax<axis=1>(x) y = Unsqueeze<axes=[2]>(a) }",
        13: "g (float[2,3] x) => (float[2,3] y) { a = Sin(x) y = Softmax<axis=1>(a) }",
    }.items():
        model = model_of(text, opset=opset, ir_version=7)
        gradient = refgrad.gradient(model)
        assert gradient.opset_import[0].version == 16
        check(model, {"x": X})


def test_local_functions_are_inlined() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[2,3] x) => (float[2,3] y) { a = local.twice(x) y = local.wave(a) }
        <opset_import: ["": 21], domain: "local"> twice (u) => (v) { v = Add(u, u) }
        <opset_import: ["": 21, "local": 1], domain: "local"> wave (u) => (v) { s = Sin(u) v = local.twice(s) }"""
    )
    check(model, {"x": X})


@pytest.mark.parametrize(("opset", "own"), [(13, 13), (21, 18), (18, 21)])
def test_a_function_may_have_an_opset_of_its_own(opset: int, own: int) -> None:
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": {opset}, "local": 1]>
        g (float[2,3] x) => (float[2,3] y) {{ y = local.wave(x) }}
        <opset_import: ["": {own}], domain: "local"> wave (u) => (v) {{ v = Sin(u) }}"""
    )
    gradient = refgrad.gradient(model)
    onnx.checker.check_model(gradient, full_check=True)
    np.testing.assert_allclose(run(gradient, {"x": X, "y_grad": X})["x_grad"], X * np.cos(X), rtol=1e-6)


def test_the_dimensions_of_a_function_are_those_of_one_call() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[A,3] x, float[B,3] z) => (float[C,3] y) { a = local.wave(x) b = local.wave(z) y = Mul(a, b) }
        <opset_import: ["": 21], domain: "local"> wave (u) => (v) { s = Sin(u) v = Neg(s) }"""
    )
    model.functions[0].value_info.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N", 3]))
    for x, z in ((X[:1], X), (X, X[:1])):
        check(model, {"x": x, "z": z})


def test_a_model_without_the_default_opset_gets_it() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph([], "g", [value], [value])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8)
    gradient = refgrad.gradient(model)
    onnx.checker.check_model(gradient, full_check=True)
    np.testing.assert_array_equal(run(gradient, {"x": X, "x_grad": W.T})["x_grad_1"], W.T)


def test_a_string_may_be_any_bytes() -> None:
    model = model_of("g (float[2,3] x) => (float[2,3] y) { y = Sin(x) }")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["s"], value_string=b"\xff"))
    assert outputs_of(refgrad.gradient(model)) == ["x_grad"]


_IF = """g (float[2,3] x, bool c) => (float[2,3] y) {
    a = Sin(x)
    chosen = If (c) <
        then_branch = t () => (%s) { %s },
        else_branch = e () => (%s) { %s }
    >
    y = %s
}"""


def test_a_branch_may_capture_what_it_does_not_carry_on() -> None:
    text = _IF % ("int64[2] s", "s = Shape(a)", "int64[2] t", "t = Shape(x)", "Reshape(a, chosen)")
    for condition in (True, False):
        check(model_of(text), {"x": X, "c": np.array(condition)})


def test_a_sequence_that_is_not_on_the_path_is_no_obstacle() -> None:
    model = model_of(
        "g (float[2,3] x, seq(float[2]) s) => (float[2,3] y, int64 n) { y = Sin(x) n = SequenceLength(s) }"
    )
    gradient = refgrad.gradient(model)
    assert outputs_of(gradient) == ["x_grad", "s_grad"]
    results = run(gradient, {"x": X, "s": [np.ones(2, np.float32)], "y_grad": X})
    np.testing.assert_allclose(results["x_grad"], X * np.cos(X), rtol=1e-6)
    np.testing.assert_array_equal(results["s_grad"], [np.zeros(2, np.float32)])


def test_an_operator_without_a_derivative_is_refused_by_name() -> None:
    model = model_of(
        "g (float[2,3] x) => (float[2,3] y) { a = Sin(x) [bad] y = custom.Strange(a) }", extra=', "custom": 1'
    )
    with pytest.raises(NoGradientError, match="Strange has no rule") as caught:
        refgrad.gradient(model)
    assert caught.value.nodes == ("bad",)
    assert not refgrad.preflight(model).ok


ENCODED = {
    "text": ("t = Cast<to=8>(x) z = Cast<to=1>(t)", "Cast"),
    "joined text": ("t = Cast<to=8>(x) u = StringConcat(t, s) z = Cast<to=1>(u)", "Cast"),
    "text of the kind of another": ("t = CastLike(x, s) z = CastLike(t, x)", "CastLike"),
    "bits": ("b = BitCast<to=6>(x) c = BitCast<to=1>(b) z = Neg(c)", "BitCast"),
    "bits that are computed with": (
        'b = BitCast<to=12>(x) h = BitShift<direction="RIGHT">(b, one) r = Sub(many, h) z = BitCast<to=1>(r)',
        "BitCast",
    ),
}


@pytest.mark.parametrize("kind", ENCODED)
@pytest.mark.parametrize("quantization", QUANTIZATION)
def test_no_derivative_is_lost_in_text_or_bits(kind: str, quantization: str) -> None:
    """They are no floats, but a float that is had back from them is no constant."""
    body, operator = ENCODED[kind]
    model = model_of(
        f"g (float[2,3] x, string[1] s, uint32[1] one, uint32[1] many) => (float[2,3] y) {{ {body} y = Mul(z, x) }}",
        opset=26,
    )
    with pytest.raises(NoGradientError, match=f"{operator} has no derivative"):
        refgrad.gradient(model, wrt=["x"], quantization=quantization)
    assert not refgrad.preflight(model, quantization=quantization).ok


@pytest.mark.parametrize(
    "body",
    [
        "t = Cast<to=8>(x) b = BitCast<to=6>(x) z = Neg(x)",
        "t = Cast<to=8>(x) b = BitCast<to=6>(x) c = Equal(t, t) z = Cast<to=1>(c)",
        "t = Cast<to=8>(x) b = BitCast<to=6>(x) c = Shape(b) d = Cast<to=1>(c) e = ReduceSum(d) z = Expand(e, c)",
    ],
)
def test_text_and_bits_are_no_obstacle_where_no_float_comes_of_them(body: str) -> None:
    model = model_of(
        f"g (float[2,3] x) => (float[2,3] y, string[2,3] t, int32[2,3] b) {{ {body} y = Mul(z, x) }}", opset=26
    )
    assert outputs_of(refgrad.gradient(model)) == ["x_grad"]
    assert refgrad.preflight(model).ok


def test_an_operator_without_a_rule_beside_the_path_is_no_obstacle() -> None:
    text = "g (float[2,3] x, float[2,3] z) => (float[2,3] y) { a = custom.Strange(z) y = Mul(a, x) }"
    model = model_of(text, extra=', "custom": 1')
    assert outputs_of(refgrad.gradient(model, wrt=["x"])) == ["x_grad"]
    with pytest.raises(NoGradientError):
        refgrad.gradient(model, wrt=["z"])


def test_external_data_is_referenced(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32)
    model = with_initializers(model_of("g (float[2,3] x) => (float[2,200] y) { y = MatMul(x, w) }"), w=weights)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    gradient = refgrad.gradient(tmp_path / "model.onnx", wrt=["x", "w"])
    assert gradient.ByteSize() < weights.nbytes
    onnx.save(gradient, tmp_path / "gradient.onnx")
    cotangent = np.random.default_rng(1).standard_normal((2, 200)).astype(np.float32)
    for name in ("numpy", "ort-cpu"):
        if name in available():
            result = get_backend(name).prepare(tmp_path / "gradient.onnx").run({"x": X, "y_grad": cotangent})
            np.testing.assert_allclose(result["x_grad"], cotangent @ weights.T, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(result["w_grad"], X.T @ cotangent, rtol=1e-4, atol=1e-4)


def test_external_data_within_nodes_is_read(tmp_path: Path) -> None:
    model = model_of(
        """g (int64 n, float[3] x) => (float[3] y) {
            c = Constant <value = float[3] {1, 2, 3}> ()
            y = Loop (n, "", x) <body = b (int64 i, bool going, float[3] p) => (bool still, float[3] q)
                <float[3] w = {0.5, 2, 0.3}> { still = Identity (going) s = Mul (p, w) q = Mul (s, c) }>
        }"""
    )
    for tensor in tensors_without_initializers(model):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    path, written = tmp_path / "model.onnx", ModelProto.FromString(model.SerializeToString())
    onnx.save(written, path, save_as_external_data=True, location="weights", size_threshold=0, convert_attribute=True)
    feeds = {"n": np.array(2), "x": X[0], "y_grad": X[1]}
    for made in (refgrad.gradient(path), refgrad.gradient(model)):
        assert outputs_of(made) == ["x_grad", "c_grad", "w_grad"]
        expected = X[1] * (np.float32([0.5, 2, 0.3]) * np.float32([1, 2, 3])) ** 2
        np.testing.assert_allclose(run(made, feeds)["x_grad"], expected, rtol=1e-6)
    (tmp_path / "weights").unlink()
    with pytest.raises(InvalidModelError, match="is missing: there is no file"):
        refgrad.gradient(path)


# Options


def test_outputs_are_kept_after_the_gradients() -> None:
    model = model_of("g (float[2,3] x) => (float[2,3] y, int64[2] n) { y = Sin(x) n = Shape(x) }")
    gradient = refgrad.gradient(model, keep_outputs=True)
    assert outputs_of(gradient) == ["x_grad", "y", "n"]
    result = run(gradient, {"x": X, "y_grad": X})
    np.testing.assert_allclose(result["y"], np.sin(X), rtol=1e-6)
    onnx.checker.check_model(gradient, full_check=True)


def test_cotangents_of_ones() -> None:
    model = model_of("g (float[N,3] x) => (float[N,3] y, float[3] z) { y = Sin(x) z = ReduceSum<keepdims=0>(y, axes) }")
    with_initializers(model, axes=np.array([0]))
    gradient = refgrad.gradient(model, cotangent="ones")
    assert inputs_of(gradient) == ["x"]
    np.testing.assert_allclose(run(gradient, {"x": X})["x_grad"], 2 * np.cos(X), rtol=1e-6)


def test_weights_are_in_the_order_of_the_model_whatever_their_sizes() -> None:
    model = model_of("g (float[2,300] x) => (float[2,1] y) { p = MatMul(x, w) y = Add(p, b) }")
    for name, shape in (("w", (300, 1)), ("b", (1,))):  # the large one is kept apart
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    assert inputs_of(refgrad.gradient(model)) == ["x", "w", "b", "y_grad"]


def test_cotangents_that_are_yielded() -> None:
    model = model_of("g (float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Sin(x) z = Cos(x) }")
    gradient = refgrad.gradient(model, cotangent="yield", dialect="ort")
    assert inputs_of(gradient) == ["x"]
    [node] = [node for node in gradient.graph.node if node.op_type == "YieldOp"]
    assert (node.domain, list(node.input), list(node.output)) == ("com.microsoft", ["y", "z"], ["y_grad", "z_grad"])
    with pytest.raises(OptionError, match="dialect='ort'"):
        refgrad.gradient(model, cotangent="yield")


def test_wrong_arguments_are_told() -> None:
    model = model_of("g (float[2,3] input, int64[2] n) => (float[2,3] y) { y = Sin(input) }")
    for options, error, text in (
        ({"wrt": ["inptu"]}, UnknownNameError, "Did you mean 'input'"),
        ({"wrt": ["n"]}, UnknownNameError, "int64"),
        ({"wrt": ["input", "input"]}, UnknownNameError, "twice"),
        ({"wrt": "input"}, OptionError, "list of names"),
        ({"wrt": []}, OptionError, "empty"),
        ({"wrt": {"input"}}, OptionError, "list of names"),
        ({"wrt": b"input"}, OptionError, "list of names"),
        ({"wrt": [None]}, OptionError, "list of names"),
        ({"wrt": 1}, OptionError, "list of names"),
        ({"outputs": (name for name in ["y"])}, OptionError, "list of names"),
        ({"outputs": ["z"]}, UnknownNameError, "'y'"),
        ({"dialect": "onx"}, OptionError, "'onnx'"),
        ({"cotangent": "one"}, OptionError, "'ones'"),
    ):
        with pytest.raises(error, match=text):
            refgrad.gradient(model, **options)  # type: ignore[arg-type]


# Shapes and types


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0, 3)], ids=str)
def test_scalars_and_nothing_at_all(shape: tuple[int, ...]) -> None:
    for dims in (shape, tuple(f"d{axis}" for axis in range(len(shape)))):
        nodes = [helper.make_node("Sin", ["x"], ["a"]), helper.make_node("Mul", ["a", "x"], ["y"])]
        value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("x", "y")]
        graph = helper.make_graph(nodes, "g", value[:1], value[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        check(model, {"x": np.full(shape, 0.5, np.float32)})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_gradients_have_the_type_of_what_they_belong_to(kind: Any, dialect: str) -> None:
    element = helper.tensor_dtype_to_string(helper.np_dtype_to_tensor_dtype(np.dtype(kind))).rpartition(".")[2].lower()
    body = "{ a = Tanh(x) b = Mul(a, x) c = MatMul(b, w) y = Softmax<axis=-1>(c) }"
    text = f"g ({element}[2,3] x) => ({element}[2,2] y) {body}"
    model = with_initializers(model_of(text), w=W.astype(kind))
    gradient = refgrad.gradient(model, dialect=dialect)
    feeds = {"x": X.astype(kind), "y_grad": W[:2].astype(kind)}
    result = run(gradient, feeds)
    exact = (
        get_backend("numpy").prepare(gradient, precision="float64").run({n: v.astype(float) for n, v in feeds.items()})
    )
    for name, value in result.items():
        assert value.dtype == kind
        np.testing.assert_allclose(value.astype(float), exact[name], atol=64 * float(ml_dtypes.finfo(kind).eps))
    assert_gradient(Case("typed", model, {"x": feeds["x"]}), dialect)


@pytest.mark.parametrize("opset", [16, 21])
def test_zeros_of_bfloat16(opset: int) -> None:
    model = model_of("g (bfloat16[2,3] x, bfloat16[2,3] z) => (bfloat16[2,3] y) { y = Neg(x) }", opset=opset)
    gradient = refgrad.gradient(model)
    onnx.checker.check_model(gradient, full_check=True)
    x = X.astype(ml_dtypes.bfloat16)
    assert run(gradient, {"x": x, "z": x, "y_grad": x})["z_grad"].dtype == ml_dtypes.bfloat16


# The gradient as a model


def test_the_callers_model_is_not_modified() -> None:
    texts = [
        *STRUCTURES.values(),
        *NAMES.values(),
        "g (float[2,2] x) => (float[2,2] y) { y = MaxPool<kernel_shape=[1]>(x) }",
    ]
    for text in texts:
        model = model_of(text)
        before = model.SerializeToString(deterministic=True)
        for dialect in DIALECTS:
            refgrad.gradient(model, dialect=dialect, keep_outputs=True)
            refgrad.preflight(model)
        assert model.SerializeToString(deterministic=True) == before
    old = model_of("g (float[2,3] x) => (float[2,3,1] y) { y = Unsqueeze<axes=[2]>(x) }", opset=9, ir_version=3)
    before = old.SerializeToString(deterministic=True)
    refgrad.gradient(old)
    assert old.SerializeToString(deterministic=True) == before


def test_the_same_model_gives_the_same_gradient() -> None:
    model = model_of(STRUCTURES["a diamond"])
    first, second = (refgrad.gradient(model).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


MLP = """g (float[2,3] x) => (float[2,2] y) {
    a = MatMul(x, w) b = Add(a, c) d = Tanh(b) e = MatMul(d, v) y = Softmax<axis=-1>(e)
}"""


def mlp() -> ModelProto:
    return with_initializers(model_of(MLP), w=W, c=np.array([0.5, -0.25], np.float32), v=W[:2])


def test_second_derivatives_of_a_network_agree_with_differences() -> None:
    assert_second_derivative(Case("mlp", mlp(), {"x": X}))


def _image(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape).astype(np.float32) / 7 - 1.1


SECOND = [
    node_case("Mul", X, X[0], shapes="unknown", opset=21),
    node_case("Div", X, np.abs(X) + 1, opset=21),
    *(node_case(name, X, opset=21) for name in ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "Gelu")),
    node_case("Gelu", X, approximate="tanh", opset=21),
    *(node_case(name, X, axis=0, opset=21) for name in ("Softmax", "LogSoftmax")),
    *(
        node_case(
            "Slice", X, np.array([-1]), np.array([-9]), np.array([1]), np.array([-2]), constant=constant, opset=21
        )
        for constant in ((), ("starts", "ends", "axes", "steps"))
    ),
    node_case("Slice", X, np.array([1]), np.array([3]), np.array([1]), shapes="symbolic", opset=21),
    *(node_case("Gather", X, np.array([0, 2, 0]), axis=1, shapes=shapes, opset=21) for shapes in ("static", "unknown")),
    node_case("Gather", X, np.array(1), axis=1, constant=["indices"], opset=21),
    node_case("GatherElements", X, np.array([[0, 1, 0]]), opset=21),
    node_case("GatherND", X, np.array([[1], [-1]]), opset=21),
    node_case("Pad", X, np.array([0, 1, 2, 0]), np.array(0.5, np.float32), opset=21),
    node_case("Pad", X, np.array([0, 1, 1, 0]), mode="reflect", opset=21),
    node_case("MatMul", X, W, opset=21),
    node_case("Gemm", X, W.T, np.array([0.5, 1.5], np.float32), transB=1, alpha=0.5, opset=21),
    node_case("Conv", _image(1, 2, 4, 4), _image(3, 2, 3, 3), _image(3), pads=[1, 0, 1, 2], strides=[2, 1], opset=21),
    node_case("MaxPool", _image(1, 2, 4, 4), kernel_shape=[2, 2], strides=[1, 2], opset=21),
    node_case("AveragePool", _image(1, 2, 4, 4), kernel_shape=[2, 2], pads=[1, 0, 0, 1], opset=21),
    node_case("GlobalAveragePool", _image(1, 2, 4, 4), opset=21),
    node_case("LayerNormalization", X, X[0], X[1], opset=21),
    node_case("SoftmaxCrossEntropyLoss", X, np.array([2, 0]), opset=21),
]


@pytest.mark.parametrize("case", SECOND, ids=str)
def test_second_derivatives_agree_with_differences(case: Case) -> None:
    assert_second_derivative(case)


@pytest.mark.skipif("ort-cpu" not in available(), reason="needs onnxruntime")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_gradient_runs_in_onnxruntime(dialect: str) -> None:
    if dialect == "ort" and not ortbuilder.available():
        pytest.skip("needs the training build of onnxruntime")
    gradient = refgrad.gradient(mlp(), dialect=dialect)
    feeds = {"x": X, "y_grad": W[:2]}
    got, expected = get_backend("ort-cpu").prepare(gradient).run(feeds), run(gradient, feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


def test_a_variadic_output_that_is_left_out_is_added_where_its_shape_is_needed() -> None:
    model = model_of("g (float[5,3] x) => (float[3,3] y) { y, z = Split<axis=0, num_outputs=2>(x) }")
    model.graph.node[0].output[1] = ""
    # ONNX Runtime crashes on such a model.
    assert_gradient(Case("split", model, {"x": np.arange(15, dtype=np.float32).reshape(5, 3)}), runtime=False)


def test_a_branch_on_the_path_needs_a_rule_of_its_operator() -> None:
    text = _IF % ("float[2,3] s", "s = Neg(a)", "float[2,3] t", "t = Identity(x)", "Identity(chosen)")
    report = refgrad.preflight(model_of(text))
    [row] = [row for row in report.rows if row.operator == "If"]
    assert row.verdict in ("rule", "missing")
    assert report.ok == (row.verdict == "rule")
    if not report.ok:
        with pytest.raises(NoGradientError, match="If cannot be differentiated"):
            refgrad.gradient(model_of(text))
    else:
        for condition in (True, False):
            check(model_of(text), {"x": X, "c": np.array(condition)})
