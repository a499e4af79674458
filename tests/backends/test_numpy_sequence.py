"""Sequences, optionals and SequenceMap: against ONNX Runtime, and against what the specification says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy_graphs import parsed
from runtime import RUNTIME, WITHOUT

from refgrad.backends import get_backend
from refgrad.errors import BackendError

pytestmark = pytest.mark.interpreter

NUMPY = get_backend("numpy")


def equal(got: Any, expected: Any) -> None:
    """The same lists of the same arrays, of the same types."""
    assert isinstance(got, list) == isinstance(expected, list)
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            equal(one, other)
    elif expected is None:
        assert got is None
    else:
        assert (np.asarray(got).dtype, np.shape(got)) == (np.asarray(expected).dtype, np.shape(expected))
        np.testing.assert_array_equal(got, expected)


def f(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i(value: Any) -> np.ndarray:
    return np.array(value, np.int64)


ABC = [f(1), f(2, 3), f()]
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
INSERT = "(seq(float[N]) s, float[M] x, int64 p) => (seq(float[K]) y) { y = SequenceInsert(s, x, p) }"
AT = "(seq(float[N]) s, int64 p) => (float[M] y) { y = SequenceAt(s, p) }"
ERASE = "(seq(float[N]) s, int64 p) => (seq(float[M]) y) { y = SequenceErase(s, p) }"


def split(attributes: str, sizes: str = "") -> str:
    given = f", int64{sizes} p" if sizes != "-" else ""
    node = f"SplitToSequence{attributes}({'x, p' if given else 'x'})"
    return f"(float[2, 3, 4] x{given}) => (seq(float[A, B, C]) y) {{ y = {node} }}"


def concat(attributes: str, rank: str = "A, B, C") -> str:
    return f"(seq(float[N, M, K]) s) => (float[{rank}] y) {{ y = ConcatFromSequence{attributes}(s) }}"


PIECES = [X[:, :1], X[:, 1:]]

# The graph, its feeds, and the result by the words of the specification where ONNX Runtime has another or none.
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("(float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x, x) }", {"x": f(1, 2)}, None),
    ("(float[N] x) => (seq(float[N]) y) { e = SequenceEmpty() y = SequenceInsert(e, x) }", {"x": f(1)}, None),
    (
        "(int8[N] x) => (int64 y) { e = SequenceEmpty<dtype = 3>() s = SequenceInsert(e, x) y = SequenceLength(s) }",
        {"x": np.zeros(1, np.int8)},
        None,
    ),
    *((INSERT, {"s": ABC, "x": f(9), "p": i(p)}, None) for p in (0, 1, 2, 3, -1, -2, -3)),
    (INSERT, {"s": [], "x": f(9), "p": i(0)}, ([f(9)],)),  # ONNX Runtime cannot be fed an empty sequence
    ("(seq(float[N]) s, float[M] x) => (seq(float[K]) y) { y = SequenceInsert(s, x) }", {"s": ABC, "x": f(9)}, None),
    *((AT, {"s": ABC, "p": i(p)}, None) for p in (0, 1, 2, -1, -2, -3)),
    (
        "(seq(float[N]) s, int32 p) => (float[M] y) { y = SequenceAt(s, p) }",
        {"s": ABC, "p": np.array(1, np.int32)},
        None,
    ),
    *((ERASE, {"s": ABC, "p": i(p)}, None) for p in (0, 1, 2, -1, -2, -3)),
    ("(seq(float[N]) s) => (seq(float[M]) y) { y = SequenceErase(s) }", {"s": ABC}, None),
    ("(seq(float[N]) s) => (int64 y) { y = SequenceLength(s) }", {"s": ABC}, None),
    ("(seq(float[N]) s) => (int64 y) { y = SequenceLength(s) }", {"s": []}, (i(0),)),
    *((split(f"<axis = {axis}>", "-"), {"x": X}, None) for axis in (0, 1, 2, -1, -3)),
    *(
        (split(f"<axis = {axis}, keepdims = 0>", "-").replace("A, B, C", "A, B"), {"x": X}, None)
        for axis in (0, 1, 2, -1)
    ),
    *((split(f"<axis = {axis}>"), {"x": X, "p": i(p)}, None) for axis, p in ((2, 1), (2, 2), (2, 3), (2, 4), (-1, 9))),
    # where sizes are given, keepdims is ignored; ONNX Runtime fails
    (split("<axis = 2, keepdims = 0>"), {"x": X, "p": i(3)}, ([X[..., :3], X[..., 3:]],)),
    *(
        (split(f"<axis = {axis}>", "[N]"), {"x": X, "p": i(p)}, None)
        for axis, p in ((2, [1, 3]), (1, [3]), (-2, [1, 0, 2]))
    ),
    (split("<axis = 2, keepdims = 0>", "[N]"), {"x": X, "p": i([1, 3])}, None),
    ("(float[3] x) => (seq(float) y) { y = SplitToSequence<keepdims = 0>(x) }", {"x": f(1, 2, 3)}, None),
    ("(float[0] x) => (seq(float[N]) y) { y = SplitToSequence(x) }", {"x": f()}, ([],)),
    (
        "(string[3] x, int64 p) => (seq(string[N]) y) { y = SplitToSequence(x, p) }",
        {"x": np.array(["a", "b", "c"], object), "p": i(2)},
        None,
    ),
    *((concat(f"<axis = {axis}>"), {"s": PIECES}, None) for axis in (1, -2)),
    *(
        (concat(f"<axis = {axis}, new_axis = 1>", "A, B, C, D"), {"s": [X, X + 1]}, None)
        for axis in (0, 1, 3, -1, -2, -4)
    ),
    ("(float[N] x) => (optional(float[N]) y) { y = Optional(x) }", {"x": f(1, 2)}, None),
    ("(seq(float[N]) x) => (optional(seq(float[N])) y) { y = Optional(x) }", {"x": ABC}, None),
    ("(float[N] x) => (float[N] y) { o = Optional(x) y = OptionalGetElement(o) }", {"x": f(1, 2)}, None),
    ("(float[N] x) => (bool y) { o = Optional(x) y = OptionalHasElement(o) }", {"x": f(1, 2)}, None),
    (
        "(float[N] x) => (bool y) { o = Optional<type = float[2]>() y = OptionalHasElement(o) }",
        {"x": f(1)},
        (np.array(False),),
    ),
    ("(optional(float[N]) x) => (bool y) { y = OptionalHasElement(x) }", {"x": None}, (np.array(False),)),
    ("(optional(float[N]) x) => (optional(float[N]) y) { y = Identity(x) }", {"x": None}, (None,)),
    ("(float[N] x) => (bool y) { y = OptionalHasElement(x) }", {"x": f(1)}, None),
    ("(float[N] x) => (float[N] y) { y = OptionalGetElement(x) }", {"x": f(1)}, None),
    (
        "(seq(float[N]) s, float[M] x) => (seq(float[K]) y) "
        "{ y = SequenceMap(s, x) <body = b (float[N] a, float[M] b) => (float[K] c) { c = Concat<axis = 0>(a, b) }> }",
        {"s": ABC, "x": f(9)},
        None,
    ),
    (
        "(seq(float[N]) s) => (seq(float[K]) y) "
        "{ y = SequenceMap(s) <body = b (float[N] a) => (float[K] c) { c = Neg(a) }> }",
        {"s": []},
        ([],),
    ),
    (
        "(seq(float[N]) s, seq(float[N]) t, float[1] x, float[1] w) => (seq(float[K]) y, seq(float[K]) z) "
        "{ y, z = SequenceMap(s, x, t) <body = b (float[N] a, float[1] b, float[N] d) => (float[K] c, float[K] e) "
        "{ c = Concat<axis = 0>(d, a, w) e = Mul(a, b) }> }",
        {"s": ABC, "t": ABC[::-1], "x": f(2), "w": f(7)},
        ([f(1, 7), f(2, 3, 2, 3, 7), f(1, 7)], [f(2), f(4, 6), f()]),
    ),
]


@pytest.mark.parametrize(
    ("text", "feeds", "expected"), CASES, ids=lambda x: x.partition("{")[2] if isinstance(x, str) else ""
)
def test_results(text: str, feeds: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    made = parsed(text)
    got = list(NUMPY.prepare(made).run(feeds).values())
    if expected is None:
        if not RUNTIME:
            pytest.skip(WITHOUT)
        expected = tuple(get_backend("ort-cpu").prepare(made).run(feeds).values())
    equal(got, list(expected))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (INSERT, {"s": ABC, "x": f(9), "p": i(4)}, r"SequenceInsert .* position 4 is not in \[-3, 3\]"),
    (INSERT, {"s": ABC, "x": f(9), "p": i(-4)}, r"position -4 is not in \[-3, 3\]"),
    (INSERT, {"s": [np.zeros(1)], "x": f(9), "p": i(0)}, "a sequence of float64 cannot hold float32"),
    (AT, {"s": ABC, "p": i(3)}, r"position 3 is not in \[-3, 2\]"),
    (AT, {"s": [], "p": i(0)}, "position 0 is not in"),
    (ERASE, {"s": ABC, "p": i(-4)}, r"position -4 is not in \[-3, 2\]"),
    ("(seq(float[N]) s) => (seq(float[M]) y) { y = SequenceErase(s) }", {"s": []}, "the sequence is empty"),
    (
        "(float[N] x, double[N] z) => (seq(float[N]) y) { y = SequenceConstruct(x, z) }",
        {"x": f(1), "z": np.ones(1)},
        "float32 cannot hold float64",
    ),
    (split("<axis = 3>", "-"), {"x": X}, "axis 3 of a tensor of rank 3"),
    (split("<axis = 2>"), {"x": X, "p": i(0)}, "split is 0, which is not positive"),
    (
        split("<axis = 2>", "[N]"),
        {"x": X, "p": i([1, 2])},
        r"split \[1, 2\] does not divide axis 2, which has 4 elements",
    ),
    (split("<axis = 2>", "[N]"), {"x": X, "p": i([5, -1])}, r"split \[5, -1\] does not divide"),
    (concat("<axis = 0>"), {"s": []}, "the sequence is empty"),
    ("(optional(float[N]) x) => (float[N] y) { y = OptionalGetElement(x) }", {"x": None}, "the optional is empty"),
    (
        "(seq(float[N]) s, seq(float[N]) t) => (seq(float[K]) y) "
        "{ y = SequenceMap(s, t) <body = b (float[N] a, float[N] d) => (float[K] c) { c = Add(a, d) }> }",
        {"s": ABC, "t": ABC[1:]},
        r"the sequences have \[3, 2\] elements",
    ),
    (
        "(seq(float[N]) s, float[1] x) => (seq(float[K]) y) "
        "{ y = SequenceMap(s, x) <body = b (float[N] a) => (float[K] c) { c = Neg(a) }> }",
        {"s": ABC, "x": f(1)},
        "the body takes 1 inputs and is given 2",
    ),
]


@pytest.mark.parametrize(
    ("text", "feeds", "message"), WRONG, ids=lambda x: x if isinstance(x, str) and "{" not in x else ""
)
def test_errors(text: str, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        NUMPY.prepare(parsed(text)).run(feeds)


def test_a_sequence_that_is_fed_stays_as_it_is() -> None:
    fed = list(ABC)
    for text, feeds in ((INSERT, {"x": f(9), "p": i(0)}), (ERASE, {"p": i(0)})):
        NUMPY.prepare(parsed(text)).run({"s": fed, **feeds})
        equal(fed, ABC)


def test_double_goes_through_sequences() -> None:
    text = "(seq(float[N]) s, float[M] x) => (seq(float[K]) y) { y = SequenceInsert(s, x) }"
    [got] = NUMPY.prepare(parsed(text), precision="float64").run({"s": ABC, "x": f(9)}).values()
    assert [x.dtype for x in got] == [np.float64] * 4
