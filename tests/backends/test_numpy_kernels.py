"""The interpreter's own kernels for ONNX operators, against ONNX Runtime and `onnx.reference`, and odd shapes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy_graphs import undeclared
from onnx.reference import ReferenceEvaluator

from refgrad.backends import available, get_backend
from refgrad.backends.numpy import registry
from refgrad.backends.numpy.kernels.activation import softmax
from refgrad.backends.numpy.kernels.erf import erf, erfc
from refgrad.backends.numpy.kernels.indexing import scatter_elements, top_k
from refgrad.backends.numpy.kernels.operands import squares_summed, summed
from refgrad.backends.numpy.kernels.reduction import cumsum
from refgrad.errors import BackendError

NUMPY = get_backend("numpy")


def model(body: str, inputs: dict[str, np.ndarray], outputs: int = 1, opset: int = 17) -> onnx.ModelProto:
    """A model whose nodes are `body` and whose outputs are y0, y1, ..., of undeclared type."""
    return onnx.shape_inference.infer_shapes(undeclared(body, inputs, [f"y{i}" for i in range(outputs)], opset))


def x(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


NAN = np.array([[1, np.nan, 3, 2], [5, 4, np.nan, 7]], np.float32).reshape(1, 1, 2, 4)

# Partly outside, turned round, and larger than an image of 5×6 pixels.
REGIONS = np.array([[1.1, 0.9, 7.4, 12.3], [5.8, 4.6, 3.1, 2.5], [-4.4, -3.4, 15.7, 13.4]], np.float32)

# Body, inputs, and what the other side has wrong: "reference: why", "ort: why".
CASES: list[tuple[str, dict[str, np.ndarray], str]] = [
    ("y0 = Conv(x, w)", {"x": x(2, 3, 8, 9), "w": x(4, 3, 3, 3)}, ""),
    (
        "y0 = Conv<strides=[2,3], pads=[1,0,2,1], dilations=[2,1]>(x, w, b)",
        {"x": x(2, 3, 8, 9), "w": x(4, 3, 3, 2), "b": x(4)},
        "",
    ),
    ('y0 = Conv<group=4, auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', {"x": x(2, 4, 8, 9), "w": x(8, 1, 3, 3)}, ""),
    ('y0 = Conv<auto_pad="SAME_LOWER">(x, w)', {"x": x(2, 4, 7), "w": x(3, 4, 2)}, ""),
    ("y0 = Conv<group=2, pads=[1,1,1,1,1,1]>(x, w)", {"x": x(1, 4, 4, 5, 6), "w": x(2, 2, 3, 3, 3)}, ""),
    (
        "y0 = ConvTranspose<strides=[2,3], pads=[1,0,0,1], output_padding=[1,2]>(x, w, b)",
        {"x": x(2, 4, 4, 5), "w": x(4, 3, 3, 3), "b": x(3)},
        "",
    ),
    (
        "y0 = ConvTranspose<group=2, strides=[2,2], dilations=[2,1]>(x, w)",
        {"x": x(2, 4, 4, 5), "w": x(4, 3, 2, 3)},
        "reference: it fails with groups",
    ),
    (
        "y0 = ConvTranspose<strides=[3,3], output_shape=[10,8]>(x, w)",
        {"x": x(2, 4, 3, 3), "w": x(4, 2, 3, 3)},
        "reference: it fails",
    ),
    ('y0 = ConvTranspose<strides=[2], auto_pad="SAME_UPPER">(x, w)', {"x": x(2, 4, 5), "w": x(4, 2, 3)}, ""),
    ("y0, y1 = MaxPool<kernel_shape=[3,2], strides=[2,2], ceil_mode=1>(x)", {"x": x(2, 3, 8, 9)}, ""),
    (
        "y0, y1 = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1], dilations=[2,2], strides=[1,2]>(x)",
        {"x": x(2, 3, 8, 9)},
        "",
    ),
    ('y0 = MaxPool<kernel_shape=[2], auto_pad="SAME_LOWER">(x)', {"x": x(2, 3, 8)}, "reference: it fails on one axis"),
    ("y0, y1 = MaxPool<kernel_shape=[2,2], storage_order=1>(x)", {"x": x(2, 3, 4, 5)}, "reference: other indices"),
    ("y0 = MaxPool<kernel_shape=[2,2,2], strides=[1,2,1]>(x)", {"x": x(1, 2, 4, 5, 6)}, ""),
    ("y0 = AveragePool<kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,1], ceil_mode=1>(x)", {"x": x(2, 3, 8, 9)}, ""),
    ("y0 = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)", {"x": x(2, 3, 5, 6)}, ""),
    ("y0 = GlobalAveragePool(x)", {"x": x(2, 3, 4, 5)}, ""),
    ("y0 = Gemm<alpha=0.5, beta=2.0, transA=1>(a, b, c)", {"a": x(4, 3), "b": x(4, 5), "c": x(5)}, ""),
    ("y0 = Gemm<transB=1>(a, b)", {"a": x(3, 4), "b": x(5, 4)}, ""),
    ("y0 = MatMul(a, b)", {"a": x(2, 1, 3, 4), "b": x(5, 4, 2)}, ""),
    ("y0 = MatMul(a, b)", {"a": x(4), "b": x(4)}, ""),
    ("y0 = BatchNormalization(x, s, b, m, v)", {"x": x(2, 3, 4), "s": x(3), "b": x(3), "m": x(3), "v": x(3) ** 2}, ""),
    (
        "y0, y1, y2 = BatchNormalization<training_mode=1, momentum=0.7>(x, s, b, m, v)",
        {"x": x(4, 3, 4), "s": x(3), "b": x(3), "m": x(3), "v": x(3) ** 2},
        "",
    ),
    ("y0, y1, y2 = LayerNormalization<axis=1>(x, s, b)", {"x": x(2, 3, 4), "s": x(3, 4), "b": x(3, 4)}, ""),
    ("y0 = LayerNormalization(x, s)", {"x": x(2, 3, 4), "s": x(4)}, ""),
    ("y0 = LRN<size=3, alpha=0.2, beta=0.6, bias=1.5>(x)", {"x": x(2, 5, 3, 3)}, "reference: it loops over the batch"),
    ("y0 = Softmax<axis=1>(x)", {"x": 100 * x(2, 3, 4)}, ""),
    ("y0 = LogSoftmax(x)", {"x": 100 * x(2, 3, 4)}, "reference: the logarithm of a softmax of 0"),
    ("y0 = Erf(x)", {"x": 3 * x(50)}, ""),
    ("y0 = Sigmoid(x)", {"x": np.float32([-200, -20, -1, 0, 1, 20, 200])}, ""),
    ("y0 = Softplus(x)", {"x": np.float32([-200, -20, -1, 0, 1, 20, 200])}, "reference: it overflows"),
    ("y0 = Relu(x)", {"x": np.float32([-1, 0, 1, np.inf])}, ""),
    (
        "y0 = GatherElements<axis=1>(x, i)",
        {"x": x(2, 3, 4), "i": ints([[0, -1]], [[2, 2]])},
        "reference: it wants indices as long as the data",
    ),
    ("y0 = GatherND<batch_dims=1>(x, i)", {"x": x(2, 3, 4), "i": ints([0], [2])}, ""),
    ("y0 = Gather<axis=-1>(x, i)", {"x": x(2, 3), "i": ints([0, -1], [1, 1])}, ""),
    ("y0 = ScatterElements<axis=1>(x, i, u)", {"x": x(2, 5), "i": ints([1, -1], [0, 3]), "u": x(2, 2)}, ""),
    *(
        (
            f'y0 = ScatterElements<reduction="{r}">(x, i, u)',
            {"x": x(3, 2), "i": ints([0, 1], [0, -1], [0, 1]), "u": x(3, 2, seed=1)},
            "",
        )
        for r in ("add", "mul", "max", "min")
    ),
    *(
        (
            f'y0 = ScatterND<reduction="{r}">(x, i, u)',
            {"x": x(3, 2), "i": ints([0], [2], [0]), "u": x(3, 2, seed=1)},
            "",
        )
        for r in ("add", "mul", "max", "min")
    ),
    ("y0 = ScatterND(x, i, u)", {"x": x(3, 2, 2), "i": ints([0, 1], [2, 0]), "u": x(2, 2)}, ""),
    (
        "y0 = Slice(x, s, e, a, t)",
        {"x": x(4, 5), "s": ints(-1, 1), "e": ints(-100, 1000), "a": ints(1, 0), "t": ints(-2, 1)},
        "",
    ),
    (
        'y0 = Pad<mode="constant">(x, p, c)',
        {"x": x(3, 4), "p": ints(1, -1, 0, 2), "c": np.float32(7)},
        "reference: np.pad refuses negative pads",
    ),
    ('y0 = Pad<mode="reflect">(x, p)', {"x": x(3, 4), "p": ints(1, 2, 0, 1)}, ""),
    ('y0 = Pad<mode="edge">(x, p)', {"x": x(3, 4), "p": ints(1, 2, 0, 1)}, ""),
    ("y0, y1 = TopK<axis=0, largest=0>(x, k)", {"x": np.float32([[3, 1], [1, 1], [2, 0]]), "k": ints(2)}, ""),
    ("y0, y1 = TopK(x, k)", {"x": np.float32([[3, 1, 3, 3], [1, 1, 2, 0]]), "k": ints(3)}, ""),
    (
        "y0 = OneHot<axis=1>(i, d, v)",
        {"i": ints([0, -1, 7], [2, 1, 0]), "d": ints(4), "v": np.float32([-1, 5])},
        "reference: it wraps an index out of range",
    ),
    ("y0 = Trilu<upper=0>(x, k)", {"x": x(2, 3, 4), "k": ints(-1)[0]}, ""),
    ("y0 = Range(a, b, c)", {"a": np.float32(1), "b": np.float32(-2.5), "c": np.float32(-0.5)}, ""),
    ("y0, y1, y2 = Split<axis=1>(x, s)", {"x": x(2, 6), "s": ints(1, 0, 5)}, ""),
    ("y0 = CumSum<exclusive=1, reverse=1>(x, a)", {"x": x(3, 4), "a": ints(1)[0]}, ""),
    ("y0 = ReduceLogSumExp<axes=[1]>(x)", {"x": 100 * x(2, 3)}, ""),
    ("y0 = ReduceL2<axes=[-1], keepdims=0>(x)", {"x": x(2, 3)}, ""),
    ("y0 = ReduceSum<noop_with_empty_axes=1>(x, a)", {"x": x(2, 3), "a": np.zeros(0, np.int64)}, ""),
    ("y0 = ReduceMax(x)", {"x": x(2, 3)}, ""),
    ("y0 = Div(a, b)", {"a": ints(7, -7, 7, -7, 6), "b": ints(2, 2, -2, -2, 3)}, ""),
    ("y0 = Pow(a, b)", {"a": x(3) ** 2, "b": ints(2, -1, 0)}, ""),
    ("y0 = Clip(x, a, b)", {"x": x(9), "a": np.float32(-0.5), "b": np.float32(0.5)}, ""),
    ("y0 = Max(a, b, c)", {"a": x(3), "b": x(2, 1), "c": x(1)}, ""),
    ("y0 = Expand(x, s)", {"x": x(3, 1), "s": ints(2, 1, 4)}, ""),
    (
        "y0 = Reshape(x, s)",
        {"x": x(2, 0, 3), "s": ints(0, -1, 3)},
        "reference: NumPy cannot infer it;ort: it cannot infer it",
    ),
    (
        "y0, y1 = SoftmaxCrossEntropyLoss<ignore_index=1>(x, t, w)",
        {"x": x(4, 3), "t": ints(0, 2, 1, 1), "w": x(3) ** 2},
        "",
    ),
    (
        'y0 = NegativeLogLikelihoodLoss<reduction="none">(x, t)',
        {"x": x(2, 3, 4), "t": ints([0, 2, 1, 1], [1, 1, 0, 2])},
        "",
    ),
    *(
        (
            f'y0 = RoiAlign<mode="{mode}", output_height=3, output_width=2, sampling_ratio={n}, spatial_scale=0.7>(x, r, b)',
            {"x": x(2, 3, 5, 6), "r": REGIONS, "b": ints(0, 1, 1)},
            "",
        )
        for mode in ("avg", "max")
        for n in (0, 2)
    ),
    (
        "y0 = MaxRoiPool<pooled_shape=[3,2], spatial_scale=0.7>(x, r)",
        {"x": x(2, 3, 5, 6), "r": np.concatenate([np.float32([[0], [1], [1]]), REGIONS], 1)},
        "reference: it has none",
    ),
    (
        "y0 = MaxUnpool<kernel_shape=[2,3], strides=[2,2]>(x, i)",
        {"x": x(1, 1, 2, 2), "i": ints([1, 4], [11, 4]).reshape(1, 1, 2, 2)},
        "",
    ),
    (
        "y0 = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, i, s)",
        {"x": x(1, 1, 2, 2), "i": ints([1, 7], [8, 15]).reshape(1, 1, 2, 2), "s": ints(1, 1, 5, 6)},
        "ort: it counts the elements of the larger shape, unlike the node test",
    ),
    *(
        (
            f'y0 = GridSample<mode="{mode}", padding_mode="{padding}", align_corners={corners}>(x, g)',
            {"x": x(2, 3, 4, 5), "g": x(2, 3, 4, 2, seed=1)},
            "reference: it knows the names since opset 20 only" if mode != "nearest" else "",
        )
        for mode, padding, corners in (("bilinear", "border", 0), ("bicubic", "reflection", 1), ("nearest", "zeros", 0))
    ),
    # Nothing in it
    ("y0 = Conv(x, w)", {"x": x(0, 3, 8, 9), "w": x(4, 3, 3, 3)}, "reference: it fails on an empty batch"),
    ("y0 = Add(a, b)", {"a": x(0, 3), "b": x(3)}, ""),
    ("y0 = Softmax(x)", {"x": x(0, 3)}, ""),
    ("y0 = ReduceSum<keepdims=0>(x, a)", {"x": x(0, 3), "a": ints(0)}, ""),
    ("y0 = Concat<axis=0>(a, b)", {"a": x(0, 3), "b": x(2, 3)}, ""),
    ("y0 = MatMul(a, b)", {"a": x(2, 0), "b": x(0, 3)}, "ort-training: memory that it has not written"),
]


def name_of(case: Any) -> str:
    return case.replace(" ", "") if isinstance(case, str) and "=" in case else ""


def close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert actual[name].shape == value.shape
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("body", "inputs", "wrong"), CASES, ids=name_of)
def test_kernel_is_that_of_onnx_runtime(body: str, inputs: dict[str, np.ndarray], wrong: str):
    if "ort-cpu" not in available():
        pytest.skip("onnxruntime is not installed")
    if "ort:" in wrong or ("ort-training:" in wrong and "training" in get_backend("ort-cpu").description()):
        pytest.skip(wrong)
    built = model(body, inputs, body.split("=")[0].count(",") + 1)
    close(NUMPY.prepare(built).run(inputs), get_backend("ort-cpu").prepare(built).run(inputs))


@pytest.mark.parametrize(("body", "inputs", "wrong"), CASES, ids=name_of)
def test_kernel_is_that_of_onnx_reference(body: str, inputs: dict[str, np.ndarray], wrong: str):
    if "reference:" in wrong:
        pytest.skip(wrong)
    built = model(body, inputs, body.split("=")[0].count(",") + 1)
    names = [output.name for output in built.graph.output]
    with np.errstate(all="ignore"):
        expected = dict(zip(names, ReferenceEvaluator(built).run(None, inputs), strict=True))
    close(NUMPY.prepare(built).run(inputs), expected)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_a_scalar_has_no_axis_to_pad(mode: str):
    """ONNX Runtime and onnx.reference refuse it."""
    inputs = {"x": np.array(2, np.float32), "p": np.zeros(0, np.int64)}
    assert NUMPY.prepare(model(f'y0 = Pad<mode="{mode}">(x, p)', inputs, 1)).run(inputs)["y0"] == 2


@pytest.mark.parametrize("kernel", registry.kernels(), ids=lambda k: f"{k.domain}.{k.op_type}-{k.since}")
def test_kernel_takes_the_attributes_of_its_schema(kernel: registry.Kernel):
    """Every attribute that a kernel names is one of the operator's, and every attribute of the operator is taken."""
    try:
        newest = onnx.defs.get_schema(kernel.op_type, kernel.domain)
    except onnx.defs.SchemaError:
        assert kernel.domain == "com.microsoft" or kernel.op_type in (
            "MaxPoolGrad",
            "AveragePoolGrad",
            "SimplifiedLayerNormalization",
            "SoftmaxCrossEntropy",
            "SparseSoftmaxCrossEntropy",
            "SparseSoftmaxCrossEntropyGrad",
        )
        return
    versions = {
        schema.since_version: schema
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name == kernel.op_type and schema.domain == kernel.domain
    }
    if any(
        k.since > kernel.since for k in registry.kernels() if (k.domain, k.op_type) == (kernel.domain, kernel.op_type)
    ):
        assert kernel.attributes <= {a for schema in versions.values() for a in schema.attributes}
        return
    assert set(newest.attributes) <= kernel.attributes
    assert kernel.attributes <= {a for schema in versions.values() for a in schema.attributes}


def test_erf_is_exact_to_a_few_units_in_the_last_place():
    points = np.concatenate([np.linspace(-7, 7, 20001), [0.0, 1e-300, 30.0, -30.0, math.inf, -math.inf]])
    np.testing.assert_allclose(erf(points), [math.erf(p) for p in points], rtol=1e-15)
    np.testing.assert_allclose(erfc(points), [math.erfc(p) for p in points], rtol=2e-15)
    assert np.isnan(erf(np.array([math.nan])))
    assert erf(np.float32([0.5])).dtype == np.float32


def test_max_pool_propagates_nan():
    built = model("y0, y1 = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", {"x": NAN}, 2)
    result = NUMPY.prepare(built).run({"x": NAN})
    np.testing.assert_array_equal(result["y0"].ravel(), [np.nan, np.nan])
    np.testing.assert_array_equal(result["y1"].ravel(), [1, 6])


def test_max_pool_indices_never_point_at_padding():
    value = np.full((1, 1, 2, 2), -np.inf, np.float32)
    built = model("y0, y1 = MaxPool<kernel_shape=[2,2], pads=[1,1,1,1]>(x)", {"x": value}, 2)
    indices = NUMPY.prepare(built).run({"x": value})["y1"]
    np.testing.assert_array_equal(indices.ravel(), [0, 0, 1, 0, 0, 1, 2, 2, 3])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "body",
    [
        "y0 = Add(a, b)",
        "y0 = Mul(a, b)",
        "y0 = Div(a, b)",
        "y0 = MatMul(a, b)",
        "y0 = Gemm<alpha=0.3>(a, b)",
        "y0 = LeakyRelu<alpha=0.1>(a)",
        "y0 = Elu<alpha=0.3>(a)",
        "y0 = Softmax(a)",
        "y0 = ReduceMean(a)",
        "y0 = Exp(a)",
        "y0 = Relu(a)",
        "y0 = Erf(a)",
        "y0 = Sum(a, b, a)",
        "y0 = Max(a, b)",
        "y0 = Where(c, a, b)",
        'y0 = ScatterND<reduction="add">(a, i, b)',
    ],
    ids=name_of,
)
def test_sixteen_bit_arithmetic_gives_the_declared_type(body: str, dtype: Any):
    values = {
        "a": x(3, 3).astype(dtype),
        "b": x(3, 3, seed=1).astype(dtype),
        "c": x(3, 3) > 0,
        "i": ints([0], [2], [0]),
    }
    inputs = {
        name: value for name, value in values.items() if f"({name}" in body or f" {name}" in body.split("(", 1)[1]
    }
    result = NUMPY.prepare(model(body, inputs, opset=18)).run(inputs)["y0"]
    assert result.dtype == dtype
    wide = {name: value.astype(np.float32) if value.dtype == dtype else value for name, value in inputs.items()}
    expected = NUMPY.prepare(model(body, wide, opset=18)).run(wide)["y0"]
    np.testing.assert_allclose(result.astype(np.float32), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("reverse", [0, 1])
def test_what_a_running_sum_or_product_excludes_has_no_part_in_it(reverse):
    x = np.array([1, 1e20, np.inf], np.float32)
    expected = {"CumSum": ([0, 1, 1e20], [np.inf, np.inf, 0]), "CumProd": ([1, 1, 1e20], [np.inf, np.inf, 1])}
    for op_type, results in expected.items():
        body = f"y0 = {op_type}<exclusive=1, reverse={reverse}>(x, a)"
        made = model(body, {"x": x, "a": np.array(0)}, opset=26)
        [result] = NUMPY.prepare(made).run({"x": x, "a": np.array(0)}).values()
        np.testing.assert_array_equal(result, np.array(results[reverse], np.float32))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_unique_elements_as_they_occur(axis):
    x = np.array([[3, 1, 3], [2, 5, 2], [3, 1, 3]], np.float32)
    body = "y0, y1, y2, y3 = Unique<sorted=0" + (">(x)" if axis is None else f", axis={axis}>(x)")
    Y, first, inverse, counts = NUMPY.prepare(model(body, {"x": x}, 4)).run({"x": x}).values()
    along = axis or 0
    np.testing.assert_array_equal(Y, np.take(x.reshape(-1) if axis is None else x, first, along))
    np.testing.assert_array_equal(np.take(Y, inverse, along), x.reshape(-1) if axis is None else x)
    np.testing.assert_array_equal(first, {None: [0, 1, 3, 4], 0: [0, 1], 1: [0, 1]}[axis])
    np.testing.assert_array_equal(counts, {None: [4, 2, 2, 1], 0: [2, 1], 1: [2, 1]}[axis])


def test_dropout_is_reproducible_and_the_identity_in_inference():
    value = x(100)
    inputs = {"x": value, "r": np.float32(0.25), "t": np.array(True)}
    training = NUMPY.prepare(model("y0, y1 = Dropout<seed=3>(x, r, t)", inputs, 2))
    first, second = training.run(inputs), training.run(inputs)
    np.testing.assert_array_equal(first["y1"], second["y1"])
    np.testing.assert_allclose(first["y0"], np.where(first["y1"], value / 0.75, 0), rtol=1e-6)
    assert 60 <= first["y1"].sum() <= 90
    inference = NUMPY.prepare(model("y0, y1 = Dropout(x)", {"x": value}, 2)).run({"x": value})
    np.testing.assert_array_equal(inference["y0"], value)
    assert inference["y1"].all()


def test_an_index_out_of_range_is_an_error():
    inputs = {"x": x(3), "i": ints(3)}
    with pytest.raises(BackendError, match="out of bounds for 3 elements"):
        NUMPY.prepare(model("y0 = Gather(x, i)", inputs)).run(inputs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 40, 50), (2, 3, 4, 5, 64), (2, 20_000), (2, 10_007), (1, 1, 5000), (5000,)])
def test_large_sums_are_those_of_numpy(dtype: type, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    rank = len(shape)
    for axes in (None, (-1,), (0,), tuple(range(rank // 2, rank)), (0, rank - 1), ()):
        for keepdims in (False, True):
            over = axes if axes is None else tuple({axis % rank for axis in axes})
            for found, expected in (
                (summed(x, over, keepdims), x.astype(float).sum(over, keepdims=keepdims)),
                (squares_summed(x, over, keepdims), np.square(x.astype(float)).sum(over, keepdims=keepdims)),
            ):
                assert found.dtype == dtype
                assert found.shape == expected.shape
                tolerance = 1e-6 if dtype == np.float32 else 1e-14
                np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.sqrt(x.size) * 4)


def test_softmax_of_large_and_infinite_scores() -> None:
    scores = np.zeros((4, 5), np.float32)
    scores[0] = [1000, 999, 0, -1000, -np.inf]
    scores[1] = -500
    scores[2] = 59
    scores[3, 0] = np.nan
    for x in (scores, scores[1:3], scores[2:3]):
        with np.errstate(invalid="ignore"):
            y = softmax(x, axis=-1)
            e = np.exp(x.astype(float) - x.astype(float).max(-1, keepdims=True))
        np.testing.assert_allclose(y, e / e.sum(-1, keepdims=True), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("special", [0.5, np.nan, np.inf])
def test_top_k_of_many_elements_with_ties_is_that_of_an_order(largest: int, special: float) -> None:
    x = np.random.default_rng(0).integers(0, 40, (2, 2000, 3)).astype(np.float32)
    x[1, 7] = special
    values, indices = top_k(x, np.array([50]), axis=1, largest=largest)
    key = np.where(np.isnan(x), 1000, x)
    expected = np.argsort(-key if largest else key, 1, kind="stable")[:, :50]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


@pytest.mark.parametrize("indices", [[1, 0, 1, -1], [3, 3, 3, 3]])
def test_scattered_slices_are_scattered_elements(indices: list[int]) -> None:
    data = np.random.default_rng(0).standard_normal((9, 5, 30)).astype(np.float32)
    updates = np.random.default_rng(1).standard_normal((8, 4, 30)).astype(np.float32)
    everywhere = np.broadcast_to(np.array(indices)[:, np.newaxis], updates.shape)
    found = scatter_elements(data, everywhere, updates, axis=1, reduction="add")
    np.testing.assert_array_equal(found, scatter_elements(data, everywhere.copy(), updates, axis=1, reduction="add"))
    with pytest.raises(IndexError, match="out of bounds"):
        scatter_elements(data, np.full_like(everywhere, 5), updates, axis=1, reduction="add")
    with pytest.raises(IndexError, match="out of bounds"):
        scatter_elements(data, np.broadcast_to(np.int64(5), updates.shape), updates, axis=1, reduction="add")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_running_sums_of_long_slices(axis: int, dtype: type) -> None:
    x = (np.random.default_rng(0).standard_normal((4, 7, 300)) * 100).astype(dtype)
    np.testing.assert_array_equal(cumsum(x, np.array(axis), exclusive=0, reverse=0), np.cumsum(x, axis, dtype=dtype))
    back = np.flip(np.cumsum(np.flip(x, axis), axis, dtype=dtype), axis)
    np.testing.assert_array_equal(cumsum(x, np.array(axis), exclusive=0, reverse=1), back)
