"""Products with weights that are quantised in blocks: they stay quantised in a gradient, and bad ones are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case
from refgrad.errors import BackendError, NoGradientError, RefgradError
from refgrad.formulas import quantized_weights
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.quantized_weights import bnb4, nbits, table
from refgrad.tables.dialects import DIALECTS

pytestmark = [pytest.mark.stock, pytest.mark.slow]

MANY = (
    nbits((2, 37), 5, 4, 16, "packed", with_bias=True),
    nbits((2, 3, 37), 5, 4, 16, "floats", grouped=True, shapes="symbolic"),
    nbits((3, 40), 7, 2, 16, "floats"),
    nbits((33,), 5, 8, 32, "packed", shapes="unknown"),
    bnb4((2, 2, 21), 9, 21, 16, 1),
    bnb4((2, 7), 7, 21, 16, 1, transB=0),
    bnb4((2, 20), 9, 20, 32, 0, shapes="symbolic"),
)


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a few rows at a time of small weights too; the last step has fewer."""
    monkeypatch.setattr(quantized_weights, "_AT_ONCE", 10)
    monkeypatch.setattr(quantized_weights, "_TOGETHER", 100)


@pytest.mark.usefixtures("in_steps")
@pytest.mark.parametrize("case", MANY, ids=str)
def test_some_rows_after_the_others(case: Case) -> None:
    for dialect in DIALECTS:
        gradient = refgrad.gradient(case.model, dialect=dialect)
        assert any(node.op_type == "Loop" for node in gradient.graph.node)
        assert_gradient(case, dialect)
    assert_second_derivative(case, directions=1)


@pytest.mark.parametrize("case", MANY, ids=str)
def test_the_second_derivative_of_all_rows_at_once(case: Case) -> None:
    assert_second_derivative(case, directions=1)


def deep(count: int, size: int, transposed: bool) -> onnx.ModelProto:
    """Layers of MatMulNBits and Tanh, the weights of which are initializers."""
    nodes, weights, x, numbers = [], [], "x", np.random.default_rng(0)
    for k in range(count):
        B = numbers.integers(0, 256, (size, size // 32, 16), dtype=np.uint8)
        scales = np.full((size, size // 32), 0.01, np.float32)
        kind = {"N": size, "K": size, "block_size": 32}
        op_type = "MatMulNBits"
        if transposed:
            op_type, B, scales, kind = "MatMulBnb4", B.ravel(), scales.ravel(), kind | {"quant_type": 1}
        weights += [numpy_helper.from_array(B, f"B{k}"), numpy_helper.from_array(scales, f"s{k}")]
        nodes.append(helper.make_node(op_type, [x, f"B{k}", f"s{k}"], [f"h{k}"], domain="com.microsoft", **kind))
        nodes.append(helper.make_node("Tanh", [f"h{k}"], [x := f"t{k}"]))
    ends = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, size]) for name in ("x", x))
    graph = helper.make_graph(nodes, "deep", [next(ends)], [next(ends)], weights)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("operator", ["MatMulNBits", "MatMulBnb4"])
@pytest.mark.parametrize("size", [256, 1024])
def test_a_session_stores_no_weights_in_floats(size: int, operator: str, tmp_path: object) -> None:
    """ONNX Runtime computes what depends on constants alone when it loads a model: what it has then is in its own copy."""
    ort = pytest.importorskip("onnxruntime")
    for cotangent in ("input", "ones"):
        gradient = refgrad.gradient(deep(2, size, operator == "MatMulBnb4"), ["x"], cotangent=cotangent)
        assert sum(node.op_type == operator for node in gradient.graph.node) == 2
        assert any(node.op_type == "Loop" for node in gradient.graph.node) == (size == 1024)
        options = ort.SessionOptions()
        options.optimized_model_filepath = f"{tmp_path}/optimized.onnx"
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        ort.InferenceSession(gradient.SerializeToString(), options, providers=["CPUExecutionProvider"])
        stored = onnx.load(options.optimized_model_filepath)
        floats = [t for graph in graphs(stored.graph) for t in graph.initializer if t.data_type == TensorProto.FLOAT]
        assert max(int(np.prod(t.dims)) for t in floats) <= size * size // 32


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """It, and those in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def test_scales_are_no_weights_unless_wrt_names_them() -> None:
    model = deep(2, 64, transposed=False)
    assert [v.name for v in refgrad.gradient(model).graph.output] == ["x_grad"]
    named = refgrad.gradient(model, ["s0", "s1"])
    assert [v.name for v in named.graph.output] == ["s0_grad", "s1_grad"]


def test_a_projection_that_is_left_out_is_0_and_has_the_derivative_0() -> None:
    full = nbits((2, 32), 3, 4, 16, "packed", with_bias=True)
    feeds = dict(full.feeds) | {"B": full.feeds["B"][:, :0]}
    model = onnx.ModelProto()
    model.CopyFrom(full.model)
    next(v for v in model.graph.input if v.name == "B").type.tensor_type.shape.dim[1].dim_value = 0
    empty = Case("empty", model, feeds)
    assert_gradient(empty)
    for backend in {"numpy", "ort-cpu"} & set(available()):
        [y] = get_backend(backend).prepare(model).run(feeds).values()
        np.testing.assert_array_equal(y, np.tile(feeds["bias"], (2, 1)))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["", "packed", "floats"])
def test_half_precision_as_onnx_runtime(bits: int, zeros: str) -> None:
    pytest.importorskip("onnxruntime")
    if bits == 8 and zeros == "floats":
        pytest.skip("no kernel")
    single = nbits((2, 3, 37), 5, bits, 16, zeros, with_bias=True)
    inputs = [value.astype(np.float16) if value.dtype == np.float32 else value for value in single.feeds.values()]
    if not zeros:
        inputs[3:3] = [None]
    inputs[4:4] = [None]
    half = case("MatMulNBits", *inputs, K=37, N=5, bits=bits, block_size=16)
    [expected] = get_backend("ort-cpu").prepare(half.model).run(half.feeds).values()
    [got] = get_backend("numpy").prepare(half.model).run(half.feeds).values()
    np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=2e-3, atol=2e-3)
    assert_gradient(half, runtime=False)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize(("gather", "quantize"), [(0, 1), (1, 0), (1, 1), (-1, -2)])
def test_a_table_of_four_bits(kind: str, gather: int, quantize: int) -> None:
    numbers, floats = np.random.default_rng(3), drawer(3)
    dtype = getattr(ml_dtypes, kind)
    low, high = (-8, 8) if kind == "int4" else (0, 16)
    shape = [20, 36]
    data = numbers.integers(low, high, shape).astype(dtype)
    shape[quantize] = -(-shape[quantize] // 16)
    scales, zeros = floats(*shape), numbers.integers(low, high, shape).astype(dtype)
    indices = np.array([[0, 19], [-1, 2]])
    axes = {"gather_axis": gather, "quantize_axis": quantize, "block_size": 16}
    made = case("GatherBlockQuantized", data, indices, scales, zeros, constant=("data", "zero_points"), **axes)
    assert_gradient(made)
    wide = np.repeat(scales, 16, quantize), np.repeat(zeros.astype(np.float32), 16, quantize)
    wide = [np.take(x, np.arange(data.shape[quantize]), quantize) for x in wide]
    expected = np.take((data.astype(np.float32) - wide[1]) * wide[0], indices, gather)
    for backend in {"numpy", "ort-cpu"} & set(available()):
        [y] = get_backend(backend).prepare(made.model).run(made.feeds).values()
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5, err_msg=backend)


@pytest.mark.parametrize("block_size", [16, 0])
def test_a_table_of_small_floats(block_size: int) -> None:
    data = drawer(4)(5, 36).astype(ml_dtypes.float8_e4m3fn)
    scales = drawer(5)(1, 3 if block_size else 1)
    made = case("GatherBlockQuantized", data, np.array([4, 0, 9]), scales, block_size=block_size)
    assert_gradient(made)
    [y] = get_backend("numpy").prepare(made.model).run(made.feeds).values()
    wide = np.repeat(scales, block_size or 36, 1)[:, :36]
    expected = data[[4, 0, 4]].astype(np.float32) * wide * np.array([[1], [1], [0]])
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_rounding_of_the_activations_has_the_derivative_that_is_chosen() -> None:
    floats = drawer(6)
    B, scale = floats(3, 20).astype(ml_dtypes.float8_e4m3fn), np.array(0.5, np.float32)
    made = case("MatMulBlockQuantizedFp8Weight", floats(2, 20), B, floats(3, 1), scale)
    seed = {"Y_grad": floats(2, 3)}
    found = {}
    for quantization in ("zero", "straight-through", "clipped"):
        gradient = refgrad.gradient(made.model, ["A"], quantization=quantization)
        found[quantization] = get_backend("numpy").prepare(gradient).run(made.feeds | seed)["A_grad"]
    through = seed["Y_grad"] @ (B.astype(np.float32) * made.feeds["b_scale"])
    np.testing.assert_array_equal(found["zero"], 0)
    np.testing.assert_allclose(found["straight-through"], through, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["clipped"], through, rtol=1e-5, atol=1e-6)


def spoiled(made: Case, **changes: object) -> Case:
    """The case with other attributes, or with inputs of another shape."""
    model = onnx.ModelProto()
    model.CopyFrom(made.model)
    node, feeds = model.graph.node[-1], dict(made.feeds)
    for name, value in changes.items():
        if name in feeds:
            feeds[name] = np.zeros(value, feeds[name].dtype)
            declared = next(v for v in model.graph.input if v.name == name)
            declared.CopyFrom(helper.make_tensor_value_info(name, declared.type.tensor_type.elem_type, value))
        else:
            kept = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return Case("spoiled", model, feeds)


PACKED = nbits((2, 40), 3, 4, 16, "packed", with_bias=True)
GROUPED = nbits((2, 40), 3, 4, 16, grouped=True)


@pytest.mark.parametrize(
    ("made", "changes", "said"),
    [
        (PACKED, {"bits": 3}, "bits is 3; there are 2, 4 and 8"),
        (PACKED, {"block_size": 24}, "block_size is 24; it is a power of 2 from 16 on"),
        (PACKED, {"block_size": 8}, "block_size is 8; it is a power of 2 from 16 on"),
        (PACKED, {"weight_prepacked": 1}, "weight_prepacked is 1"),
        (PACKED, {"B": (3, 2, 8)}, r"\[3, 2, 8\].*\[3, 3, 8\]"),
        (PACKED, {"scales": (3, 2)}, r"\[3, 2\].*\[3, 3\]"),
        (PACKED, {"zero_points": (3, 3)}, r"\[3, 3\].*\[3, 2\]"),
        (PACKED, {"bias": (4,)}, r"\[4\].*\[3\]"),
        (GROUPED, {"g_idx": (39,)}, r"\[39\].*40"),
        (bnb4((2, 21), 3, 21, 16, 1), {"quant_type": 2}, r"quant_type is 2; there are 0 \(FP4\) and 1 \(NF4\)"),
        (bnb4((2, 21), 3, 21, 16, 1), {"block_size": 20}, "block_size is 20"),
        (bnb4((2, 21), 3, 21, 16, 1), {"absmax": (3,)}, r"\[3\].*\[4\]"),
        (bnb4((2, 21), 3, 21, 16, 1), {"B": (31,)}, r"\[31\].*\[32\]"),
        (table((5, 40), 4, 16, np.array([0])), {"bits": 3}, "bits is 3; there are 2, 4 and 8"),
        (table((5, 40), 4, 16, np.array([0])), {"block_size": 8}, "block_size is 8"),
        (table((5, 40), 4, 16, np.array([0])), {"gather_axis": 1}, "data of uint8 has gather_axis 0"),
    ],
)
def test_bad_input_is_refused_by_name(made: Case, changes: dict[str, object], said: str) -> None:
    bad = spoiled(made, **changes)
    with pytest.raises(RefgradError, match=said):
        refgrad.gradient(bad.model)
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(bad.model).run(bad.feeds)


def test_a_group_that_does_not_exist_is_refused() -> None:
    feeds = dict(GROUPED.feeds) | {"g_idx": np.full(40, 3, np.int32)}
    with pytest.raises(BackendError, match="g_idx has numbers from 3 to 3; there are 3 blocks"):
        get_backend("numpy").prepare(GROUPED.model).run(feeds)


@pytest.mark.parametrize(("operator", "said"), [("MatMulPacked", "formats"), ("SparseToDenseMatMul", "sparse tensor")])
def test_what_has_no_derivative_is_refused_with_the_reason(operator: str, said: str) -> None:
    nodes = [helper.make_node(operator, ["x", "w"], ["y"], domain="com.microsoft")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "w", "y")]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(helper.make_model(graph, opset_imports=imports, ir_version=10))
