"""Random valid graphs: a few seeds, every graph that once failed, and whether wrong rules are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest

from refgrad.conformance.strategies import entries
from refgrad.conformance.tools.fuzzing.graphs.growing import Sample
from refgrad.conformance.tools.fuzzing.graphs.samples import sample
from refgrad.conformance.tools.fuzzing.graphs.shrinking import shrink
from refgrad.conformance.tools.fuzzing.graphs.verdicts import FOREIGN, WRONG, judge
from refgrad.protos.traverse import every_node
from refgrad.tables.registry import RULES, rule

pytestmark = [pytest.mark.slow, pytest.mark.stock]  # the runtime of the training wheel dies of some graphs

Shapes = dict[str, tuple[int, ...]]

# What once failed, made small: the opset, the graph, and the shapes of its float inputs, or what else is fed.
PAST: dict[str, tuple[int, str, dict[str, Any]]] = {
    "a normalization whose input has an unknown rank, and its output a known one": (
        19,
        "(float[N] a, float[M,K,L,J] w, float[P] s, float[2,2,2,3] x) => (float[A,B,C,D] y) "
        "{ c = ConvTranspose<dilations=[1,1], strides=[2,2]>(x, w, a) y = InstanceNormalization<epsilon=0.1>(c, s, a) }",
        {"a": (2,), "w": (2, 2, 2, 1), "s": (2,), "x": (2, 2, 2, 3)},
    ),
    "the same in inference": (
        25,
        "(int64[K] k, float[2] v, float[2,2,1,1] x) => (float[A,B,C,D] y) "
        "{ p = Mul(v, v) r = ReduceSum<keepdims=1>(x, k) y = BatchNormalization<epsilon=0.1>(r, v, v, v, p) }",
        {"k": np.array([-1, 2]), "v": (2,), "x": (2, 2, 1, 1)},
    ),
    "a result that is declared as one of two branches has it": (
        21,
        "(float[2,2,1] x, int64[1] e, bool c) => (float[2,2,1] y) { y = If(c)<then_branch = a () => (float[2,2,1] p) "
        "{ p = Exp(x) }, else_branch = b () => (float[1,2,1] q) { z = Constant<value = int64[1] {0}>() "
        "s = Sin(x) q = Slice(s, z, e) }> }",
        {"x": (2, 2, 1), "e": np.array([1]), "c": np.array(True)},
    ),
    "an average over declared windows whose cotangent has no known size": (
        18,
        "(float[1,2,2] x) => (float[A,B,C] y) { t = Softplus(x) y = AveragePool<kernel_shape=[2], pads=[1,1]>(t) }",
        {"x": (1, 2, 2)},
    ),
    "branches of two ranks that return a value twice": (
        18,
        "(float[1,4] x, bool c) => (float z) { p, q = If(c)<then_branch = t () => (float[] u, float[] u) { u = "
        "ReduceMax<keepdims=0>(x) }, else_branch = e () => (float[A,B] v, float[A,B] v) { v = Sin(x) }> "
        "s = Exp(q) z = ReduceSum<keepdims=0>(s) }",
        {"x": (1, 4), "c": np.array(True)},
    ),
    "a result that jvp does not return, of a type that onnx does not infer": (
        21,
        "(float[2,2,3] x, float[2] s) => (float[2,2,3] y, float[2,2,3] z) { y = GroupNormalization<num_groups=1>(x, s, s) "
        "z = Softplus(y) }",
        {"x": (2, 2, 3), "s": (2,)},
    ),
    **{
        f"slices of an unknown rank along axis {axis}": (
            18,
            "(float[2,2] x, int64[K] k, float[2] s) => (float[A] y, float[D,B,C] z) { t = Exp(x) "
            "r = ReduceL2<keepdims=1>(t, k) y, z = Scan<num_scan_inputs=1, "
            f"scan_input_axes=[{axis}], body = b (float[2] p, float[] v) => (float[2] q, float[A,B] o) {{ e = Sin(v) "
            "f = ReduceSum<keepdims=0>(e) q = Mul(p, f) c = Constant<value_ints=[-1,1]>() o = Reshape(e, c) }>(s, r) }",
            {"x": (2, 2), "k": np.array([1]), "s": (2,)},
        )
        for axis in (0, 1, -1)
    },
}
OF_FUNCTIONS = {
    "num_scan_inputs by an attribute of a function": (
        '<ir_version: 10, opset_import: ["": 21, "local": 1]> g (float[2,3] x, float[3] s) => (float[3] y, float[2,3] z) '
        "{ y, z = local.sums<count=1>(s, x) } "
        '<domain: "local", opset_import: ["": 21]> sums <count>(s, x) => (y, z) { y, z = Scan<num_scan_inputs: int = @count, '
        "body = b (float[3] t, float[3] v) => (float[3] o, float[3] p) { q = Mul(t, v) o = Tanh(q) p = Sin(q) }>(s, x) }",
        {"x": (2, 3), "s": (3,)},
    ),
    "an attribute of a function that is a window's": (
        '<ir_version: 10, opset_import: ["": 21, "local": 1]> g (float[1,3,2] x) => (float[1,3,2] y) '
        "{ y = local.normal<size=3>(x) } "
        '<domain: "local", opset_import: ["": 21]> normal <size>(x) => (y) { y = LRN<size: int = @size>(x) }',
        {"x": (1, 3, 2)},
    ),
    "a sequence in a function before opset 17": (
        '<ir_version: 8, opset_import: ["": 16, "local": 1]> g (float[2,3] x) => (float[3] y) { y = local.first(x) } '
        '<domain: "local", opset_import: ["": 16]> first (x) => (y) { s = SplitToSequence<axis=0, keepdims=0>(x) '
        "k = Constant<value = int64 {0}>() y = SequenceAt(s, k) }",
        {"x": (2, 3)},
    ),
}


def made_of(text: str, fed: dict[str, Any], seed: int = 0) -> Sample:
    """A sample of a model as text; every float is differentiated by."""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(seed)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    feeds = {}
    for name, given in fed.items():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kinds[name])
        feeds[name] = np.asarray(rng.uniform(0.2, 1.8, given), dtype) if isinstance(given, tuple) else given
    wrt = tuple(name for name, array in feeds.items() if array.dtype.kind == "f")
    return Sample(seed, model, feeds, wrt, tuple(value.name for value in model.graph.output))


def of_past(name: str) -> Sample:
    if name in OF_FUNCTIONS:
        return made_of(*OF_FUNCTIONS[name])
    opset, graph, fed = PAST[name]
    return made_of(f'<ir_version: 10, opset_import: ["": {opset}]> g {graph}', fed)


@pytest.mark.parametrize("name", [*PAST, *OF_FUNCTIONS])
def test_what_once_failed(name: str) -> None:
    found = judge(of_past(name))
    assert found.verdicts == []
    assert not found.note
    assert {"gradient", "ort dialect", "jvp"} <= found.compared


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_graphs(first: int) -> None:
    compared = 0
    for seed in range(first, first + 10):
        made = sample(seed)
        if made is None:
            continue
        found = judge(made)
        assert [one for one in found.verdicts if one.kind != FOREIGN] == [], seed
        compared += "gradient" in found.compared
    assert compared >= 8


def test_graphs_have_operators_of_all_strategies() -> None:
    """Except for a few, which the complex step does not know, or whose case has several nodes."""
    drawn = {node.op_type for made in map(sample, range(250)) if made is not None for node in every_node(made.model)}
    known = {entry.operator for entry in entries()}
    assert len(known & drawn) >= 120, sorted(known - drawn)


def test_a_graph_depends_on_its_seed_alone() -> None:
    one, other = (sample(seed=11) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.model.SerializeToString() == other.model.SerializeToString()
    assert all(np.array_equal(x, other.feeds[name]) for name, x in one.feeds.items())


PLANTED: dict[str, tuple[str, dict[str, Any], Callable[..., Any], str, dict[str, Any]]] = {
    "a factor in one element of many": (
        "Tanh",
        {},
        lambda op, d_output, output: op.Mul(d_output, op.Sub(1.0001, op.Mul(output, output))),
        "(float[2,3] x) => (float[2,3] y) { s = Sin(x) t = Tanh(s) u = Softmax(t) y = Mul(u, s) }",
        {"x": (2, 3)},
    ),
    "a transposed operand": (
        "MatMul",
        {},
        lambda op, d_Y, A, B: (op.MatMul(d_Y, B), op.MatMul(op.Transpose(A), d_Y)),
        "(float[3,3] x, float[3,3] w) => (float[3] y) { a = Exp(x) b = MatMul(a, w) y = ReduceMax<axes=[0], keepdims=0>(b) }",
        {"x": (3, 3), "w": (3, 3)},
    ),
    "a scatter where a sum belongs": (
        "Gather",
        {"wrt": ["data"]},
        lambda op, d_output, data, indices, axis: op.ScatterElements(op.zeros_like(data), indices, d_output, axis=axis),
        "(float[3] x, int64[4] i) => (float[4] y) { s = Sin(x) g = Gather(s, i) y = Cos(g) }",
        {"x": (3,), "i": np.array([0, 1, 1, 2])},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_is_noticed_and_its_graph_made_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op_type, options, function, graph, fed = PLANTED[name]
    made = made_of(f'<ir_version: 8, opset_import: ["": 17]> g {graph}', fed)
    assert judge(made).verdicts == []
    monkeypatch.setitem(RULES, ("", op_type), RULES["", op_type])  # so that it is put back
    rule(op_type, replace=True, **options)(function)
    [verdict, *_] = judge(made).verdicts
    assert (verdict.step, verdict.kind) == ("gradient", WRONG)
    small = shrink(made, verdict, seconds=5)
    assert [node.op_type for node in small.model.graph.node if node.op_type != "Identity"] == [op_type]
