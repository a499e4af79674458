"""If, Loop and Scan in every form: each row is a model whose gradient equals differences in double.

The random models say that a loop and its steps written out, a Loop and a Scan, an If and the branch it takes, are one.
"""

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import NoGradientError
from refgrad.reverse.assembly import names_in

pytestmark = pytest.mark.slow

STEP = 1e-5
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
HEAD = "float[3] x, float[3] z, float a, float[{T}, 3] Q, int64 m, bool c"


class Form:
    """A model in text, its sizes and what it is fed that is no float."""

    def __init__(
        self, nodes, *, weights="<float[3] w = {0.5, -0.25, 2}>", steps=3, m=2, c=True, opset=18, kind="float"
    ):
        self.nodes, self.weights, self.steps, self.m, self.c = nodes, weights, steps, m, c
        self.opset, self.kind = opset, kind

    def model(self):
        head = f'<ir_version: 8, opset_import: ["": {self.opset}, "com.microsoft": 1]>'
        text = f"{head} g ({HEAD.format(T=self.steps)}) => (float[3] y) {self.weights} {{ {self.nodes} }}"
        return onnx.parser.parse_model(text.replace("float", self.kind) if self.kind != "float" else text)

    def feeds(self):
        rng = np.random.default_rng(3)
        drawn = {name: rng.uniform(-1, 1, size) for name, size in self.sizes().items()}
        return drawn | {"m": np.array(self.m), "c": np.array(self.c)}

    def sizes(self):
        return {"x": 3, "z": 3, "a": (), "Q": (self.steps, 3)}


FORMS = {
    # Names
    "siblings use the same names": Form(
        "y = If(c)<then_branch = t () => (float[3] v) { u = Sin(x) v = Mul(u, w) }, "
        "else_branch = e () => (float[3] v) { u = Cos(z) v = Mul(u, x) }>"
    ),
    "a body calls its inputs as outer values are called": Form(
        "t = Sin(x) y, s = Scan<num_scan_inputs = 1, body = b (float[3] x, float[3] t) => (float[3] k, float[3] u) "
        "{ u = Mul(x, t) k = Add(u, w) }>(t, Q)"
    ),
    "a nested body calls its state as the outer one does": Form(
        "y = Loop<body = b (int64 i, bool c1, float[3] s) => (bool c2, float[3] n) { c2 = Identity(c1) "
        "n = Loop<body = d (int64 i, bool c1, float[3] s) => (bool c2, float[3] n) "
        "{ c2 = Identity(c1) t = Sin(s) n = Mul(t, x) }>(m, , s) }>(m, , z)"
    ),
    # Results that no node of the body makes
    "the state stays": Form(
        "y, r = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] s, float[3] t) "
        "{ t = Mul(s, q) }>(x, Q)"
    ),
    "states swap": Form(
        "u, v = Loop<body = b (int64 i, bool on, float[3] s, float[3] t) => (bool on, float[3] t, float[3] s) { }>(m, , x, z) "
        "k = Sin(u) y = Mul(k, v)",
        m=3,
    ),
    "states swap, one of them changed": Form(
        "u, v = Loop<body = b (int64 i, bool on, float[3] s, float[3] t) => (bool on, float[3] t, float[3] k) "
        "{ k = Sin(s) }>(m, , x, z) k0 = Mul(u, u) y = Mul(k0, v)",
        m=5,
    ),
    "one value made twice": Form(
        "u, v, r = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] t, float[3] q) => (float[3] k,"
        " float[3] k, float[3] k) "
        "{ p = Mul(s, t) k = Add(p, q) }>(x, z, Q) p = ReduceSum<keepdims = 0>(r) h = Mul(u, v) y = Mul(h, p)"
    ),
    "the branch returns a capture": Form(
        "y = If(c)<then_branch = t () => (float[3] u) { u = Identity(x) }, else_branch = e () => (float[3] v) { v = Sin(z) }>"
    ),
    # Used and not used
    "a state that nothing reads": Form(
        "u, v = Loop<body = b (int64 i, bool on, float[3] s, float[3] t) => (bool on, float[3] k, float[3] h) "
        "{ k = Sin(s) h = Cos(t) }>(m, , x, z) y = Mul(u, w)"
    ),
    "a final state that is left out": Form(
        ', r = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k, float[3] h) '
        "{ k = Sin(s) h = Mul(k, z) }>(m, , x) one = Constant<value_ints = [0]>() y = ReduceSum<keepdims = 0>(r, one)"
    ),
    "a stack that is left out": Form(
        "u, , r = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k, float[3] h, float[3] j) "
        "{ k = Mul(s, q) h = Sin(k) j = Cos(k) }>(x, Q) one = Constant<value_ints = [0]>() "
        "v = ReduceSum<keepdims = 0>(r, one) y = Mul(u, v)"
    ),
    "a state overwritten": Form(
        "u, r = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k, float[3] h) "
        "{ k = Sin(q) h = Mul(s, q) }>(x, Q) one = Constant<value_ints = [0]>() v = ReduceSum<keepdims ="
        " 0>(r, one) y = Mul(u, v)"
    ),
    "a state overwritten by a constant that no step writes": Form(
        "y = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k) <float[3] k0 = {1, 2, 3}> "
        "{ k = Identity(k0) }>(x, Q)",
        steps=0,
    ),
    "a state overwritten by a constant in a Loop of no step": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) "
        "{ k = Constant<value_floats = [1.0, 2.0, 3.0]>() }>(m, , x)",
        m=0,
    ),
    "a backward pass that reads no slice": Form(
        "y = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k) { k = Add(s, z) }>(x, Q)"
    ),
    "a capture that is a slice and a state too": Form(
        "s, r = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k, float[3] h) "
        "{ v = ReduceMean<keepdims = 0>(Q) p = Mul(s, q) k = Mul(p, x) h = Add(k, v) }>(x, Q) "
        "one = Constant<value_ints = [0]>() v = ReduceSum<keepdims = 0>(r, one) y = Add(s, v)"
    ),
    # What bodies hold
    "initializers and constants in a body": Form(
        "y = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k) <float[3] f = {0.5, 1, -1}> "
        "{ g = Constant<value_floats = [1.0, 0.5, 2.0]>() p = Mul(s, f) t = Sin(p) h = Mul(t, g) k = Add(h, q) }>(x, Q)"
    ),
    "a weight two levels up": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) "
        "{ k = If(c)<then_branch = t () => (float[3] u) { p = Mul(s, w) u = Sin(p) }, "
        "else_branch = e () => (float[3] v) { v = Mul(s, x) }> }>(m, , x)"
    ),
    "integer and Boolean states": Form(
        "y, j, f = Loop<body = b (int64 i, bool on, float[3] s, int64 k, bool f) => (bool on, float[3] n, int64 k1, bool f1) "
        "{ one = Constant<value_int = 1>() k1 = Add(k, one) f1 = Not(f) r = Cast<to = 1>(k) p = Mul(s, r) u = Sin(p) "
        "n = Where(f, u, s) }>(m, , x, m, c)",
        m=3,
    ),
    "the number of the step": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] n) "
        "{ r = Cast<to = 1>(i) p = Add(s, r) n = Sin(p) }>(m, , x)"
    ),
    "a loop within a loop, one output of which is stored and one not": Form(
        "y = If(c)<then_branch = t () => (float[3] u) { u = Loop<body = b (int64 i, bool on, float[3] s) =>"
        " (bool on, float[3] n) "
        "{ f, r = Loop<body = d (int64 i1, bool on1, float[3] s1) => (bool on1, float[3] n1, float[3] h) "
        "{ n1 = Mul(s1, x) h = Sin(n1) }>(m, , s) one = Constant<value_ints = [0]>() q = Tanh(r) "
        "v = ReduceSum<keepdims = 0>(q, one) n = Mul(v, f) }>(m, , z) }, else_branch = e () => (float[3] v0) { v0 = Sin(x) }>"
    ),
    "a microsoft operator in a body": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] n) "
        "{ t = com.microsoft.QuickGelu(s) n = Mul(t, x) }>(m, , z)"
    ),
    # The number of steps
    "no step": Form(
        "u, r = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k, float[3] h) "
        "{ k = Sin(s) h = Mul(k, w) }>(m, , x) "
        "one = Constant<value_ints = [0]>() v = ReduceSum<keepdims = 0>(r, one) k = Mul(u, z) y = Add(k, v)",
        m=0,
    ),
    "the condition is false before the first step": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) { k = Sin(s) }>(m, c, x)", c=False
    ),
    "the condition is false after the first step": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool off, float[3] k) { k = Sin(s) off = Not(on) }>(m, c, x)"
    ),
    "only a condition, of what is differentiated": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool off, float[3] k) <float most = {20}> "
        '{ p = Mul(s, s) q = ReduceSum<keepdims = 0>(p) r = Add(s, z) k = Mul(r, w) off = Less(q, most) }>("", c, x)',
        weights="<float[3] w = {1.5, -1.25, 2}>",
    ),
    "one more step for the largest trip count": Form(
        "u = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) { k = Sin(s) }>(m, c, x) y = Mul(u, z)", m=1
    ),
    # Slices by the number of the step
    "a Loop over the first of the slices": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) "
        "{ q = Gather(Q, i) p = Mul(s, q) k = Sin(p) }>(m, , x)"
    ),
    "a Loop over slices along the last axis": Form(
        "P = Transpose(Q) y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) "
        "{ q = Gather<axis = -1>(P, i) p = Mul(s, q) k = Sin(p) }>(m, , x)"
    ),
    "slices that are read twice, and returned": Form(
        "u, r, t = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k, float[3] q, float[3] h) "
        "{ q = Gather(Q, i) g = Gather<axis = 1>(Q, i) d = ReduceSum<keepdims = 0>(g) p = Mul(s, q) k = Add(p, d) h = Sin(q) }>"
        "(m, , x) z0 = Constant<value_ints = [0]>() v = Mul(r, t) h0 = ReduceSum<keepdims = 0>(v, z0) y = Mul(u, h0)"
    ),
    "slices of what is read whole too": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) "
        "{ q = Gather(Q, i) all = ReduceMean<keepdims = 0>(Q) p = Mul(s, q) k = Mul(p, all) }>(m, , x)"
    ),
    "slices of which a condition leaves some": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool off, float[3] k) "
        "{ q = Gather(Q, i) k = Mul(s, q) one = Constant<value_int = 1>() off = Less(i, one) }>(, c, x)",
        steps=4,
    ),
    "no slice is read": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) { q = Gather(Q, i) k = Mul(s, q) }>(m, , x)",
        m=0,
    ),
    "no slice is read, of unknown sizes": Form(
        "P = Compress<axis = 0>(Q, d) y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) "
        "{ q = Gather<axis = 1>(P, i) e = ReduceSum<keepdims = 0>(q) k = Mul(s, e) }>(m, , x)",
        weights="<float[3] w = {0.5, -0.25, 2}, bool[3] d = {1, 0, 1}>",
        m=0,
    ),
    # Layout of Scan
    "slices along the last axis, backwards": Form(
        "P = Transpose(Q) s, r = Scan<num_scan_inputs = 2, scan_input_axes = [-1, 0], scan_input_directions = [1, 0], "
        "scan_output_axes = [-1], scan_output_directions = [1], "
        "body = b (float[3] s, float[3] p, float[3] q) => (float[3] k, float[3] h) "
        "{ t = Mul(s, p) k = Add(t, q) h = Sin(k) }>(x, P, Q) R = Mul(r, P) one = Constant<value_ints = [1]>() "
        "v = ReduceSum<keepdims = 0>(R, one) y = Mul(s, v)"
    ),
    # Opsets, types
    **{
        f"opset {opset}": Form(
            "y, r = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] q) => (float[3] k, float[3] h) "
            "{ g = ReduceMean<keepdims = 0>(s) z0 = ReduceMean<keepdims = 0>(q) f = Less(g, z0) "
            "k = If(f)<then_branch = t () => (float[3] u) { u = Mul(s, q) }, "
            "else_branch = e () => (float[3] v) { v = Sin(s) }> h = Mul(k, x) }>(x, Q)",
            opset=opset,
        )
        for opset in (11, 13, 16, 21, 26)
    },
    "double": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) { p = Sin(s) k = Mul(p, w) }>(m, , x)",
        kind="double",
    ),
    "half": Form(
        "y = Loop<body = b (int64 i, bool on, float[3] s) => (bool on, float[3] k) { p = Sin(s) k = Mul(p, z) }>(m, , x)",
        kind="float16", weights="",
    ),
}  # fmt: skip


def differences(model, feeds, cotangents, wrt):
    """The whole gradient by central differences in double, of a model whose weights are inputs."""
    run = get_backend("numpy").prepare(model, precision="float64").run

    def loss(name, shift):
        made = run(feeds | {name: feeds[name] + shift})
        return sum((made[key] * value).sum() for key, value in cotangents.items())

    found = {}
    for name in wrt:
        found[name] = np.zeros(feeds[name].shape)
        for place in np.ndindex(feeds[name].shape):
            shift = np.zeros(feeds[name].shape)
            shift[place] = STEP
            found[name][place] = (loss(name, shift) - loss(name, -shift)) / (2 * STEP)
    return found


def widened(array):
    return array if array.dtype.kind == "b" else array.astype(np.float64)


def open_weights(model):
    """The model with its initializers as inputs, and their values."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    values = {t.name: widened(numpy_helper.to_array(t)) for t in model.graph.initializer}
    for tensor in model.graph.initializer:
        opened.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del opened.graph.initializer[:]
    return opened, values


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_equals_differences(name, dialect):
    form = FORMS[name]
    model = form.model()
    opened, weights = open_weights(model)
    feeds = form.feeds()
    wrt = [*form.sizes(), *(name for name, array in weights.items() if array.dtype == np.float64)]
    cotangents = {"y": np.array([0.7, -1.3, 0.4])}
    expected = differences(opened, feeds | weights, cotangents, wrt)
    gradient = refgrad.gradient(model, wrt, dialect=dialect)
    onnx.checker.check_model(refgrad.protos.traverse.checkable(gradient))
    prepared = get_backend("numpy").prepare(gradient, precision="float64")
    inputs = {name: array for name, array in (feeds | weights).items() if name in {*feeds, *wrt}}
    found = prepared.run(inputs | {"y_grad": cotangents["y"]})
    for key, value in zip(wrt, found.values(), strict=True):
        np.testing.assert_allclose(value, expected[key], rtol=1e-6, atol=1e-8, err_msg=key)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.kind != "float16"])
def test_the_second_derivative_equals_differences_of_the_first(name):
    form = FORMS[name]
    feeds, wrt = form.feeds(), [*form.sizes()]
    first = refgrad.gradient(form.model(), wrt, cotangent="ones")
    rng = np.random.default_rng(4)
    cotangents = {
        v.name: rng.uniform(-1, 1, size) for v, size in zip(first.graph.output, form.sizes().values(), strict=True)
    }
    expected = differences(first, feeds, cotangents, wrt)
    second = refgrad.gradient(first, wrt)
    named, _ = names_in(second)
    found = (
        get_backend("numpy")
        .prepare(second, precision="float64")
        .run(feeds | {named[key]: array for key, array in cotangents.items()})
    )
    for key, array in zip(wrt, found.values(), strict=True):
        np.testing.assert_allclose(array, expected[key], rtol=1e-6, atol=1e-8, err_msg=key)


# Random bodies: the same steps in three forms


OPERATORS = {"Add": 2, "Sub": 2, "Mul": 2, "Sin": 1, "Tanh": 1, "Identity": 1, "MatMul": 1}  # MatMul by W
NUMBER = st.integers(0, 11)  # of a value, by the number of those that there are


@dataclass(frozen=True)
class Body:
    """What a step computes of the states, of its slice and of x, which it captures."""

    operations: list[tuple[str, int, int]]
    states: list[int]  # what each of them becomes
    stacks: list[int]

    def nodes(self, inputs, prefix):
        """The nodes, and the names of the states and of the slices of the stacks after them."""
        values, nodes = [*inputs, "x"], []
        for k, (operator, *operands) in enumerate(self.operations):
            read = [values[n % len(values)] for n in operands[: OPERATORS[operator]]]
            values.append(f"{prefix}v{k}")
            nodes.append(helper.make_node(operator, read + ["W"] * (operator == "MatMul"), [values[-1]]))
        return nodes, *([values[n % len(values)] for n in places] for places in (self.states, self.stacks))


BODIES = st.builds(
    Body,
    st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), NUMBER, NUMBER), max_size=6),
    st.lists(NUMBER, min_size=1, max_size=3),
    st.lists(NUMBER, max_size=2),
)


def value(name, shape=(3,), kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def integers(name, *numbers):
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


class Iteration:
    """One iteration as a Scan, as a Loop, and step by step."""

    def __init__(self, body, steps, axis, backward, stack_axis, stack_backward):
        self.body, self.steps, self.axis, self.backward = body, steps, axis, backward
        self.stack_axis, self.stack_backward = stack_axis, stack_backward
        self.starts = [f"s{k}" for k in range(len(body.states))]
        self.ends = [f"e{k}" for k in range(len(body.states))]
        self.stacks = [f"r{k}" for k in range(len(body.stacks))]

    def made(self, inputs, prefix):
        """The nodes of a step; its results are nodes' own where they are captured."""
        nodes, states, stacks = self.body.nodes(inputs, prefix)
        results = []
        for k, name in enumerate([*states, *stacks]):
            if name == "x":
                name = f"{prefix}x{k}"
                nodes.append(helper.make_node("Identity", ["x"], [name]))
            results.append(name)
        return nodes, results

    def scan(self):
        formals = [f"f{k}" for k in range(len(self.starts))]
        nodes, results = self.made([*formals, "q"], "in_")
        graph = helper.make_graph(nodes, "b", [value(n) for n in [*formals, "q"]], [value(n) for n in results])
        settings = {"scan_input_axes": [self.axis], "scan_input_directions": [self.backward]}
        if self.stacks:
            settings["scan_output_axes"] = [self.stack_axis] * len(self.stacks)
            settings["scan_output_directions"] = [self.stack_backward] * len(self.stacks)
        read, written = [*self.starts, "Q"], [*self.ends, *self.stacks]
        return [helper.make_node("Scan", read, written, body=graph, num_scan_inputs=1, **settings)], []

    def loop(self):
        formals = [f"f{k}" for k in range(len(self.starts))]
        nodes, results = self.made([*formals, "q"], "in_")
        place = helper.make_node("Sub", ["last", "i"], ["place"])
        at = "place" if self.backward else "i"
        first = [place, helper.make_node("Gather", ["Q", at], ["q"], axis=self.axis)]
        goes = helper.make_node("Identity", ["on"], ["on_"])
        inputs = [value("i", (), INT64), value("on", (), BOOL), *(value(n) for n in formals)]
        outputs = [value("on_", (), BOOL), *(value(n) for n in results)]
        graph = helper.make_graph([*first, *nodes, goes], "b", inputs, outputs)
        raw = [f"{name}_in_order" for name in self.stacks]
        made = [helper.make_node("Loop", ["trips", "", *self.starts], [*self.ends, *raw], body=graph)]
        for inner, name in zip(raw, self.stacks, strict=True):
            made.append(helper.make_node("Gather", [inner, "order"], [f"{name}_ordered"], axis=0))
            turn = {"perm": [0, 1] if self.stack_axis == 0 else [1, 0]}
            made.append(helper.make_node("Transpose", [f"{name}_ordered"], [name], **turn))
        numbers = {"trips": self.steps, "last": self.steps - 1}
        scalars = [numpy_helper.from_array(np.array(n, np.int64), name) for name, n in numbers.items()]
        return made, [*scalars, integers("order", *self.order(self.stack_backward))]

    def unrolled(self):
        states, made, slices = self.starts, [], [[] for _ in self.stacks]
        for step, place in enumerate(self.order(self.backward)):
            made.append(helper.make_node("Gather", ["Q", f"at_{place}"], [f"q_{step}"], axis=self.axis))
            nodes, results = self.made([*states, f"q_{step}"], f"step{step}_")
            made += nodes
            states = results[: len(states)]
            for found, name in zip(slices, results[len(states) :], strict=True):
                found.append(name)
        made += [helper.make_node("Identity", [s], [e]) for s, e in zip(states, self.ends, strict=True)]
        for name, found in zip(self.stacks, slices, strict=True):
            parts = [f"{name}_{k}" for k in range(self.steps)]
            for part, k in zip(parts, self.order(self.stack_backward), strict=True):
                made.append(helper.make_node("Unsqueeze", [found[k], "stack_axis"], [part]))
            made.append(helper.make_node("Concat", [*parts, "empty"], [name], axis=self.stack_axis))
        empty = np.zeros((0, 3) if self.stack_axis == 0 else (3, 0), np.float32)
        places = [numpy_helper.from_array(np.array(k), f"at_{k}") for k in range(self.steps)]
        return made, [*places, numpy_helper.from_array(empty, "empty"), integers("stack_axis", self.stack_axis)]

    def order(self, backward):
        return range(self.steps)[:: -1 if backward else 1]

    def model(self, nodes, constants):
        sliced = (self.steps, 3) if self.axis == 0 else (3, self.steps)
        stacked = (self.steps, 3) if self.stack_axis == 0 else (3, self.steps)
        inputs = [value("x"), value("W", (3, 3)), value("Q", sliced), *map(value, self.starts)]
        outputs = [*map(value, self.ends), *(value(name, stacked) for name in self.stacks)]
        graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def gradients(model):
    """The gradients of every input for random cotangents, in double."""
    rng = np.random.default_rng(5)
    gradient = refgrad.gradient(model, wrt=[v.name for v in model.graph.input])
    onnx.checker.check_model(gradient)
    sizes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*model.graph.input, *model.graph.output)
    }
    outputs = {v.name for v in model.graph.output}
    feeds = {f"{name}_grad" if name in outputs else name: rng.uniform(-1, 1, size) for name, size in sizes.items()}
    return get_backend("numpy").prepare(gradient, precision="float64").run(feeds)


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-12, err_msg=name)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    BODIES, st.integers(0, 6), st.sampled_from((0, 1)), st.sampled_from((0, 1)), st.sampled_from((0, 1)),
    st.sampled_from((0, 1)),
)  # fmt: skip
def test_scan_loop_and_the_steps_written_out_agree(body, steps, axis, backward, stack_axis, stack_backward):
    form = Iteration(body, steps, axis, backward, stack_axis, stack_backward)
    expected = gradients(form.model(*form.unrolled()))
    assert_equal(gradients(form.model(*form.scan())), expected)
    assert_equal(gradients(form.model(*form.loop())), expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(BODIES, BODIES, st.booleans())
def test_if_and_the_branch_that_it_takes_agree(body, other, taken):
    inputs = [value("x"), value("W", (3, 3)), value("s0"), value("s1")]
    constant = numpy_helper.from_array(np.array(taken), "c")

    def branch(one, prefix):
        nodes, states, _ = one.nodes(["s0", "s1"], prefix)
        nodes.append(helper.make_node("Sin", states[:1], [f"{prefix}y"]))
        return nodes

    def model(nodes):
        graph = helper.make_graph(nodes, "g", inputs, [value("y")], [constant])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    then, left = (helper.make_graph(branch(one, "t_"), "b", [], [value("t_y")]) for one in (body, other))
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=left)
    inlined = [*branch(body if taken else other, "t_"), helper.make_node("Identity", ["t_y"], ["y"])]
    assert_equal(gradients(model([node])), gradients(model(inlined)))


def test_a_wrong_order_of_the_steps_is_caught():
    form = Iteration(Body([("Mul", 0, 1), ("Sin", 3, 0)], [4], [3]), 3, 0, 0, 0, 0)
    right = gradients(form.model(*form.unrolled()))
    form.backward = 1
    with pytest.raises(AssertionError):
        assert_equal(gradients(form.model(*form.scan())), right)


LONGER = "q = Concat <axis = 0> (p, x)"
STACKED = "o = Constant <value_ints = [0]> () q = Unsqueeze (p, o)"
MOVING = {
    "size": (
        f"""y = Loop (m, "", x) <body = b (int64 i, bool g, float[2] p)
            => (bool k, float[M] q) {{ k = Identity (g) {LONGER} }}>""",
        "size 2 along axis 0 before a step and 4",
    ),
    "rank": (
        f"""y = Loop (m, "", x) <body = b (int64 i, bool g, float[2] p)
            => (bool k, float[M, N] q) {{ k = Identity (g) {STACKED} }}>""",
        "1 axes before a step and 2 after it",
    ),
    "Scan": (
        f"""y, z = Scan <num_scan_inputs = 1, body = b (float[2] p, float e)
            => (float[M] q, float f) {{ {LONGER} f = Exp (e) }}> (x, x)""",
        "size 2 along axis 0 before a step and 4",
    ),
    "in an If": (
        f"""c = Cast <to = 9> (m) y = If (c) <then_branch = t () => (float[K] u) {{
                u = Loop (m, "", x) <body = b (int64 i, bool g, float[2] p)
                    => (bool k, float[M] q) {{ k = Identity (g) {LONGER} }}>
            }}, else_branch = e () => (float[2] v) {{ v = Exp (x) }}>""",
        "size 2 along axis 0 before a step and 4",
    ),
}


@pytest.mark.parametrize("form", MOVING)
def test_a_state_whose_shape_changes_is_refused(form):
    nodes, message = MOVING[form]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (int64 m, float[2] x) => (float[L] y) {{ {nodes} }}'
    )
    with pytest.raises(NoGradientError, match=f"its state 'p' has {message}"):
        refgrad.gradient(model)
    report = refgrad.preflight(model)
    assert not report.ok
    assert [row.verdict for row in report.rows if row.operator in ("Loop", "Scan")] == ["none"]


@pytest.mark.parametrize("quantization", ["straight-through", "clipped"])
def test_one_branch_alone_reads_a_quantised_value(quantization: str) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> m (float[2] x, bool c) => (float[2] y) {
            s = Constant <value = float {0.01}> () z = Constant <value = int8 {0}> () q = QuantizeLinear(x, s, z)
            y = If (c) <then_branch = t () => (float[2] a) { a = DequantizeLinear(q, s, z) },
                        else_branch = e () => (float[2] b) { b = Sin(x) }> }"""
    )
    gradient = refgrad.gradient(model, quantization=quantization, cotangent="ones")
    onnx.checker.check_model(gradient, full_check=True)
    x = np.array([0.5, 2.0], np.float32)  # the second is beyond the range of int8
    for backend in ("numpy", "ort-cpu"):
        if backend not in available():
            continue
        run = get_backend(backend).prepare(gradient).run
        taken = run({"x": x, "c": np.array(True)})["x_grad"]
        np.testing.assert_array_equal(taken, [1, 1] if quantization == "straight-through" else [1, 0])
        np.testing.assert_allclose(run({"x": x, "c": np.array(False)})["x_grad"], np.cos(x), rtol=1e-6)
