"""`refgrad.split`: two models that do the work of one gradient, with little between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from control_flow_graphs import RandomGraph
from onnx import ModelProto
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.cases import every_case
from refgrad.conformance.problems.problem import ask
from refgrad.errors import NoGradientError, OptionError, RefgradError, UnknownNameError
from refgrad.reverse.assembly import names_in, noted

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
EVERY = 97  # of the cases


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f"{HEAD} {text}" if text[0] != "<" else text)


def run(model: ModelProto, values: dict[str, Any], backend: str = "numpy") -> dict[str, Any]:
    prepared = get_backend(backend).prepare(model)
    return prepared.run({value.name: values[value.name] for value in prepared.inputs if value.name in values})


def same(one: Any, other: Any) -> bool:
    """True if two results are equal, but for the order in which NumPy adds up."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return np.array_equal(one, other)
    return np.allclose(
        one, other, rtol=0, atol=1e-6 * np.abs(other).max(initial=0, where=np.isfinite(other)), equal_nan=True
    )


def assert_split(
    model: ModelProto, feeds: dict[str, Any], wrt: Any = None, backend: str = "numpy", **options: Any
) -> Any:
    """The parts give the outputs and the gradients of the joint graph, and say what they are."""
    joint = refgrad.gradient(model, wrt, keep_outputs=True, **options)
    parts = refgrad.split(model, wrt, **options)
    rng = np.random.default_rng(5)
    values = dict(feeds)
    plain = run(model, feeds, backend)
    for output, cotangent in names_in(joint)[0].items():
        values[cotangent] = rng.standard_normal(plain[output].shape).astype(plain[output].dtype)
    expected = run(joint, values, backend)
    kept = run(parts.forward, values, backend)
    found = run(parts.backward, values | kept, backend)
    for name, value in (kept | found).items():
        assert name not in expected or same(expected[name], value), name
    assert names_in(parts.backward) == names_in(joint)
    assert list(found) == list(names_in(joint)[1].values())
    assert list(kept)[: len(model.graph.output)] == [value.name for value in model.graph.output]
    assert (
        noted(parts.forward, "saved", tuple[str, ...])
        == noted(parts.backward, "saved", tuple[str, ...])
        == tuple(parts.saved)
    )
    assert not {value.name for value in joint.graph.input}.intersection(parts.saved)
    assert {value.name for value in parts.backward.graph.input} == (
        {value.name for value in joint.graph.input}.intersection(reads(parts.backward))
        | set(parts.saved)
        | set(names_in(joint)[0].values())
    )
    return parts


def reads(model: ModelProto) -> set[str]:
    from refgrad.protos.traverse import reads_of

    return {name for node in model.graph.node for name in reads_of(node)} | {v.name for v in model.graph.output}


LAYER = "layer (float[N, 3] x, float[3, 4] w) => (float[N, 4] y) { p = MatMul(x, w) y = Tanh(p) }"
X = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


def test_an_output_that_the_backward_part_reads_crosses_and_nothing_else() -> None:
    parts = assert_split(parsed(LAYER), {"x": X, "w": W})
    assert parts.saved == ("y",)
    assert [value.name for value in parts.forward.graph.output] == ["y"]


def test_the_fewest_bytes_cross() -> None:
    """A mask of bytes instead of floats; a sum over rows instead of all of them."""
    model = parsed("""g (float[64, 64] x, float[64, 64] z) => (float[64, 64] y) {
        a = Exp(x) s = ReduceSum<keepdims = 1>(a) b = Sqrt(s) y = Mul(b, z) }""")
    x = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32)
    parts = assert_split(model, {"x": x, "z": x})
    sizes = [np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]) for v in parts.forward.graph.output[1:]]
    assert sum(sizes) <= 64 * 64 + 2


def test_no_costly_node_is_in_both_parts() -> None:
    model = parsed("""g (float[8, 3] x, float[3, 3] w) => (float[8, 3] y) {
        a = MatMul(x, w) b = Sigmoid(a) c = MatMul(b, w) d = Transpose<perm = [1, 0]>(c) e = Softmax(d)
        f = Transpose<perm = [1, 0]>(e) y = Mul(f, b) }""")
    joint = refgrad.gradient(model, keep_outputs=True)
    parts = refgrad.split(model)
    both = Counter(node.op_type for part in (parts.forward, parts.backward) for node in part.graph.node)
    assert both == Counter(node.op_type for node in joint.graph.node)


def test_shapes_are_computed_again_rather_than_kept() -> None:
    model = parsed("""g (float[N, M] x) => (float[K] y) {
        a = Exp(x) n = Shape(a) f = Constant<value = int64[1] {-1}>() r = Reshape(a, f) y = Sin(r) }""")
    parts = assert_split(model, {"x": X})
    assert all("Shape" not in name for name in parts.saved)
    assert len(parts.saved) <= 2


def test_less_crosses_with_recomputation() -> None:
    text = " ".join(f"h{k + 1} = MatMul(t{k}, w) t{k + 1} = Tanh(h{k + 1})" for k in range(12))
    model = parsed(f"g (float[8, 3] x, float[3, 3] w) => (float[8, 3] y) {{ t0 = Tanh(x) {text} y = Identity(t12) }}")
    feeds = {"x": np.ones((8, 3), np.float32), "w": np.eye(3, dtype=np.float32) / 2}
    less = assert_split(model, feeds, recompute=True)
    assert len(less.saved) < len(refgrad.split(model).saved) / 2


def test_random_numbers_are_drawn_once() -> None:
    model = parsed("""g (float[8, 30] x) => (float[8, 30] y) {
        r = Constant<value = float {0.5}>() t = Constant<value = bool {1}>() a = Exp(x) d = Dropout(a, r, t)
        n = RandomNormalLike(x) e = Exp(d) y = Mul(e, n) }""")
    parts = refgrad.split(model)
    draws = {"Dropout", "RandomNormalLike"}
    assert draws.isdisjoint(node.op_type for node in parts.backward.graph.node)
    x = np.random.default_rng(3).standard_normal((8, 30)).astype(np.float32)
    kept = run(parts.forward, {"x": x})
    gradient = run(parts.backward, {"x": x, "y_grad": np.ones_like(x)} | kept)["x_grad"]
    assert ((gradient == 0) | (np.abs(gradient / kept["y"] - 2 * np.exp(x)) < 1e-3)).all()
    assert 0.3 < (gradient == 0).mean() < 0.7


WEIGHTED = (
    "g (float[N, 3] x) => (float[N, 4] y) <float[3, 4] w = {1,2,3,4,5,6,7,8,9,1,2,3}> { p = MatMul(x, w) y = Tanh(p) }"
)


@pytest.mark.parametrize("weights", ["overridable", "constants", "inputs"])
def test_weights_are_in_both_parts_as_asked(weights: str) -> None:
    parts = refgrad.split(parsed(WEIGHTED), weights=weights)
    for part in (parts.forward, parts.backward):
        assert ("w" in {value.name for value in part.graph.input}) == (weights != "constants")
        assert ("w" in {tensor.name for tensor in part.graph.initializer}) == (weights != "inputs")
    assert_split(parsed(WEIGHTED), {"x": X, "w": W}, weights="inputs")


@pytest.mark.parametrize(
    "text",
    [
        "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] x2) { y = Exp(x) x2 = Identity(x) }",
        "g (float[N, 3] x, float z) => (float[N, 3] y) { y = Mul(x, z) }",
        "g (float[N, 3] x, float[N, 3] z) => (float[N, 3] y) { f = Floor(x) y = Add(f, z) }",  # a gradient of zeros
        "g (float[N, 3] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }",
        "g (float[0, 3] x) => (float[0, 3] y) { a = Exp(x) y = Mul(a, x) }",
        """g (float[N, 3] x) => (float[M, 3] y) { k = Constant<value = int64[2] {2, 1}>()
           s = SplitToSequence(x, k) i = Constant<value = int64 {0}>() a = SequenceAt(s, i) y = Exp(a) }""",
    ],
)
def test_small_models(text: str) -> None:
    model = parsed(text)
    sizes = {"z": np.float32(2)} if "float z" in text else {"z": X[:3]}
    x = X[:0] if "float[0" in text else X[:3]
    feeds = {"x": x} | sizes
    assert_split(model, {value.name: feeds[value.name] for value in model.graph.input})


def test_local_functions_are_where_they_are_called() -> None:
    model = parsed("""<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (float[N, 3] x) => (float[N, 3] y) { a = f.swish(x) b = f.swish(a) c = f.other(b) y = Mul(c, x) }
        <domain: "f", opset_import: ["": 21]> swish (u) => (v) { s = Sigmoid(u) v = Mul(u, s) }
        <domain: "f", opset_import: ["": 21]> other (u) => (v) { v = Exp(u) }""")
    parts = assert_split(model, {"x": X})
    for part in (parts.forward, parts.backward):
        called = {node.op_type for node in part.graph.node if node.domain == "f"}
        assert called <= {function.name for function in part.functions}


@pytest.mark.parametrize("seed", range(12))
def test_control_flow(seed: int) -> None:
    graph = RandomGraph(seed, 0.3)
    assert_split(graph.model(), graph.feeds())


@needs_runtime
def test_onnxruntime_runs_both() -> None:
    graph = RandomGraph(3, 0)
    for model, feeds in ((parsed(LAYER), {"x": X, "w": W}), (graph.model(), graph.feeds())):
        assert_split(model, feeds, backend="ort-cpu")


def test_an_operator_of_each_kind() -> None:
    count = 0
    for case in list(every_case())[::EVERY]:
        problem = ask(case)
        try:
            refgrad.gradient(problem.model, problem.wrt)
        except RefgradError:
            continue
        parts = refgrad.split(problem.model, problem.wrt)
        values = dict(problem.feeds)
        for output, name in names_in(parts.backward)[0].items():
            values[name] = problem.cotangents[output]
        joint = run(refgrad.gradient(problem.model, problem.wrt), values)
        found = run(parts.backward, values | run(parts.forward, values))
        assert all(same(found[name], joint[name]) for name in joint), case.name
        count += 1
    assert count > 50


def test_scores_of_attention_of_unknown_rank() -> None:
    """onnx takes them for scalars."""
    model = parsed("""<ir_version: 10, opset_import: ["": 23]>
        g (float[2, 2, 3, 4] q, int64[n] s) => (float y) {
            r = Reshape(q, s) o, k, v, a = Attention (r, r, r) e = Exp(a) f = Shape(e) p = Reshape(e, f) i = Sin(p)
            y = ReduceSum<keepdims = 0>(i) }""")
    q = np.random.default_rng(4).standard_normal((2, 2, 3, 4)).astype(np.float32)
    assert_split(model, {"q": q, "s": np.array([2, 2, 3, 4])}, ["q"])


def test_the_model_of_the_caller_stays_as_it_is() -> None:
    model = parsed(WEIGHTED)
    before = model.SerializeToString()
    parts = refgrad.split(model)
    assert model.SerializeToString() == before
    for part in (parts.forward, parts.backward):
        onnx.checker.check_model(part, full_check=True)


def test_the_same_parts_again() -> None:
    graph = RandomGraph(7, 0.2).model()
    one, other = refgrad.split(graph), refgrad.split(graph)
    assert one.forward == other.forward
    assert one.backward == other.backward


def test_errors_are_those_of_the_gradient() -> None:
    with pytest.raises(UnknownNameError, match="'q'"):
        refgrad.split(parsed(LAYER), ["q"])
    with pytest.raises(OptionError, match="weights"):
        refgrad.split(parsed(LAYER), weights="none")
    with pytest.raises(NoGradientError):
        refgrad.split(parsed("g (float[N] x) => (float[M] y) { s = Cast<to = 8>(x) y = Cast<to = 1>(s) }"))
