"""`precision="float64"`: nothing on the way rounds to less than double."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import FeedError

NUMPY = get_backend("numpy")

# Body (output y), shape of x. Every other input is a constant in the body.
OPERATORS = {
    "y = Cast<to = 1>(x)": (3,),
    "y = Cast<to = 10>(x)": (3,),
    "h = Cast<to = 16>(x) y = Cast<to = 1>(h)": (3,),
    "one = Constant<value_float = 0.1>() y = Mul(x, one)": (3,),
    "k = Constant<value = float[1] {0.1}>() y = Add(x, k)": (3,),
    "s = Shape(x) z = ConstantOfShape(s) y = Add(x, z)": (3,),
    "s = Shape(x) z = ConstantOfShape<value = float[1] {0.1}>(s) y = Add(x, z)": (3,),
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
