"""Bad input is an error that names the node, its operator, what came and what is allowed; never a silent result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy_nodes import ENDED, ONNXRUNTIME, RANDOM, NodeCase, model_of, node_cases, operators
from onnx import AttributeProto, helper, parser
from runtime import needs_runtime

from refgrad.backends import get_backend
from refgrad.errors import BackendError, FeedError

pytestmark = pytest.mark.interpreter

NUMPY = get_backend("numpy")
PARTS = 8


def f(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: int) -> np.ndarray:
    return np.array(value, np.int64)


def node_model(body: str, inputs: Mapping[str, np.ndarray], opset: int = 21) -> onnx.ModelProto:
    """A model of the node y = body, of undeclared output, called "bad"."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g (float u) => (float y) {{ {body} }}'
    )
    del model.graph.input[:], model.graph.output[:]
    for name, value in inputs.items():
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
    model.graph.output.append(onnx.ValueInfoProto(name="y"))
    model.graph.node[-1].name = "bad"
    return model


LINEAR = 'y, s = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (q, k, v)'

# Body, inputs, and what the message says.
BAD: list[tuple[str, dict[str, np.ndarray], str]] = [
    ("y = Gather(x, i)", {"x": f(3), "i": i(3)}, "3, which is out of bounds for 3 elements: -3..2"),
    ("y = Gather(x, i)", {"x": f(3), "i": i(0, -4)}, "-4, which is out of bounds for 3"),
    ("y = Gather <axis = 1> (x, i)", {"x": f(3), "i": i(0)}, "axis 1 of a tensor of rank 1: an axis is in -1..0"),
    ("y = GatherElements(x, i)", {"x": f(2, 2), "i": i(2, 0).reshape(1, 2)}, "2, which is out of bounds for 2"),
    ("y = GatherElements(x, i)", {"x": f(2, 2), "i": i(0, 0)}, "indices have rank 1 and the data 2"),
    ("y = GatherND(x, i)", {"x": f(2, 2), "i": i(0, -3)}, "-3, which is out of bounds for 2"),
    ("y = GatherND(x, i)", {"x": f(2), "i": i(0, 0)}, r"indices \[2\] with batch_dims=0 do not fit data \[2\]"),
    ("y = ScatterElements(x, i, u)", {"x": f(3), "i": i(-4), "u": f(1)}, "-4, which is out of bounds for 3"),
    (
        "y = ScatterElements(x, i, u)",
        {"x": f(3), "i": i(0), "u": f(2)},
        r"updates has the shape \[2\]; \[1\] is needed",
    ),
    ("y = ScatterND(x, i, u)", {"x": f(3), "i": i(3).reshape(1, 1), "u": f(1)}, "3, which is out of bounds for 3"),
    ("y = ScatterND(x, i, u)", {"x": f(3), "i": i(0).reshape(1, 1), "u": f(1, 1)}, "updates has the shape"),
    (
        'y = ScatterND <reduction = "sum"> (x, i, u)',
        {"x": f(3), "i": i(0).reshape(1, 1), "u": f(1)},
        "'sum' is not known; there are 'none'",
    ),
    ("y = com.microsoft.GatherGrad(s, i, d)", {"s": i(3), "i": i(-4), "d": f(1)}, "-4, which is out of bounds"),
    ("y = com.microsoft.GatherElementsGrad(d, s, i)", {"d": f(1), "s": i(3), "i": i(5)}, "5, which is out of bounds"),
    ("y = OneHot(i, d, v)", {"i": i(0), "d": scalar(-1), "v": f(2)}, "depth is -1; it must not be negative"),
    ("y = OneHot(i, d, v)", {"i": i(0), "d": scalar(2), "v": f(3)}, r"values \[3\]; expected one number"),
    ("y = Slice(x, s, e)", {"x": f(3), "s": i(0, 0), "e": i(1)}, "must have the same length"),
    ("y = Slice(x, s, e, a)", {"x": f(3), "s": i(0), "e": i(1), "a": i(1)}, "axis 1 of a tensor of rank 1"),
    ("y = Slice(x, s, e, a, t)", {"x": f(3), "s": i(0), "e": i(1), "a": i(0), "t": i(0)}, "contain 0; a step must be"),
    ("y, z = TopK(x, k)", {"x": f(3), "k": i(4)}, r"K is \[4\]; it must be one number from 0 to 3, the size of axis 0"),
    ("y, z = TopK(x, k)", {"x": f(3), "k": i(-1)}, r"K is \[-1\]"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(4)}, r"have 6 elements, which do not fit the shape \[4\]"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(-1, -1)}, "may have one -1"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(-1, 4)}, "6 elements, which do not fit"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(6, -2)}, "no size below -1"),
    ("y = Reshape(x, s)", {"x": f(2), "s": i(2, 0)}, "has a 0 where the data .* have no size to copy"),
    ("y = Reshape <allowzero = 1> (x, s)", {"x": f(0, 2), "s": i(0, -1)}, "not beside a 0 that allowzero allows"),
    ("y = Expand(x, s)", {"x": f(2, 3), "s": i(2, 4)}, "could not be broadcast|shape mismatch"),
    ("y = Expand(x, s)", {"x": f(2), "s": i(-2)}, "sizes that are not negative"),
    ("y = Where(c, x, y1)", {"c": np.ones(2, bool), "x": f(3), "y1": f(3)}, "could not be broadcast"),
    ("y = Add(x, w)", {"x": f(2), "w": f(3)}, "could not be broadcast"),
    ("y = Concat <axis = 0> (x, w)", {"x": f(2, 2), "w": f(2, 3)}, r"\[2, 2\], \[2, 3\] differ in another axis than 0"),
    ("y = Concat <axis = 2> (x, x)", {"x": f(2, 2)}, "axis 2 of a tensor of rank 2: an axis is in -2..1"),
    ("y, z = Split(x, s)", {"x": f(5), "s": i(2, 2)}, "add up to 4; axis 0 has 5 elements"),
    ("y, z = Split(x, s)", {"x": f(5), "s": i(6, -1)}, "each of 2 outputs needs one that is not negative"),
    ("y, z = Split <num_outputs = 3> (x)", {"x": f(6)}, "num_outputs=3, and the node has 2 outputs"),
    ("y = MatMul(x, w)", {"x": f(2, 3), "w": f(2, 3)}, "mismatch|do not fit"),
    ("y = Gemm(x, w)", {"x": f(1, 2, 3), "w": f(3, 2)}, "A has rank 3 and B 2; both must be matrices"),
    ("y = Gemm(x, w, c)", {"x": f(2, 3), "w": f(3, 2), "c": f(3)}, r"C has the shape \[3\], which does not broadcast"),
    ("y = Conv(x, w)", {"x": f(1, 3, 4), "w": f(2, 2, 2)}, r"X \[1, 3, 4\] and W \[2, 2, 2\] do not fit 1 groups"),
    ("y = Conv <group = 2> (x, w)", {"x": f(1, 4, 4), "w": f(3, 2, 2)}, "the groups divide what W makes"),
    ("y = Conv <group = 0> (x, w)", {"x": f(1, 4, 4), "w": f(3, 2, 2)}, "do not fit 0 groups"),
    ("y = Conv <kernel_shape = [3]> (x, w)", {"x": f(1, 2, 4), "w": f(3, 2, 2)}, r"W has the shape \[3, 2, 2\]"),
    ("y = Conv(x, w, b)", {"x": f(1, 2, 4), "w": f(3, 2, 2), "b": f(1, 3)}, r"B has the shape \[1, 3\]; \[3\]"),
    ("y = Conv <strides = [0]> (x, w)", {"x": f(1, 2, 4), "w": f(3, 2, 2)}, "strides .0.*: 1 positive numbers"),
    ("y = Conv <pads = [1]> (x, w)", {"x": f(1, 2, 4), "w": f(3, 2, 2)}, "pads .1.: 2 numbers"),
    ("y = ConvTranspose(x, w)", {"x": f(1, 3, 4), "w": f(2, 2, 2)}, "X has the channels that W reads"),
    ("y = MaxPool <kernel_shape = [0]> (x)", {"x": f(1, 1, 4)}, "kernel .0.|positive numbers are needed"),
    ("y = MaxPool <kernel_shape = [-2]> (x)", {"x": f(1, 1, 4)}, "positive|kernel"),
    ("y = AveragePool <kernel_shape = [7]> (x)", {"x": f(1, 1, 4)}, "a window of 7 elements does not fit into 4"),
    (
        "y = MaxUnpool <kernel_shape = [2], strides = [2]> (x, i)",
        {"x": f(1, 1, 2), "i": i(0, -1).reshape(1, 1, 2)},
        "-1, which is out of bounds for 4 elements: 0..3",
    ),
    ("y = MaxUnpool <kernel_shape = [2]> (x, i)", {"x": f(1, 1, 2), "i": i(0).reshape(1, 1, 1)}, "I has the shape"),
    ("y = Pad(x, p)", {"x": f(2), "p": i(-2, -1)}, "cut more of the data"),
    ("y = Pad(x, p)", {"x": f(2), "p": i(1)}, "1 axes need 2 numbers"),
    ('y = Pad <mode = "mirror"> (x, p)', {"x": f(2), "p": i(1, 1)}, "mode='mirror' is not known; there are 'constant'"),
    ("y = Transpose <perm = [0, 0]> (x)", {"x": f(2, 3)}, "is not a permutation of the 2 axes"),
    ("y = Transpose <perm = [1, 0]> (x)", {"x": f(2, 3, 4)}, "is not a permutation of the 3 axes"),
    (
        "y = Squeeze(x, a)",
        {"x": f(2, 1), "a": i(0)},
        r"axis 0 of \[2, 1\] has 2 elements; only an axis of 1 can be squeezed",
    ),
    ("y = Unsqueeze(x, a)", {"x": f(2), "a": i(0, 0)}, "name one of the 3 axes twice"),
    ("y = Unsqueeze(x, a)", {"x": f(2), "a": i(2)}, "axis 2 of a tensor of rank 2"),
    ("y = Tile(x, r)", {"x": f(2), "r": i(1, 2)}, "needs 1 numbers that are not negative"),
    ("y = Tile(x, r)", {"x": f(2), "r": i(-1)}, "not negative"),
    ("y = Flatten <axis = 3> (x)", {"x": f(2, 2)}, "axis 3 of a tensor of rank 2"),
    ("y = ReduceSum(x, a)", {"x": f(2, 2), "a": i(2)}, "axis 2 of a tensor of rank 2"),
    ("y = ReduceMax(x, a)", {"x": f(2, 2), "a": i(0, -2)}, "name one of the 2 axes twice"),
    ("y = ArgMax <axis = 2> (x)", {"x": f(2, 2)}, "axis 2 of a tensor of rank 2"),
    ("y = ArgMax <axis = 0> (x)", {"x": f(0, 2)}, "has no elements to choose from"),
    ("y = CumSum(x, a)", {"x": f(2), "a": scalar(1)}, "axis 1 of a tensor of rank 1"),
    ("y = LayerNormalization <axis = 2> (x, s)", {"x": f(2, 2), "s": f(2)}, "axis 2 of a tensor of rank 2"),
    ("y = LayerNormalization(x, s)", {"x": f(1, 2), "s": f(3, 2)}, "does not broadcast to"),
    ("y = BatchNormalization(x, s, s, s, m)", {"x": f(1, 2, 3), "s": f(2), "m": f(1, 2)}, "var has the shape"),
    ("y = InstanceNormalization(x, s, s)", {"x": f(1, 2, 3), "s": f(3)}, r"scale has the shape \[3\]; \[2\] is needed"),
    ("y = EyeLike(x)", {"x": f(2)}, "has rank 1; a matrix has rank 2"),
    ("y = Range(s, e, d)", {"s": scalar(0), "e": scalar(3), "d": scalar(0)}, "the step must not be 0"),
    ("y = ConstantOfShape(s)", {"s": i(-1)}, "not negative"),
    ("y = Div(x, w)", {"x": i(1, 2), "w": i(1, 0)}, r"B has a 0 at \[1\]; an integer cannot be divided by 0"),
    ("y = Mod(x, w)", {"x": i(1, 2), "w": i(0, 1)}, r"B has a 0 at \[0\]"),
    ("y = Pow(x, w)", {"x": i(2, 0), "w": i(-1, -1)}, r"X, where Y is negative, has a 0 at \[1\]"),
    ("y = Cast <to = 1> (x)", {"x": np.array(["1", "two"], object)}, "'two'; a string must be a number"),
    ("y = Cast <to = 6> (x)", {"x": np.array(["3000000000"], object)}, "do not all fit int32"),
    ("y = NegativeLogLikelihoodLoss(x, l)", {"x": f(2, 3), "l": i(0, -1)}, "labels contain -1, .*: 0..2"),
    ("y, z = SoftmaxCrossEntropyLoss(x, l)", {"x": f(2, 3), "l": i(3, 0)}, "labels contain 3"),
    ("y, z = SoftmaxCrossEntropyLoss(x, l)", {"x": f(2, 3), "l": i(0)}, r"labels has the shape \[1\]; \[2\] is needed"),
    ("y = NegativeLogLikelihoodLoss(x, l, w)", {"x": f(2, 3), "l": i(0, 1), "w": f(2)}, "weights has the shape"),
    ("y = RoiAlign(x, r, b)", {"x": f(1, 1, 2, 2), "r": f(1, 4), "b": i(1)}, "batch_indices contain 1, .*: 0..0"),
    ("y = GridSample(x, g)", {"x": f(1, 1, 2, 2), "g": f(2, 1, 1, 2)}, "the same ranks and batches"),
    ("y = AffineGrid(t, s)", {"t": f(1, 2, 3), "s": i(2, 1, 2, 2)}, "does not fit the size"),
    ("y = STFT(x, s)", {"x": f(1, 4, 1), "s": scalar(0)}, "frames of 4 samples every 0"),
    (
        LINEAR,
        {"q": f(1, 2, 4), "k": f(1, 3, 4), "v": f(1, 2, 4)},
        r"key has the shape \[1, 3, 4\]; \[1, 2, 4\] is needed",
    ),
    (LINEAR, {"q": f(1, 2, 4), "k": f(1, 2, 4), "v": f(1, 3, 4)}, r"value has the shape \[1, 3\]; \[1, 2\] is needed"),
    (
        "y, s = LinearAttention <q_num_heads = 2, kv_num_heads = 2> (q, q, q)",
        {"q": f(1, 2, 4)},
        "update_rule='gated_delta' needs decay, which is left out",
    ),
    (
        "y, s = CausalConvWithState(x, w)",
        {"x": f(1, 2, 4), "w": f(2, 2, 3)},
        r"weight has the shape \[2, 2, 3\]; \[2, 1, 3\]",
    ),
    ("y, s = CausalConvWithState(x, w, b)", {"x": f(1, 2, 4), "w": f(2, 1, 3), "b": f(1)}, r"bias has the shape \[1\]"),
    (
        "y = If <then_branch = t () => (float[2] a, float[2] b) {a = Neg(x) b = Abs(x)}, "
        "else_branch = e () => (float[2] c) {c = Abs(x)}> (g)",
        {"g": np.array(True), "x": f(2)},
        r"then_branch takes \[\] and gives \['a', 'b'\]; it must take nothing and give 1 outputs",
    ),
    (
        "y = Loop <body = b (int64 i, bool c) => (bool d, float[2] a) {d = Identity(c) a = Abs(x)}> (n, , x)",
        {"n": scalar(2), "x": f(2)},
        r"the body takes 2 inputs \['i', 'c'\] and is given 3",
    ),
    (
        "y, z = Loop <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] a) {d = Identity(c) a = Abs(s)}> (n, , x)",
        {"n": scalar(2), "x": f(2)},
        "it has 1 outputs, and the node names 2",
    ),
    (
        "y = Scan <num_scan_inputs = 1, body = b (float s) => (float a) {a = Abs(s)}> (x, x)",
        {"x": f(2)},
        r"the body takes 1 inputs \['s'\] and is given 2",
    ),
    ("y = DFT(x, , a)", {"x": f(1, 4, 1), "a": scalar(5)}, "axis 5 of a tensor of rank 3"),
]


@pytest.mark.parametrize(("body", "inputs", "message"), BAD, ids=[f"{body}-{text}"[:90] for body, _, text in BAD])
def test_a_bad_input_names_the_node_and_what_is_allowed(body, inputs, message):
    model = node_model(body, inputs, 27 if "LinearAttention" in body or "CausalConv" in body else 21)
    node = model.graph.node[-1]
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    with pytest.raises(BackendError, match=message) as caught:
        NUMPY.prepare(model).run(inputs)
    assert f"node 'bad' ({operator}) failed on inputs " in str(caught.value)
    first = next(iter(inputs.values()))
    assert f"{first.dtype}{list(first.shape)}" in str(caught.value)


# Body, and what the message says of a node that cannot be bound, whatever it is fed.
UNBOUND: list[tuple[str, str]] = [
    ("y = Add(x)", r"has 1 inputs \['x'\]; the operator has 2"),
    ("y = Add(x, x, x)", r"has 3 inputs \['x', 'x', 'x'\]; the operator has 2"),
    ("y = Concat <axis = 0> ()", r"has 0 inputs \[\]; the operator has at least 1"),
    ("y, z = Relu(x)", r"has 2 outputs \['y', 'z'\]; the operator has 1"),
    ("y = Add(x, )", "'B', which the operator requires|has 1 inputs"),
    ("y = Where(, x, x)", "leaves out its input 'condition', which the operator requires"),
    ("y = Softmax <axis = 1.5> (x)", "has attribute 'axis' of type FLOAT, not INT"),
    ("y = LeakyRelu <alpha = 1> (x)", "has attribute 'alpha' of type INT, not FLOAT"),
    ("y = Transpose <perm = 1> (x)", "has attribute 'perm' of type INT, not INTS"),
    ("y = Softmax <beta = 1.5> (x)", r"attribute \['beta'\] is not supported"),
    ("y = Concat(x, x)", "leaves out its attribute 'axis', which the operator requires"),
    ("y = Nothing(x)", "no kernel for 'Nothing' of domain '' at opset 21"),
    ("y = com.microsoft.Nothing(x)", "no kernel for 'Nothing' of domain 'com.microsoft' at opset 1"),
    ("y = ai.onnx.ml.Scaler(x)", "imports no opset of domain 'ai.onnx.ml'. Add it to opset_import"),
]


def test_a_constant_of_another_type_than_its_attribute_is_named():
    model = node_model("c = Constant <value = float[2] {1, 2}> () y = Add(x, c)", {"x": f(2)})
    model.graph.node[0].attribute[0].type = AttributeProto.FLOAT
    with pytest.raises(BackendError, match="has 'value' of type FLOAT, not TENSOR"):
        NUMPY.prepare(model)


@pytest.mark.parametrize(("body", "message"), UNBOUND, ids=[body for body, _ in UNBOUND])
def test_a_node_that_cannot_be_bound_is_named(body, message):
    model = node_model(body, {"x": f(2, 2)})
    node = model.graph.node[-1]
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    with pytest.raises(BackendError, match=message) as caught:
        NUMPY.prepare(model)
    assert f"node 'bad' ({operator})" in str(caught.value)


FEEDS: list[tuple[dict[str, Any], str]] = [
    ({"x": f(2, 3), "z": f(3, 2)}, "have 'z', but the model has no such input.*Its inputs are 'x', 'w'"),
    ({"x": f(2, 3)}, r"No feed for w: float32\[m, n\]"),
    ({"x": f(2, 3).astype(np.float64), "w": f(3, 2)}, "'x' has dtype float32, the feed float64"),
    ({"x": f(2), "w": f(3, 2)}, "has rank 2, the feed has shape .2,. of rank 1"),
    ({"x": f(2, 4), "w": f(3, 2)}, "has 3 elements on axis 1, the feed has shape .2, 4."),
    ({"x": f(2, 3), "w": f(3, 4)}, "Dimension 'n' is 2 on axis 0 of 'x' and 4 on axis 1 of 'w'"),
    ({"x": [[1.0, 2.0], [3.0]], "w": f(3, 2)}, "cannot be made an array"),
]


@pytest.mark.parametrize(("feeds", "message"), FEEDS)
def test_a_bad_feed_names_the_input_and_what_is_declared(feeds, message):
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 3] x, float[m, n] w) => (float[n, n] y) { y = MatMul(x, w) }'
    )
    with pytest.raises(FeedError, match=message):
        NUMPY.prepare(model).run(feeds)


def test_a_sequence_is_fed_as_a_list():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (seq(float[2]) x) => (int64 y) { y = SequenceLength(x) }'
    )
    with pytest.raises(FeedError, match="'x' is a sequence, the feed a ndarray"):
        NUMPY.prepare(model).run({"x": f(3, 2)})


# What is answered where ONNX Runtime refuses, or otherwise than it does: operators, what was spoiled, and why.
OTHERWISE: list[tuple[tuple[str, ...], str, str]] = [
    (("ArgMax", "ArgMin"), "keepdims = .*", "a flag other than 0 and 1 is true"),
    (("CumProd", "CumSum"), "(exclusive|reverse) = .*", "a flag other than 0 and 1 is true"),
    (("Mod",), "fmod = .*", "a flag other than 0 and 1 is true"),
    (("RotaryEmbedding",), "interleaved = .*", "a flag other than 0 and 1 is true"),
    (("GlobalAveragePool", "GlobalMaxPool"), "X: one rank less", "without spatial axes a pool is of one element"),
    (("GlobalLpPool",), "X: a row more", "the norm of no pixels is 0"),
    (("LRN",), "size = 100", "the specification gives the window of an even size too"),
    (("MatMulInteger",), "A: one rank less", "a vector times a matrix is a vector"),
    (("MatMulInteger",), "[ab]_zero_point: a (row|column) more", "one element in another shape"),
    (("MelWeightMatrix",), "sample_rate: 100 at .*", "corners of triangles may lie beyond half the rate"),
    (("QLinearConv",), "w_(scale|zero_point): a (row|column) more", "as many elements in another shape"),
    (("QLinearMatMul",), "a: one rank less", "a vector times a matrix is a vector"),
    (("QLinearMatMul",), ".*_(scale|zero_point): a (row|column) more", "one element in another shape"),
    (("QLinearMatMul",), "a_(scale|zero_point): axis 0 longer", "one for each row, for which there is no kernel"),
    (("RoiAlign",), "sampling_ratio = -100", "what is not above 0 adapts to the size of the bin"),
    (("Squeeze",), "axes: axis 0 shorter", "no axes are none; ONNX Runtime squeezes all"),
    (("TfIdfVectorizer",), "X: one rank less", "a scalar is one word"),
    (("TopK",), "K: .*", "one number in another shape"),
    (("Unsqueeze",), "axes: a (row|column) more", "one axis in another shape"),
    (("ai.onnx.ml.LinearClassifier", "ai.onnx.ml.Normalizer"), "X: a column more", "one more axis of rows"),
    (("ai.onnx.ml.LinearRegressor", "ai.onnx.ml.Normalizer"), "X: a row more", "one more axis of rows"),
    (("ai.onnx.ml.SVMRegressor",), "X: a row more", "one more axis of rows, and no vectors are a linear model"),
    (("ai.onnx.ml.TreeEnsemble",), "X: one rank less", "one row"),
    (("com.microsoft.BiasGelu",), "A: a column more|B: a row more|B: one rank less", "the bias is broadcast"),
    (("com.microsoft.MatMulIntegerToFloat",), "B: a row more", "a stack has a zero point for each column too"),
    (
        ("com.microsoft.SparseAttention",),
        "total_sequence_length: a (row|column) more|sparse_block_size = 100",
        "ONNX Runtime runs only in the memory of its caches",
    ),
    (
        ("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization"),
        "input: a row more",
        "the last axis is normalized, whatever is before it",
    ),
]
UNSUPPORTED = (  # not a word on the input
    "NOT_IMPLEMENTED",
    "is not a registered function",
    "ValidateOpsetForDomain",
    "Type 'tensor(float)' of input parameter",  # its schema knows 16 bits only
    "contrib::MatMulFpQ4::Compute",  # "not yet supported on this hardware platform", says the end of a long message
)


def exemption(operator: str, form: str) -> int | None:
    """Which line of `OTHERWISE` is about that operator spoiled so."""
    found = (i for i, (names, forms, _) in enumerate(OTHERWISE) if operator in names and re.fullmatch(forms, form))
    return next(found, None)


def spoiled(case: NodeCase, rng: np.random.Generator) -> Iterator[tuple[str, onnx.NodeProto, dict[str, np.ndarray]]]:
    """The case with one size, rank, index or attribute changed."""
    for name in case.values:
        x = np.asarray(case.values[name])
        forms = {"a row more": x[np.newaxis], "a column more": x[..., np.newaxis]}
        if x.ndim and x.size:
            axis = int(rng.integers(x.ndim))
            n = x.shape[axis]
            forms["one rank less"] = np.array(x[0])
            forms[f"axis {axis} longer"] = np.take(x, np.arange(n + 1) % n, axis)
            forms[f"axis {axis} shorter"] = np.take(x, np.arange(n - 1), axis)
        if x.size and x.dtype.kind in "iu":
            spot, low = tuple(int(rng.integers(n)) for n in x.shape), -100 if x.dtype.kind == "i" else 100
            for value in (low, 100):
                forms[f"{value} at {list(spot)}"] = x.copy()
                forms[f"{value} at {list(spot)}"][spot] = value
        for form, changed in forms.items():
            yield f"{name}: {form}", case.node, {**case.values, name: np.array(changed, x.dtype)}
    for position, attribute in enumerate(case.node.attribute):
        for value in (-100, 100) if attribute.type == onnx.AttributeProto.INT else ():
            node = onnx.NodeProto()
            node.CopyFrom(case.node)
            node.attribute[position].i = value
            yield f"{attribute.name} = {value}", node, dict(case.values)


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(got, list) and len(got) == len(expected) and all(map(same, got, expected))
    if got is None or expected is None or isinstance(expected, dict):
        return True
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        return False
    if expected.dtype.kind not in "biuf":
        return True
    finite = expected[np.isfinite(expected)] if expected.dtype.kind == "f" else expected
    scale = float(np.max(np.abs(finite.astype(np.float64)), initial=0))
    return np.allclose(got.astype(np.float64), expected.astype(np.float64), 2e-3, 1e-4 * scale + 1e-6, True)


@needs_runtime
@pytest.mark.parametrize("part", range(PARTS))
def test_spoiled_cases_are_refused_or_computed_as_by_onnx_runtime(part):
    wrong, used = [], set()
    some = operators()[part::PARTS]
    for operator in some:
        rng = np.random.default_rng(0)
        case = next(node_cases(operator))
        for form, node, values in spoiled(case, rng):
            model = model_of(case, values, node)
            try:
                results = list(NUMPY.prepare(model).run(values).values())
            except BackendError:
                continue
            if operator in RANDOM:
                continue
            expected = ONNXRUNTIME.run(model, values)
            fault = ""
            if isinstance(expected, str):
                if expected != ENDED and not any(reason in expected for reason in UNSUPPORTED):
                    fault = f"answered; ONNX Runtime says {expected}"
            elif not all(map(same, results, expected)):
                fault = "ONNX Runtime has another result"
            if fault and (line := exemption(operator, form)) is not None:
                used.add((operator, line))
            elif fault:
                wrong.append(f"{case}, {form}: {fault}")
    listed = {(name, i) for i, (names, _, _) in enumerate(OTHERWISE) for name in names if name in some}
    wrong += [f"{name}: {OTHERWISE[i][1]!r} is not needed" for name, i in sorted(listed - used)]
    assert not wrong, "\n".join(wrong)
