"""ONNX Runtime's indexers: what they choose by hand, what they refuse, and the derivative of what they keep."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checking import assert_second_derivative
from onnx import parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases.microsoft import case
from refgrad.conformance.cases.microsoft.indexer import csa, qsa
from refgrad.errors import BackendError, NoGradientError

pytestmark = [pytest.mark.stock, pytest.mark.thorough]


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


def test_second_derivatives() -> None:
    assert_second_derivative(csa(held=3))


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
        ('policy_mode="nsa", token_budget=2', "its policy_mode 'nsa' is not known; there are 'qsa' and 'csa'"),
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
        (qsa(), {"key": np.ones((2, 3, 4))}, r"key has the shape \[2, 3, 4\]"),
        (qsa(room=5), {}, "past_key has 5 rows; 3 by past_sequence_length and 3 new ones are more"),
        (qsa(), {"query": np.ones((2, 3, 7))}, "query has 7 channels; heads of 5 channels"),
        (qsa(), {"cos_cache": np.ones((7, 6)), "sin_cache": np.ones((7, 6))}, "does not fit heads of 5 channels"),
        (csa(held=4), {}, "past_proj_buffer has 4 tokens; it has fewer than 4, twice compress_ratio"),
        (csa(), {"position_ids": np.ones((2, 4), np.int64)}, "position_ids has the shape"),
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
