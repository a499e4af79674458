"""Derivatives through sequences and optionals: against differences in double precision, ONNX Runtime and torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy_graphs import parsed
from onnx import helper
from runtime import RUNTIME

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import InvalidModelError, NoGradientError, UnknownNameError
from refgrad.reverse.assembly import names_in
from refgrad.tables.registry import RULES, rule

NUMPY = get_backend("numpy")
STEP = 1e-5
Value = Any  # an array, a list of arrays, or None for an empty optional


def arrays(value: Value) -> list[np.ndarray]:
    """The tensors in a value."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def random_like(value: Value, random: np.random.Generator) -> Value:
    """Normal numbers in place of those of `value`; of an empty optional none."""
    if isinstance(value, list):
        return [random.standard_normal(x.shape) for x in value]
    return value if value is None else random.standard_normal(np.shape(value))


def moved(value: Value, by: Value, step: float) -> Value:
    """`value` + step·`by`."""
    if isinstance(value, list):
        return [x + step * d for x, d in zip(value, by, strict=True)]
    return value if value is None else value + step * by


def dot(one: Value, other: Value) -> float:
    """The inner product of two values of the same structure."""
    pairs = list(zip(arrays(one), arrays(other), strict=True))
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    return float(sum((a * b).sum() for a, b in pairs))


def is_float(value: Value) -> bool:
    return value is None or all(x.dtype == np.float64 for x in arrays(value))


def check(model: onnx.ModelProto, feeds: Mapping[str, Value], orders: int = 2, runtime: bool = True) -> None:
    """The gradient of `model` at `feeds`, and that of the gradient, against central differences and ONNX Runtime."""
    random = np.random.default_rng(7)
    primal = NUMPY.prepare(model)
    results = primal.run(dict(feeds))
    gradient = refgrad.gradient(model)
    onnx.checker.check_model(gradient, full_check=True)
    cotangents, gradients = names_in(gradient)
    given = {name: random_like(results[output], random) for output, name in cotangents.items()}
    every = {**feeds, **given}
    got = NUMPY.prepare(gradient).run(every)
    directions = {name: random_like(feeds[name], random) for name in gradients}
    ahead, back = (
        primal.run({**feeds, **{n: moved(feeds[n], d, sign * STEP) for n, d in directions.items()}}) for sign in (1, -1)
    )
    expected = sum((dot(ahead[o], given[n]) - dot(back[o], given[n])) / (2 * STEP) for o, n in cotangents.items())
    found = sum(dot(got[name], directions[x]) for x, name in gradients.items() if feeds[x] is not None)
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-8)
    if runtime and RUNTIME and all(value is not None and len(arrays(value)) for value in every.values()):
        again = get_backend("ort-cpu").prepare(gradient).run(every)
        for name, value in got.items():
            for a, b in zip(arrays(value), arrays(again[name]), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    if orders > 1:
        check(gradient, every, orders - 1, runtime)


def d(*shape: int, start: float = 0.3) -> np.ndarray:
    return start + np.sin(np.arange(np.prod(shape, dtype=int)) + start).reshape(shape)


def i(value: Any) -> np.ndarray:
    return np.array(value, np.int64)


SEQ = [d(2), d(3, start=0.7), d(1, start=-0.4)]
SQUARES = "SequenceMap<body = b (double[K] e) => (double[L] z) { z = Mul(e, e) }>"

CASES: dict[str, tuple[str, dict[str, Value]]] = {
    "construct": (
        "(double[2] x, double[3] w) => (seq(double[N]) y) { a = Mul(x, x) b = Sin(w) y = SequenceConstruct(a, b, a) }",
        {"x": d(2), "w": d(3)},
    ),
    "construct, one tensor twice": (
        "(double[2] x) => (double[4] y) { a = Mul(x, x) s = SequenceConstruct(a, a) y = ConcatFromSequence<axis = 0>(s) }",
        {"x": d(2)},
    ),
    "insert at the end": (
        f"(seq(double[N]) s, double[M] x) => (seq(double[K]) y) {{ a = Sin(x) t = {SQUARES}(s) y = SequenceInsert(t, a) }}",
        {"s": SEQ, "x": d(4)},
    ),
    **{
        f"insert at {p}": (
            f"(seq(double[N]) s, double[M] x, int64 p) => (seq(double[K]) y) "
            f"{{ a = Sin(x) t = {SQUARES}(s) y = SequenceInsert(t, a, p) }}",
            {"s": SEQ, "x": d(4), "p": i(p)},
        )
        for p in (0, 1, 2, 3, -1, -2, -3)
    },
    **{
        f"insert at the constant {p}": (
            f"(seq(double[N]) s, double[M] x) => (seq(double[K]) y) "
            f"{{ p = Constant<value = int64 {{{p}}}>() y = SequenceInsert(s, x, p) }}",
            {"s": SEQ, "x": d(4)},
        )
        for p in (0, 3, -1, -3)
    },
    "insert into an empty sequence": (
        "(seq(double[N]) s, double[M] x) => (seq(double[K]) y) { a = Sin(x) y = SequenceInsert(s, a) }",
        {"s": [], "x": d(4)},
    ),
    "insert into none": (
        "(double[M] x) => (seq(double[K]) y) { e = SequenceEmpty<dtype = 11>() a = Sin(x) y = SequenceInsert(e, a) }",
        {"x": d(4)},
    ),
    "erase alone": (
        "(seq(double[N]) s, int64 p) => (seq(double[K]) y) { y = SequenceErase(s, p) }",
        {"s": SEQ, "p": i(0)},
    ),
    "erase the last": (
        f"(seq(double[N]) s) => (seq(double[K]) y) {{ t = {SQUARES}(s) y = SequenceErase(t) }}",
        {"s": SEQ},
    ),
    **{
        f"erase at {p}": (
            f"(seq(double[N]) s, int64 p) => (seq(double[K]) y) {{ t = {SQUARES}(s) y = SequenceErase(t, p) }}",
            {"s": SEQ, "p": i(p)},
        )
        for p in (0, 1, 2, -1, -2, -3)
    },
    **{
        f"erase at the constant {p}": (
            f"(seq(double[N]) s) => (seq(double[K]) y) "
            f"{{ t = {SQUARES}(s) p = Constant<value = int64 {{{p}}}>() y = SequenceErase(t, p) }}",
            {"s": SEQ},
        )
        for p in (1, -1, -3)
    },
    **{
        f"at {p}": (
            "(seq(double[N]) s, int64 p) => (double[M] y) { a = SequenceAt(s, p) y = Mul(a, a) }",
            {"s": SEQ, "p": i(p)},
        )
        for p in (0, 1, 2, -1, -2, -3)
    },
    "at a place of 32 bits": (
        "(seq(double[N]) s, int32 p) => (double[M] y) { a = SequenceAt(s, p) y = Mul(a, a) }",
        {"s": SEQ, "p": np.array(-2, np.int32)},
    ),
    "several places of one sequence": (
        "(seq(double[N]) s) => (double[M] y) { p = Constant<value = int64 {0}>() q = Constant<value = int64 {-1}>() "
        "a = SequenceAt(s, p) b = SequenceAt(s, q) c = SequenceAt(s, p) ab = Mul(a, b) y = Mul(ab, c) }",
        {"s": SEQ},
    ),
    "places and the whole": (
        f"(seq(double[N]) s) => (double[M] y, seq(double[K]) t) {{ p = Constant<value = int64 {{1}}>() "
        f"a = SequenceAt(s, p) y = Mul(a, a) t = {SQUARES}(s) }}",
        {"s": SEQ},
    ),
    "elements that differ in size broadcast": (
        "(seq(double[N]) s) => (double[M] y) { p = Constant<value = int64 {0}>() q = Constant<value = int64 {2}>() "
        "a = SequenceAt(s, p) b = SequenceAt(s, q) y = Mul(a, b) }",
        {"s": SEQ},
    ),
    "split sizes that differ broadcast": (
        "(double[N, 4] x, int64[K] n) => (double[A, B] y) { s = SplitToSequence(x, n) p = Constant<value = int64 {0}>() "
        "q = Constant<value = int64 {1}>() a = SequenceAt(s, p) b = SequenceAt(s, q) y = Mul(a, b) }",
        {"x": d(4, 4), "n": i([1, 3])},
    ),
    **{
        f"split{attributes}{sizes} of {kind}": (
            f"({kind} x) => (seq(double[{rank}]) y) {{ a = Mul(x, x) {constant} y = SplitToSequence{attributes}({given}) }}",
            {"x": d(2, 3, 4)},
        )
        for kind in ("double[2, 3, 4]", "double[A, B, C]")
        for attributes, rank in (
            ("", "D, E, F"),
            ("<axis = 1>", "D, E, F"),
            ("<axis = -1, keepdims = 0>", "D, E"),
            ("<axis = 1, keepdims = 0>", "D, E"),
            ("<keepdims = 0>", "D, E"),
        )
        for sizes, constant, given in (
            ("", "", "a"),
            *((f" {n}", f"n = Constant<value = int64 {{{n}}}>()", "a, n") for n in (1, 2) if "0>" not in attributes),
        )
    },
    **{
        f"split into {n}": (
            "(double[2, 3, 4] x, int64[K] n) => (seq(double[A, B, C]) y) "
            "{ a = Mul(x, x) y = SplitToSequence<axis = -1>(a, n) }",
            {"x": d(2, 3, 4), "n": i(n)},
        )
        for n in ([1, 3], [4], [2, 0, 2])
    },
    **{
        f"split nothing{attributes}": (
            f"(double[A, B] x) => (seq(double[{rank}]) y) {{ a = Mul(x, x) y = SplitToSequence{attributes}(a) }}",
            {"x": d(*shape)},
        )
        for attributes, shape, rank in (
            ("", (0, 2), "C, D"),
            ("<axis = 1, keepdims = 0>", (2, 0), "C"),
            ("<axis = -1>", (2, 0), "C, D"),
        )
    },
    **{
        f"concat along {axis}": (
            f"(seq(double[A, B]) s) => (double[C, D] y) {{ a = ConcatFromSequence<axis = {axis}>(s) y = Mul(a, a) }}",
            {"s": [d(*shape) for shape in shapes]},
        )
        for axis, shapes in (
            (0, [(2, 3), (1, 3), (0, 3)]),
            (1, [(2, 1), (2, 3)]),
            (-1, [(2, 1), (2, 3)]),
            (-2, [(2, 3)]),
        )
    },
    **{
        f"stack along {axis}": (
            f"(seq(double[A, B]) s) => (double[C, D, E] y) "
            f"{{ a = ConcatFromSequence<axis = {axis}, new_axis = 1>(s) y = Mul(a, a) }}",
            {"s": [d(2, 3), d(2, 3, start=0.9)]},
        )
        for axis in (0, 1, 2, -1, -3)
    },
    "optional": (
        "(double[N] x) => (optional(double[N]) y) { a = Mul(x, x) y = Optional(a) }",
        {"x": d(3)},
    ),
    "optional and back": (
        "(double[N] x) => (double[N] y) { a = Mul(x, x) o = Optional(a) p = Identity(o) y = OptionalGetElement(p) }",
        {"x": d(3)},
    ),
    "optional sequence and back": (
        f"(seq(double[N]) s) => (seq(double[N]) y) {{ a = {SQUARES}(s) o = Optional(a) y = OptionalGetElement(o) }}",
        {"s": SEQ},
    ),
    "element of a tensor": ("(double[N] x) => (double[N] y) { o = OptionalGetElement(x) y = Mul(o, o) }", {"x": d(3)}),
    "element of a sequence": (
        f"(seq(double[N]) s) => (seq(double[N]) y) {{ o = OptionalGetElement(s) y = {SQUARES}(o) }}",
        {"s": SEQ},
    ),
    **{
        f"optional input, {'empty' if x is None else 'given'}": (
            "(optional(double[3]) x, double[3] w) => (double[3] y) { has = OptionalHasElement(x) "
            "v = If(has) <then_branch = t () => (double[3] p) { e = OptionalGetElement(x) p = Mul(e, w) }, "
            "else_branch = u () => (double[3] q) { q = Sin(w) }> y = Mul(v, v) }",
            {"x": x, "w": d(3)},
        )
        for x in (d(3, start=0.5), None)
    },
    **{
        f"optional sequence, {'empty' if x is None else 'given'}": (
            "(optional(seq(double[N])) x, double[3] w) => (seq(double[K]) y) { has = OptionalHasElement(x) "
            "y = If(has) <then_branch = t () => (seq(double[K]) p) { e = OptionalGetElement(x) a = Mul(w, w) "
            "p = SequenceInsert(e, a) }, "
            "else_branch = u () => (seq(double[K]) q) { b = Sin(w) q = SequenceConstruct(b, b) }> }",
            {"x": x, "w": d(3)},
        )
        for x in (SEQ, None)
    },
    "identity": ("(seq(double[N]) s) => (seq(double[N]) y) { y = Identity(s) }", {"s": SEQ}),
    "no output depends on it": (
        "(seq(double[N]) s, double[M] x) => (int64 n, double[M] y) { n = SequenceLength(s) y = Mul(x, x) }",
        {"s": SEQ, "x": d(2)},
    ),
    "map": (f"(seq(double[N]) s) => (seq(double[N]) y) {{ y = {SQUARES}(s) }}", {"s": SEQ}),
    "map of nothing": (
        "(seq(double[N]) s, double[1] w) => (seq(double[N]) y) { y = SequenceMap<body = b (double[K] e, double[1] f) => "
        "(double[L] z) { z = Mul(e, f) }>(s, w) }",
        {"s": [], "w": d(1)},
    ),
    "map with a tensor, a sequence and a capture": (
        "(seq(double[N]) s, seq(double[1]) t, double[1] w, double[1] v) => (seq(double[N]) y, seq(double[N]) r) { u = Sin(v) "
        "y, r = SequenceMap<body = b (double[K] e, double[1] f, double[1] g) => (double[L] z, double[L] x) "
        "{ p = Mul(e, f) q = Exp(p) z = Mul(q, g) h = Mul(u, g) x = Mul(h, q) }>(s, t, w) }",
        {"s": SEQ, "t": [d(1), d(1, start=0.5), d(1, start=2)], "w": d(1, start=1), "v": d(1, start=-1)},
    ),
    "map with one output of no use": (
        "(seq(double[N]) s) => (double[M] y) { a, n = SequenceMap<body = b (double[K] e) => (double[L] z, int64[1] n) "
        "{ z = Exp(e) n = Shape(e) }>(s) l = ConcatFromSequence<axis = 0>(n) y = ConcatFromSequence<axis = 0>(a) }",
        {"s": SEQ},
    ),
    "map with an initializer and a sequence within": (
        "(seq(double[N]) s) => (seq(double[M]) y) { y = SequenceMap<body = b (double[K] e) => (double[L] z) "
        "<double c = {2}> { a = Mul(e, c) t = SequenceConstruct(a, e, a) r = ConcatFromSequence<axis = 0>(t) "
        "z = Mul(r, r) }>(s) }",
        {"s": SEQ},
    ),
    "map of a map": (
        f"(seq(double[N]) s) => (seq(double[M]) y) {{ y = SequenceMap<body = b (double[K] e) => (double[L] z) "
        f"{{ t = SplitToSequence(e) q = {SQUARES}(t) r = ConcatFromSequence<axis = 0>(q) z = Mul(r, e) }}>(s) }}",
        {"s": SEQ},
    ),
    "branches": (
        f"(seq(double[N]) s, double[2] x, bool c) => (seq(double[M]) y) {{ y = If(c) <then_branch = t () => "
        f"(seq(double[K]) p) {{ a = Sin(x) p = SequenceInsert(s, a) }}, else_branch = u () => (seq(double[K]) q) "
        f"{{ q = {SQUARES}(s) }}> }}",
        {"s": SEQ, "x": d(2), "c": np.array(False)},
    ),
    "loop that adds": (
        "(double[2] x, int64 n) => (double[M] y) { s = SequenceEmpty<dtype = 11>() e, l = Loop(n, , s, x) <body = b "
        "(int64 i, bool go, seq(double[N]) r, double[2] h) => (bool gone, seq(double[N]) w, double[2] k) "
        "{ gone = Identity(go) k = Sin(h) w = SequenceInsert(r, k) }> a = ConcatFromSequence<axis = 0>(e) y = Mul(a, a) }",
        {"x": d(2), "n": i(3)},
    ),
    "loop over a sequence": (
        "(seq(double[N]) s, double[1] w) => (seq(double[M]) y) { t = SequenceEmpty<dtype = 11>() n = SequenceLength(s) "
        "y = Loop(n, , t) <body = b (int64 i, bool go, seq(double[N]) r) => (bool gone, seq(double[N]) q) "
        "{ gone = Identity(go) e = SequenceAt(s, i) a = Mul(e, w) b = Mul(a, a) q = SequenceInsert(r, b) }> }",
        {"s": SEQ, "w": d(1)},
    ),
    **{
        f"loop that reads the last, {n} steps": (
            "(seq(double[2]) s, int64 n) => (seq(double[2]) y) { p = Constant<value = int64 {-1}>() "
            "y = Loop(n, , s) <body = b (int64 i, bool go, seq(double[2]) r) => (bool gone, seq(double[2]) q) "
            "{ gone = Identity(go) e = SequenceAt(r, p) a = Sin(e) q = SequenceInsert(r, a) }> }",
            {"s": [d(2)], "n": i(n)},
        )
        for n in (0, 1, 3)
    },
    "loop whose sequence nobody reads": (
        "(double[2] x, int64 n) => (double[2] y) { s = SequenceConstruct(x) "
        ", y = Loop(n, , s, x) <body = b (int64 i, bool go, seq(double[2]) r, double[2] h) => "
        "(bool gone, seq(double[2]) w, double[2] k) { gone = Identity(go) p = Constant<value = int64 {0}>() "
        "e = SequenceAt(r, p) k = Mul(h, e) w = SequenceInsert(r, k) }> }",
        {"x": d(2), "n": i(2)},
    ),
}


FORWARD = ["construct", "insert at -1", "split into [1, 3]", "concat along 1", "map", "loop that adds"]


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode(name: str) -> None:
    text, feeds = CASES[name]
    model = parsed(text, opset=18)
    forward = refgrad.jvp(model)
    random = np.random.default_rng(3)
    tangents = {
        x: random_like(feeds[x], random) for x in feeds if f"{x}_tangent" in (v.name for v in forward.graph.input)
    }
    got = NUMPY.prepare(forward).run({**feeds, **{f"{x}_tangent": tangent for x, tangent in tangents.items()}})
    ahead, back = (
        NUMPY.prepare(model).run({**feeds, **{x: moved(feeds[x], t, step) for x, t in tangents.items()}})
        for step in (STEP, -STEP)
    )
    for output, value in ahead.items():
        for found, one, other in zip(
            arrays(got[f"{output}_tangent"]), arrays(value), arrays(back[output]), strict=True
        ):
            np.testing.assert_allclose(found, (one - other) / (2 * STEP), rtol=1e-7, atol=1e-9)


@pytest.mark.torch
def test_torch() -> None:
    """A list that is filled row by row, without its last element in one factor of the result."""
    torch = pytest.importorskip("torch")
    model = parsed(
        "(double[N, 2] x, double[2] w) => (double[A, B] y) { rows = SplitToSequence<axis = 0>(x) n = SequenceLength(rows) "
        "t = SequenceEmpty<dtype = 11>() s = Loop(n, , t) <body = b (int64 i, bool go, seq(double[a, b]) r) => "
        "(bool gone, seq(double[c, d]) q) { gone = Identity(go) e = SequenceAt(rows, i) h = Mul(e, w) k = Tanh(h) "
        "q = SequenceInsert(r, k) }> p = Constant<value = int64 {-1}>() z = SequenceAt(s, p) u = SequenceErase(s) "
        "c = ConcatFromSequence<axis = 0>(u) y = Mul(c, z) }",
        opset=18,
    )
    feeds = {"x": d(4, 2), "w": d(2, start=0.8), "y_grad": d(3, 2, start=0.1)}
    x, w, weights = (torch.tensor(value, requires_grad=name != "y_grad") for name, value in feeds.items())
    made = [torch.tanh(row * w) for row in x.split(1)]
    (torch.cat(made[:-1]) * made[-1] * weights).sum().backward()
    got = NUMPY.prepare(refgrad.gradient(model)).run(feeds)
    for name, value in (("x_grad", x), ("w_grad", w)):
        np.testing.assert_allclose(got[name], value.grad.numpy(), rtol=1e-13, atol=1e-15)


NO_RUNTIME = {"map of a map"}  # ONNX Runtime runs no SequenceMap within another, not even forwards


@pytest.mark.parametrize("name", CASES)
def test_differences(name: str) -> None:
    text, feeds = CASES[name]
    check(parsed(text, opset=18), feeds, runtime=name not in NO_RUNTIME)


@pytest.mark.parametrize("name", ["places and the whole", "split into [1, 3]", "map", "loop that adds"])
def test_an_older_opset(name: str) -> None:
    text, feeds = CASES[name]
    model = parsed(text, opset=17)
    assert refgrad.gradient(model).opset_import[0].version == 17
    check(model, feeds)


def test_opset_16_is_raised_to_that_of_sequence_map() -> None:
    text, feeds = CASES["concat along 1"]
    model = parsed(text, opset=16)
    assert refgrad.gradient(model).opset_import[0].version == 17
    check(model, feeds, orders=1)


def test_ones() -> None:
    model = parsed(f"(seq(double[N]) s) => (seq(double[N]) y) {{ y = {SQUARES}(s) }}", opset=18)
    gradient = refgrad.gradient(model, cotangent="ones")
    [got] = NUMPY.prepare(gradient).run({"s": SEQ}).values()
    for found, x in zip(got, SEQ, strict=True):
        np.testing.assert_array_equal(found, 2 * x)


def test_the_structure_of_the_result() -> None:
    model = parsed(
        "(seq(float[N]) s, seq(int64[N]) n, optional(float[2]) o, float[2] x) => (seq(float[N]) y, float[2] z) "
        "{ y = Identity(s) e = OptionalGetElement(o) z = Mul(e, x) }",
        opset=18,
    )
    gradient = refgrad.gradient(model)
    tensor = helper.make_tensor_type_proto(
        onnx.TensorProto.FLOAT, [None]
    )  # elements may differ in size: it has no name
    kinds = {v.name: v.type for v in (*gradient.graph.input, *gradient.graph.output)}
    assert list(kinds) == ["s", "n", "o", "x", "y_grad", "z_grad", "s_grad", "o_grad", "x_grad"]
    assert kinds["s_grad"] == kinds["y_grad"] == helper.make_sequence_type_proto(tensor)
    assert kinds["o_grad"].tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_preflight() -> None:
    model = parsed(
        "(seq(float[N]) s) => (int64 n, float[M] y) { n = SequenceLength(s) p = Constant<value = int64 {0}>() "
        "y = SequenceAt(s, p) }",
        opset=18,
    )
    report = refgrad.preflight(model)
    assert report.ok
    assert [(row.operator, row.verdict) for row in report.rows] == [("SequenceLength", "zero"), ("SequenceAt", "rule")]


ERRORS = {
    "two types in one sequence": (
        "(float[2] x, double[2] w) => (seq(float[2]) y) { y = SequenceConstruct(x, w) }",
        {},
        InvalidModelError,
        "SequenceConstruct 'SequenceConstruct_0' makes a sequence of mixed element types: 'x' of type float, 'w' of type "
        "double. Cast them to one type.",
    ),
    "another type inserted": (
        "(seq(float[2]) s, double[2] w) => (seq(float[2]) y) { y = SequenceInsert(s, w) }",
        {},
        InvalidModelError,
        "makes a sequence of mixed element types: 's' of type float, 'w' of type double",
    ),
    "a sequence of integers": (
        "(seq(int64[N]) s, float x) => (seq(int64[N]) y, float z) { y = Identity(s) z = Mul(x, x) }",
        {"wrt": ["s"]},
        UnknownNameError,
        "'s' in wrt holds tensors of type int64: only floats have a derivative",
    ),
    "a sequence captured by SequenceMap": (
        "(seq(float[N]) s, seq(float[1]) t) => (seq(float[N]) y) { p = Constant<value = int64 {0}>() y = SequenceMap"
        "<body = b (float[K] e) => (float[L] z) { a = SequenceAt(t, p) z = Mul(e, a) }>(s) }",
        {},
        NoGradientError,
        "captures the sequence 't', whose cotangent no element can return: give it to the node as an input",
    ),
    "a state that is needed and a sequence": (
        f"(seq(float[N]) s, int64 n) => (seq(float[M]) y) {{ y = Loop(n, , s) <body = b (int64 i, bool go, "
        f"seq(float[N]) r) => (bool gone, seq(float[N]) q) {{ gone = Identity(go) "
        f"q = {SQUARES.replace('double', 'float')}(r) }}> }}",
        {},
        NoGradientError,
        "'r' in the body of node",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    text, options, error, message = ERRORS[name]
    with pytest.raises(error) as raised:
        refgrad.gradient(parsed(text, opset=18), **options)
    assert message in str(raised.value)


WRONG: dict[str, tuple[str, list[str], str, Callable[..., Any]]] = {
    "a position from the back that is not moved": (
        "SequenceInsert",
        ["input_sequence", "tensor"],
        "insert at -1",
        lambda op, d_output_sequence, position: (
            op.SequenceErase(d_output_sequence, position),
            op.SequenceAt(d_output_sequence, position),
        ),
    ),
    "zeros at the end": (
        "SequenceErase",
        ["input_sequence"],
        "erase alone",
        lambda op, d_output_sequence, input_sequence, position: op.SequenceInsert(
            d_output_sequence, op.zeros_like(op.SequenceAt(input_sequence, position))
        ),
    ),
    "the cotangent before its place": (
        "SequenceAt",
        ["input_sequence"],
        "at 1",
        lambda op, d_tensor, input_sequence: op.SequenceErase(
            op.SequenceInsert(op.zeros_like(input_sequence), d_tensor, op.const(np.array(0)))
        ),
    ),
    "a factor of 2.001": (
        "ConcatFromSequence",
        ["input_sequence"],
        "stack along 1",
        lambda op, d_concat_result, axis: op.SplitToSequence(op.Mul(d_concat_result, 2.001), axis=axis, keepdims=0),
    ),
    "an optional that is negated": ("Optional", ["input"], "optional and back", lambda op, d_output: op.Neg(d_output)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op_type, wrt, name, function = WRONG[wrong]
    monkeypatch.setitem(RULES, ("", op_type), RULES["", op_type])  # so that it is put back
    rule(op_type, replace=True, wrt=wrt)(function)
    text, feeds = CASES[name]
    with pytest.raises(AssertionError):
        check(parsed(text, opset=18), feeds, orders=1)
