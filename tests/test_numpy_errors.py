"""Bad input is an error that names the node, its operator, what came and what is allowed; never a silent result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy_nodes import ENDED, ONNXRUNTIME, RANDOM, NodeCase, by_operator, model_of
from onnx import helper, parser

from refgrad.backends import available, get_backend
from refgrad.errors import BackendError, FeedError

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
        "'sum' is none of",
    ),
    ("y = com.microsoft.GatherGrad(s, i, d)", {"s": i(3), "i": i(-4), "d": f(1)}, "-4, which is out of bounds"),
    ("y = com.microsoft.GatherElementsGrad(d, s, i)", {"d": f(1), "s": i(3), "i": i(5)}, "5, which is out of bounds"),
    ("y = OneHot(i, d, v)", {"i": i(0), "d": scalar(-1), "v": f(2)}, "depth is -1; it must not be negative"),
    ("y = OneHot(i, d, v)", {"i": i(0), "d": scalar(2), "v": f(3)}, r"values \[3\] must be one number"),
    ("y = Slice(x, s, e)", {"x": f(3), "s": i(0, 0), "e": i(1)}, "must have one"),
    ("y = Slice(x, s, e, a)", {"x": f(3), "s": i(0), "e": i(1), "a": i(1)}, "axis 1 of a tensor of rank 1"),
    ("y = Slice(x, s, e, a, t)", {"x": f(3), "s": i(0), "e": i(1), "a": i(0), "t": i(0)}, "contain 0; a step is"),
    ("y, z = TopK(x, k)", {"x": f(3), "k": i(4)}, r"K is \[4\]; it must be one number from 0 to the 3 of axis 0"),
    ("y, z = TopK(x, k)", {"x": f(3), "k": i(-1)}, r"K is \[-1\]"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(4)}, r"have 6 elements, which do not fit the shape \[4\]"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(-1, -1)}, "may have one -1"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(-1, 4)}, "6 elements, which do not fit"),
    ("y = Reshape(x, s)", {"x": f(2, 3), "s": i(6, -2)}, "and nothing below it"),
    ("y = Reshape(x, s)", {"x": f(2), "s": i(2, 0)}, "has a 0 where the data .* have no size to copy"),
    ("y = Reshape <allowzero = 1> (x, s)", {"x": f(0, 2), "s": i(0, -1)}, "beside an allowed zero none"),
    ("y = Expand(x, s)", {"x": f(2, 3), "s": i(2, 4)}, "could not be broadcast|shape mismatch"),
    ("y = Expand(x, s)", {"x": f(2), "s": i(-2)}, "sizes that are not negative"),
    ("y = Where(c, x, y1)", {"c": np.ones(2, bool), "x": f(3), "y1": f(3)}, "could not be broadcast"),
    ("y = Add(x, w)", {"x": f(2), "w": f(3)}, "could not be broadcast"),
    ("y = Concat <axis = 0> (x, w)", {"x": f(2, 2), "w": f(2, 3)}, r"\[2, 2\], \[2, 3\] differ beside axis 0"),
    ("y = Concat <axis = 2> (x, x)", {"x": f(2, 2)}, "axis 2 of a tensor of rank 2: an axis is in -2..1"),
    ("y, z = Split(x, s)", {"x": f(5), "s": i(2, 2)}, "add up to 4; axis 0 has 5 elements"),
    ("y, z = Split(x, s)", {"x": f(5), "s": i(6, -1)}, "not negative is needed for each of 2 outputs"),
    ("y, z = Split <num_outputs = 3> (x)", {"x": f(6)}, "num_outputs=3, and the node has 2 outputs"),
    ("y = MatMul(x, w)", {"x": f(2, 3), "w": f(2, 3)}, "mismatch|do not fit"),
    ("y = Gemm(x, w)", {"x": f(1, 2, 3), "w": f(3, 2)}, "A has rank 3 and B 2; both are matrices"),
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
    ('y = Pad <mode = "mirror"> (x, p)', {"x": f(2), "p": i(1, 1)}, "mode='mirror' is none of"),
    ("y = Transpose <perm = [0, 0]> (x)", {"x": f(2, 3)}, "no permutation of the 2 axes"),
    ("y = Transpose <perm = [1, 0]> (x)", {"x": f(2, 3, 4)}, "no permutation of the 3 axes"),
    ("y = Squeeze(x, a)", {"x": f(2, 1), "a": i(0)}, r"axis 0 of \[2, 1\] has 2 elements; 1 can be squeezed"),
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
    ("y = Range(s, e, d)", {"s": scalar(0), "e": scalar(3), "d": scalar(0)}, "the step is not 0"),
    ("y = ConstantOfShape(s)", {"s": i(-1)}, "not negative"),
    ("y = Div(x, w)", {"x": i(1, 2), "w": i(1, 0)}, r"B has a 0 at \[1\]; integers are not divided by it"),
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
    ("y = DFT(x, , a)", {"x": f(1, 4, 1), "a": scalar(5)}, "axis 5 of a tensor of rank 3"),
]


@pytest.mark.parametrize(("body", "inputs", "message"), BAD, ids=[f"{body}-{text}"[:90] for body, _, text in BAD])
def test_a_bad_input_names_the_node_and_what_is_allowed(body, inputs, message):
    model = node_model(body, inputs)
    node = model.graph.node[-1]
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    with pytest.raises(BackendError, match=message) as caught:
        NUMPY.prepare(model).run(inputs)
    assert f"node 'bad' ({operator}) failed on inputs " in str(caught.value)
    first = next(iter(inputs.values()))
    assert f"{first.dtype}{list(first.shape)}" in str(caught.value)


FEEDS: list[tuple[dict[str, Any], str]] = [
    ({"x": f(2, 3), "z": f(3, 2)}, "has no input 'z'.*Its inputs are 'x', 'w'"),
    ({"x": f(2, 3)}, r"No feed for w: float32\[m, n\]"),
    ({"x": f(2, 3).astype(np.float64), "w": f(3, 2)}, "'x' has dtype float32, the feed float64"),
    ({"x": f(2), "w": f(3, 2)}, "has rank 2, the feed has shape .2,. of rank 1"),
    ({"x": f(2, 4), "w": f(3, 2)}, "has 3 elements on axis 1, the feed has shape .2, 4."),
    ({"x": f(2, 3), "w": f(3, 4)}, "Dimension 'n' is 2 on axis 0 of 'x' and 4 on axis 1 of 'w'"),
    ({"x": [[1.0, 2.0], [3.0]], "w": f(3, 2)}, "no array"),
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


# Operators that answer where ONNX Runtime refuses, or otherwise than it does, and why.
OTHERWISE = {
    "ai.onnx.ml": "its operators have inputs of ranks that ONNX Runtime has no kernel for",
    "com.microsoft": "what ONNX Runtime asks beyond what it computes with is no condition",
    "AveragePool": "an image without pixels has windows in its pads, or none",
    "ArgMax": "flags other than 0 and 1 are true",
    "ArgMin": "flags other than 0 and 1 are true",
    "Attention": "flags other than 0 and 1 are true",
    "BatchNormalization": "flags other than 0 and 1 are true",
    "Cast": "saturate says nothing of types that do not saturate",
    "ConvTranspose": "an image without pixels has no result",
    "CumProd": "flags other than 0 and 1 are true",
    "CumSum": "flags other than 0 and 1 are true",
    "DeformConv": "a shape that is not read",
    "DequantizeLinear": "scales and zero points of other ranks with as many elements",
    "GlobalAveragePool": "the mean of no pixels is NaN; ranks that ONNX Runtime has no kernel for",
    "GlobalLpPool": "the norm of no pixels is 0",
    "GlobalMaxPool": "ranks that ONNX Runtime has no kernel for",
    "ImageDecoder": "the bytes are read in any shape",
    "GRU": "lengths and shapes of an empty batch",
    "GroupNormalization": "ONNX Runtime cannot reshape what is empty",
    "LRN": "ONNX Runtime takes images of an odd size only",
    "LSTM": "lengths and shapes of an empty batch",
    "LpPool": "flags other than 0 and 1 are true; an image without pixels",
    "MatMul": "a batch of 0 and one of 1 are one of 0",
    "MatMulInteger": "a vector is a vector",
    "MaxPool": "flags other than 0 and 1 are true; an image without pixels",
    "MaxUnpool": "of several elements with one index the last stays, which is chance",
    "MeanVarianceNormalization": "over no axes it is 0",
    "Mod": "floats without fmod are allowed since opset 28; flags",
    "NonMaxSuppression": "boxes of other shapes with as many elements",
    "OneHot": "a depth of 0 has no position",
    "Pad": "reflect and wrap go round more than once",
    "QLinearConv": "scales and zero points of other ranks with as many elements",
    "QLinearMatMul": "scales and zero points of other ranks with as many elements",
    "QuantizeLinear": "scales and zero points of other ranks with as many elements",
    "RNN": "lengths and shapes of an empty batch",
    "Reduce": "flags other than 0 and 1 are true; ONNX Runtime keeps the size of reduced axes beside an empty one",
    "Resize": "ONNX Runtime has no kernel for some axes",
    "Upsample": "ONNX Runtime has no kernel for some axes",
    "RoiAlign": "a ratio below 0 is none",
    "RotaryEmbedding": "flags other than 0 and 1 are true",
    "STFT": "a frame is as long as the signal",
    "SequenceAt": "positions are counted otherwise",
    "Split": "the pieces of what is empty are",
    "SplitToSequence": "the pieces of what is empty are",
    "Squeeze": "no axes are none",
    "StringNormalizer": "locales; an empty input",
    "TfIdf": "bounds of n-grams that are not read",
    "TopK": "flags other than 0 and 1 are true; K of other ranks with one element",
    "Unique": "flags other than 0 and 1 are true",
    "Unsqueeze": "axes of other ranks",
}


UNSUPPORTED = ("NOT_IMPLEMENTED", "is not a registered function", "ValidateOpsetForDomain")  # not a word on the input


def lenient(operator: str) -> bool:
    return any(operator.startswith(name) for name in OTHERWISE)


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


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("part", range(PARTS))
def test_spoiled_cases_are_refused_or_computed_as_by_onnx_runtime(part):
    wrong = []
    for operator in list(by_operator())[part::PARTS]:
        rng = np.random.default_rng(0)
        case = by_operator()[operator][0]
        for form, node, values in spoiled(case, rng):
            model = model_of(case, values, node)
            try:
                results = list(NUMPY.prepare(model).run(values).values())
            except BackendError:
                continue
            if lenient(operator) or operator in RANDOM:
                continue
            expected = ONNXRUNTIME.run(model, values)
            if isinstance(expected, str):
                if expected != ENDED and not any(reason in expected for reason in UNSUPPORTED):
                    wrong.append(f"{case}, {form}: answered; ONNX Runtime says {expected}")
            elif not all(map(same, results, expected)):
                wrong.append(f"{case}, {form}: ONNX Runtime has another result")
    assert not wrong, "\n".join(wrong)
