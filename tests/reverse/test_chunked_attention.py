"""`recompute` takes attention in blocks of rows: the same gradients, and never all the scores at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import BackendError
from refgrad.microsoft.cases import case, drawer

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
LONG = 520  # not a multiple of the rows of a block

FORMS = {
    "plain": "s = MatMul(q, kt) p = Softmax <axis=-1> (s) y = MatMul(p, v)",
    "scaled and masked": "s = MatMul(q, kt) a = Mul(s, c) m = Add(a, mask) p = Softmax <axis=-1> (m) y = MatMul(p, v)",
    "mask of keys": "s = MatMul(q, kt) a = Div(s, c) m = Where(shown, a, low) p = Softmax <axis=3> (m) y = MatMul(p, v)",
    "soft cap": "s = MatMul(q, kt) a = Div(s, c) t = Tanh(a) u = Mul(t, c) p = Softmax <axis=-1> (u) y = MatMul(p, v)",
    "rows without keys": """s = MatMul(q, kt) m = Add(s, mask) p = Softmax <axis=-1> (m) n = IsNaN(p) z = Where(n, zero, p)
        y = MatMul(z, v)""",
    "the same keys and values": """s = MatMul(q, kt) p = Softmax <axis=-1> (s) k = Transpose <perm=[0,1,3,2]> (kt)
        y = MatMul(p, k)""",
}


def _model(text: str, length: int | str, keys: int | str, outputs: str = "float[2,2,A,3] y") -> ModelProto:
    inputs = f"float[2,2,{length},3] q, float[2,2,3,{keys}] kt, float[2,2,{keys},3] v, float[1,1,{length},{keys}] mask"
    head = '<ir_version: 8, opset_import: ["": 18]> g'
    constants = (
        "c = Constant <value_float=0.7> () low = Constant <value_float=-3.0> () zero = Constant <value_float=0.0> ()"
    )
    return parser.parse_model(f"{head} ({inputs}, bool[1,1,1,{keys}] shown) => ({outputs}) {{ {constants} {text} }}")


def _feeds(length: int, keys: int) -> dict[str, np.ndarray]:
    shapes = {"q": (2, 2, length, 3), "kt": (2, 2, 3, keys), "v": (2, 2, keys, 3), "mask": (1, 1, length, keys)}
    feeds = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return feeds | {
        "shown": RNG.random((1, 1, 1, keys)) < 0.8,
        "y_grad": RNG.standard_normal((2, 2, length, 3)).astype(np.float32),
    }


def _run(gradient: ModelProto, feeds: dict[str, np.ndarray], backend: str) -> dict[str, np.ndarray]:
    return get_backend(backend).prepare(gradient).run({v.name: feeds[v.name] for v in gradient.graph.input})


def _scores(gradient: ModelProto, keys: int) -> int:
    """How many rows of scores the largest product with that many columns has."""
    values = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in gradient.graph.value_info}
    return max((dims[-2] for dims in values.values() if len(dims) == 4 and dims[-1] == keys), default=0)


def _compare(model: ModelProto, feeds: dict[str, np.ndarray], backend: str = "numpy", **options: Any) -> int:
    """Both gradients agree; how many more products the one has that computes again."""
    kept, again = refgrad.gradient(model, **options), refgrad.gradient(model, recompute=True, **options)
    assert [v.name for v in kept.graph.output] == [v.name for v in again.graph.output]
    expected, found = _run(kept, feeds, backend), _run(again, feeds, backend)
    for name, value in expected.items():
        size = max(float(np.abs(value).max(initial=0)), 1e-6)
        np.testing.assert_allclose(found[name], value, atol=2e-5 * size, rtol=0, err_msg=name)
    return sum(node.op_type == "MatMul" for node in again.graph.node) - sum(
        n.op_type == "MatMul" for n in kept.graph.node
    )


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_the_gradients_are_the_same(form: str, backend: str) -> None:
    if backend == "ort-cpu":
        pytest.importorskip("onnxruntime")
    assert _compare(_model(FORMS[form], LONG, 7), _feeds(LONG, 7), backend) > 10


@pytest.mark.parametrize("length", [1, 7, 9, 40])
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows_at_run_time(form: str, length: int) -> None:
    assert _compare(_model(FORMS[form], "T", "S"), _feeds(length, 5)) > 10


@pytest.mark.parametrize("mask", ["", ", mask", ", shown"])
def test_the_operator_attention(mask: str) -> None:
    text = f"k = Transpose <perm=[0,1,3,2]> (kt) y = Attention <scale=0.3> (q, k, v{mask})"
    model = _model(text, LONG, 7)
    model.opset_import[0].version = 23
    model.ir_version = 11
    _compare(model, _feeds(LONG, 7))
    again = refgrad.gradient(model, recompute=True)
    assert sum(node.op_type == "Attention" for node in again.graph.node) in (0, 5)
    assert _scores(again, 7) < LONG


def test_an_attention_of_onnx_runtime() -> None:
    floats = drawer()
    one = case("MultiHeadAttention", *(floats(1, LONG, 4) for _ in range(3)), num_heads=2)
    feeds = one.feeds | {f"{v.name}_grad": floats(1, LONG, 4) for v in one.model.graph.output}
    assert _compare(one.model, feeds) > 10


@pytest.mark.parametrize(
    ("text", "outputs"),
    [
        ("s = MatMul(q, kt) p = Softmax <axis=-1> (s) y = MatMul(p, v)", "float[2,2,A,3] y, float[2,2,A,7] p"),
        ("s = MatMul(q, kt) p = Softmax <axis=-1> (s) r = ReduceSum(s) w = MatMul(p, v) y = Add(w, r)", "float[2,2,A,3] y"),
        ("s = MatMul(q, kt) p = Softmax <axis=2> (s) y = MatMul(p, v)", "float[2,2,A,3] y"),
        ("s = Add(mask, mask) p = Softmax <axis=-1> (s) y = MatMul(p, v)", "float[2,2,A,3] y"),
        ("s = MatMul(q, kt) p = Softmax <axis=-1> (s) pt = Transpose <perm=[0,1,3,2]> (p) w = MatMul(pt, q) y = MatMul(p, v)",
         "float[2,2,A,3] y"),
    ],
)  # fmt: skip
def test_what_others_read_is_left_as_it_is(text: str, outputs: str) -> None:
    model = _model(text, LONG, 7, outputs)
    assert not any("block" in node.name for node in refgrad.gradient(model, outputs=["y"], recompute=True).graph.node)


@pytest.mark.parametrize(
    "text",
    [
        "a = Add(p, c) b = Concat <axis=1> (a, a) y = MatMul(b, v)",
        "a = Mul(p, c) b = Concat <axis=1> (a, c) y = MatMul(b, v)",
        "a = Add(p, c) b = Concat <axis=2> (a, a) y = MatMul(b, w)",
        "a = Add(p, c) b = Slice(a, lower, upper, one) y = MatMul(b, v)",
        "a = Add(c, s) r = Softmax <axis=-1> (a) y = MatMul(r, v)",
    ],
)
def test_rows_behind_a_broadcast_that_adds_an_axis(text: str) -> None:
    """The scores have rank 2, what is added to them rank 3: then rows lie along another axis than before."""
    constants = (
        "lower = Constant <value_ints=[0]> () upper = Constant <value_ints=[200]> () one = Constant <value_ints=[1]> ()"
    )
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[600,4] q, float[4,6] kt, float[6,3] v, float[12,3] w,
        float[2,600,6] c) => (float[A,B,C] y) {{ {constants} s = MatMul(q, kt) p = Softmax <axis=-1> (s) {text} }}"""
    )
    shapes = {"q": (600, 4), "kt": (4, 6), "v": (6, 3), "w": (12, 3), "c": (2, 600, 6)}
    feeds = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    y = get_backend("numpy").prepare(model).run(feeds)["y"]
    feeds["y_grad"] = RNG.standard_normal(y.shape).astype(np.float32)
    plain, again = (
        _run(refgrad.gradient(model, keep_outputs=True, recompute=choice), feeds, "numpy") for choice in (False, True)
    )
    for name, value in plain.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_short_attention_is_left_as_it_is() -> None:
    gradient = refgrad.gradient(_model(FORMS["plain"], 64, 64), recompute=True)
    assert not any("block" in node.name for node in gradient.graph.node)


def test_only_the_named_nodes_are_split() -> None:
    model = _model(FORMS["plain"], LONG, 7)
    for node in model.graph.node:
        node.name = f"/layer/{node.op_type}_{node.output[0]}"
    assert any("block" in n.name for n in refgrad.gradient(model, recompute=["/layer/*"]).graph.node)
    assert not any("block" in n.name for n in refgrad.gradient(model, recompute=["/layer/Softmax*"]).graph.node)


def test_never_all_scores_at_once() -> None:
    """The interpreter runs in memory where the gradient that keeps its values does not, by far."""
    size = 1024
    kind = f"float[{size},4]"
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]> g ({kind} q, {kind} k, {kind} v) => ({kind} y) {{
            kt = Transpose(k) s = MatMul(q, kt) p = Softmax <axis=-1> (s) y = MatMul(p, v)
        }}""")
    feeds = {name: RNG.standard_normal((size, 4)).astype(np.float32) for name in ("q", "k", "v", "y_grad")}
    scores = size * size * 4
    kept, again = (refgrad.gradient(model, recompute=recompute) for recompute in (False, True))
    get_backend("numpy").prepare(again, max_memory=scores).run(feeds)
    with pytest.raises(BackendError, match="max_memory"):
        get_backend("numpy").prepare(kept, max_memory=3 * scores).run(feeds)


HEADS, TOKENS, SIZE = 2, 640, 8
_CACHED = f"<num_heads = {HEADS}, kv_num_heads = 1, softcap = 2.0, local_window_size = 100>"
OF_ONNX_RUNTIME = {
    "heads": f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}> (q, k, v)",
    "causal": f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}, unidirectional = 1> (q, k, v)",
    "masked": f"y = com.microsoft.MultiHeadAttention <num_heads = {HEADS}> (q, k, v, , mask)",
    "grouped": f"y = com.microsoft.GroupQueryAttention {_CACHED} (q, one, two, , , seqlens, total)",
    "sinks": f"y = com.microsoft.GroupQueryAttention {_CACHED} (q, one, two, , , seqlens, total, , , , , sink)",
}


@pytest.mark.parametrize("tokens", [TOKENS, "S"])
@pytest.mark.parametrize("form", OF_ONNX_RUNTIME)
def test_attention_of_onnx_runtime_is_split_too(form: str, tokens: int | str) -> None:
    """With queries in groups, masks whose rows only the run tells, and sinks; for a length that only the run tells, too."""
    wide, narrow = (f"float[1, {tokens}, {width}]" for width in (HEADS * SIZE, SIZE))
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g ({wide} q, {wide} k, {wide} v, {narrow} one, {narrow} two, float[{HEADS}] sink, int32[1, {tokens}] mask,
           int32[1] seqlens, int32 total) => ({wide} y) {{ {OF_ONNX_RUNTIME[form]} }}""")
    feeds = {name: RNG.standard_normal((1, TOKENS, HEADS * SIZE)).astype(np.float32) for name in "qkv"}
    feeds |= {name: RNG.standard_normal((1, TOKENS, SIZE)).astype(np.float32) for name in ("one", "two")}
    feeds |= {"sink": np.array([1.0, -1.0], np.float32), "mask": (np.arange(TOKENS) % 3 > 0).astype(np.int32)[None]}
    feeds |= {"seqlens": np.array([TOKENS - 1], np.int32), "total": np.array(TOKENS, np.int32)}
    feeds["y_grad"] = RNG.standard_normal((1, TOKENS, HEADS * SIZE)).astype(np.float32)
    kept, again = (refgrad.gradient(model, recompute=recompute) for recompute in (False, True))
    assert any("block" in node.name for node in again.graph.node)
    expected = get_backend("numpy").prepare(kept, precision="float64").run(feeds)
    for name, got in get_backend("numpy").prepare(again, precision="float64").run(feeds).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    onnxruntime = get_backend("ort-cpu").prepare(again).run(feeds)
    for name, got in onnxruntime.items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    scores = HEADS * TOKENS * TOKENS * 4
    get_backend("numpy").prepare(again, max_memory=scores + scores // 4).run(feeds)  # all scores are kept several times
