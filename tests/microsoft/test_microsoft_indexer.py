"""ONNX Runtime's indexers: what they choose by hand, what they refuse, and the derivative of what they keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx import parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import case
from refgrad.microsoft.cases.indexer import csa, packed_csa, packed_qsa, qsa
from refgrad.tables.definitions import DEFINITIONS

pytestmark = [pytest.mark.stock, pytest.mark.slow]


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in operators of ai.onnx, which ONNX Runtime has on the CPU."""
    return refgrad.lower(model)


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
def test_the_best_block_comes_before_the_tokens_of_the_block_that_is_not_complete(backend: str) -> None:
    """Blocks of 2 tokens: the keys of the second one lie along the query, those of the first against it."""
    keys = np.array([[[-1, 0], [-1, 0], [1, 0], [2, 0], [-1, 0]]], np.float32)
    query = np.tile(np.array([1, 0], np.float32), (1, 5, 1))
    caches = np.ones((5, 2), np.float32), np.zeros((5, 2), np.float32)
    given = [
        query,
        keys,
        np.ones(2, np.float32),
        np.ones(2, np.float32),
        *caches,
        None,
        np.zeros((1, 0, 2), np.float32),
    ]
    made = case("SparseAttentionIndexer", *given, policy_mode="qsa", compress_ratio=2, token_budget=2, outputs=2)
    model = made.model if backend == "numpy" else lowered(made.model)
    results = get_backend(backend).prepare(model).run(made.feeds)
    expected = [[0, -1, -1], [0, 1, -1], [0, 1, 2], [2, 3, -1], [2, 3, 4]]
    np.testing.assert_array_equal(results["selected_indices"][0], expected)
    np.testing.assert_array_equal(results["present_key"], keys)


def test_an_entry_of_a_window_is_the_mean_of_what_its_gates_let_through() -> None:
    """Two windows of 2 tokens, all gates alike: the first is the mean of its own two, the second of four."""
    key = np.array([[[10, 0, 1, 1], [20, 0, 3, 1], [0, 0, 5, 1], [0, 0, 7, 1]]], np.float32)
    ones, zeros = np.ones((8, 1), np.float32), np.zeros((8, 1), np.float32)
    given = [np.ones((1, 4, 2), np.float32), key, *[np.ones(2, np.float32)] * 2, ones, zeros, None]
    given += [np.zeros((1, 0, 2), np.float32), np.zeros_like(key), np.zeros((2, 4), np.float32)]
    given += [np.ones((1, 4, 1), np.float32), np.arange(4)[None], None, np.zeros((2, 1, 0, 4), np.float32)]
    made = case("SparseAttentionIndexer", *given, policy_mode="csa", compress_ratio=2, index_topk=2, outputs=3)
    for backend, model in (("numpy", made.model), ("ort-cpu", lowered(made.model))):
        results = get_backend(backend).prepare(model).run(made.feeds)
        pooled = np.array([[2, 1], [(10 + 20 + 5 + 7) / 4, 0.5]])
        expected = pooled / np.sqrt((pooled**2).mean(1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(results["present_key"][0], expected, rtol=1e-5)
        np.testing.assert_array_equal(results["present_proj_buffer"][0, 0], key[0, 2:])
        seen = (results["selected_indices"][0] >= 0).sum(1)
        np.testing.assert_array_equal(seen, [0, 1, 1, 2])


PACKED = {
    "blocks": packed_qsa(capture=[2, 0, 1, 5], state_update_capacity=3),
    "windows": packed_csa(),
    "windows of three": packed_csa(ratio=3, held=(5, 2, 0, 3)),
}


@pytest.mark.parametrize("made", [csa(held=3), *PACKED.values()], ids=["dense", *PACKED])
def test_second_derivatives(made: Case) -> None:
    assert_second_derivative(made)


@pytest.mark.parametrize("made", PACKED.values(), ids=PACKED)
def test_the_gradients_of_packed_requests_are_those_of_the_kernel(made: Case) -> None:
    assert_gradient(made)


def run(made: Case, backend: str, **changed: Any) -> dict[str, np.ndarray]:
    """What the case's model computes; on ONNX Runtime as its body."""
    model = made.model if backend == "numpy" else lowered(made.model)
    return get_backend(backend).prepare(model).run({**made.feeds, **changed})


BACKENDS = pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])


@BACKENDS
def test_a_request_fills_blocks_with_its_pending_tokens_and_then_its_new_ones(backend: str) -> None:
    """Blocks of 2: a request after 3 tokens has one pending; with 4 new ones 2 blocks are complete, and a token is left."""
    made = packed_qsa(counts=(4,), past=(3,), epsilon=0.0)
    flat = np.ones((9, 2), np.float32)
    ones = {"cos_cache": flat, "sin_cache": 0 * flat, "key_norm_weight": np.ones(4, np.float32)}
    results = run(made, backend, **ones)
    key, pending = made.feeds["key"], made.feeds["past_kv_buffer"][0, 0]
    means = np.stack([pending + key[0], key[1] + key[2]]) / 2
    expected = means / np.sqrt((means**2).mean(1, keepdims=True))
    state = results["present_key_state"][0]
    np.testing.assert_allclose(state[1:], expected, rtol=1e-5)
    np.testing.assert_array_equal(state[0], made.feeds["past_key_state"][0, 0])
    np.testing.assert_array_equal(results["present_kv_buffer"][0, 0], key[3])
    np.testing.assert_array_equal(results["present_state_lengths"], [[3, 1]])
    chosen = [set(row[row >= 0]) for row in results["selected_indices"]]
    assert chosen[0] in ({0, 1}, {2, 3})  # token 3 completes the second block
    assert 4 in chosen[1]
    np.testing.assert_array_equal(results["selected_counts"], [2, 3, 2, 3])


@BACKENDS
@pytest.mark.parametrize("policy", ["qsa", "csa"])
def test_a_step_that_does_not_fit_leaves_the_state_and_selects_nothing(policy: str, backend: str) -> None:
    """The last request's state is full, and its tokens would complete another entry: status 2. The others go on."""
    made = packed_qsa(past=(3, 4, 0, 6), ratio=2) if policy == "qsa" else packed_csa()
    results = run(made, backend)
    np.testing.assert_array_equal(results["state_status"], [0, 0, 0, 2])
    for name in ("key_state", "kv_buffer", "state_lengths"):
        np.testing.assert_array_equal(results[f"present_{name}"][3], made.feeds[f"past_{name}"][3])
    assert not results["selected_counts"][5:].any()
    assert (results["selected_indices"][5:] == -1).all()
    assert results["selected_counts"][:5].any()
    gradient = refgrad.gradient(made.model, ["key"], outputs=["present_key_state", "present_kv_buffer"])
    seeds = {f"present_{name}_grad": np.ones_like(made.feeds[f"past_{name}"]) for name in ("key_state", "kv_buffer")}
    gradients = get_backend(backend).prepare(gradient).run({**made.feeds, **seeds})["key_grad"]
    assert gradients[:5].any(1).all()
    assert not gradients[5:].any()


@BACKENDS
def test_lengths_that_do_not_fit_each_other_are_reported_and_clamped(backend: str) -> None:
    """Of blocks a past is its complete blocks and the tokens of the pending one; of windows only the ranges are known."""
    made = packed_qsa(lengths=[[1, 1], [2, 1], [0, 2], [5, 0]])
    results = run(made, backend)
    np.testing.assert_array_equal(results["state_status"], [0, 1, 1, 1])
    np.testing.assert_array_equal(results["present_state_lengths"][1:], [[2, 1], [0, 1], [3, 0]])
    made = packed_csa(lengths=[[1, 1], [2, 4], [-1, 0], [5, 0]])
    results = run(made, backend)
    np.testing.assert_array_equal(results["state_status"], [0, 1, 1, 1])
    np.testing.assert_array_equal(results["present_state_lengths"][1:], [[2, 3], [0, 0], [3, 0]])


@BACKENDS
def test_the_updates_of_the_first_tokens_are_captured(backend: str) -> None:
    """A token that completes a block has its entry, another one itself."""
    made = packed_qsa(capture=[2, 3, 1, 0], state_update_capacity=3)
    results = run(made, backend)
    update, key = results["state_update"], made.feeds["key"]
    np.testing.assert_allclose(update[0, 0], results["present_key_state"][0, 1], rtol=1e-6)
    np.testing.assert_array_equal(update[0, 1], key[1])
    np.testing.assert_array_equal(update[2, 0], key[4])
    assert not update[0, 2].any()
    assert not update[1].any()
    assert not update[3].any()
    off = packed_qsa(capture=[2, 3, 1, 0], active=0, state_update_capacity=3)
    assert not run(off, backend)["state_update"].any()


@pytest.mark.parametrize("policy", ["qsa", "csa"])
def test_requests_alone_choose_as_the_dense_operator_does(policy: str) -> None:
    """One request without a past, against a sample without one."""
    made = (
        packed_qsa(counts=(5,), past=(0,)) if policy == "qsa" else packed_csa(counts=(5,), past=(0,), lengths=[[0, 0]])
    )
    fed, rows = made.feeds, {"query", "key", "gate", "head_weights", "position_ids"}
    same = {name: x[None] if name in rows else x for name, x in fed.items()}
    names = ["query", "key", "query_norm_weight", "key_norm_weight", "cos_cache", "sin_cache"]
    given = [*(same[name] for name in names), None, np.zeros((1, 0, 4), np.float32)]
    settings = {"policy_mode": policy, "compress_ratio": 2, "outputs": 2, "token_budget": 2}
    if policy == "csa":
        settings["index_topk"] = settings.pop("token_budget")
        given += [same[name] for name in ("gate", "position_bias", "head_weights", "position_ids")]
        given += [None, np.zeros((2, 1, 0, 8), np.float32)]
    dense = run(case("SparseAttentionIndexer", *given, **settings), "numpy")
    results = run(made, "numpy")
    np.testing.assert_array_equal(results["selected_indices"], dense["selected_indices"][0])
    if policy == "csa":
        np.testing.assert_allclose(results["present_key_state"][0, :2], dense["present_key"][0], rtol=1e-6)


def test_a_buffer_of_zeros_has_a_finite_gradient_without_epsilon() -> None:
    """Slots without a new entry would divide 0 by the root of 0."""
    for made in (packed_qsa(epsilon=0.0), packed_csa(epsilon=0.0)):
        zeros = {name: np.zeros_like(x) for name, x in made.feeds.items() if name.endswith("_buffer")}
        gradient = refgrad.gradient(made.model, outputs=["present_key_state"])
        seed = {"present_key_state_grad": np.ones_like(made.feeds["past_key_state"])}
        for backend in ("numpy", "ort-cpu"):
            gradients = get_backend(backend).prepare(gradient).run({**made.feeds, **zeros, **seed})
            assert all(np.isfinite(x).all() for x in gradients.values())


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_state_of_another_type_than_the_keys(kind: str) -> None:
    """Keys in bfloat16 or float16 are computed in float32, and rounded to the type of the state alone."""
    made = packed_qsa(capture=[2, 0, 1, 5], state_update_capacity=3)
    narrow = np.dtype("float16") if kind == "float32" else np.dtype("float32")
    model, feeds = onnx.ModelProto(), {}
    model.CopyFrom(made.model)
    for name, x in made.feeds.items():
        to = np.dtype(kind) if name == "past_key_state" else narrow
        feeds[name] = x.astype(to) if x.dtype == np.float32 else x
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            to = np.dtype(kind) if value.name.endswith("_key_state") else narrow
            value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(to)
    results, body = (get_backend("numpy").prepare(m).run(feeds) for m in (model, lowered(model)))
    for name, x in results.items():
        assert x.dtype == body[name].dtype, name
        np.testing.assert_allclose(x.astype(np.float64), body[name].astype(np.float64), rtol=2e-3, err_msg=name)
    assert results["present_key_state"].dtype == kind


def test_gates_without_a_softmax_give_0_and_a_finite_gradient() -> None:
    made = csa(held=0)
    feeds = dict(made.feeds)
    name = next(n for n in feeds if n.startswith("gate"))
    feeds[name] = feeds[name].copy()
    feeds[name][0, :2, -1], feeds[name][1, 1, -2] = -np.inf, np.inf
    gradient = refgrad.gradient(made.model, outputs=["present_key"])
    results = get_backend("numpy").prepare(made.model).run(feeds)
    assert np.isfinite(results["present_key"]).all()
    seed = np.ones_like(results["present_key"])
    for backend in ("numpy", "ort-cpu"):
        gradients = get_backend(backend).prepare(gradient).run(feeds | {"present_key_grad": seed})
        assert all(np.isfinite(value).all() for value in gradients.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('policy_mode="nsa", token_budget=2', "its policy_mode 'nsa' is not known; there are qsa, csa"),
        ('policy_mode="qsa"', "needs its attribute token_budget, which is positive"),
        ('policy_mode="qsa", token_budget=3', "its token_budget is 3, which its compress_ratio 2 does not divide"),
        (
            'policy_mode="qsa", token_budget=2, index_topk=1',
            "it has no index_topk and head_weight_scale; leave them out",
        ),
        ('policy_mode="csa", index_topk=1', "it needs its inputs gate, position_bias, head_weights, position_ids"),
    ],
)
def test_a_form_that_is_not_covered_is_refused_with_the_reason(settings: str, said: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[1,2,4] q, float[1,2,4] k, float[4] w, float[9,2] c, float[1,3,4] p) => (float[1,5,4] y)
        {{ i, y = com.microsoft.SparseAttentionIndexer<compress_ratio=2, {settings}>(q, k, w, w, c, c, , p) }}"""
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(parser.parse_model(text), ["k"])


@pytest.mark.parametrize(
    ("made", "changed", "said"),
    [
        (packed_qsa(), ("policy_mode", "nsa"), "its policy_mode 'nsa' is not known; there are qsa, csa"),
        (packed_qsa(), ("compress_ratio", 0), "its compress_ratio is 0; it is positive"),
        (packed_qsa(), ("state_capacity", 0), "its state_capacity is 0; it is positive"),
        (packed_qsa(), ("token_budget", 3), "its token_budget is 3, which its compress_ratio 2 does not divide"),
        (packed_qsa(), ("policy_mode", "csa"), "needs its attribute index_topk, which is positive"),
        (packed_csa(), ("token_budget", 2), "with policy_mode='csa' it has no token_budget; leave them out"),
        (packed_qsa(), ("state_update_capacity", 2), "it needs its input state_update_capture_count"),
        (packed_qsa(), ("state_update_capacity", 9), "its state_update_capacity is 9; it is from 0 to 8"),
        (packed_csa(), ("state_update_capacity", 2), "what captures updates of the state is of policy_mode='qsa'"),
        (packed_qsa(), ("indexshare_state_policy", "drop"), "its indexshare_state_policy 'drop' is not known"),
        (packed_qsa(), ("max_output_entries", 4), "a selection that is shared .* is not covered"),
        (packed_qsa(), ("position_ids", "key"), "its input position_ids is of policy_mode='csa'; leave it out"),
        (packed_csa(), ("key", ""), "with policy_mode='csa' it needs its input key"),
        (packed_csa(), ("past_gate_buffer", ""), "it needs its inputs gate, position_bias, head_weights, position_ids"),
        (packed_qsa(), ("indexshare_mode", "past_sequence_lengths"), "its schema does not say which rows"),
    ],
    ids=lambda p: None,
)
def test_a_form_of_packed_requests_that_is_not_covered_is_refused(
    made: Case, changed: tuple[str, Any], said: str
) -> None:
    model, (name, value) = onnx.ModelProto(), changed
    model.CopyFrom(made.model)
    node = model.graph.node[0]
    names = [p.name for p in DEFINITIONS["com.microsoft", node.op_type].schema.inputs]
    if name in names:
        place = names.index(name)
        node.input.extend([""] * (place + 1 - len(node.input)))
        node.input[place] = value
    else:
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model, outputs=["present_key_state"])
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(model).run(made.feeds)


@pytest.mark.parametrize(
    ("made", "changed", "said"),
    [
        (qsa(), {"key": np.ones((2, 3, 4))}, r"key has the shape \[2, 3, 4\]"),
        (qsa(room=5), {}, "past_key has 5 rows; 3 by past_sequence_length and 3 new ones are more"),
        (qsa(), {"query": np.ones((2, 3, 7))}, "query has 7 channels; heads of 5 channels"),
        (qsa(), {"cos_cache": np.ones((7, 6)), "sin_cache": np.ones((7, 6))}, "does not fit heads of 5 channels"),
        (csa(held=4), {}, "past_proj_buffer has 4 tokens; it has fewer than 4, twice compress_ratio"),
        (csa(), {"position_ids": np.ones((2, 4), np.int64)}, "position_ids has the shape"),
        (packed_qsa(), {"key": np.ones((8, 5))}, r"key has the shape \[8, 5\]; it is \[8, 4\]"),
        (packed_qsa(), {"query": np.ones((8, 7))}, "query has 7 channels; heads of 4 channels"),
        (packed_qsa(), {"past_key_state": np.ones((4, 4, 4))}, r"past_key_state .*; it is \[4, 3, 4\]"),
        (packed_qsa(), {"past_kv_buffer": np.ones((4, 2, 4))}, r"past_kv_buffer .*; it is \[4, 3, 4\]"),
        (packed_csa(), {"past_gate_buffer": np.ones((4, 3, 4))}, r"past_gate_buffer .*; it is \[4, 3, 8\]"),
        (packed_qsa(), {"past_state_lengths": np.ones((4, 3))}, r"past_state_lengths .*; it is \[4, 2\]"),
        (packed_qsa(), {"past_sequence_lengths": np.ones(3)}, r"past_sequence_lengths .*; it is \[4\]"),
        (
            packed_qsa(),
            {"cumulative_sequence_lengths": np.array([0, 4, 3, 5, 8])},
            r"cumulative_sequence_lengths is \[0, 4, 3, 5, 8\]; it rises from 0 to the 8 tokens",
        ),
        (packed_csa(), {"head_weights": np.ones((8, 3))}, r"head_weights .*; it is \[8, 2\]"),
        (packed_csa(), {"cos_cache": np.ones((9, 3)), "sin_cache": np.ones((9, 3))}, "does not fit heads of 4"),
        (
            packed_qsa(each=True),
            {"cos_cache": np.ones((3, 9, 2)), "sin_cache": np.ones((3, 9, 2))},
            r"or \[4, \?, \?\]",
        ),
    ],
    ids=lambda p: None,
)
def test_bad_input_is_refused_by_name(made: Case, changed: dict[str, np.ndarray], said: str) -> None:
    model, feeds = onnx.ModelProto(), dict(made.feeds)
    model.CopyFrom(made.model)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    for name, array in changed.items():
        feeds[name] = array.astype(feeds[name].dtype)
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(model).run(feeds)
