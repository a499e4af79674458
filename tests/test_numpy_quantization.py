"""The interpreter's kernels of quantization, against onnx's node tests and ONNX Runtime; and its random numbers."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.backend.test import loader

from refgrad.backends import available, get_backend
from refgrad.errors import BackendError

RNG = np.random.default_rng(0)
F32 = np.float32


def node_tests() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = loader.load_model_tests(kind="node")
    return [test for test in tests if any(part in test.name for part in ("quantize", "qlinear", "integer"))]


def as_array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


@pytest.mark.parametrize("test", node_tests(), ids=lambda test: test.name)
def test_node_tests_of_quantization(test: Any) -> None:
    given, expected = test.data_sets[0]
    feeds = {value.name: as_array(x) for value, x in zip(test.model.graph.input, given, strict=True)}
    results = get_backend("numpy").prepare(test.model).run(feeds)
    for value, array in zip(test.model.graph.output, map(as_array, expected), strict=True):
        assert results[value.name].dtype == array.dtype
        np.testing.assert_array_equal(results[value.name].astype(np.float64), array.astype(np.float64))


def whole(kind: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(kind)
    return RNG.integers(info.min, info.max + 1, shape).astype(kind)


X8, W8, Z8 = whole(np.uint8, 2, 4, 7), whole(np.int8, 6, 2, 3), whole(np.int8, 6)
SCALES = {"s": F32(0.02), "t": (RNG.uniform(0.5, 1.5, 6) * 0.01).astype(F32), "r": F32(1.7)}

# What onnx.reference has not, or has wrong: values beyond int32, convolutions of lines, scales per row.
PRODUCT = {"a": whole(np.uint8, 3, 4), "b": whole(np.int8, 4, 6), "za": np.uint8(3), "zb": Z8}
NODES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("QuantizeLinear", {"x": np.array([1e12, -1e12, np.inf, -np.inf, 254.5, 0.5, 1.5], F32), "s": F32(1)}, {}),
    (
        "QuantizeLinear",
        {"x": RNG.standard_normal((5, 3)).astype(F32), "s": np.full((3, 3), 0.1, F32)},
        {"axis": 0, "block_size": 2},
    ),
    (
        "QLinearConv",
        {"x": X8, "sx": SCALES["s"], "zx": np.uint8(9), "w": W8, "sw": SCALES["t"], "zw": np.zeros(6, np.int8)}
        | {"sy": SCALES["r"], "zy": np.uint8(100)},
        {"group": 2, "pads": [1, 0]},
    ),
    ("ConvInteger", {"x": X8, "w": whole(np.uint8, 6, 4, 3), "zx": np.uint8(9), "zw": np.uint8(7)}, {}),
    ("MatMulInteger", PRODUCT, {}),
    (
        "QLinearMatMul",
        {"a": PRODUCT["a"], "sa": F32(0.02), "za": np.uint8(3), "b": PRODUCT["b"], "sb": SCALES["t"], "zb": Z8}
        | {"sy": F32(0.3), "zy": np.uint8(90)},
        {},
    ),
)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"), NODES, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
def test_kernels_against_onnx_runtime(op_type: str, inputs: dict[str, Any], attributes: dict[str, Any]) -> None:
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    node = helper.make_node(op_type, list(arrays), ["y"], **attributes)
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in arrays.items()
    ]
    graph = helper.make_graph([node], "g", values, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21 if "block_size" in attributes else 17)], ir_version=10
    )
    model = onnx.shape_inference.infer_shapes(model)
    got, expected = (get_backend(name).prepare(model).run(arrays)["y"] for name in ("numpy", "ort-cpu"))
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("kind", ["int4", "uint4", "int2", "uint2"])
def test_elements_of_less_than_a_byte_come_out_of_onnx_runtime(kind: str) -> None:
    dtype = getattr(ml_dtypes, kind)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    text = f"g (float[5] x) => ({kind}[5] y) <float s = {{1.0}}> {{ y = QuantizeLinear<output_dtype = {to}>(x, s) }}"
    try:
        opset = 21 if kind.endswith("4") else 25
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
        prepared = get_backend("ort-cpu").prepare(model)
    except BackendError as error:
        pytest.skip(str(error))
    feeds = {"x": np.array([-9, -1.2, 1.4, 0.6, 3], F32)}
    expected = get_backend("numpy").prepare(model).run(feeds)["y"]
    got = prepared.run(feeds)["y"]
    assert got.dtype == expected.dtype
    assert got.tolist() == expected.tolist()
    back = onnx.ModelProto()
    back.CopyFrom(model)
    back.graph.input[0].type.tensor_type.elem_type = to
    back.graph.node[0].op_type = "DequantizeLinear"
    back.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    del back.graph.node[0].attribute[:]
    with pytest.raises(
        BackendError, match=f"several elements of {kind} share a byte, .* make it an initializer|cannot be fed {kind}"
    ):
        get_backend("ort-cpu").prepare(back).run({"x": expected})


def random_model(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> {text}')


def test_random_numbers_are_those_of_the_output_that_they_make() -> None:
    """So a function of random numbers can be differentiated: its gradient draws what it drew."""
    body = "a = RandomNormal<shape=[20]>() b = RandomUniformLike(x) c = Bernoulli(x)"
    model = random_model(f"g (float[20] x) => (float[20] a, float[20] b, float[20] c) {{ {body} }}")
    feeds = {"x": np.full(20, 0.5, F32)}
    prepared = get_backend("numpy").prepare(model)
    first, second = prepared.run(feeds), prepared.run(feeds)
    other = get_backend("numpy").prepare(random_model(f"g (float[20] x) => (float[20] y) {{ {body} y = Add(a, b) }}"))
    np.testing.assert_array_equal(other.run(feeds)["y"], first["a"] + first["b"])
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
    text = "g (float[20] x) => (float[20] a, float[20] b) { a = RandomUniformLike(x) b = RandomUniformLike(x) }"
    results = get_backend("numpy").prepare(random_model(text)).run(feeds)
    assert not np.array_equal(results["a"], results["b"])
