"""Cases of If, Loop and Scan: captured weights, states of all kinds, axes and directions, no steps, nested bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from refgrad.conformance.case import SHAPES, Case
from refgrad.model import native
from refgrad.protos.traverse import graphs

# The feeds: the shape of random floats, or the array itself.
Feeds: TypeAlias = Mapping[str, tuple[int, ...] | np.ndarray]
# A name, the declared outputs, the nodes with "T" for the type of the floats, and the feeds.
FlowRow: TypeAlias = tuple[str, str, str, Feeds]

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float": np.float32, "double": np.float64}
YES, NO = np.array(True), np.array(False)


def count(number: int) -> np.ndarray:
    """A number of steps."""
    return np.array(number, np.int64)


_TWO_WAYS = """[node] y = If (c) <then_branch = t () => (T[] p) { p0 = MatMul(x, w) p = Tanh(p0) },
               else_branch = e () => (T[] q) { q0 = Mul(x, b) q = Sigmoid(q0) }>"""
_WEIGHTS: Feeds = {"x": (2, 3), "w": (3, 3), "b": (3,)}
_PIECE = """s = ReduceSum <keepdims = 0> (x) zero = Constant <value = T {0}> () c = Less(s, zero)
            [node] y = If (c) <then_branch = t () => (T[] p) { p = Exp(x) }, else_branch = e () => (T[] q) { q = Mul(x, x) }>"""

IFS: tuple[FlowRow, ...] = (
    ("true", "T[i, j] y", _TWO_WAYS, {"c": YES, **_WEIGHTS}),
    ("false", "T[i, j] y", _TWO_WAYS, {"c": NO, **_WEIGHTS}),
    ("of-nothing", "T[i, j] y", _TWO_WAYS, {"c": NO, "x": (0, 3), "w": (3, 3), "b": (3,)}),
    ("by-what-varies", "T[i, j] y", _PIECE, {"x": (2, 3)}),
    (
        "other-shapes",
        "T[i, j] y",
        """[node] r = If (c) <then_branch = t () => (T[] p) { p = ReduceSum <keepdims = 1> (x, axis) },
                             else_branch = e () => (T[] q) { q = Mul(x, x) }>
           y = Mul(r, b)""",
        {"c": YES, "x": (2, 3), "b": (3,), "axis": np.array([1])},
    ),
    (
        "constant-in-a-branch",
        "T[i, j] y",
        """[node] r = If (c) <then_branch = t () => (T[] p) { p = Constant <value = T[1] {2}> () },
                             else_branch = e () => (T[] q) { q = Mul(x, b) }>
           y = Mul(r, x)""",
        {"c": YES, "x": (2, 3), "b": (3,)},
    ),
    (
        "several-results",
        "T[i, j] y, T[k] z",
        """[node] y, z, n = If (c) <
             then_branch = t () => (T[] p, T[] p1, int64[] p2) { p = Sigmoid(x) p1 = Identity(b) p2 = Shape(x) },
             else_branch = e () => (T[] q, T[] q1, int64[] q2) { q = Mul(x, b) q1 = Sin(b) q2 = Shape(b) }>""",
        {"c": YES, "x": (2, 3), "b": (3,)},
    ),
    (
        "nested",
        "T[i, j] y",
        """[node] y = If (c) <
             then_branch = t () => (T[] p) { h = Mul(x, b) p = If (d) <
               then_branch = tt () => (T[] r) { r = Mul(h, x) }, else_branch = te () => (T[] s) { s = Exp(h) }> },
             else_branch = e () => (T[] q) { q = Sin(x) }>""",
        {"c": YES, "d": NO, "x": (2, 3), "b": (3,)},
    ),
)

_STEPS = """[node] y, s = Loop (M, C, x) <body = f (int64 i, bool go, T[] h) => (bool on, T[] n, T[k, l] o) {
              on = Identity(go) h0 = MatMul(h, w) n = Tanh(h0) o = Mul(n, b) }>"""
_WHILE = """[node] y, s = Loop (M, C, x) <body = f (int64 i, bool go, T[] h) => (bool on, T[] n, T[] o) {
              n = Mul(h, b) o = Sin(n) size = ReduceSumSquare <keepdims = 0> (n) most = Constant <value = T {40}> ()
              on = Less(size, most) }>"""
_GROWING: Feeds = {"x": np.array([0.5, -1.2, 0.9]), "b": np.array([1.6, 1.4, -1.5])}

LOOPS: tuple[FlowRow, ...] = (
    ("steps", "T[i, j] y, T[n, k, l] s", _STEPS, {"M": count(3), "C": YES, **_WEIGHTS}),
    ("no-step", "T[i, j] y, T[n, k, l] s", _STEPS, {"M": count(0), "C": YES, **_WEIGHTS}),
    ("not-begun", "T[i, j] y, T[n, k, l] s", _STEPS, {"M": count(3), "C": NO, **_WEIGHTS}),
    ("of-nothing", "T[i, j] y, T[n, k, l] s", _STEPS, {"M": count(2), "C": YES, **_WEIGHTS, "x": (0, 3)}),
    ("for-ever", "T[i, j] y, T[n, k, l] s", _STEPS.replace("(M, C,", '(M, "",'), {"M": count(3), **_WEIGHTS}),
    ("while", "T[i] y, T[n, k] s", _WHILE.replace("(M,", '("",'), {"C": YES, **_GROWING}),
    ("until-either", "T[i] y, T[n, k] s", _WHILE, {"M": count(9), "C": YES, **_GROWING}),
    ("until-neither", "T[i] y, T[n, k] s", _WHILE.replace("(M, C,", '(M, "",'), {"M": count(2), **_GROWING}),
    (
        "states-that-change-places",
        "T[i] y, T[j] z",
        """[node] y, z = Loop (M, "", x, u) <body = f (int64 i, bool go, T[] a, T[] e) => (bool on, T[] m, T[] n) {
             on = Identity(go) m = Identity(e) n0 = Mul(a, w) n = Sin(n0) }>""",
        {"M": count(3), "x": (3,), "u": (3,), "w": (3,)},
    ),
    (
        "row-by-row",
        "T[i] y, T[n] s",
        """z = Constant <value = int64 {0}> ()
           [node] y, k, s = Loop (M, "", x, z) <body = f (int64 i, bool go, T[] h, int64 j)
             => (bool on, T[] n, int64 l, T[] o) {
             on = Identity(go) one = Constant <value = int64 {1}> () row = Gather(w, j) n = Mul(h, row)
             o = ReduceSum <keepdims = 0> (n) l = Add(j, one) }>""",
        {"M": count(3), "x": (3,), "w": (4, 3)},
    ),
    (
        "without-states",
        "T[n, i] s",
        """[node] s = Loop (M, "") <body = f (int64 i, bool go) => (bool on, T[] o) {
             on = Identity(go) row = Gather(x, i) o = Mul(row, row) }>""",
        {"M": count(2), "x": (3, 2)},
    ),
    (
        "results-left-out",
        "T[i, j] y",
        _STEPS.replace("y, s", "y"),
        {"M": count(3), "C": YES, **_WEIGHTS},
    ),
    (
        "a-choice-per-step",
        "T[i] y",
        """[node] y = Loop (M, "", x) <body = f (int64 i, bool go, T[] h) => (bool on, T[] n) {
             on = Identity(go) one = Constant <value = int64 {1}> () c = Equal(i, one)
             n = If (c) <then_branch = t () => (T[] p) { p = Mul(h, w) }, else_branch = e () => (T[] q) { q = Sin(h) }> }>""",
        {"M": count(3), "x": (3,), "w": (3,)},
    ),
    (
        "nested",
        "T[i] y",
        """[node] y = Loop (M, "", x) <body = f (int64 i, bool go, T[] h) => (bool on, T[] n) {
             on = Identity(go)
             n = Loop (i, "", h) <body = g (int64 j, bool ago, T[] u) => (bool aon, T[] v) {
               aon = Identity(ago) v0 = Mul(u, h) v = Sub(v0, w) }> }>""",
        {"M": count(3), "x": (3,), "w": (3,)},
    ),
)

_CELL = """[node] y, s = Scan (h, x) <num_scan_inputs = 1, body = f (T[] a, T[] e) => (T[] n, T[k, l] o) {
             p = MatMul(a, w) q = Add(p, e) n = Tanh(q) o = Mul(n, b) }>"""
_CELLS: Feeds = {"h": (2, 3), "x": (4, 2, 3), "w": (3, 3), "b": (3,)}
_TURNED = """[node] y, s, t = Scan (h, x, u) <num_scan_inputs = 2, scan_input_axes = [1, -1], scan_input_directions = [1, 0],
               scan_output_axes = [1, 0], scan_output_directions = [0, 1],
               body = f (T[] a, T[] e, T[] d) => (T[] n, T[] o, T[] r) {
               n0 = Mul(a, e) n = Add(n0, d) o = Sigmoid(n) r = Mul(d, e) }>"""

SCANS: tuple[FlowRow, ...] = (
    ("cell", "T[i, j] y, T[n, k, l] s", _CELL, _CELLS),
    ("no-step", "T[i, j] y, T[n, k, l] s", _CELL, {**_CELLS, "x": (0, 2, 3)}),
    ("of-nothing", "T[i, j] y, T[n, k, l] s", _CELL, {**_CELLS, "h": (0, 3), "x": (4, 0, 3)}),
    ("turned", "T[i] y, T[k, n] s, T[m, l] t", _TURNED, {"h": (3,), "x": (3, 4), "u": (3, 4)}),
    (
        "product-of-numbers",
        "T y, T[n] s",
        """[node] y, s = Scan (h, x) <num_scan_inputs = 1, body = f (T[] a, T[] e) => (T[] n, T[] o) {
             n = Mul(a, e) o = Identity(n) }>""",
        {"h": (), "x": (4,)},
    ),
    (
        "slices-alone",
        "T[n, i] s",
        """[node] s = Scan (x) <num_scan_inputs = 1, body = f (T[] e) => (T[] o) { o = Mul(e, w) }>""",
        {"x": (3, 2), "w": (2,)},
    ),
    (
        "last-state-left-out",
        "T[m, l] t",
        _TURNED.replace("y, s, t", '"", "", t'),
        {"h": (3,), "x": (3, 4), "u": (3, 4)},
    ),
    ("stacks-left-out", "T[i] y", _TURNED.replace("y, s, t", "y"), {"h": (3,), "x": (3, 4), "u": (3, 4)}),
    (
        "what-it-reads-twice",
        "T[i] y, T[n, k] s",
        """[node] y, s = Scan (h, x) <num_scan_inputs = 1, body = f (T[] a, T[] e) => (T[] n, T[] o) {
             r = ReduceSum <keepdims = 0> (x) n0 = Mul(a, e) n = Add(n0, r) o = Mul(n, h) }>""",
        {"h": (3,), "x": (4, 3)},
    ),
    (
        "nested",
        "T[i] y, T[n, k, l] s",
        """[node] y, s = Scan (h, x) <num_scan_inputs = 1, body = f (T[] a, T[] e) => (T[] n, T[] o) {
             n, o = Scan (a, e) <num_scan_inputs = 1, body = g (T[] u, T[] v) => (T[] m, T[] r) {
               m0 = Mul(u, w) m = Add(m0, v) r = Mul(m, a) }> }>""",
        {"h": (3,), "x": (2, 4, 3), "w": (3,)},
    ),
)

# ONNX Runtime ends the process where the last value of a state has no name.
ENDS_THE_PROCESS: tuple[FlowRow, ...] = (
    (
        "last-state-unused",
        "T[n, i, j] s",
        _STEPS.replace("y, s", '"", s'),
        {"M": count(3), "C": YES, **_WEIGHTS},
    ),
)

FORMS = (*(("If", row) for row in IFS), *(("Loop", row) for row in LOOPS), *(("Scan", row) for row in SCANS))
# Loops that neither carry nor stack a tensor of unknown rank; refgrad refuses those that do.
OF_ANY_RANK = ("without-states",)
# The opsets in which the operators changed; onnx converts models of opsets before 16.
OPSETS = {"If": (8, 11, 13, 16, 19, 21, 23), "Loop": (8, 11, 13, 16, 19, 21, 23), "Scan": (9, 11, 16, 19, 21, 23)}
OF_OPSETS = {"If": IFS[:2], "Loop": (LOOPS[0], LOOPS[2]), "Scan": (SCANS[0], SCANS[3])}


def cases() -> Iterator[Case]:
    """Every form under every kind of declaration; the first forms also in other types, with constants and in every opset."""
    for op, row in FORMS:
        for shapes in SHAPES if op == "If" or row[0] in OF_ANY_RANK else SHAPES[:2]:
            yield flow(op, row, shapes=shapes)
    for op, rows in OF_OPSETS.items():
        for opset in OPSETS[op]:
            for row in rows:
                yield flow(op, row, opset=opset)
        for kind in ("double", "float16", "bfloat16"):
            for row in rows:
                yield flow(op, row, kind=kind)
    for op, row, constant in (
        ("If", IFS[0], ("c",)),
        ("If", IFS[1], ("c", "w")),
        ("Loop", LOOPS[0], ("M", "C")),
        ("Loop", LOOPS[0], ("M", "w")),
        ("Loop", LOOPS[6], ("C",)),
        ("Scan", SCANS[0], ("w", "b")),
    ):
        yield flow(op, row, constant=constant)


def apart() -> Iterator[Case]:
    """Cases in which ONNX Runtime ends the process."""
    for row in ENDS_THE_PROCESS:
        yield flow("Loop", row)


def flow(
    op: str, row: FlowRow, opset: int = 21, shapes: str = "static", kind: str = "float", constant: tuple[str, ...] = ()
) -> Case:
    """The case of a row; it is about the node that the row calls `node`, of the operator `op`.

    :param shapes: as for `node_case`; "unknown": nodes read the floats through a Reshape to a shape that is fed.
    :param constant: the inputs that are initializers and not fed.
    """
    name, outputs, nodes, given = row
    rng = np.random.default_rng(len(name))
    arrays: dict[str, np.ndarray] = {
        n: _numbers(value, rng).astype(TYPES[kind]) if _is_float(value) else np.asarray(value)
        for n, value in given.items()
    }
    text = f'<ir_version: 10, opset_import: ["": {opset}]> {op} () => ({outputs}) {{ {nodes} }}'
    model = native.parse_model(_typed(text, kind))
    feeds = {n: array for n, array in arrays.items() if n not in constant}
    model.graph.initializer.extend(numpy_helper.from_array(arrays[n], n) for n in constant)
    reshapes: list[NodeProto] = []
    for n, array in list(feeds.items()):
        dims = list(array.shape) if shapes == "static" else [f"size_{size}" for size in array.shape]
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(n, element, dims))
        if shapes == "unknown" and _is_float(given[n]):
            feeds[f"{n}_shape"] = np.array(array.shape, np.int64)
            model.graph.input.append(helper.make_tensor_value_info(f"{n}_shape", TensorProto.INT64, [f"{n}_rank"]))
            reshapes.append(helper.make_node("Reshape", [n, f"{n}_shape"], [f"{n}_"], allowzero=1))
    moved = {node.input[0]: node.output[0] for node in reshapes}
    for graph in graphs(model.graph):
        for node in graph.node:
            node.input[:] = [moved.get(n, n) for n in node.input]
    others = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*reshapes, *others])
    native.check_model(model)
    constants = [f"constant={','.join(constant)}"] if constant else []
    types = [] if kind == "float" else [kind]
    return Case("-".join([op, name, *types, *constants, shapes, f"opset{opset}"]), model, feeds)


def _is_float(value: tuple[int, ...] | np.ndarray) -> bool:
    return isinstance(value, tuple) or value.dtype.kind == "f"


def _numbers(value: tuple[int, ...] | np.ndarray, rng: np.random.Generator) -> Any:
    """Numbers of the given shape, none of them near 0; a given array as it is."""
    if not isinstance(value, tuple):
        return value
    return np.asarray(rng.uniform(0.3, 1.1, value) * rng.choice([-1, 1], value))


def _typed(text: str, kind: str) -> str:
    """The text with `kind` as the type T."""
    for after in ("[", " "):
        for before in (" ", "("):
            text = text.replace(f"{before}T{after}", f"{before}{kind}{after}")
    return text
