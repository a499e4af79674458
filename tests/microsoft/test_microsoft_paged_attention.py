"""ONNX Runtime's attentions to pages and to selected keys: what is refused, and that they are those to keys in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from grouped_attention import NUMPY, floats, grouped, int32, node_model, prompt

import refgrad
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import drawer

pytestmark = [pytest.mark.stock, pytest.mark.slow]


def paged(**given: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A PagedAttention of 2 and 1 tokens after 3 and 0, `given` in the place of its inputs and attributes."""
    draw = drawer()
    every: dict[str, Any] = {
        "query": draw(3, 16),
        "key": draw(3, 8),
        "value": draw(3, 8),
        "key_cache": draw(6, 2, 2, 4),
        "value_cache": draw(6, 2, 2, 4),
        "cumulative_sequence_length": int32(0, 2, 3),
        "past_seqlens": int32(3, 0),
        "block_table": np.array([[4, 1, 3], [2, -1, -1]], np.int32),
        "num_heads": 4,
        "kv_num_heads": 2,
    }
    return node_model("PagedAttention", every | given, {"output": 2, "key_cache_out": 4, "value_cache_out": 4})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_heads": 3}, "kv_num_heads=2 does not divide num_heads=3"),
        (
            {"cumulative_sequence_length": int32(0, 2, 4)},
            r"cumulative_sequence_length is \[0, 2, 4\]; it rises from 0 to the 3",
        ),
        ({"past_seqlens": int32(3)}, r"past_seqlens has the shape \[1\]; it is \[2\]"),
        ({"past_seqlens": int32(5, 0)}, r"the samples have \[7, 1\] tokens; their pages hold 6"),
        ({"past_seqlens": int32(-1, 0)}, r"past_seqlens is \[-1, 0\]; each number is in 0..6"),
        ({"block_table": np.full((2, 3), 6, np.int32)}, "block_table is .*; each number is in -1..5"),
        ({"block_table": np.zeros((3, 3), np.int32)}, r"block_table has the shape \[3, 3\]; it is \[2, \?\]"),
        ({"slot_mapping": int32(0, 12, 1)}, r"slot_mapping is \[0, 12, 1\]; each number is in -1..11"),
        ({"key_cache": floats(6, 2, 1, 4)}, r"key_cache has the shape .*; it is \[6, 2, 2, 4\]"),
        ({"kv_cache_layout": "LATENT"}, "LATENT needs key, kv_num_heads=1"),
        ({"k_quant_type": "PER_TOKEN"}, "'PER_TOKEN' is not known; there are 'NONE', 'PER_TENSOR', 'PER_CHANNEL'"),
        ({"k_quant_type": "PER_TENSOR", "k_scale": floats(1)}, "key_cache holds float32; a cache of 8 bits holds int8"),
        ({"cos_cache": floats(4, 2), "sin_cache": floats(4, 2), "do_rotary": 1}, "the positions contain 4"),
    ],
)
def test_bad_input_of_paged_attention_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    model, feeds = paged(**given)
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(model).run(feeds)


def test_pages_hold_what_a_cache_in_a_row_does() -> None:
    """The first sample is a GroupQueryAttention after its past."""
    model, feeds = paged()
    rows = [feeds[name][[4, 1, 3]].reshape(6, 2, 4)[:3].swapaxes(0, 1)[None] for name in ("key_cache", "value_cache")]
    new = {name: feeds[name][None, :2] for name in ("query", "key", "value")}
    alone = grouped(prompt(1, 2, 3, 4) | new | dict(zip(("past_key", "past_value"), rows, strict=True)))
    expected = NUMPY.prepare(alone.model).run(alone.feeds)
    results = NUMPY.prepare(model).run(feeds)
    np.testing.assert_allclose(results["output"][:2], expected["output"][0], rtol=1e-6)
    held = results["key_cache_out"][[4, 1, 3]].reshape(6, 2, 4)[:5].swapaxes(0, 1)
    np.testing.assert_array_equal(held, expected["present_key"][0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k_cache_dtype": "int4"}, "key_cache holds int4, which is not covered"),
        ({"v_quant_type": "PER_TENSOR"}, "PER_TENSOR needs the input v_scale"),
        ({"v_head_size": 2}, "v_head_size needs kv_cache_layout='LATENT' and scale"),
        ({"kv_cache_layout": "LATENT"}, "LATENT needs key, kv_num_heads=1"),
        ({"kv_cache_layout": "BOTH"}, "there are SEPARATE and LATENT"),
    ],
)
def test_a_form_of_paged_attention_that_is_not_covered_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(paged(**given)[0])


def chosen(**given: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A DynamicSparseAttention of two queries after 2 and 0 tokens, `given` in the place of its inputs and attributes."""
    draw = drawer()
    every: dict[str, Any] = {
        "query": draw(2, 2, 16),
        "key": draw(2, 2, 8),
        "value": draw(2, 2, 8),
        "past_key": draw(2, 2, 2, 4),
        "past_value": draw(2, 2, 2, 4),
        "selected_indices": np.array([[2, 0], [1, -1], [0, -1], [1, 0]], np.int32),
        "selected_counts": int32(2, 1, 1, 2),
        "seqlens_k": int32(3, 1),
        "total_sequence_length": np.array(4, np.int32),
        "num_heads": 4,
        "kv_num_heads": 2,
    }
    return node_model("DynamicSparseAttention", every | given, {"output": 3, "present_key": 4, "present_value": 4})


def chosen_in_pages(**given: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A SparsePagedAttention like `paged`."""
    _, feeds = paged()
    choice = {"selected_indices": np.array([[2, 0], [1, -1], [0, -1]], np.int32), "selected_counts": int32(2, 1, 1)}
    every = {**feeds, **choice, "num_heads": 4, "kv_num_heads": 2, **given}
    return node_model("SparsePagedAttention", every, {"output": 2, "key_cache_out": 4, "value_cache_out": 4})


ALL = np.array([[0, 1, 2, 3]] * 4, np.int32)


def test_who_chooses_all_keys_has_the_attention_to_all() -> None:
    """A later key is not seen."""
    model, feeds = chosen(selected_indices=ALL, selected_counts=int32(4, 4, 4, 4))
    whole = {name: x for name, x in feeds.items() if not name.startswith("selected")}
    plain = grouped(prompt(2, 2, 2, 4) | whole | {"query_seqlens": int32(2, 2)})
    expected, results = (NUMPY.prepare(m).run(f) for m, f in ((plain.model, plain.feeds), (model, feeds)))
    for name, x in expected.items():
        np.testing.assert_allclose(results[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
    flat, held = paged()
    every = np.tile(np.arange(6, dtype=np.int32), (3, 1))
    model, feeds = chosen_in_pages(selected_indices=every, selected_counts=int32(6, 6, 6))
    np.testing.assert_allclose(
        NUMPY.prepare(model).run(feeds)["output"], NUMPY.prepare(flat).run(held)["output"], rtol=1e-6
    )


def test_a_result_in_bfloat16() -> None:
    model, feeds = chosen()
    narrow = {name: x.astype(np.float16) if x.dtype == np.float32 else x for name, x in feeds.items()}
    given = {"output_bf16": 1, "num_heads": 4, "kv_num_heads": 2}
    model, feeds = node_model("DynamicSparseAttention", narrow | given, {"output": 3})
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    result = NUMPY.prepare(model).run(feeds)["output"]
    body = NUMPY.prepare(refgrad.lower(model)).run(feeds)["output"]
    assert result.dtype.name == body.dtype.name == "bfloat16"
    np.testing.assert_array_equal(result.astype(np.float32), body.astype(np.float32))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_heads": 3}, "kv_num_heads=2 does not divide num_heads=3"),
        ({"selected_indices": ALL, "selected_counts": int32(5, 1, 1, 1)}, "each number is in 0..4"),
        ({"selected_indices": ALL + 1, "selected_counts": int32(4, 1, 1, 1)}, "selected_indices contain 4"),
        ({"selected_indices": ALL * 0, "selected_counts": int32(2, 1, 1, 1)}, "names a place twice"),
        ({"selected_counts": int32(1)}, r"selected_counts has the shape \[1\]; it is \[4\]"),
        ({"seqlens_k": int32(3, 0)}, r"seqlens_k is \[3, 0\]; each number is in 1..3"),
        ({"total_sequence_length": np.array(5, np.int32)}, "the past has 2 rows and 2 are new"),
        ({"past_value": floats(2, 2, 3, 4)}, r"past_value has the shape .*; it is \[2, 2, 2, 4\]"),
        (
            {"attention_mode": "all"},
            "attention_mode='all' with .* is not covered; there are selected_only",
        ),
        (
            {"attention_mode": "local_plus_selected"},
            "there are .* local_plus_selected with auxiliary",
        ),
        ({"selected_kv_source": "auxiliary"}, "needs auxiliary_key"),
    ],
)
def test_a_bad_choice_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    model, feeds = chosen(**given)
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(model).run(feeds)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"selected_indices": ALL[:3] + 3, "selected_counts": int32(4, 1, 1)}, "selected_indices contain 6"),
        ({"past_seqlens": int32(5, 0)}, r"the samples have \[7, 1\] tokens; their pages hold 6"),
        ({"auxiliary_cache_layout": "paged"}, "auxiliary_cache_layout='paged' is not known; there is 'contiguous'"),
        (
            {
                "selected_kv_source": "auxiliary",
                "auxiliary_key": floats(2, 3, 4, 4),
                "auxiliary_value": floats(2, 3, 4, 4),
            },
            r"auxiliary_key has the shape .*; it is \[2, 3, 2, 4\]",
        ),
    ],
)
def test_a_bad_choice_in_pages_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    model, feeds = chosen_in_pages(**given)
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(model).run(feeds)


@pytest.mark.parametrize("make", [chosen, chosen_in_pages])
def test_a_choice_that_is_not_covered_is_refused(make: Any) -> None:
    with pytest.raises(NoGradientError, match="attention_mode='local_plus_selected' with selected_kv_source='main'"):
        refgrad.gradient(make(attention_mode="local_plus_selected")[0])
