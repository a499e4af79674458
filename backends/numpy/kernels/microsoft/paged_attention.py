"""ONNX Runtime's attentions to keys in the pages of a cache, or to those that each query has selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from refgrad.backends.numpy.kernels.microsoft.grouped_attention import (
    QUANTIZATIONS,
    Quantizer,
    Rotary,
    among,
    attend,
    normalized,
    one_number,
    per_sample,
    sink_scores,
    split,
    wide,
    within,
)
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("PagedAttention", domain=MICROSOFT, fresh=True)
def paged_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    key_cache: Array,
    value_cache: Array | None,
    cumulative_sequence_length: Array,
    past_seqlens: Array,
    block_table: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    slot_mapping: Array | None = None,
    head_sink: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    attention_metadata: Array | None = None,
    *,
    do_rotary: int = 0,
    is_causal: int = 1,
    k_cache_dtype: str = "",
    k_quant_type: str = "NONE",
    kv_cache_layout: str = "SEPARATE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    v_cache_dtype: str = "",
    v_head_size: int = 0,
    v_quant_type: str = "NONE",
) -> tuple[Array, ...]:
    """The tokens are written to their places in the pages, then one token after another reads the pages of its sample"""
    flags = {"do_rotary": do_rotary, "rotary_interleaved": rotary_interleaved, "is_causal": is_causal}
    for name, flag in flags.items():
        among(name, flag, (0, 1))
    among("kv_cache_layout", kv_cache_layout, ("SEPARATE", "LATENT"))
    latent = kv_cache_layout == "LATENT"
    if latent and (key is None or value is not None or value_cache is not None or kv_num_heads != 1):
        raise ValueError("LATENT needs key, kv_num_heads=1, and neither value nor value_cache")
    if not latent and value_cache is None:
        raise ValueError("value_cache is missing; only LATENT is without it")
    if v_head_size and (not latent or not scale):
        raise ValueError("v_head_size needs kv_cache_layout='LATENT' and scale")
    if local_window_size == 0:
        raise ValueError("local_window_size is 0; a window has at least one key, and -1 means no window")
    if query.ndim != 2:
        raise ValueError(f"query has the shape {list(query.shape)}; (tokens, heads·size) is needed")
    declared = query.dtype
    rows: list[Any] = [None if x is None else wide(x)[np.newaxis] for x in (query, key, value if not latent else key)]
    q, k, v = (x[0] for x in split(rows[0], rows[1], rows[2], num_heads, kv_num_heads))
    tokens, _, size = q.shape
    if q_norm_weight is not None and k_norm_weight is not None:
        q = normalized("q_norm_weight", q, wide(q_norm_weight), qk_norm_epsilon)
        k = normalized("k_norm_weight", k, wide(k_norm_weight), qk_norm_epsilon)
    elif (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together; one of them is missing")

    if key_cache.ndim != 4:
        raise ValueError(f"key_cache has the shape {list(key_cache.shape)}; (pages, rows, heads, size) is needed")
    pages, page = key_cache.shape[:2]
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache is not None:
            check_shape(name, cache.shape, (pages, page, kv_num_heads, size))
    sample, place, totals = _in_a_row(cumulative_sequence_length, past_seqlens, block_table, tokens, pages, page)
    if do_rotary:
        turn = Rotary(wide(cos_cache), wide(sin_cache), place, rotary_interleaved, rotary_offset)
        q, k = turn(q), turn(k)
    if slot_mapping is not None:
        check_shape("slot_mapping", slot_mapping.shape, (tokens,))
        within("slot_mapping", slot_mapping, -1, pages * page - 1)
    slots = _slots(slot_mapping, block_table, sample, place, page)
    written, read = [], []
    forms = [(k, key_cache, k_quant_type, k_scale, "k"), (v, value_cache, v_quant_type, v_scale, "v")]
    for x, cache, kind, number, name in forms[: 1 if latent else 2]:
        assert cache is not None
        quantizer = _of_cache(cache, kind, number, name)
        written.append(_put(cache, quantizer.to_cache(x), slots))
        read.append(quantizer.read(wide(written[-1])))
    sink = sink_scores(wide(head_sink), num_heads, False, q.dtype)
    y = np.zeros((tokens, num_heads, v_head_size or size), q.dtype)
    for t in range(tokens):
        b = sample[t]
        last = int(place[t]) + 1 if is_causal else int(totals[b])
        first = max(0, int(place[t]) + 1 - local_window_size) if local_window_size > 0 else 0
        spots = np.arange(first, last)
        spots = spots[block_table[b, spots // page] >= 0]
        at = block_table[b, spots // page], spots % page
        keys, values = read[0][at], read[-1][at][..., : v_head_size or size]
        seen = np.ones((1, len(spots)), bool)
        y[t], _ = attend(q[t : t + 1], keys, values, seen, scale, softcap, None, sink)
    return y.reshape(tokens, num_heads * y.shape[2]).astype(declared), *written


def _in_a_row(
    bounds: Array, past_seqlens: Array, table: Array, tokens: int, pages: int, page: int
) -> tuple[Array, Array, Array]:
    """Of each token its sample and its place there; and how many tokens a sample has."""
    bounds = rising("cumulative_sequence_length", bounds, tokens)
    batch = len(bounds) - 1
    if table.ndim != 2:
        raise ValueError(f"block_table has the shape {list(table.shape)}; (batch, pages of a sample) is needed")
    check_shape("block_table", table.shape, (batch, table.shape[1]))
    within("block_table", table, -1, pages - 1)
    counts, room = np.diff(bounds), table.shape[1] * page
    before = per_sample("past_seqlens", past_seqlens, batch, 0, room)
    totals = before + counts
    if np.any(totals > room):
        raise ValueError(f"the samples have {totals.tolist()} tokens; their pages hold {room}")
    sample = np.repeat(np.arange(batch), counts)
    return sample, before[sample] + np.arange(tokens) - bounds[sample], totals


def rising(what: str, bounds: Array, tokens: int) -> Array:
    """`bounds` as int64. Raises ValueError where they do not rise from 0 to the number of tokens."""
    bounds = bounds.astype(np.int64)
    if bounds.ndim != 1 or not len(bounds) or bounds[0] or bounds[-1] != tokens or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{what} is {bounds.tolist()}; it rises from 0 to the {tokens} tokens")
    return bounds


def _slots(
    slot_mapping: Array | None, table: Array, sample: Array, place: Array, page: int
) -> list[tuple[int, int] | None]:
    """The page and row where each token is written, None where it is not."""
    found: list[tuple[int, int] | None] = []
    for t, (b, at) in enumerate(zip(sample, place, strict=True)):
        if slot_mapping is None:
            found.append((int(table[b, at // page]), int(at) % page) if table[b, at // page] >= 0 else None)
        else:
            found.append(divmod(int(slot_mapping[t]), page) if slot_mapping[t] >= 0 else None)
    return found


def _put(cache: Array, rows: Array, slots: Sequence[tuple[int, int] | None]) -> Array:
    """A copy of the cache with each row in its slot."""
    full = cache.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot is not None:
            full[slot] = row.astype(cache.dtype)
    return full


def _of_cache(cache: Array, kind: str, scale: Array | None, name: str) -> Quantizer:
    """How a paged cache (pages, rows, heads, size) of floats or of int8 is written and read."""
    among(f"{name}_quant_type", kind, QUANTIZATIONS)
    if cache.dtype == np.uint8 or (cache.dtype == np.int8) != (kind != "NONE"):
        raise ValueError(f"{name}_quant_type={kind} does not fit a cache of {cache.dtype}; only int8 is quantised")
    return Quantizer(kind, scale, f"{name}_scale", 0 if kind == "NONE" else 8, *cache.shape[2:])


@kernel("DynamicSparseAttention", domain=MICROSOFT, fresh=True)
def dynamic_sparse_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    auxiliary_key: Array | None,
    auxiliary_value: Array | None,
    selected_indices: Array,
    selected_counts: Array,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    head_sink: Array | None = None,
    committed_length: Array | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
    *,
    attention_mode: str = "selected_only",
    auxiliary_kv_shared: int = 0,
    do_rotary: int = 0,
    is_causal: int = 1,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    output_bf16: int = 0,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float | None = None,
    selected_kv_source: str = "main",
    smooth_softmax: int = 0,
) -> tuple[Array | None, ...]:
    """One query after another reads the rows that it has selected, and the rows of its window"""
    for name, flag in (
        ("do_rotary", do_rotary),
        ("rotary_interleaved", rotary_interleaved),
        ("output_bf16", output_bf16),
    ):
        among(name, flag, (0, 1))
    among("is_causal", is_causal, (1,))
    others = _to_choose_from(attention_mode, selected_kv_source, auxiliary_key, auxiliary_value, auxiliary_kv_shared)
    local = attention_mode == "local_plus_selected"
    if local and local_window_size < 1:
        raise ValueError(f"local_window_size is {local_window_size}; local_plus_selected needs one above 0")
    declared = query.dtype
    q, k, v = split(wide(query), wide(key), wide(value), num_heads, kv_num_heads)
    batch, length, _, size = q.shape
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value go together; one of them is missing")
    capacity = 0 if past_key is None else past_key.shape[2] if past_key.ndim == 4 else -1
    for name, past in (("past_key", past_key), ("past_value", past_value)):
        if past is not None:
            check_shape(name, past.shape, (batch, kv_num_heads, capacity, size))
    total = one_number("total_sequence_length", total_sequence_length)
    lengths = per_sample("seqlens_k", seqlens_k, batch, length - 1, total - 1) + 1
    if total > capacity + length:
        raise ValueError(f"total_sequence_length is {total}; the past has {capacity} rows and {length} are new")
    before = lengths - length
    within("the number of tokens before the new ones", before, 0, capacity)
    room = total
    if others is not None:
        room = others[0].shape[2] if others[0].ndim == 4 else -1
        for name, x in zip(("auxiliary_key", "auxiliary_value"), others, strict=True):
            check_shape(name, x.shape, (batch, kv_num_heads, room, size))
    chosen = _choices(selected_indices, selected_counts, batch * length, room)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = normalized("q_norm_weight", q, wide(q_norm_weight), qk_norm_epsilon)
        k = normalized("k_norm_weight", k, wide(k_norm_weight), qk_norm_epsilon)
    elif (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together; one of them is missing")
    if do_rotary:
        places = before[:, None] + np.arange(length) if position_ids is None else position_ids
        check_shape("position_ids", places.shape, (batch, length))
        turn = Rotary(wide(cos_cache), wide(sin_cache), places, rotary_interleaved, rotary_offset)
        q, k = turn(q), turn(k)
    sink = sink_scores(wide(head_sink), num_heads, bool(smooth_softmax), q.dtype)
    y = np.zeros_like(q)
    presents, read = [], []
    for x, past, number, name in ((k, past_key, key_scale, "key_scale"), (v, past_value, value_scale, "value_scale")):
        bits = 8 if past is not None and past.dtype == np.int8 else 0
        quantizer = Quantizer("PER_CHANNEL", number, name, bits, kv_num_heads, size)
        kind = declared if past is None else past.dtype
        present = np.zeros((batch, kv_num_heads, max(total, capacity), size), kind)
        for b, start in enumerate(before):
            if past is not None:
                present[b, :, :start] = past[b, :, :start]
            present[b, :, start : start + length] = quantizer.to_cache(x[b]).swapaxes(0, 1)
        presents.append(present)
        read.append(quantizer.read(wide(present.swapaxes(1, 2))))
    for b, s in np.ndindex(batch, length):
        own, picked = int(before[b]) + s, chosen[b * length + s]
        if others is None:
            picked = picked[picked <= own]
            parts = [(read[0][b, picked], read[1][b, picked])]
        else:
            parts = [(others[0][b, :, picked], others[1][b, :, picked])]
            if local:
                near = slice(max(0, own + 1 - local_window_size), own + 1)
                parts.append((read[0][b, near], read[1][b, near]))
        keys, values = (np.concatenate(group) for group in zip(*parts, strict=True))
        seen = np.ones((1, len(keys)), bool)
        y[b, s], _ = attend(q[b, s][None], keys, values, seen, scale, 0.0, None, sink)
    kind = np.dtype(ml_dtypes.bfloat16) if output_bf16 else declared
    return y.reshape(batch, length, num_heads * size).astype(kind), *presents, None


@kernel("SparsePagedAttention", domain=MICROSOFT, fresh=True)
def sparse_paged_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    key_cache: Array,
    value_cache: Array,
    cumulative_sequence_length: Array,
    past_seqlens: Array,
    block_table: Array,
    slot_mapping: Array | None,
    selected_indices: Array,
    selected_counts: Array,
    auxiliary_key: Array | None = None,
    auxiliary_value: Array | None = None,
    auxiliary_lengths: Array | None = None,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    head_sink: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    attention_metadata: Array | None = None,
    *,
    attention_mode: str = "selected_only",
    auxiliary_cache_layout: str = "contiguous",
    auxiliary_kv_shared: int = 0,
    do_rotary: int = 0,
    is_causal: int = 1,
    k_quant_type: str = "NONE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float | None = None,
    selected_kv_source: str = "main",
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> tuple[Array, ...]:
    """One token after another reads the rows that it has selected, and the rows of its window"""
    flags = {"do_rotary": do_rotary, "rotary_interleaved": rotary_interleaved, "is_causal": is_causal}
    for name, flag in flags.items():
        among(name, flag, (0, 1))
    among("auxiliary_cache_layout", auxiliary_cache_layout, ("contiguous",))
    if local_window_size == 0:
        raise ValueError("local_window_size is 0; a window has at least one key, and -1 means no window")
    others = _to_choose_from(attention_mode, selected_kv_source, auxiliary_key, auxiliary_value, auxiliary_kv_shared)
    if query.ndim != 2:
        raise ValueError(f"query has the shape {list(query.shape)}; (tokens, heads·size) is needed")
    declared = query.dtype
    rows: list[Any] = [None if x is None else wide(x)[np.newaxis] for x in (query, key, value)]
    q, k, v = (x[0] for x in split(rows[0], rows[1], rows[2], num_heads, kv_num_heads))
    tokens, _, size = q.shape
    if q_norm_weight is not None and k_norm_weight is not None:
        q = normalized("q_norm_weight", q, wide(q_norm_weight), qk_norm_epsilon)
        k = normalized("k_norm_weight", k, wide(k_norm_weight), qk_norm_epsilon)
    elif (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together; one of them is missing")
    if key_cache.ndim != 4:
        raise ValueError(f"key_cache has the shape {list(key_cache.shape)}; (pages, rows, heads, size) is needed")
    pages, page = key_cache.shape[:2]
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_shape(name, cache.shape, (pages, page, kv_num_heads, size))
    sample, place, totals = _in_a_row(cumulative_sequence_length, past_seqlens, block_table, tokens, pages, page)
    room = block_table.shape[1] * page
    valid = np.full(len(totals), room)
    if others is not None:
        room = others[0].shape[1] if others[0].ndim == 4 else -1
        heads = 1 if others[0].ndim == 4 and others[0].shape[2] == 1 else kv_num_heads
        for name, x in zip(("auxiliary_key", "auxiliary_value"), others, strict=True):
            check_shape(name, x.shape, (len(totals), room, heads, size))
        others = [x.repeat(kv_num_heads // heads, axis=2) for x in others]
        valid = np.full(len(totals), room)
        if auxiliary_lengths is not None:
            valid = per_sample("auxiliary_lengths", auxiliary_lengths, len(totals), 0, room)
    chosen = _choices(selected_indices, selected_counts, tokens, room)
    if do_rotary:
        turn = Rotary(wide(cos_cache), wide(sin_cache), place, rotary_interleaved, rotary_offset)
        q, k = turn(q), turn(k)
    if slot_mapping is not None:
        check_shape("slot_mapping", slot_mapping.shape, (tokens,))
        within("slot_mapping", slot_mapping, -1, pages * page - 1)
    slots = _slots(slot_mapping, block_table, sample, place, page)
    written, read = [], []
    for x, cache, kind, number, name in (
        (k, key_cache, k_quant_type, k_scale, "k"),
        (v, value_cache, v_quant_type, v_scale, "v"),
    ):
        quantizer = _of_cache(cache, kind, number, name)
        written.append(_put(cache, quantizer.to_cache(x), slots))
        read.append(quantizer.read(wide(written[-1])))
    sink = sink_scores(wide(head_sink), num_heads, False, q.dtype)
    y = np.zeros_like(q)
    for t in range(tokens):
        b, picked = int(sample[t]), chosen[t]
        last = int(place[t]) + 1 if is_causal else int(totals[b])
        parts = []
        if others is not None:
            picked = picked[picked < valid[b]]
            parts.append((others[0][b, picked], others[1][b, picked]))
        spots = picked[picked < last] if others is None else np.zeros(0, np.int64)
        if attention_mode == "local_plus_selected":
            spots = np.arange(max(0, int(place[t]) + 1 - local_window_size) if local_window_size > 0 else 0, last)
        spots = spots[block_table[b, spots // page] >= 0]
        at = block_table[b, spots // page], spots % page
        parts.append((read[0][at], read[1][at]))
        keys, values = (np.concatenate(group) for group in zip(*parts, strict=True))
        seen = np.ones((1, len(keys)), bool)
        y[t], _ = attend(q[t : t + 1], keys, values, seen, scale, softcap, None, sink)
    return y.reshape(tokens, num_heads * size).astype(declared), *written


def _to_choose_from(mode: str, source: str, key: Array | None, value: Array | None, shared: int) -> list[Array] | None:
    """The auxiliary keys and values, None where the queries choose among the main ones."""
    among("attention_mode", mode, ("selected_only", "local_plus_selected"))
    among("selected_kv_source", source, ("main", "auxiliary"))
    if source == "main":
        if mode == "local_plus_selected":
            raise ValueError("local_plus_selected chooses from the auxiliary keys; set selected_kv_source='auxiliary'")
        return None
    if key is None or (value is None and not shared):
        raise ValueError(
            "selected_kv_source='auxiliary' needs auxiliary_key, and auxiliary_value or auxiliary_kv_shared=1"
        )
    return [wide(key), wide(key if shared else value)]


def _choices(indices: Array, counts: Array, rows: int, room: int) -> list[Array]:
    """The places that each query has selected, of `room`."""
    if indices.ndim != 2:
        raise ValueError(f"selected_indices has the shape {list(indices.shape)}; (queries, entries) is needed")
    check_shape("selected_indices", indices.shape, (rows, indices.shape[1]))
    counts = per_sample("selected_counts", counts, rows, 0, indices.shape[1])
    found = [row[:count].astype(np.int64) for row, count in zip(indices, counts, strict=True)]
    for row in found:
        check_indices(row, room, "selected_indices", lowest=0)
        if len(set(row.tolist())) < len(row):
            raise ValueError(f"selected_indices has {row.tolist()}, which names a place twice")
    return found
