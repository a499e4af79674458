"""Cases of sequences and optionals. The models make them from tensors that are fed, and end in a tensor made from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.control_flow import Feeds, FlowRow, count, flow

_THREE = "s0 = SequenceConstruct(x, u, x)"
_ROWS = "y = ConcatFromSequence <axis = 0> (s)"
_OF_THREE: Feeds = {"x": (2, 3), "u": (1, 3)}

MAKING: tuple[tuple[str, FlowRow], ...] = (
    ("SequenceConstruct", ("twice", "T[i, j] y", f"[node] s = SequenceConstruct(x, u, x) {_ROWS}", _OF_THREE)),
    (
        "SequenceConstruct",
        (
            "numbers",
            "T y",
            "[node] s = SequenceConstruct(x, u) i = Constant <value = int64 {1}> () y0 = SequenceAt(s, i) y = Mul(y0, x)",
            {"x": (), "u": ()},
        ),
    ),
    (
        "SequenceConstruct",
        ("of-nothing", "T[i, j] y", f"[node] s = SequenceConstruct(x, u) {_ROWS}", {"x": (0, 3), "u": (2, 3)}),
    ),
    (
        "SplitToSequence",
        (
            "pieces",
            "T[i, j] y",
            "[node] s = SplitToSequence <axis = 1> (x, n) y0 = SequenceAt(s, i) y = Mul(y0, y0)",
            {},
        ),
    ),
    (
        "SplitToSequence",
        (
            "rows",
            "T[j] y",
            "[node] s = SplitToSequence <keepdims = 0> (x) y0 = SequenceAt(s, i) y1 = SequenceAt(s, k) y = Mul(y0, y1)",
            {"x": (3, 4), "i": count(-1), "k": count(0)},
        ),
    ),
    (
        "SplitToSequence",
        (
            "lengths",
            "T[i] y",
            "[node] s = SplitToSequence (x, n) y0 = SequenceAt(s, i) y = Sin(y0)",
            {"x": (5,), "n": np.array([2, 3]), "i": count(1)},
        ),
    ),
    (
        "SplitToSequence",
        (
            "nothing",
            "T[i, j] y",
            "[node] s = SplitToSequence <axis = -1> (x, n) y0 = SequenceAt(s, i) y = Sin(y0)",
            {"x": (0, 4), "n": count(2), "i": count(1)},
        ),
    ),
)
_PIECES: Feeds = {"x": (3, 5), "n": count(2), "i": count(1)}

READING: tuple[tuple[str, FlowRow], ...] = (
    ("SequenceAt", ("second", "T[i, j] y", f"{_THREE} [node] y0 = SequenceAt(s0, k) y = Mul(y0, x)", {})),
    ("SequenceInsert", ("second", "T[i, j] y", f"{_THREE} e = Sin(x) [node] s = SequenceInsert(s0, e, k) {_ROWS}", {})),
    ("SequenceErase", ("second", "T[i, j] y", f"{_THREE} [node] s = SequenceErase(s0, k) {_ROWS}", {})),
)
LAST: tuple[tuple[str, FlowRow], ...] = (
    (
        "SequenceInsert",
        ("last", "T[i, j] y", f"{_THREE} e = Sin(u) [node] s = SequenceInsert(s0, e) {_ROWS}", _OF_THREE),
    ),
    ("SequenceErase", ("last", "T[i, j] y", f"{_THREE} [node] s = SequenceErase(s0) {_ROWS}", _OF_THREE)),
    (
        "ConcatFromSequence",
        ("rows", "T[i, j] y", f"{_THREE} [node] y0 = ConcatFromSequence <axis = 0> (s0) y = Sin(y0)", _OF_THREE),
    ),
    (
        "ConcatFromSequence",
        (
            "stack",
            "T[i, j, k] y",
            "s = SequenceConstruct(x, u, x) [node] y0 = ConcatFromSequence <axis = -1, new_axis = 1> (s) y = Sin(y0)",
            {"x": (2, 3), "u": (2, 3)},
        ),
    ),
    (
        "SequenceMap",
        (
            "product",
            "T[i, j] y",
            f"""{_THREE} [node] s = SequenceMap (s0, b) <body = f (T[] e, T[] d) => (T[] r) {{
                  r0 = MatMul(e, w) r = Mul(r0, d) }}> {_ROWS}""",
            {**_OF_THREE, "b": (3,), "w": (3, 3)},
        ),
    ),
    (
        "SequenceMap",
        (
            "two-sequences",
            "T[i, j] y",
            f"""{_THREE} t0 = SequenceConstruct(u, u, x)
                [node] s, t = SequenceMap (s0, t0) <body = f (T[] e, T[] d) => (T[] r, T[] q) {{
                  r = Mul(e, d) q = Sin(e) }}>
                y0 = ConcatFromSequence <axis = 0> (s) y1 = ConcatFromSequence <axis = 0> (t)
                y = Concat <axis = 0> (y0, y1)""",
            _OF_THREE,
        ),
    ),
    (
        "Optional",
        ("tensor", "T[i, j] y", "[node] o = Optional(x) e = OptionalGetElement(o) y = Sin(e)", {"x": (2, 0)}),
    ),
    ("Optional", ("number", "T y", "[node] o = Optional(x) e = OptionalGetElement(o) y = Sin(e)", {"x": ()})),
    (
        "Optional",
        ("sequence", "T[i, j] y", f"{_THREE} [node] o = Optional(s0) s = OptionalGetElement(o) {_ROWS}", _OF_THREE),
    ),
    (
        "OptionalGetElement",
        (
            "sequence",
            "T[i, j] y",
            f"{_THREE} o = Optional(s0) [node] s = OptionalGetElement(o) {_ROWS}",
            _OF_THREE,
        ),
    ),
    (
        "OptionalGetElement",
        ("tensor", "T[i] y", "[node] y0 = OptionalGetElement(x) y = Sin(y0)", {"x": (0,)}),
    ),
    (
        "OptionalGetElement",
        ("number", "T y", "[node] y0 = OptionalGetElement(x) y = Sin(y0)", {"x": ()}),
    ),
)


def cases() -> Iterator[Case]:
    """Every operator under every kind of declaration; positions and lengths fed and constant."""
    for op, (name, outputs, nodes, given) in MAKING:
        row: FlowRow = (name, outputs, nodes, given or _PIECES)
        for shapes in SHAPES:
            yield flow(op, row, shapes=shapes)
        if integers := tuple(n for n, value in row[3].items() if n in "nik"):
            yield flow(op, row, constant=integers)
    for op, (name, outputs, nodes, _) in READING:
        for position in (0, 1, -1, -2):
            row = (f"{name}-at-{position}", outputs, nodes, {**_OF_THREE, "k": count(position)})
            for shapes in SHAPES:
                yield flow(op, row, shapes=shapes)
            yield flow(op, row, constant=("k",))
    for op, row in LAST:
        for shapes in SHAPES:
            yield flow(op, row, shapes=shapes)
    for op, row in LAST[:5]:
        for kind in ("double", "float16"):
            yield flow(op, row, kind=kind)
