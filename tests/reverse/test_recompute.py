"""Recomputation: the same gradient, from fewer values that are kept, in a graph that no optimizer undoes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from runtime import RUNTIME, needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import BackendError, OptionError, UnknownNameError
from refgrad.model.normalise import normalise
from refgrad.reverse import recompute as repetition
from refgrad.reverse.recompute import segments

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

HEAD = '<ir_version: 10, opset_import: ["": 20]>'


def parsed(text: str) -> ModelProto:
    """A model whose nodes are called as their first output is."""
    model = onnx.parser.parse_model(f"{HEAD} {text}" if text[0] != "<" else text)
    for node in model.graph.node:
        node.name = node.output[0]
    return model


CHAIN = parsed("""chain (float[4, 6] x, float[6, 6] w) => (float[4, 6] y) {
    a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) d = Exp(c) e = Mul(d, b) f = Sigmoid(e) g = MatMul(f, w) h = Tanh(g)
    y = Mul(h, x)
}""")
MODELS = {
    "a chain": CHAIN,
    "sizes that are not known": parsed("""open (float[N, M] x) => (float[N, M] y) {
        a = Exp(x) s = ReduceSum<keepdims = 1>(a) b = Div(a, s) c = Tanh(b) n = Shape(c) d = Expand(s, n) y = Mul(c, d)
    }"""),
    "scalars": parsed("scalars (float x) => (float y) { a = Exp(x) b = Tanh(a) c = Sin(b) y = Mul(c, b) }"),
    "float64": parsed("wide (double[3] x) => (double[3] y) { a = Exp(x) b = Tanh(a) c = Sin(b) y = Mul(c, b) }"),
    "float16": parsed("half (float16[3] x) => (float16[3] y) { a = Exp(x) b = Tanh(a) c = Sin(b) y = Mul(c, b) }"),
    "nodes with many outputs": parsed("""many (float[6, 4] x) => (float[2, 4] y, float[3, 4] top) {
        a = Exp(x) p, q, r = Split<num_outputs = 3>(a) b = Tanh(p) c = Mul(b, q) three = Constant<value = int64[1] {3}>()
        top, where = TopK<axis = 0>(a, three) d = Sin(c) y = Mul(d, r)
    }"""),
    "integers, booleans and shapes": parsed("""kinds (float[3, 4] x, int64[2] i) => (float[2, 4] y) {
        a = Tanh(x) z = Constant<value = float {0}>() b = Greater(a, z) c = Exp(a) d = Where(b, c, a) j = Add(i, i)
        e = Gather(d, j) n = Shape(e) f = Reshape(e, n) y = Mul(f, f)
    }"""),
    "a convolution": parsed("""conv (float[1, 2, 6, 6] x, float[3, 2, 3, 3] w, float[3] s) => (float[1, 3, 2, 2] y) {
        a = Conv(x, w) b = BatchNormalization<training_mode = 0>(a, s, s, s, s) c = Relu(b)
        d = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c) y = Exp(d)
    }"""),
    "weights that are computed": parsed("""weights (float[2, 3] x) => (float[2, 3] y)
        <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
        t = Transpose(w) u = Tanh(t) a = MatMul(x, u) b = Sin(a) c = MatMul(b, u) y = Tanh(c)
    }"""),
    "branches": parsed("""branches (float[3] x, bool c) => (float[3] y) {
        a = Exp(x) b = If(c)<then_branch = t () => (float[3] t3) { t1 = Tanh(a) t2 = Sin(t1) t3 = Mul(t2, x) },
        else_branch = e () => (float[3] e2) { e1 = Cos(a) e2 = Mul(e1, a) }> d = Tanh(b) y = Mul(d, a)
    }"""),
    "a branch beside the derivative": parsed("""beside (float[3] x, bool c) => (float[3] y) {
        a = Exp(x) n = If(c)<then_branch = t () => (int64 t2) { t1 = Shape(a) t2 = ReduceSum<keepdims = 0>(t1) },
        else_branch = e () => (int64 e1) { e1 = Size(a) }> m = CastLike(n, x) d = Tanh(a) f = Mul(d, m) y = Mul(f, a)
    }"""),
    "a loop": parsed("""loop (float[3] x, int64 n) => (float[3] y) {
        a = Tanh(x) g = Constant<value = bool {1}>() l = Loop(n, g, a)<body = step (int64 i, bool go, float[3] s)
        => (bool on, float[3] s3) { on = Identity(go) s1 = Sin(s) s2 = Mul(s1, a) s3 = Exp(s2) }> y = Mul(l, x)
    }"""),
    "a scan": parsed("""scan (float[3] x, float[5, 3] z) => (float[3] y, float[5, 3] ys) {
        a = Tanh(x) l, k = Scan(a, z)<num_scan_inputs = 1, body = step (float[3] s, float[3] z_t)
        => (float[3] s4, float[3] out) { s1 = Sin(s) s2 = Mul(s1, z_t) s3 = Exp(s2) s4 = Tanh(s3) out = Mul(s4, a) }>
        y = Mul(l, x) ys = Exp(k)
    }"""),
    "sequences on the way": parsed("""sequences (float[4, 3] x) => (float[6, 3] y) {
        a = Tanh(x) n = Constant<value = int64[2] {2, 2}>() s = SplitToSequence(a, n) z = Constant<value = int64 {0}>()
        p = SequenceAt(s, z) b = Exp(p) t = SequenceInsert(s, b) q = ConcatFromSequence<axis = 0>(t) r = Sin(q)
        y = Mul(r, q)
    }"""),
    "a map over a sequence": parsed("""mapped (float[4, 3] x) => (float[4, 3] y) {
        a = Tanh(x) n = Constant<value = int64[2] {1, 3}>() s = SplitToSequence(a, n)
        m = SequenceMap(s, x)<body = one (float[N, 3] e, float[4, 3] w) => (float[N, 3] e3) {
            e1 = Sin(e) r = ReduceMean<keepdims = 0>(w) e2 = Mul(e1, r) e3 = Exp(e2) }>
        q = ConcatFromSequence<axis = 0>(m) r = Sin(q) y = Mul(r, a)
    }"""),
    "nested bodies": parsed("""nested (float[3] x, float[5, 3] z, bool c) => (float[3] y) {
        a = Tanh(x)
        l = Scan(a, z)<num_scan_inputs = 1, body = step (float[3] s, float[3] z_t) => (float[3] s4) {
            s1 = Sin(s) s2 = If(c)<then_branch = t () => (float[3] t2) { t1 = Mul(s1, z_t) t2 = Tanh(t1) },
            else_branch = e () => (float[3] e1) { e1 = Cos(s1) }> s3 = Exp(s2) s4 = Mul(s3, a) }>
        b = If(c)<then_branch = u () => (float[3] u2) {
            g = Constant<value = bool {1}>() k = Constant<value = int64 {2}>()
            u1 = Loop(k, g, l)<body = inner (int64 i, bool go, float[3] v) => (bool on, float[3] v2) {
                on = Identity(go) v1 = Sin(v) v2 = Mul(v1, a) }> u2 = Exp(u1) },
        else_branch = f () => (float[3] f1) { f1 = Neg(l) }>
        y = Mul(b, l)
    }"""),
    "an optional": parsed("""optional (float[4, 3] x) => (float[4, 3] y) {
        a = Tanh(x) o = Optional(a) b = OptionalGetElement(o) c = Exp(b) d = Sin(c) y = Mul(d, b)
    }"""),
    "a sequence beside the derivative": parsed("""sequence (float[4, 3] x) => (float[2, 3] y) {
        a = Tanh(x) n = Constant<value = int64[2] {2, 2}>() s = SplitToSequence(a, n) one = Constant<value = int64 {1}>()
        i = SequenceLength(s) k = CastLike(i, x) b = Mul(a, k) two = Constant<value = int64[2] {0, 1}>()
        c = Gather(b, two) d = Exp(c) y = Mul(d, c)
    }"""),
}
# the segment of the node at a position; 0: none
SPLITS = {
    "one segment": lambda k: 1,
    "segments of three nodes": lambda k: k // 3 + 1,
    "every other node": lambda k: k % 2,
    "two segments that alternate": lambda k: k % 2 + 1,
    "the second half": lambda k: int(k > 4),
}


def random_feeds(model: ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Small numbers; sizes that are not declared are 3."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        shape = [dim.dim_value or 3 for dim in tensor.shape.dim]
        drawn = rng.uniform(0.1, 1.1, shape) if dtype.kind == "f" else np.ones(shape)
        feeds[value.name] = np.asarray(drawn, dtype)
    return feeds


def ran(model: ModelProto, feeds: dict[str, np.ndarray], backend: str = "numpy") -> dict[str, np.ndarray]:
    return get_backend(backend).prepare(model).run(feeds)


def copies(model: ModelProto) -> list[NodeProto]:
    """The nodes that are copies of forward nodes, not those that tie them."""
    return [node for node in model.graph.node if re.search(r"_again(_\d+)?$", node.name)]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k], equal_nan=True) for k in one)


def split(model: ModelProto, numbers: Iterable[int]) -> tuple[ModelProto, list[str]]:
    """The model with the number of its segment in the name of every node, and a pattern for each segment but 0."""
    tagged, numbers = ModelProto(), list(numbers)
    tagged.CopyFrom(model)
    for node, number in zip(tagged.graph.node, numbers, strict=True):
        node.name = f"{number}/{node.name}"
    return tagged, [f"{number}/*" for number in sorted({*numbers} - {0})]


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_same_bit_for_bit(name):
    model = MODELS[name]
    stored = refgrad.gradient(model, keep_outputs=True)
    feeds = random_feeds(stored)
    expected = ran(stored, feeds)
    choices = {"True": (model, True)}
    choices |= {what: split(model, map(of, range(len(model.graph.node)))) for what, of in SPLITS.items()}
    for what, (tagged, chosen) in choices.items():
        again = refgrad.gradient(tagged, keep_outputs=True, recompute=chosen)
        onnx.checker.check_model(again, full_check=True)
        assert same(ran(again, feeds), expected), what


@needs_runtime
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_same_on_onnxruntime(name):
    stored, again = (refgrad.gradient(MODELS[name], recompute=choice) for choice in (False, True))
    feeds = random_feeds(stored)
    expected, found = ran(stored, feeds, "ort-cpu"), ran(again, feeds, "ort-cpu")
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-3 if value.dtype == np.float16 else 1e-6)


def random_model(seed: int) -> ModelProto:
    """Twenty nodes, each of which reads any two values before it; two of them are outputs."""
    rng = np.random.default_rng(seed)
    values = ["x", "z"]
    nodes = []
    for k in range(20):
        op_type = str(rng.choice(["Mul", "Add", "Sin", "Tanh", "Split", "Softmax", "Dropout"]))
        reads = [str(rng.choice(values[-6:])) for _ in range(2 if op_type in ("Mul", "Add") else 1)]
        if op_type == "Split":
            nodes.append(helper.make_node("Split", reads, [f"p{k}", f"q{k}"], name=f"p{k}", num_outputs=2, axis=1))
            nodes.append(helper.make_node("Concat", [f"q{k}", f"p{k}"], [f"v{k}"], name=f"v{k}", axis=1))
        elif op_type == "Dropout":
            nodes.append(helper.make_node("Dropout", [*reads, "ratio", "train"], [f"v{k}"], name=f"v{k}", seed=k))
        else:
            nodes.append(helper.make_node(op_type, reads, [f"v{k}"], name=f"v{k}"))
        values.append(f"v{k}")
    value = helper.make_tensor_value_info
    constants = [numpy_helper.from_array(np.float32(0.5), "ratio"), numpy_helper.from_array(np.bool_(True), "train")]
    ends = (
        [value(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "z")],
        [value(name, TensorProto.FLOAT, [2, 4]) for name in ("v13", "v19")],
    )
    graph = helper.make_graph(nodes, "random", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("seed", range(40))
def test_any_choice_of_nodes_in_any_graph_gives_the_same(seed):
    model, rng = random_model(seed), np.random.default_rng(seed)
    stored = refgrad.gradient(model, wrt=["x", "z"], keep_outputs=True)
    feeds = random_feeds(stored)
    expected = ran(stored, feeds)
    for count in (1, 2, 5):
        tagged, chosen = split(model, rng.integers(0, count + 1, len(model.graph.node)))
        again = refgrad.gradient(tagged, wrt=["x", "z"], keep_outputs=True, recompute=chosen)
        onnx.checker.check_model(again, full_check=True)
        made = set(feeds) | {tensor.name for tensor in again.graph.initializer}
        for node in again.graph.node:
            assert made.issuperset(filter(None, node.input)), "a value is read before it is computed"
            made.update(node.output)
        assert same(ran(again, feeds), expected)
        assert not any(node.op_type == "Dropout" for node in copies(again))


def layers(count: int = 6, width: int = 32, rows: int = 64) -> ModelProto:
    """A narrow stream to which every layer adds what it made of it four times as wide; the stream goes through little."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for k in range(count):
        for name, shape in ((f"up{k}", (width, 4 * width)), (f"down{k}", (4 * width, width))):
            weights.append(numpy_helper.from_array(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32), name))
        steps = [("MatMul", [x, f"up{k}"], "a"), ("Tanh", [f"a{k}"], "b"), ("Sigmoid", [f"b{k}"], "c")]
        steps += [("Mul", [f"b{k}", f"c{k}"], "d"), ("Tanh", [f"d{k}"], "e"), ("MatMul", [f"e{k}", f"down{k}"], "f")]
        steps += [("Add", [x, f"f{k}"], "g")]
        nodes += [helper.make_node(op, reads, [f"{made}{k}"], name=f"/{k}/{made}") for op, reads, made in steps]
        x = f"g{k}"
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, width])] for name in ("x", x)]
    graph = helper.make_graph(nodes, "layers", *ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def by_layer(count: int = 6) -> list[str]:
    return [f"/{k}/*" for k in range(count)]


def needed_memory(model: ModelProto) -> int:
    """The least max_memory that the interpreter runs a model within, to a hundredth."""
    feeds = random_feeds(model)
    low, high = 0, 2**26
    while high - low > high // 100:
        middle = (low + high) // 2
        try:
            get_backend("numpy").prepare(model, max_memory=middle).run(feeds)
        except BackendError:
            low = middle
        else:
            high = middle
    return high


def test_less_is_held_at_once():
    count, wide = (
        24,
        64 * 128 * 4,
    )  # bytes of a wide value; the weights of a layer are as large, the stream is a quarter of it
    model = layers(count)
    stored, cut, layered = (
        needed_memory(refgrad.gradient(model, wrt=["x"], recompute=choice)) / wide
        for choice in (False, True, by_layer(count))
    )
    assert stored > count + 3 * count  # three wide values of every layer are kept
    for needed in (cut, layered):
        assert needed < count + count / 4 + 6  # the stream, and the values of one segment


def test_a_segment_ends_where_little_crosses():
    cut = segments(normalise(layers(12)), True)
    assert sum(map(len, cut)) == 12 * 7
    assert {len(names) for names in cut[:-1]} <= set(range(5, 14))  # the root of 84 is 9
    for names in cut:
        assert max(names, key=lambda name: (int(name.split("/")[1]), name)).endswith("/g"), "cut at the stream"


def ancestors(model: ModelProto, names: Iterable[str]) -> set[str]:
    """Every value that those in `names` are computed from."""
    makers = {name: node for node in model.graph.node for name in node.output}
    found, pending = set(), list(names)
    while pending:
        made = makers.get(pending.pop())
        for name in () if made is None else made.input:
            if name not in found:
                found.add(name)
                pending.append(name)
    return found


def optimized(model: ModelProto, folder) -> ModelProto:
    """What onnxruntime makes of a model before it runs it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def count_of(model: ModelProto, *op_types: str) -> int:
    return sum(node.op_type in op_types for node in model.graph.node)


@needs_runtime
def test_onnxruntime_keeps_the_copies_and_what_they_wait_for(tmp_path):
    model = layers()
    found = optimized(refgrad.gradient(model, recompute=by_layer()), tmp_path)
    assert (
        count_of(found, "Tanh") == 2 * count_of(model, "Tanh") - 2
    )  # the last layer is computed in the backward pass alone
    for layer in range(6):
        again = [
            name
            for node in found.graph.node
            for name in node.output
            if name.startswith((f"b{layer}_again", f"e{layer}_again"))
        ]
        assert len(again) == 2
        for name in again:
            before = ancestors(found, [name])
            later = [f"{weight}{k}_grad" for k in range(layer + 1, 6) for weight in ("up", "down")]
            assert before.issuperset(later), "it waits for the gradients of the weights of every later layer"


@needs_runtime
def test_onnxruntime_joins_no_tie_with_a_reshape(tmp_path):
    """Where it joins two in a row, or takes a shape for the data of the Reshape that reads it."""
    model = parsed("""reshapes (float[2, 6] x, int64[2] i) => (float[2, 6] y) <int64[2] k = {2, 6}> {
        a = Tanh(x) m = Neg(i) n = Neg(m) b = Reshape(a, n) c = Tanh(b) g = Tanh(c) d = Reshape(g, k) e = Tanh(d)
        f = Tanh(e)
        y = Mul(f, x)
    }""")
    model.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [3, 4]))
    tagged, chosen = split(model, [1, 1, 1, 2, 2, 2, 3, 3, 3, 0])
    again = refgrad.gradient(tagged, recompute=chosen, keep_outputs=True)
    feeds = random_feeds(again) | {"i": np.array([3, 4], np.int64)}
    assert same(ran(again, feeds, "ort-cpu"), ran(refgrad.gradient(model, keep_outputs=True), feeds, "ort-cpu"))
    found = optimized(again, tmp_path)
    for value in "bcde":
        [copy] = [name for node in found.graph.node for name in node.output if name.startswith(f"{value}_again")]
        assert "y" in ancestors(found, [copy]), "it waits for the end of the forward pass"


@needs_runtime
def test_without_what_they_wait_for_the_copies_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(repetition.Repetition, "_ready", lambda self, names, made: "")
    model = layers()
    found = optimized(refgrad.gradient(model, recompute=by_layer()), tmp_path)
    assert count_of(found, "Tanh") == count_of(model, "Tanh")


def test_the_first_copies_wait_for_the_end_of_the_forward_pass():
    model = parsed("end (float[3] x) => (float[3] y) { a = Exp(x) b = Sin(a) c = Tanh(b) y = Add(c, c) }")
    again = refgrad.gradient(model, keep_outputs=True, recompute=["*"])
    assert len(copies(again)) == 3
    for node in copies(again):
        assert "y" in ancestors(again, node.output)


def test_what_is_not_finite_passes_unchanged():
    feeds = {
        "x": np.array([[np.nan, np.inf, -np.inf, 1e38, -0.0, 0.0]] * 4, np.float32),
        "w": np.eye(6, dtype=np.float32),
    }
    feeds["y_grad"] = np.full((4, 6), np.inf, np.float32)
    stored, again = (refgrad.gradient(CHAIN, recompute=choice) for choice in (False, ["[b-h]"]))
    assert copies(again)
    assert same(ran(again, feeds), ran(stored, feeds))


def differentiated(model: ModelProto, order: int, choice: bool | list[str]) -> ModelProto:
    """The gradient of the gradient of ... the sum of y by x."""
    for k in range(order):
        model = refgrad.gradient(model, ["x"], ["y"] if not k else None, cotangent="ones", recompute=choice)
    onnx.checker.check_model(model, full_check=True)
    assert bool(copies(model)) is bool(choice)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_result_can_be_differentiated_again(name):
    feeds = random_feeds(MODELS[name])
    [expected] = ran(differentiated(MODELS[name], 2, False), feeds).values()
    tolerance = 1e-2 if expected.dtype == np.float16 else 1e-5
    for choice in (True, ["*"]):
        made = differentiated(MODELS[name], 2, choice)
        for backend in ("numpy", "ort-cpu") if RUNTIME else ("numpy",):
            [found] = ran(made, feeds, backend).values()
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_a_third_derivative():
    model = parsed("thrice (float[3] x) => (float[3] y) { a = Exp(x) b = Sin(a) c = Mul(b, a) y = Tanh(c) }")
    feeds = random_feeds(model)
    [expected] = ran(differentiated(model, 3, False), feeds).values()
    for choice in (True, ["*"]):
        [found] = ran(differentiated(model, 3, choice), feeds).values()
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_is_random_is_kept():
    model = parsed("""random (float[64] x) => (float[64] y) <float r = {0.5}, bool t = {1}> {
        a = Exp(x) b = Dropout(a, r, t) c = Tanh(b) y = Mul(c, c)
    }""")
    again = refgrad.gradient(model, recompute=["*"], keep_outputs=True)
    assert Counter(node.op_type for node in again.graph.node)["Dropout"] == 1
    found = ran(again, random_feeds(again))
    assert 0 < np.count_nonzero(found["y"]) < 64
    assert np.array_equal(found["y"] != 0, found["x_grad"] != 0)


FUNCTIONS = """<ir_version: 10, opset_import: ["": 20, "own": 1]> calls (float[64] x) => (float[64] y)
    <float r = {0.5}, bool t = {1}> { a = Exp(x) b = own.block(a, r, t) c = own.block(b, r, t) d = Tanh(c) y = Mul(d, c) }
    <domain: "own", opset_import: ["": 20]> block (u, r, t) => (w) { %s v = Sin(k) w = Mul(v, k) }"""


def test_what_is_in_functions_is_repeated():
    model = parsed(FUNCTIONS % "k = Tanh(u)")
    stored, again = (refgrad.gradient(model, recompute=choice) for choice in (False, ["*"]))
    assert Counter(node.op_type for node in copies(again))["Sin"] == 2
    feeds = random_feeds(stored)
    assert same(ran(again, feeds), ran(stored, feeds))


def test_what_is_random_in_functions_is_kept():
    model = parsed(FUNCTIONS % "k = Dropout(u, r, t)")
    again = refgrad.gradient(model, recompute=["*"], keep_outputs=True)
    assert Counter(node.op_type for node in copies(again))["Dropout"] == 0
    found = ran(again, random_feeds(again))
    assert 0 < np.count_nonzero(found["y"]) < 64
    assert np.array_equal(found["y"] != 0, found["x_grad"] != 0)


def test_what_depends_on_initializers_alone_is_kept():
    again = refgrad.gradient(MODELS["weights that are computed"], recompute=["*"], keep_outputs=True)
    assert {node.op_type for node in copies(again)} == {"MatMul", "Sin"}


@pytest.mark.parametrize(
    ("name", "node", "op_type", "kept"),
    [("a scan", "l", "Scan", 1), ("a loop", "l", "Loop", 2), ("branches", "b", "If", 0)],
)
def test_a_node_with_bodies_stores_its_states_alone(name, node, op_type, kept):
    """The state of Scan, the state and the number of the step of Loop, nothing of If."""
    model = MODELS[name]
    original = next(one for one in model.graph.node if one.name == node)
    for choice in ([node], True):
        again = refgrad.gradient(model, recompute=choice)
        forward, backward = (one for one in again.graph.node if one.op_type == op_type)
        assert len(forward.output) - len(original.output) == kept
        inner = {one.op_type for attribute in backward.attribute for one in attribute.g.node}
        assert "Sin" in inner
        assert not [one for one in copies(again) if one.op_type == op_type]


@pytest.mark.parametrize("cotangent", ["input", "ones", "yield"])
def test_in_the_dialect_of_onnxruntime(cotangent):
    model = layers(3)
    stored, again = (
        refgrad.gradient(model, dialect="ort", cotangent=cotangent, recompute=choice) for choice in (False, by_layer(3))
    )
    assert copies(again)
    if cotangent == "yield":
        [at] = (node for node in again.graph.node if node.op_type == "YieldOp")
        assert list(at.input) == ["g2"]
        return
    feeds = random_feeds(stored)
    assert same(ran(again, feeds), ran(stored, feeds))


def test_a_node_belongs_to_the_first_entry_that_it_matches():
    graph = normalise(layers(2))
    assert segments(graph, ["/0/a", "/0/*", "*"]) == [
        {"/0/a"},
        {f"/0/{name}" for name in "bcdefg"},
        {f"/1/{name}" for name in "abcdefg"},
    ]


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        (["/0/*", "/7/*"], UnknownNameError, r"recompute=\['/7/\*'\] matches no node.*The nodes are '/0/a'"),
        (["/0/aa"], UnknownNameError, "Did you mean '/0/a'"),
        ("/0/*", OptionError, r"'/0/\*' is neither a bool nor a list"),
        ([1], OptionError, r"not \[1\]"),
        (1, OptionError, "True, False, or a list"),
    ],
)
def test_what_is_no_choice_of_nodes(choice, error, says):
    with pytest.raises(error, match=says):
        refgrad.gradient(layers(2), recompute=choice)


def test_the_command(tmp_path, capsys):
    path, output = tmp_path / "model.onnx", tmp_path / "gradient.onnx"
    onnx.save(layers(3), path)
    words = ["grad", str(path), "-o", str(output)]
    for more, expected in (
        ([], False),
        (["--recompute"], True),
        (["--recompute-nodes", "/0/*,/1/*"], ["/0/*", "/1/*"]),
    ):
        assert main([*words, *more]) == 0
        assert onnx.load(output) == refgrad.gradient(path, recompute=expected)
    assert main([*words, "--recompute", "--recompute-nodes", "/0/*"]) == 2
    assert "exclude each other" in capsys.readouterr().err
