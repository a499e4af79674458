"""`precision="float64"`: nothing on the way rounds to less than double."""

from __future__ import annotations

from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy_nodes import ONNXRUNTIME, RANDOM, model_of, models, node_cases, operators
from onnx import numpy_helper, parser
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.numpy.precision import Float64
from refgrad.backends.numpy.registry import in_tuple
from refgrad.errors import FeedError

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

NUMPY = get_backend("numpy")

# Body (output y), shape of x. Every other input is a constant in the body.
OPERATORS = {
    "y = Cast<to = 1>(x)": (3,),
    "y = Cast<to = 10>(x)": (3,),
    "h = Cast<to = 16>(x) y = Cast<to = 1>(h)": (3,),
    "one = Constant<value_float = 0.1>() y = Mul(x, one)": (3,),
    "k = Constant<value = float[1] {0.1}>() y = Add(x, k)": (3,),
    "sizes = Shape(x) z = ConstantOfShape(sizes) y = Add(x, z)": (3,),
    "sizes = Shape(x) z = ConstantOfShape<value = float[1] {0.1}>(sizes) y = Add(x, z)": (3,),
    "e = EyeLike<dtype = 1>(x) y = MatMul(x, e)": (3, 3),
    "a = Constant<value_float = 0.3>() b = CastLike(a, x) y = Mul(b, x)": (3,),
    "y = Celu<alpha = 0.7>(x)": (5,),
    "y = Elu<alpha = 0.7>(x)": (5,),
    "y = Erf(x)": (5,),
    "y = Gelu(x)": (5,),
    "y = HardSigmoid(x)": (5,),
    "y = HardSwish(x)": (5,),
    "y = LeakyRelu(x)": (5,),
    "y = Mish(x)": (5,),
    "y = Selu(x)": (5,),
    "y = Softplus(x)": (5,),
    "y = Softsign(x)": (5,),
    "y = Sigmoid(x)": (5,),
    "y = Softmax(x)": (2, 3),
    "y = LRN<size = 3>(x)": (1, 4, 2, 2),
    "y = LpNormalization(x)": (2, 3),
    "y = InstanceNormalization(x, s, s)": (1, 2, 5),
    "y = LayerNormalization(x, s)": (3, 2),
    "y = MeanVarianceNormalization(x)": (2, 2, 2, 2),
    "r = Constant<value_float = 0.4>() t = Constant<value = bool {1}>() y, m = Dropout<seed = 1>(x, r, t)": (5,),
    "y = LpPool<kernel_shape = [2]>(x)": (1, 1, 5),
    "y = AveragePool<kernel_shape = [2]>(x)": (1, 1, 5),
    "y = ReduceLogSumExp(x)": (2, 3),
    "y = ReduceL2(x)": (2, 3),
    "y = CumSum(x, i)": (5,),
    'y = Einsum<equation = "ij,ij->i">(x, x)': (2, 3),
    'z = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() y = Resize<mode = "linear">(x, , z)': (1, 1, 3, 3),
    "g = Constant<value = float[1,1,2,2] {0.1, 0.2, -0.3, 0.4}>() y = GridSample(x, g)": (1, 1, 3, 3),
    "l = Constant<value_ints = [1, 0]>() y, p = SoftmaxCrossEntropyLoss(x, l)": (2, 3),
    "w = HannWindow<output_datatype = 1>(n) y = Mul(x, w)": (5,),
    """c = Constant<value = bool {1}>()
    y = If (c) <
        then_branch = a () => (float u) { k = Constant<value_float = 0.1>() u = Mul(x, k) },
        else_branch = b () => (float v) { v = Identity(x) }>""": (3,),
    "y = Swish(x)": (5,),
}


def prepare(body: str, shape: tuple[int, ...], opset: int = 24) -> object:
    dims = ", ".join(map(str, shape))
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]> g (float[{dims}] x) => (float y)
        <float[2] s = {{1.5, 0.7}}, int64 n = {{5}}, int64 i = {{0}}> {{ {body} }}"""
    model = parser.parse_model(text)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return NUMPY.prepare(model, precision="float64")


@pytest.mark.parametrize(("body", "shape"), OPERATORS.items(), ids=list(OPERATORS))
def test_operator_stays_in_double(body, shape):
    """The second difference over a step of 1e-6 is about 1e-12; a rounding to float32 makes it 1e-8 or more."""
    prepared = prepare(body, shape)
    rng = np.random.default_rng(0)
    x, direction = rng.random(shape) + 0.3, rng.standard_normal(shape)
    if "Celu" in body or "Selu" in body or "Elu" in body:
        x = -x
    middle, ahead, behind = (prepared.run({"x": x + t * direction})["y"] for t in (0, 1e-6, -1e-6))
    assert middle.dtype == np.float64
    assert np.abs(ahead - behind).max() > 1e-9
    np.testing.assert_array_less(np.abs(ahead + behind - 2 * middle), 1e-9 * (1 + np.abs(middle)))


def test_describes_and_returns_double_and_widens_feeds():
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float16[2] x, float[2] w, int64[2] i) => (float[2] y, int64[2] j)
        <float[2] w = {0.1, 0.2}> { a = Cast<to = 1>(x) y = Mul(a, w) j = Neg(i) }"""
    model = parser.parse_model(text)
    before = model.SerializeToString()
    prepared = NUMPY.prepare(model, precision="float64")
    assert [str(value) for value in prepared.inputs] == ["x: float64[2]", "w: float64[2]", "i: int64[2]"]
    assert [str(value) for value in prepared.outputs] == ["y: float64[2]", "j: int64[2]"]
    for dtype in (np.float16, np.float32, np.float64):
        result = prepared.run({"x": np.ones(2, dtype), "i": np.ones(2, np.int64)})
        assert result["y"].dtype == np.float64
        assert result["j"].dtype == np.int64
        np.testing.assert_array_equal(result["y"], np.float32([0.1, 0.2]).astype(np.float64))
    with pytest.raises(FeedError, match="dtype float64, the feed int64"):
        prepared.run({"x": np.ones(2, np.int64), "i": np.ones(2, np.int64)})
    assert model.SerializeToString() == before


def test_a_double_model_is_unchanged():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (double[2] x) => (double[2] y) { y = Exp(x) }'
    x = np.array([0.1, 0.2])
    for precision in (None, "float64"):
        result = NUMPY.prepare(parser.parse_model(text), precision=precision).run({"x": x})["y"]
        np.testing.assert_array_equal(result, np.exp(x))


def test_a_number_of_a_gradient_is_what_it_was_before_it_was_rounded():
    """A third in float16 is off by 2e-4: a gradient in double must not be."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float16[3] x) => (float16 y) { y = ReduceMean <keepdims = 0> (x) }'
    )
    prepared = NUMPY.prepare(refgrad.gradient(model, cotangent="ones"), precision="float64")
    np.testing.assert_array_equal(prepared.run({"x": np.ones(3)})["x_grad"], np.full(3, 1 / 3))


NARROW = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
ELEMENTS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
PARTS = 8

# What a result in float32 may differ from by more than rounding, and why.
ROUNDED = {
    "Cast": "a cast to 16 bits rounds in the one and not in the other",
    "Constant": "in test_dynamicquantizelinear_expanded a number lies between two integers",
    "DequantizeLinear": "an output in 16 bits is rounded in the one and not in the other",
    "DynamicQuantizeLinear": "a number lies between two integers",
}

# What is in double here and not in ONNX Runtime, and why.
SINGLE = {
    "Attention": "ONNX Runtime is off by 1e-8 (a finding)",
    "DFT": "ONNX Runtime is off by 1e-8 (a finding)",
    "Dropout": "random",
    "FastGelu": "ONNX Runtime has its constants in float32 (a finding for Gelu)",
    "Gelu": "ONNX Runtime has its constants in float32 (a finding)",
    "GroupNormalization": "the body casts to the stash_type, float32",
    "QuickGelu": "the default 1.702 is rounded to float32",
}


def operator_of(model: onnx.ModelProto) -> str:
    """The operator of the first node that is not the Reshape before or after it."""
    operators = [node.op_type for node in model.graph.node]
    return next((name for name in operators if name != "Reshape"), operators[0])


def narrow(value: Any) -> bool:
    """True if a value, or an item of a sequence or map, is a float of less than 64 bits."""
    if isinstance(value, list | tuple):
        return any(map(narrow, value))
    if isinstance(value, dict):
        return any(map(narrow, value.values()))
    return getattr(value, "dtype", None) in NARROW


def arrays(value: Any) -> list[np.ndarray]:
    """The arrays of numbers in a value."""
    if isinstance(value, list | tuple):
        return [array for item in value for array in arrays(item)]
    array = np.asarray(value)
    numbers = array.dtype in NARROW or array.dtype.kind in "biuf"
    return [array] if numbers and not isinstance(value, dict) else []


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with DOUBLE in place of every narrower float, subgraphs included."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graphs = [wide.graph]
    while graphs:
        graph = graphs.pop()
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in ELEMENTS:
                value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        tensors = list(graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    graphs.append(attribute.g)
                if attribute.type == onnx.AttributeProto.TENSOR:
                    tensors.append(attribute.t)
                if attribute.name in ("to", "dtype", "stash_type", "output_datatype") and attribute.i in ELEMENTS:
                    attribute.i = onnx.TensorProto.DOUBLE
        for tensor in tensors:
            if tensor.data_type in ELEMENTS:
                array = numpy_helper.to_array(tensor).astype(np.float64)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return wide


@pytest.fixture
def narrowed(monkeypatch) -> list[str]:
    """What any bound node returned that is not double, those in subgraphs and bodies too."""
    found: list[str] = []

    def watched(self: Float64, call: Any, node: onnx.NodeProto) -> Any:
        def run(*inputs: Any, **options: Any) -> Any:
            results = in_tuple(call(*inputs, **options))
            found.extend(type(result).__name__ for result in results if narrow(result))
            return results

        return run

    monkeypatch.setattr(Float64, "call", watched)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_every_value_is_double_and_that_of_float32_but_for_its_rounding(part, narrowed):
    wrong = []
    for name, model, feeds in models(slice(part, None, PARTS)):
        values = NUMPY.prepare(model, precision="float64").run(feeds, trace=True)
        if narrowed or any(map(narrow, values.values())):
            wrong.append(f"{name}: {narrowed} {[key for key, value in values.items() if narrow(value)]}")
            narrowed.clear()
        operator = operator_of(model)
        if operator in (*RANDOM, *ROUNDED) or any(node.op_type.startswith("Random") for node in model.graph.node):
            continue
        given = {value.type.tensor_type.elem_type for value in model.graph.input}
        tolerance = 1e-2 if onnx.TensorProto.BFLOAT16 in given else 4e-3 if onnx.TensorProto.FLOAT16 in given else 2e-5
        for key, value in NUMPY.prepare(model).run(feeds).items():
            for x, y in zip(arrays(values[key]), arrays(value), strict=True):
                x, y = x.astype(np.float64), y.astype(np.float64)
                scale = np.max(np.abs(y), where=np.isfinite(y), initial=0)
                if x.shape != y.shape or not np.allclose(x, y, tolerance, tolerance * scale, True):
                    wrong.append(f"{name}: {key} is another")
    assert not wrong, "\n".join(wrong)


@pytest.mark.matrix
@needs_runtime
@pytest.mark.parametrize(
    "operator",
    [
        name
        for name in operators()
        if name.rpartition(".")[2] not in (*RANDOM, *SINGLE) and not name.startswith("ai.onnx.ml")
    ],
)
def test_double_is_that_of_onnx_runtime_on_the_model_in_double(operator):
    """It has no kernel in double for some; the results of ai.onnx.ml are float32 by definition."""
    wrong = []
    for case in islice(node_cases(operator), 6):
        values = {name: v.astype(np.float64) if v.dtype in NARROW else v for name, v in case.values.items()}
        model = model_of(case, case.values)
        if not any(v.dtype in NARROW for v in case.values.values()):
            continue
        expected = apart(in_double(model), values)
        if expected is None:
            continue
        results = NUMPY.prepare(model, precision="float64").run(case.values)
        for (name, x), y in zip(results.items(), expected, strict=True):
            if isinstance(y, np.ndarray) and x.dtype == y.dtype == np.float64:
                scale = np.max(np.abs(y), where=np.isfinite(y), initial=0)
                if x.shape != y.shape or not np.allclose(x, y, 1e-12, 1e-12 * scale, True):
                    wrong.append(f"{case}: {name} is off by {np.max(np.abs(x - y)):.2g}")
    assert not wrong, "\n".join(wrong)


def apart(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any] | None:
    results = ONNXRUNTIME.run(model, feeds)
    return None if isinstance(results, str) else results
