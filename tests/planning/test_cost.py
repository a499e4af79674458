"""What a run costs, from shapes alone: counts by hand, and memory against what NumPy and ONNX Runtime take."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from measuring import feeds_of, layers, measured, parsed
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad import traits
from refgrad.backends.numpy.layout import MemoryLayout, contiguous, merged
from refgrad.cli import main
from refgrad.errors import InvalidModelError, OptionError, UnknownNameError
from refgrad.planning import onnxruntime
from refgrad.planning.program import program

pytestmark = pytest.mark.slow

COUNTS = {  # a graph, and its operations counted by hand
    "MatMul": ("(float[2,5,3] x, float[3,4] w) => (float[2,5,4] y) { y = MatMul(x, w) }", 2 * 3 * 2 * 5 * 4),
    "MatMul of vectors": ("(float[7] x, float[7] w) => (float y) { y = MatMul(x, w) }", 14),
    "Gemm": (
        "(float[3,5] x, float[3,4] w, float[4] b) => (float[5,4] y) { y = Gemm<transA = 1>(x, w, b) }",
        2 * 3 * 20 + 20,
    ),
    "Gemm that scales": (
        "(float[5,3] x, float[3,4] w) => (float[5,4] y) { y = Gemm<alpha = 0.5>(x, w) }",
        2 * 3 * 20 + 20,
    ),
    "FusedMatMul": (
        "(float[3,5] x, float[4,3] w) => (float[5,4] y) { y = com.microsoft.FusedMatMul<transA = 1, transB = 1>(x, w) }",
        2 * 3 * 20,
    ),
    "Conv": (
        "(float[2,6,8,8] x, float[4,3,3,3] w, float[4] b) => (float[2,4,6,6] y) { y = Conv<group = 2>(x, w, b) }",
        2 * (3 * 9) * 2 * 4 * 36 + 2 * 4 * 36,
    ),
    "ConvTranspose": (
        "(float[1,2,5,5] x, float[2,3,3,3] w) => (float[1,3,7,7] y) { y = ConvTranspose(x, w) }",
        2 * (3 * 9) * 50,
    ),
    "Einsum": ('(float[2,3] x, float[3,4] w) => (float[2,4] y) { y = Einsum<equation = "ij,jk->ik">(x, w) }', 2 * 24),
    "Einsum without a sum": (
        '(float[2] x, float[3] w) => (float[2,3] y) { y = Einsum<equation = "i,j->ij">(x, w) }',
        6,
    ),
    "Attention": (
        "(float[1,2,5,4] q, float[1,2,7,4] k, float[1,2,7,3] v) => (float[1,2,5,3] y) { y = Attention(q, k, v) }",
        2 * 70 * (4 + 3) + 2 * 70,
    ),
    "LSTM": (
        "(float[6,2,3] x, float[1,20,3] w, float[1,20,5] r) => (float[6,1,2,5] y) { y = LSTM<hidden_size = 5>(x, w, r) }",
        6 * 2 * (2 * 20 * (3 + 5) + 2 * 20),
    ),
    "element-wise": ("(float[4,1] x, float[1,3] w) => (float[4,3] y) { y = Add(x, w) }", 12),
    "reduction": ("(float[4,3] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }", 12),
    "Sum of three": ("(float[4] x, float[4] w, float[4] v) => (float[4] y) { y = Sum(x, w, v) }", 8),
    "pooling": (
        "(float[1,1,4,4] x) => (float[1,1,3,3] y) { y = MaxPool<kernel_shape = [2, 2]>(x) }",
        4 * 9,
    ),
    "movement": (
        "(float[4,3] x) => (float[12] y) { t = Transpose(x) s = Constant<value_ints = [12]>() y = Reshape(t, s) }",
        0,
    ),
    "a scatter that adds": (
        '(float[4] x, int64[2] i, float[2] u) => (float[4] y) { y = ScatterElements<reduction = "add">(x, i, u) }',
        2,
    ),
    "If takes the dearer branch": (
        "(bool c, float[4] x) => (float[4] y) { y = If(c) <then_branch = a () => (float[4] p) { p = Neg(x) }, "
        "else_branch = b () => (float[4] q) { t = Neg(x) q = Exp(t) }> }",
        8,
    ),
    "Scan": (
        "(float[3] h, float[5,3] x) => (float[3] y, float[5,3] z) { y, z = Scan<num_scan_inputs = 1, body = b "
        "(float[3] s, float[3] t) => (float[3] u, float[3] v) { u = Add(s, t) v = Exp(u) }>(h, x) }",
        5 * 6,
    ),
    "Loop": (
        "(float[3] x) => (float[3] y) { n = Constant<value_int = 4>() y = Loop(n, , x) <body = b (int64 i, bool c, float[3] s) "
        "=> (bool d, float[3] u) { d = Identity(c) u = Exp(s) }> }",
        12,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_operations(name):
    text, count = COUNTS[name]
    assert refgrad.cost(parsed(f"g {text}", 23)).flops == count


def test_functions_are_their_bodies():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[4] x) => (float[4] y) { y = own.twice(x) } '
        '<domain: "own", opset_import: ["": 21]> twice (a) => (b) { t = Exp(a) b = Neg(t) }'
    )
    assert [node.operator for node in refgrad.cost(model).nodes] == ["Exp", "Neg"]


def test_bytes():
    found = refgrad.cost(
        parsed("g (float[N,3] x, float[3,4] w) => (float[N,4] y) { p = MatMul(x, w) y = Relu(p) }"), {"N": 10}
    )
    product, relu = found.nodes
    assert (product.read, product.written) == (10 * 3 * 4 + 48, 160)
    assert (relu.read, relu.written) == (160, 160)
    assert (found.feeds, found.weights, found.results) == (120 + 48, 0, 160)


# What is wrong with sizes


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ({}, OptionError, r"size 'N' of input 'x' is not known.*sizes=\{'N': 32\}\."),
        ({"N": 2}, OptionError, r"Axis 1 of input 'x' has neither a size nor a name.*'\*'"),
        ({"M": 2}, UnknownNameError, "no input has the dimension 'M'"),
        ({"N": -1}, OptionError, "whole number"),
        ({"N": 1.5}, OptionError, "whole number"),
        ({"N": True}, OptionError, "whole number"),
        ([2], OptionError, "mapping from symbols"),
    ],
)
def test_sizes_that_are_none(sizes, error, says):
    with pytest.raises(error, match=says):
        refgrad.cost(parsed("g (float[N,?] x) => (float[N,?] y) { y = Neg(x) }"), sizes)


def test_an_axis_is_called_by_its_input_too():
    model = parsed("g (float[N,?] x) => (float[N,?] y) { y = Neg(x) }")
    assert refgrad.cost(model, {"N": 2, "x[1]": 7}).flops == 14
    assert refgrad.cost(model, {"x[0]": 3, "x[1]": 7}).flops == 21
    with pytest.raises(UnknownNameError, match=r"no input has the dimension 'x\[2\]'"):
        refgrad.cost(model, {"N": 2, "x[2]": 7})
    fixed = parsed("g (float[4] x) => (float[4] y) { y = Neg(x) }")
    with pytest.raises(UnknownNameError, match=r"no input has the dimension 'x\[0\]'"):
        refgrad.cost(fixed, {"x[0]": 7})


def test_any_size():
    model = parsed("g (float[N,?] x) => (float[N,?] y) { y = Neg(x) }")
    assert refgrad.cost(model, {"N": 2, "*": 5}).flops == 10


def test_a_size_that_depends_on_values():
    with pytest.raises(InvalidModelError, match="'i' depends on values that are fed"):
        refgrad.cost(parsed("g (float[4] x) => (int64[1,K] i) { i = NonZero(x) }"))
    with pytest.raises(InvalidModelError, match="the rounds of"):
        refgrad.cost(
            parsed(
                "g (int64 n, float[3] x) => (float[3] y) { y = Loop(n, , x) <body = b (int64 i, bool c, float[3] s) "
                "=> (bool d, float[3] u) { d = Identity(c) u = Exp(s) }> }"
            )
        )


def test_what_has_no_cost():
    with pytest.raises(OptionError, match="is not a tensor"):
        refgrad.cost(
            parsed("g (seq(float[4]) x) => (float[4] y) { i = Constant<value_int = 0>() y = SequenceAt(x, i) }")
        )
    with pytest.raises(OptionError, match="declares no shape"):
        refgrad.cost(_shapeless())
    with pytest.raises(OptionError, match="no runtime 'cuda'"):
        refgrad.cost(parsed("g (float[4] x) => (float[4] y) { y = Neg(x) }"), runtime="cuda")


def _shapeless() -> onnx.ModelProto:
    model = parsed("g (float[4] x) => (float[4] y) { y = Neg(x) }")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


def test_shapes_through_values():
    """A shape that is computed from shapes, with more operators than onnx follows."""
    text = (
        "g (float[N,6] x) => (float[M,3] y) { s = Shape(x) n = Gather<axis = 0>(s, zero) two = Mul(n, twice) "
        "r = Range(nil, two, one) m = ReduceMax<keepdims = 1>(r) k = Add(m, one_) shape = Concat<axis = 0>(k, three) "
        "y = Reshape(x, shape) }"
    )
    model = parsed(
        text.replace(
            "=> (float[M,3] y) {",
            "=> (float[M,3] y) <int64 zero = {0}, int64 twice = {2}, int64 nil = {0}, int64 one = {1}, int64[1] one_ = {1}, "
            "int64[1] three = {3}> {",
        )
    )
    assert refgrad.cost(model, {"N": 50}).results == 100 * 3 * 4


# Layouts


def test_layouts_are_those_of_numpy():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        shape = tuple(rng.choice([1, 2, 3, 4, 6], rng.integers(1, 5)).tolist())
        array, layout = np.zeros(shape, np.int8), contiguous(shape)
        perm = rng.permutation(len(shape)).tolist()
        array, layout = array.transpose(perm), layout.transposed(perm)
        if rng.random() < 0.3:
            array = array[(slice(None),) * (array.ndim - 1) + (slice(0, max(array.shape[-1] - 1, 1)),)]
            layout = MemoryLayout(array.shape, layout.strides)
        assert layout.is_contiguous == array.flags.c_contiguous
        if rng.random() < 0.3:
            array = np.broadcast_to(array, (2, *array.shape))
            layout = layout.broadcast(array.shape)
        wanted = _other_shape(array.shape, rng)
        found = layout.reshaped(wanted)
        made = array.reshape(wanted)
        assert (found is not None) == np.shares_memory(made, array), (array.shape, array.strides, wanted)
        if found is not None:
            ours = [s for n, s in zip(found.shape, found.strides, strict=True) if n > 1]
            assert ours == [s for n, s in zip(made.shape, made.strides, strict=True) if n > 1]


def test_results_lie_as_numpy_lays_them():
    rng = np.random.default_rng(1)
    for _ in range(500):
        shape = tuple(rng.choice([1, 2, 3, 4], 3).tolist())
        arrays, layouts = [], []
        for _ in range(int(rng.integers(1, 4))):
            perm = rng.permutation(3)
            mine = [1 if rng.random() < 0.2 else n for n in shape]
            arrays.append(np.zeros([mine[k] for k in perm], np.int8).transpose(np.argsort(perm)))
            layouts.append(contiguous(tuple(mine[k] for k in perm)).transposed(np.argsort(perm).tolist()))
        made = np.nditer([*arrays, None], order="K").operands[-1]
        found = merged(made.shape, layouts)
        assert [(n, s) for n, s in zip(made.shape, made.strides, strict=True) if n > 1] == [
            (n, s) for n, s in zip(found.shape, found.strides, strict=True) if n > 1
        ]


def _other_shape(shape, rng):
    factors = [p for n in shape for p in {1: [], 2: [2], 3: [3], 4: [2, 2], 5: [5], 6: [2, 3]}[n]]
    if rng.random() < 0.5:
        rng.shuffle(factors)
    parts = [1] * int(rng.integers(1, 5))
    places = sorted(rng.integers(0, len(parts), len(factors)).tolist())
    for factor, place in zip(factors, places, strict=True):
        parts[place] *= factor
    return tuple(parts)


# The interpreter


BIG = "[64,64,64]"  # 1 MiB
PEAKS = {
    "in place": f"(float{BIG} x) => (float{BIG} y) {{ a = Neg(x) b = Exp(a) y = Tanh(b) }}",
    "kept": f"(float{BIG} x) => (float{BIG} y) {{ a = Neg(x) b = Exp(a) y = Add(a, b) }}",
    "a product": f"(float{BIG} x) => (float{BIG} y) {{ a = Neg(x) y = MatMul(a, a) }}",
    "views": f"(float{BIG} x) => (float{BIG} y) {{ a = Neg(x) t = Transpose<perm = [0, 2, 1]>(a) y = Exp(t) }}",
    "a view that is copied": (
        "(float[64,64,64] x) => (float[4096,64] y) { s = Constant<value_ints = [4096, 64]>() a = Neg(x) "
        "t = Transpose<perm = [1, 2, 0]>(a) y = Reshape(t, s) }"
    ),
    "an operand that BLAS cannot read": (
        "(float[64,64,64] x, float[64,64,64] w) => (float[64,64,64] y) { a = Neg(x) t = Transpose<perm = [2, 1, 0]>(a) "
        "y = MatMul(w, t) }"
    ),
    "an expansion": (
        f"(float[64] x) => (float{BIG} y) {{ s = Constant<value_ints = [64, 64, 64]>() e = Expand(x, s) y = Neg(e) }}"
    ),
    "a slice that outlives": (
        f"(float{BIG} x) => (float[1,64,64] y) {{ b = Constant<value_ints = [0]>() e = Constant<value_ints = [1]>() "
        "a = Neg(x) t = Slice(a, b, e) c = ReduceSum<keepdims = 0>(x) u = Add(x, c) r = ReduceSum<keepdims = 0>(u) "
        "y = Add(t, r) }"
    ),
    "Softmax": f"(float{BIG} x) => (float{BIG} y) {{ a = Neg(x) y = Softmax<axis = 1>(a) }}",
    "LogSoftmax": f"(float{BIG} x) => (float{BIG} y) {{ y = LogSoftmax(x) }}",
    "LayerNormalization": f"(float{BIG} x, float[64] s) => (float{BIG} y) {{ y = LayerNormalization(x, s) }}",
    "Erf": f"(float{BIG} x) => (float{BIG} y) {{ y = Erf(x) }}",
    "Gelu": f"(float{BIG} x) => (float{BIG} y) {{ y = Gelu(x) }}",
    "Gelu by tanh": f'(float{BIG} x) => (float{BIG} y) {{ y = Gelu<approximate = "tanh">(x) }}',
    "a cube": f"(float{BIG} x) => (float{BIG} y) {{ c = Constant<value_float = 3.0>() y = Pow(x, c) }}",
    "Conv": (
        "(float[2,16,64,64] x, float[32,16,3,3] w) => (float[2,32,64,64] y) { y = Conv<pads = [1, 1, 1, 1]>(x, w) }"
    ),
    "Conv with strides": (
        "(float[8,8,64,64] x, float[32,8,5,5] w) => (float[8,32,30,30] y) { y = Conv<strides = [2, 2]>(x, w) }"
    ),
    "ConvTranspose by strides of 1": (
        "(float[2,4,64,64] x, float[4,32,5,5] w) => (float[2,32,68,68] y) { y = ConvTranspose(x, w) }"
    ),
    "LSTM": (
        "(float[64,16,64] x, float[1,256,64] w, float[1,256,64] r) => (float[64,1,16,64] y) "
        "{ y = LSTM<hidden_size = 64>(x, w, r) }"
    ),
    "a scatter of rows that adds": (
        "(float[2048,256] x, float[1024,256] u) => (float[2048,256] y) { n = Constant<value_int = 0>() "
        "m = Constant<value_int = 1024>() d = Constant<value_int = 1>() r = Range(n, m, d) a = Constant<value_ints = [1]>() "
        'i = Unsqueeze(r, a) y = ScatterND<reduction = "add">(x, i, u) }'
    ),
    "a scatter into zeros": (
        "(float[64,256] u, int64[64,256] i) => (float[2048,256] y) { s = Constant<value_ints = [2048, 256]>() "
        'z = ConstantOfShape(s) y = ScatterElements<axis = 0, reduction = "add">(z, i, u) }'
    ),
    "a scatter into what is turned": (
        "(float[256,2048] x, float[64,256] u, int64[64,256] i) => (float[2048,256] y) { a = Neg(x) t = Transpose(a) "
        'y = ScatterElements<axis = 0, reduction = "add">(t, i, u) }'
    ),
    "a dequantized tensor": (
        "(int8[1024,256] x, float s, int8 z) => (float[1024,256] y) { a = DequantizeLinear(x, s, z) y = Neg(a) }"
    ),
    "a quantized tensor": "(float[1024,256] x, float s, int8 z) => (int8[1024,256] y) { y = QuantizeLinear(x, s, z) }",
    "a tensor quantized by its range": (
        "(float[1024,256] x) => (uint8[1024,256] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }"
    ),
    "a product of whole numbers": (
        "(uint8[64,1024] x, int8[1024,512] w, uint8 z) => (int32[64,512] y) { y = MatMulInteger(x, w, z) }"
    ),
    "a product of many whole numbers": (
        "(uint8[1024,16] x, int8[16,512] w, uint8 z, int8 v) => (int32[1024,512] y) { y = MatMulInteger(x, w, z, v) }"
    ),
    "a convolution of whole numbers": (
        "(uint8[1,16,64,64] x, int8[32,16,3,3] w, uint8 z) => (int32[1,32,64,64] y) "
        "{ y = ConvInteger<pads = [1,1,1,1]>(x, w, z) }"
    ),
    "a quantized LSTM": (
        "(float[4,2,128] x, int8[1,128,1024] w, int8[1,256,1024] r, float[1] s, int8[1] z) => (float[4,1,2,256] y) "
        "{ y = com.microsoft.DynamicQuantizeLSTM<hidden_size = 256>(x, w, r, , , , , , s, z, s, z) }"
    ),
    "a short GRU": (
        "(float[4,64,32] x, float[2,192,32] w, float[2,192,64] r) => (float[4,2,64,64] y) "
        '{ y = GRU<direction = "bidirectional", hidden_size = 64>(x, w, r) }'
    ),
    "a short LSTM": (
        "(float[4,64,32] x, float[2,256,32] w, float[2,256,64] r) => (float[4,2,64,64] y) "
        '{ y = LSTM<direction = "bidirectional", hidden_size = 64>(x, w, r) }'
    ),
    "a short RNN": (
        "(float[4,64,32] x, float[2,64,32] w, float[2,64,64] r) => (float[4,2,64,64] y) "
        '{ y = RNN<direction = "bidirectional", hidden_size = 64>(x, w, r) }'
    ),
    "a Scan": (
        "(float[64,64] h, float[64,64,64] x) => (float[64,64] y, float[64,64,64] z) { y, z = Scan<num_scan_inputs = 1, "
        "body = b (float[64,64] s, float[64,64] t) => (float[64,64] u, float[64,64] v) { u = MatMul(s, t) v = Exp(u) }>(h, x) }"
    ),
    "a Loop": (
        "(float[256,256] x) => (float[256,256] y, float[8,256,256] z) { n = Constant<value_int = 8>() "
        "y, z = Loop(n, , x) <body = b (int64 i, bool c, float[256,256] s) => (bool d, float[256,256] u, float[256,256] v) "
        "{ d = Identity(c) u = Sin(s) v = Cos(u) }> }"
    ),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_the_interpreter(name):
    model = parsed(f"g {PEAKS[name]}")
    predicted, most = refgrad.cost(model).peak, measured(model, feeds_of(model))
    assert abs(predicted - most) <= 0.05 * most, (predicted, most)


UNARY = ("Neg", "Exp", "Sigmoid", "Relu", "Abs", "Softmax", "Identity", "Erf")
BINARY = ("Add", "Mul", "Sub", "MatMul", "Max")


def random_model(seed: int) -> onnx.ModelProto:
    """Twenty nodes that read any value made before them."""
    rng = np.random.default_rng(seed)
    nodes, names = [], ["x", "w"]
    for number in range(20):
        name, kind = f"v{number}", rng.random()
        if kind < 0.4:
            nodes.append(helper.make_node(str(rng.choice(UNARY)), [str(rng.choice(names[-4:]))], [name]))
        elif kind < 0.6:
            perm = rng.permutation(3).tolist()
            nodes.append(helper.make_node("Transpose", [str(rng.choice(names[-4:]))], [name], perm=perm))
        elif kind < 0.7:
            flat = f"f{number}"
            nodes.append(helper.make_node("Reshape", [str(rng.choice(names[-4:])), "flat"], [flat]))
            nodes.append(helper.make_node("Reshape", [flat, "shape"], [name]))
        else:
            operands = [str(n) for n in rng.choice(names[-4:], 2)]
            nodes.append(helper.make_node(str(rng.choice(BINARY)), operands, [name]))
        names.append(name)
    value = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("flat", [-1]), ("shape", [64, 64, 64]))]
    graph = helper.make_graph(
        nodes,
        "random",
        [value(n, TensorProto.FLOAT, [64, 64, 64]) for n in ("x", "w")],
        [value(names[-1], TensorProto.FLOAT, [64, 64, 64])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(60))
def test_the_peak_of_random_graphs(seed):
    model = random_model(seed)
    predicted, most = refgrad.cost(model).peak, measured(model, feeds_of(model))
    assert abs(predicted - most) <= 0.05 * most + 2**14, (predicted, most)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_of_a_gradient(recompute):
    model = refgrad.gradient(layers(), keep_outputs=True, recompute=recompute)
    predicted, most = refgrad.cost(model).peak, measured(model, feeds_of(model))
    assert abs(predicted - most) <= 0.05 * most, (predicted, most)


# ONNX Runtime


def profiled(model: onnx.ModelProto, folder: Path) -> dict[str, int]:
    """The bytes that ONNX Runtime's arena was asked for and holds behind each node, without any optimization."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, feeds_of(model))
    events = json.loads(Path(session.end_profiling()).read_text())
    found = {
        event["name"].removesuffix("_kernel_time"): event["args"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    }
    first = next(iter(found.values()))
    if "mem_bytes_requested_in_use" not in first:
        pytest.skip("this ONNX Runtime does not profile its arena")
    base = int(first["mem_bytes_requested_in_use"]) - int(first["mem_requested_in_use_delta"])
    return {name: int(args["mem_bytes_requested_in_use"]) - base for name, args in found.items()}


def test_order_and_reuse_are_those_of_onnxruntime(tmp_path, monkeypatch):
    """Its profile says in which order it takes the nodes, and what it holds."""
    model = refgrad.gradient(layers(), keep_outputs=True)
    seen = profiled(model, tmp_path)
    found = program(model)
    # without optimizations nothing is folded but constants, and nothing is fused
    constants = {k for k, step in enumerate(found.steps) if step.op_type == "Constant"}
    monkeypatch.setattr(onnxruntime, "_folded", lambda _: constants)
    monkeypatch.setattr(onnxruntime, "_is_fused", lambda *_: False)
    monkeypatch.setattr(onnxruntime, "_scales_product", lambda *_: False)
    assert [found.steps[k].name for k in onnxruntime._order(found, constants)] == list(seen)
    alive = onnxruntime.usage(found).alive
    most = max(seen.values())
    for step, predicted in zip(found.steps, alive, strict=True):
        if step.name in seen:
            assert abs(predicted - seen[step.name]) <= 0.05 * most, step.name


ONE_OPERAND = traits.ACTIVATIONS | traits.SOFTMAXES | {"Abs", "Clip", "Neg", "Sqrt", "Trilu"}


@pytest.mark.parametrize("operator", sorted(ONE_OPERAND - {"HardSwish", "Mish", "PRelu", "Swish"}))
def test_operators_that_onnxruntime_lets_overwrite_their_operand(operator, tmp_path):
    model = parsed(f"g (float[64, 64] x) => (float[64, 64] y) {{ h = Exp(x)  r = {operator}(h)  y = Exp(r) }}")
    for node in model.graph.node:
        node.name = node.output[0]
    seen = profiled(model, tmp_path)
    assert (seen["r"] == seen["h"]) == (operator in onnxruntime._FIRST)


def test_the_arena_gives_the_smallest_chunk_that_fits():
    arena, size = onnxruntime._Arena(), 2**18
    first, second, third = (arena.allocate(size) for _ in range(3))
    assert (first, second, third) == (0, size, 2 * size)
    assert arena.resident == 3 * size  # the last quarter of the first MiB was never written to
    arena.free(second)
    assert arena.allocate(size) == second  # it fits better than the end, as it comes first
    arena.free(first)
    assert arena.allocate(1000) == 0
    assert arena.held == 2 * size + 1024
    assert arena.allocate(2**20) > 2**20  # a region of its own
    assert arena.resident == 3 * size + 2**20


def test_a_random_arena_never_hands_out_memory_twice():
    rng, arena, held = np.random.default_rng(0), onnxruntime._Arena(), {}
    for _ in range(3000):
        if held and rng.random() < 0.5:
            at = int(rng.choice(list(held)))
            arena.free(at)
            del held[at]
        else:
            size = int(2 ** rng.uniform(8, 22))
            at = arena.allocate(size)
            assert all(at + size <= other or other + more <= at for other, more in held.items())
            held[at] = size
    assert arena.held == sum(-(-size // 256) * 256 for size in held.values())
    for at in list(held):
        arena.free(at)
    assert arena.held == 0


# The command


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(parsed("g (float[N,3] x, float[3,4] w) => (float[N,4] y) { p = MatMul(x, w) y = Relu(p) }"), path)
    return path


def test_the_command(saved, tmp_path, capsys):
    assert main(["show", str(saved), "--cost", "--dim", "N=10"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("MatMul") < shown.index("Relu")
    assert "FLOPs: 280" in shown
    assert main(["show", str(saved), "--cost", "--dim", "10", "--json", "--runtime", "onnxruntime"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["flops"], document["runtime"]) == (280, "onnxruntime")
    output = tmp_path / "cost.json"
    assert main(["show", str(saved), "--cost", "--dim", "N=10", "-o", str(output)]) == 0
    assert json.loads(output.read_text())["results"] == 160


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cost"], "--dim N=32"),
        (["--cost", "--dim", "M=2"], "no input has the dimension 'M'"),
        (["--cost", "--dim", "N"], "give a size"),
        (["--cost", "--dot"], "exclude each other"),
        (["--cost", "--dim", "2", "--runtime", "cuda"], "--runtime 'cuda' is not known"),
        (["--dim", "N=2"], "--dim is for --cost"),
    ],
)
def test_what_the_command_refuses(saved, options, says, capsys):
    assert main(["show", str(saved), *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("read_again", [False, True])
def test_a_gelu_that_is_written_out_is_one_node_on_onnxruntime(read_again):
    """What lies within it takes no memory, unless something else reads it."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        agraph (float[1024, 1024] a) => (float[1024, 1024] z)
        <float half = {0.5}, float three = {3}, float d = {0.044715}, float c = {0.79788458}, float one = {1}> {
            x = Exp(a)  h = Mul(x, half)  p = Pow(x, three)  q = Mul(p, d)  r = Add(x, q)  s = Mul(r, c)  t = Tanh(s)
            u = Add(t, one)  y = Mul(h, u)  z = AGAIN
        }""".replace("AGAIN", "Add(y, t)" if read_again else "Neg(y)")
    )
    alive = [node.alive for node in refgrad.cost(model, runtime="onnxruntime").nodes]
    assert (0 in alive) != read_again
    assert sum(size > 0 for size in alive) == (10 if read_again else 3)


@pytest.mark.parametrize(
    ("nodes", "held"),
    [
        ("m = MatMul(x, w)  y = Add(m, b)", 1),
        ("m = MatMul(x, w)  y = Add(b, m)", 1),
        ("m = MatMul(x, w)  y = Add(m, x)", 2),
        ("m = MatMul(x, w)  y = Add(m, m)", 2),
        ("m = MatMul(x, w)  n = Add(m, b)  y = Add(n, m)", 3),
        ("m = Gemm(x, w)  y = Transpose<perm = [1, 0]>(m)", 1),
        ("m = Gemm(x, w, b)  y = Transpose<perm = [1, 0]>(m)", 2),
    ],
)
def test_a_product_and_what_is_fused_with_it_are_one_node_on_onnxruntime(nodes, held):
    """The row that is added to a product, and the Transpose of a Gemm, take no memory of their own."""
    model = parsed(f"g (float[512, 512] x, float[512, 512] w, float[512] b) => (float[512, 512] y) {{ {nodes} }}")
    assert max(node.alive for node in refgrad.cost(model, runtime="onnxruntime").nodes) == held * 2**20


MISFITS = {  # nodes that onnx's inference lets pass and no runtime computes
    "a kernel of another rank": """m (float[1,1,7,5] x, float[1,1,3,3,1] w) => (float[1,1,4,3] y) {
        y = Conv <strides = [2, 2], kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w) }""",
    "an operand less than the equation has": """m (float[3] x) => (float y) {
        y = Einsum <equation = "i,i->"> (x) }""",
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_node_whose_inputs_do_not_fit_is_named(name):
    with pytest.raises(InvalidModelError, match=r"(Conv|Einsum).*|fit"):
        refgrad.cost(parsed(MISFITS[name]))


@pytest.mark.parametrize("kind", [127, 1000])
def test_an_input_of_a_type_that_does_not_exist_is_refused(kind):
    model = parsed("m (float[2,2] x, float[2,2] w) => (float[4,2] y) { y = Concat <axis = 0> (x, w) }")
    model.graph.input[1].type.tensor_type.elem_type = kind
    with pytest.raises(InvalidModelError, match=f"Input 'w' has the element type {kind}"):
        refgrad.cost(model)


def test_an_array_of_more_axes_than_numpy_has_lies_in_their_order():
    shape = (2, 3, *[1] * 500)
    assert merged(shape, [MemoryLayout(shape, (1, 2, *[0] * 500))]) == contiguous(shape)
