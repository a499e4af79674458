"""What a plan does with memory: constants folded, dead inputs overwritten, views let go, and limits that hold."""

import gc
import signal
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
import reuse
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from refgrad.backends import get_backend
from refgrad.backends.numpy import plan as plans
from refgrad.backends.numpy.memory import OBJECT, Watch
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.errors import BackendError, OptionError

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]
at_every_size = reuse.at_every_size

NUMPY = get_backend("numpy")
MIB = 2**20


def graph(nodes, inputs, outputs, initializers=(), opset=18):
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in inputs.items()]
    result = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in dict(initializers).items()]
    proto = helper.make_graph(nodes, "g", value, result, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(proto, opset_imports=imports, ir_version=10)


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs.split(), outputs.split(), f"make_{outputs.split()[0]}", **attributes)


@contextmanager
def peak():
    """The most MiB that NumPy held at once beyond what it holds now."""
    gc.collect()
    tracemalloc.start()
    result = []
    try:
        yield result
    finally:
        result.append(tracemalloc.get_traced_memory()[1] / MIB)
        tracemalloc.stop()


# Constants


def steps(model):
    return [step.label for step in NUMPY.prepare(model)._plan.steps]


def test_what_depends_on_constants_is_computed_once():
    model = graph(
        [node("Shape", "w", "s"), node("Reshape", "w s", "r"), node("Neg", "r", "n"), node("Add", "x n", "y")],
        {"x": [2, 3]},
        ["y"],
        {"w": np.ones((2, 3), np.float32)},
    )
    assert len(steps(model)) == 1
    feed = np.ones((2, 3), np.float32)
    result = NUMPY.prepare(model).run({"x": feed}, trace=True)
    assert set(result) == {"x", "s", "r", "n", "y"}
    np.testing.assert_array_equal(result["y"], 0 * feed)


def test_a_default_that_can_be_fed_is_no_constant():
    model = graph([node("Neg", "w", "y")], {"w": [2]}, ["y"], {"w": np.ones(2, np.float32)})
    assert len(steps(model)) == 1
    prepared = NUMPY.prepare(model)
    np.testing.assert_array_equal(prepared.run({})["y"], [-1, -1])
    np.testing.assert_array_equal(prepared.run({"w": np.full(2, 3, np.float32)})["y"], [-3, -3])


def test_what_would_grow_is_not_folded():
    shape = np.array([1024, 1024])
    model = graph([node("ConstantOfShape", "s", "c"), node("Add", "x c", "y")], {"x": [1]}, ["y"], {"s": shape})
    assert len(steps(model)) == 2


def test_a_constant_that_fails_fails_when_it_is_needed():
    model = graph(
        [node("Reshape", "w s", "r"), node("Neg", "x", "y")],
        {"x": [2]},
        ["y", "r"],
        {"w": np.ones(3, np.float32), "s": np.array([2])},
    )
    prepared = NUMPY.prepare(model)
    assert prepared.run({"x": np.ones(2, np.float32)}, outputs=["y"])["y"].tolist() == [-1, -1]
    with pytest.raises(BackendError, match=r"'make_r' \(Reshape\)"):
        prepared.run({"x": np.ones(2, np.float32)})


# Reuse


def test_a_chain_lives_in_two_arrays():
    count = 12
    nodes = [node("Exp" if k % 2 else "Neg", f"x{k}", f"x{k + 1}") for k in range(count)]
    prepared = NUMPY.prepare(graph(nodes, {"x0": [256, 1024]}, [f"x{count}"]))
    feed = np.full((256, 1024), 0.5, np.float32)
    with peak() as most:
        prepared.run({"x0": feed})
    assert most[0] < 2.1
    assert (feed == 0.5).all()


def test_a_small_view_does_not_keep_a_large_array():
    nodes, count = [], 8
    for k in range(count):
        nodes += [node("Exp", "x", f"e{k}"), node("Slice", f"e{k} zero one", f"s{k}")]
    nodes.append(node("Sum", " ".join(f"s{k}" for k in range(count)), "y"))
    constants = {"zero": np.array([0]), "one": np.array([1])}
    prepared = NUMPY.prepare(graph(nodes, {"x": [256, 1024]}, ["y"], constants))
    feed = np.ones((256, 1024), np.float32)
    with peak() as most:
        prepared.run({"x": feed})
    assert most[0] < 1.1


UNARY = ("Neg", "Relu", "Tanh", "Sigmoid", "Abs", "Identity", "Softplus", "Erf", "HardSwish")
BINARY = ("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean", "Where")
SHAPED = ("Reshape", "Transpose", "Split", "Slice", "Unsqueeze", "Concat", "Flatten", "Expand")
SCATTER = ("ScatterElements", "ScatterND")


@st.composite
def random_graphs(draw):
    """A graph over tensors of 4x4 elements in which values are read often, viewed, and asked for in between."""
    names = ["x0", "x1", "w"]
    nodes = []
    for k in range(draw(st.integers(3, 14))):
        op_type = draw(st.sampled_from(UNARY + BINARY + SHAPED + SCATTER))
        a, b = (draw(st.sampled_from(names)) for _ in range(2))
        y = f"y{k}"
        match op_type:
            case "Reshape":
                nodes.append(node("Reshape", f"{a} square", y))
            case "Transpose":
                nodes.append(node("Transpose", a, y, perm=[1, 0]))
            case "Split":
                nodes += [
                    node("Split", a, f"{y}p {y}q", axis=0, num_outputs=2),
                    node("Concat", f"{y}q {y}p", y, axis=0),
                ]
            case "Slice":
                nodes.append(node("Slice", f"{a} three below axis back", y))
            case "Unsqueeze":
                nodes += [node("Unsqueeze", f"{a} axis", f"{y}u"), node("Squeeze", f"{y}u axis", y)]
            case "Concat":
                nodes += [node("Concat", f"{a} {b}", f"{y}c", axis=1), node("Slice", f"{y}c axis four one", y)]
            case "Flatten":
                nodes.append(node("Flatten", a, y, axis=1))
            case "Expand":
                nodes.append(node("Expand", f"{a} square", y))
            case "ScatterElements":
                nodes.append(node("ScatterElements", f"{a} rows {b}", y, axis=0, reduction="add"))
            case "ScatterND":
                nodes.append(node("ScatterND", f"{a} turned {b}", y))
            case "Where":
                nodes += [node("Less", f"{a} {b}", f"{y}l"), node("Where", f"{y}l {b} {a}", y)]
            case _:
                nodes.append(node(op_type, a if op_type in UNARY else f"{a} {b}", y))
        names.append(y)
    wanted = draw(st.lists(st.sampled_from(names[3:]), min_size=1, max_size=3, unique=True))
    constants = {
        "w": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4),
        "square": np.array([4, 4]),
        "three": np.array([3]),
        "below": np.array([-5]),
        "axis": np.array([0]),
        "back": np.array([-1]),
        "four": np.array([4]),
        "one": np.array([1]),
        "rows": np.array([[0, 3, 1, 1]] * 4),
        "turned": np.array([[3], [1], [0], [2]]),
    }
    return graph(nodes, {"x0": [4, 4], "x1": [4, 4]}, wanted, constants)


def compare_with_and_without_reuse(model):
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in ("x0", "x1")}
    kept = {name: array.copy() for name, array in feeds.items()}
    prepared = NUMPY.prepare(model)
    every = prepared.run(feeds, trace=True)  # where nothing dies and nothing is reused
    for _ in range(2):
        for name, value in prepared.run(feeds).items():
            np.testing.assert_array_equal(value, every[name])
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, kept[name])


@settings(max_examples=150, deadline=None)
@given(random_graphs())
def test_memory_that_is_reused_changes_nothing(model):
    compare_with_and_without_reuse(model)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Neg", "x0", "a"), node("Exp", "a", "b"), node("Add", "a b", "y")],
        [
            node("Neg", "x0", "a"),
            node("Transpose", "a", "t", perm=[1, 0]),
            node("Exp", "a", "b"),
            node("Add", "t b", "y"),
        ],
        [node("Neg", "x0", "a"), node("Identity", "a", "y"), node("Exp", "a", "z")],
    ],
    ids=["read again", "viewed", "asked for"],
)
def test_a_plan_that_overwrites_what_is_needed_is_caught(nodes, monkeypatch):
    model = graph(nodes, {"x0": [4, 4], "x1": [4, 4]}, ["y", "z"] if nodes[-1].output[0] == "z" else ["y"])
    compare_with_and_without_reuse(model)

    def wrong(self, index):
        return tuple(name not in self._external for name in self._steps[index].inputs)

    honest = plans.PlannedGraph._schedule

    def schedule(self, wanted, trace):
        if trace:
            with monkeypatch.context() as undone:
                undone.setattr(plans._Lives, "free", lambda self, index: ())
                return honest(self, wanted, trace)
        return honest(self, wanted, trace)

    monkeypatch.setattr(plans.PlannedGraph, "_schedule", schedule)
    monkeypatch.setattr(plans._Lives, "free", wrong)
    with pytest.raises(AssertionError, match="not equal"):
        compare_with_and_without_reuse(model)


# Limits


def chain(count=4):
    nodes = [node("Exp", f"x{k}", f"x{k + 1}") for k in range(count)]
    return graph(nodes, {"x0": ["n"]}, [f"x{count}"])


def test_a_node_that_needs_too_much_is_named_with_what_it_needs():
    model = graph([node("ConstantOfShape", "s", "c"), node("Neg", "c", "y")], {}, ["y"], {"s": np.array([2**40])})
    with pytest.raises(BackendError, match=r"node 'make_c' \(ConstantOfShape\) needs 4 TiB .* max_memory is 1 GiB"):
        NUMPY.prepare(model, max_memory=2**30).run({})


def test_the_number_in_the_message_is_enough_and_one_less_is_not():
    feed = np.ones(1000, np.float32)
    with pytest.raises(BackendError, match="Give it 8000 or more"):
        NUMPY.prepare(chain(), max_memory=7999).run({"x0": feed})
    with pytest.raises(BackendError, match=r"node 'make_x2'.*Give it 12000 or more"):
        NUMPY.prepare(chain(), max_memory=8000).run({"x0": feed})
    prepared = NUMPY.prepare(chain(), max_memory=12000)
    for _ in range(2):
        assert prepared.run({"x0": -feed})["x4"].shape == (1000,)


def test_subgraphs_are_held_to_the_limit():
    body = helper.make_graph(
        [node("Identity", "c", "d"), node("Expand", "x big", "e"), node("ReduceMax", "e", "r", keepdims=0)],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("r", TensorProto.FLOAT, []),
        ],
    )
    loop = helper.make_node("Loop", ["n", ""], ["y"], "loop", body=body)
    model = graph([loop], {"x": [1]}, ["y"], {"n": np.array(3), "big": np.array([2**20])})
    feeds = {"x": np.ones(1, np.float32)}
    assert NUMPY.prepare(model, max_memory=5 * MIB).run(feeds)["y"].tolist() == [1, 1, 1]
    with pytest.raises(BackendError, match=r"node 'make_e' \(Expand\) needs 4 MiB"):
        NUMPY.prepare(model, max_memory=3 * MIB).run(feeds)


KEPT = {
    "Loop": """g (float[65536] x, int64 n) => (float[k, m] y) {
        y = Loop (n) <body = b (int64 i, bool c) => (bool d, float[65536] r) { d = Identity(c) r = Neg(x) }>
    }""",
    "Scan": """g (float[65536] x, float[n] e) => (float[k, m] y) {
        y = Scan<num_scan_inputs = 1, body = b (float i) => (float[65536] r) { r = Mul(x, i) }>(e)
    }""",
    "SequenceMap": """g (seq(float[m]) s) => (seq(float[m]) y) {
        y = SequenceMap(s) <body = b (float[m] i) => (float[m] r) { r = Exp(i) }>
    }""",
}


@pytest.mark.parametrize("op_type", KEPT)
def test_what_a_loop_keeps_is_held_to_the_limit(op_type):
    text = KEPT[op_type].replace("Loop (n)", 'Loop (n, "")')
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    x = np.ones(65536, np.float32)  # a quarter of a MiB
    feeds = {"Loop": {"x": x, "n": np.array(40)}, "Scan": {"x": x, "e": x[:40]}, "SequenceMap": {"s": [x] * 40}}[
        op_type
    ]
    prepared = NUMPY.prepare(model, max_memory=3 * MIB)
    with peak() as most, pytest.raises(BackendError, match="max_memory is 3 MiB"):
        prepared.run(feeds)
    assert most[0] < 3.1
    assert len(NUMPY.prepare(model, max_memory=21 * MIB).run(feeds)["y"]) == 40


def test_a_result_whose_rank_onnx_does_not_infer_is_held_to_the_limit():
    unpool = node("MaxUnpool", "x i s", "y", kernel_shape=[1, 1])
    model = graph(
        [unpool], {"x": [1, 1, 1, 1]}, ["y"], {"i": np.zeros((1, 1, 1, 1), np.int64), "s": [1, 1, 2**16, 2**16]}
    )
    with pytest.raises(BackendError, match=r"\(MaxUnpool\) needs 16 GiB"):
        NUMPY.prepare(model, max_memory=MIB).run({"x": np.ones((1, 1, 1, 1), np.float32)})


def test_gradient_operators_are_held_to_the_limit():
    model = graph([node("GatherGrad", "s i dy", "dx", domain="com.microsoft")], {"dy": [1]}, ["dx"],
                  {"s": np.array([2**30]), "i": np.array([3])})  # fmt: skip
    with pytest.raises(BackendError, match=r"\(com.microsoft.GatherGrad\) needs 4 GiB"):
        NUMPY.prepare(model, max_memory=2**30).run({"dy": np.ones(1, np.float32)})


def test_outputs_that_nobody_names_are_not_counted_on():
    def layer(x, deviation):
        return helper.make_node("LayerNormalization", [x, "one"], ["", "", deviation], f"make_{deviation}")

    model = graph([layer("x", "d"), layer("d", "e")], {"x": ["n", 1]}, ["e"], {"one": np.ones(1, np.float32)})
    feeds = {"x": np.ones((1000, 1), np.float32)}
    # What is fed, what is read and what is made; and the scale.
    assert NUMPY.prepare(model, max_memory=3 * 4000 + 4).run(feeds)["e"].shape == (1000, 1)
    with pytest.raises(BackendError, match=r"'make_e'.*Give it 12004 or more"):
        NUMPY.prepare(model, max_memory=3 * 4000 + 3).run(feeds)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1G"])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(OptionError, match="max_memory="):
        NUMPY.prepare(chain(), max_memory=limit)


def test_what_the_machine_cannot_give_is_reported_on_the_node():
    model = graph([node("ConstantOfShape", "s", "y")], {}, ["y"], {"s": np.array([2**58])})
    with pytest.raises(BackendError, match=r"node 'make_y' \(ConstantOfShape\)"):
        NUMPY.prepare(model).run({})


# Interruption


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, as it does not in a process that was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_leaves_nothing_behind():
    prepared = NUMPY.prepare(chain(6))
    feed = np.linspace(0, 0.1, 5, dtype=np.float32)
    expected = prepared.run({"x0": feed})["x6"]
    kept = feed.copy()
    for stop in range(6):

        def interrupt(done, total, label, stop=stop):
            if done == stop:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            prepared.run({"x0": feed}, progress=interrupt)
        np.testing.assert_array_equal(feed, kept)
        np.testing.assert_array_equal(prepared.run({"x0": feed})["x6"], expected)


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ([], {}),
        ([], {"max_memory": 2**40}),
        ([], {"precision": "float64"}),
        ([helper.make_node("Optional", [], ["o"], type=helper.make_tensor_type_proto(TensorProto.FLOAT, []))], {}),
    ],
    ids=["plain", "max_memory", "float64", "a type"],
)
def test_the_model_is_not_kept(extra, options):
    script = f"""
import numpy as np, onnx
from pathlib import Path
from refgrad.backends import get_backend

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

model = onnx.ModelProto.FromString({graph([node("Add", "x w", "y"), *extra], {"x": [1]}, ["y"]).SerializeToString()!r})
prepare = get_backend("numpy").prepare
weights = np.ones(2**25, np.float32)
model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
del weights
prepared = prepare(model, **{options!r})
before = resident()
del model
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 120


def test_progress_counts_the_nodes():
    seen = []
    NUMPY.prepare(chain(3)).run({"x0": np.ones(2, np.float32)}, progress=lambda *now: seen.append(now))
    assert [(done, total) for done, total, _ in seen] == [(0, 3), (1, 3), (2, 3)]
    assert seen[0][2] == "node 'make_x1' (Exp)"


def test_any_value_of_the_graph_can_be_asked_for():
    prepared = NUMPY.prepare(chain(3))
    result = prepared.run({"x0": np.zeros(2, np.float32)}, outputs=["x1", "x0"])
    assert result["x1"].tolist() == [1, 1]
    assert result["x0"].tolist() == [0, 0]


# What a kernel takes for itself is counted before it takes it: each of these needs more than 32 MiB on small inputs.
SCRATCH = {
    "Attention": "m (float[1,1,3000,8] x) => (float[a,b,c,d] y) { y = Attention(x, x, x) }",
    "Cast to string": "m (float[200000] x) => (string[a] y) { y = Cast<to=8>(x) }",
    "Conv": "m (float[1,1,4,4] x, float[1,1,3,3] w) => (float[a,b,c,d] y) "
    "{ y = Conv<dilations=[3000,3000], pads=[6000,6000,1,1]>(x, w) }",
    "ConcatFromSequence": f"m (float[100000] x) => (float[a] y) "
    f"{{ s = SequenceConstruct({', '.join(['x'] * 100)}) y = ConcatFromSequence<axis=0>(s) }}",
    "FlexAttention": "m (float[1,1,3000,8] x) => (float[a,b,c,d] y) { y = ai.onnx.preview.FlexAttention(x, x, x) }",
    "GridSample": 'm (float[1,3,8,8] x, float[1,900,900,2] g) => (float[a,b,c,d] y) { y = GridSample<mode="cubic">(x, g) }',
    "LRN": "m (float[1,4,4,4] x) => (float[1,4,4,4] y) { y = LRN<size=2000001>(x) }",
    "MelWeightMatrix": "m (float x) => (float[a,b] y) { a = Constant<value_int=1000>() b = Constant<value_int=8000>() "
    "l = Constant<value_float=1.>() h = Constant<value_float=4000.>() w = MelWeightMatrix(a, b, b, l, h) y = Mul(w, x) }",
    "MultiHeadAttention": "m (float[1,3000,8] x) => (float[a,b,c] y) "
    "{ y = com.microsoft.MultiHeadAttention<num_heads=1>(x, x, x) }",
    "NonZero": f"m (float[{','.join(['2'] * 17)}] x) => (int64[a,b] y) {{ y = NonZero(x) }}",
    "RoiAlign": "m (float[1,64,8,8] x, float[1,4] r, int64[1] b) => (float[a,c,d,e] y) "
    "{ y = RoiAlign<output_height=16, output_width=16, sampling_ratio=16>(x, r, b) }",
    "RoiAlign of regions without end": "m (float[1,1,8,8] x) => (float[a,c,d,e] y) "
    "{ b = Constant<value_ints=[0]>() r = Constant<value_floats=[0., 0., 1e9, 1e9]>() s = Constant<value_ints=[1, 4]>() "
    "q = Reshape(r, s) "
    "y = RoiAlign<output_height=1, output_width=1>(x, q, b) }",
    "SplitToSequence": "m (float[200000] x) => (float[b] y) "
    "{ s = Constant<value_int=1>() q = SplitToSequence<axis=0>(x, s) y = ConcatFromSequence<axis=0>(q) }",
    "StringConcat": "m (string x) => (string y) { n = Constant<value_int=40>() c = Constant<value=bool{1}>() y = Loop<body = b "
    "(int64 i, bool d, string s) => (bool e, string t) { e = Identity(d) t = StringConcat(s, s) }>(n, c, x) }",
    "StringSplit": "m (string[2000] x) => (string[a,b] y, int64[c] n) "
    '{ s = Constant<value_string="a a">() l = Loop<body = b (int64 i, bool d, string p) => (bool e, string q) '
    "{ e = Identity(d) q = StringConcat(p, p) }>(k, t, s) k = Constant<value_int=11>() t = Constant<value=bool{1}>() "
    "o = Constant<value_ints=[1]>() u = Unsqueeze(l, z) z = Constant<value_ints=[0]>() v = Concat<axis=0>(x, u) "
    "y, n = StringSplit(v) }",
    "SVMRegressor": 'm (float[4000,4] x) => (float[a,b] y) { y = ai.onnx.ml.SVMRegressor<kernel_type="RBF", '
    f"kernel_params=[1., 0., 3.], n_supports=1000, rho=[0.], coefficients=[{', '.join(['1.'] * 1000)}], "
    f"support_vectors=[{', '.join(['1.'] * 4000)}]>(x) }}",
}


@pytest.mark.parametrize("what", SCRATCH)
def test_what_a_kernel_takes_for_itself_is_counted_before(what):
    limit = 32 << 20
    imports = '"": 23, "com.microsoft": 1, "ai.onnx.ml": 3, "ai.onnx.preview": 1'
    model = parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {SCRATCH[what]}")
    prepared = NUMPY.prepare(model, max_memory=limit)
    feeds = random_feeds(prepared.inputs)
    tracemalloc.start()
    try:
        with pytest.raises(BackendError, match=r"max_memory is 32 MiB"):
            prepared.run(feeds)
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_lists_and_strings_are_counted():
    long = ["a" * 1000] * 1000
    watch = Watch(10**9, [np.array(long, object)])
    assert watch.total > 10**6
    scalars = [np.zeros(()) for _ in range(1000)]
    watch = Watch(10**9, [scalars, scalars])
    assert watch.total == 1000 * (8 + OBJECT)
    watch.release([scalars, scalars])
    assert watch.total == 0


def test_axes_that_no_array_has_are_refused_at_once():
    text = """m (float x) => (float y) { n = Constant<value_int=100000>() z = Constant<value_int=0>()
        o = Constant<value_int=1>() i = Range(z, n, o) u = Unsqueeze(x, i) y = ReduceSum<keepdims=0>(u) }"""
    prepared = NUMPY.prepare(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))
    with pytest.raises(BackendError, match="the result has 100000 axes, and NumPy has arrays of 64 at most"):
        prepared.run({"x": np.float32(1)})


def test_a_sparse_tensor_is_measured_before_it_is_dense():
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> m (float x) => (float[a,b] y) { y = Mul(w, x) }'
    )
    sparse = model.graph.sparse_initializer.add(dims=[4000, 4000])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64)))
    with pytest.raises(
        BackendError, match=r"'w' of dims .* takes 64000000 bytes when it is dense, and max_memory is 1048576"
    ):
        NUMPY.prepare(model, max_memory=MIB)
