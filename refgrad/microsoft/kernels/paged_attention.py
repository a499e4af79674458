"""ONNX Runtime's attentions to keys in the pages of a cache, or to those that each query has selected."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.grouped_attention import (
    Quantizer,
    Rotary,
    attend,
    normalized,
    per_sample,
    sink_scores,
    split,
    wide,
    within,
)
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("PagedAttention", domain=MICROSOFT, fresh=True)
def paged_attention(args: Arguments) -> tuple[Array, ...]:
    """The tokens are written to their places in the pages, then one token after another reads the pages of its sample"""
    latent = args.kv_cache_layout == "LATENT"
    q, k, v = normalized(args, *split(Arguments(**vars(args) | {"value": args.key}) if latent else args))
    tokens, _, size = q.shape
    page = args.key_cache.shape[1]
    sample, place, totals = _in_a_row(args)
    if args.do_rotary:
        turn = Rotary(args, place)
        q, k = turn(q), turn(k)
    slots = _slots(args, sample, place)
    written, read = _written(args, (k, v)[: 1 if latent else 2], slots)
    sink = sink_scores(args, False, q.dtype)
    y = np.zeros((tokens, args.num_heads, args.v_head_size or size), q.dtype)
    for t in range(tokens):
        b = sample[t]
        last = int(place[t]) + 1 if args.is_causal else int(totals[b])
        first = max(0, int(place[t]) + 1 - args.local_window_size) if args.local_window_size > 0 else 0
        spots = np.arange(first, last)
        spots = spots[args.block_table[b, spots // page] >= 0]
        at = args.block_table[b, spots // page], spots % page
        keys, values = read[0][at], read[-1][at][..., : args.v_head_size or size]
        seen = np.ones((1, len(spots)), bool)
        y[t], _ = attend(q[t : t + 1], keys, values, seen, args.scale, args.softcap, None, sink)
    return y.reshape(tokens, args.num_heads * y.shape[2]).astype(args.query.dtype), *written


def _in_a_row(args: Arguments) -> tuple[Array, Array, Array]:
    """Of each token its sample and its place there; and how many tokens a sample has."""
    tokens, (pages, page) = len(args.query), args.key_cache.shape[:2]
    bounds = rising("cumulative_sequence_length", args.cumulative_sequence_length, tokens)
    within("block_table", args.block_table, -1, pages - 1)
    counts, room = np.diff(bounds), args.block_table.shape[1] * page
    before = per_sample("past_seqlens", args.past_seqlens, 0, room)
    totals = before + counts
    if np.any(totals > room):
        raise ValueError(f"the samples have {totals.tolist()} tokens; their pages hold {room}")
    sample = np.repeat(np.arange(len(counts)), counts)
    return sample, before[sample] + np.arange(tokens) - bounds[sample], totals


def rising(what: str, bounds: Array, tokens: int) -> Array:
    """`bounds` as int64. Raises ValueError where they do not rise from 0 to the number of tokens."""
    bounds = bounds.astype(np.int64)
    if bounds.ndim != 1 or not len(bounds) or bounds[0] or bounds[-1] != tokens or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{what} is {bounds.tolist()}; it rises from 0 to the {tokens} tokens")
    return bounds


def _slots(args: Arguments, sample: Array, place: Array) -> list[tuple[int, int] | None]:
    """The page and row where each token is written, None where it is not."""
    (pages, page), table, slot_mapping = args.key_cache.shape[:2], args.block_table, args.slot_mapping
    if slot_mapping is not None:
        within("slot_mapping", slot_mapping, -1, pages * page - 1)
    found: list[tuple[int, int] | None] = []
    for t, (b, at) in enumerate(zip(sample, place, strict=True)):
        if slot_mapping is None:
            found.append((int(table[b, at // page]), int(at) % page) if table[b, at // page] >= 0 else None)
        else:
            found.append(divmod(int(slot_mapping[t]), page) if slot_mapping[t] >= 0 else None)
    return found


def _written(
    args: Arguments, rows: Sequence[Array], slots: Sequence[tuple[int, int] | None]
) -> tuple[list[Array], list[Array]]:
    """Copies of the caches with each row of the new keys and values in its slot, and their numbers as floats."""
    written, read = [], []
    for x, cache, kind, scale, name in zip(
        rows,
        (args.key_cache, args.value_cache),
        (args.k_quant_type, args.v_quant_type),
        (args.k_scale, args.v_scale),
        ("k_scale", "v_scale"),
        strict=False,
    ):
        quantizer = Quantizer(kind, scale, name, 0 if kind == "NONE" else 8, *cache.shape[2:])
        full = cache.copy()
        for row, slot in zip(quantizer.to_cache(x), slots, strict=True):
            if slot is not None:
                full[slot] = row.astype(cache.dtype)
        written.append(full)
        read.append(quantizer.read(wide(full)))
    return written, read


@kernel_of_body("DynamicSparseAttention", domain=MICROSOFT, fresh=True)
def dynamic_sparse_attention(args: Arguments) -> tuple[Array | None, ...]:
    """One query after another reads the rows that it has selected, and the rows of its window"""
    others = _to_choose_from(args)
    local = args.attention_mode == "local_plus_selected"
    declared = args.query.dtype
    q, k, v = normalized(args, *split(args))
    batch, length, _, size = q.shape
    capacity, total = 0 if args.past_key is None else args.past_key.shape[2], args.total_sequence_length.item()
    lengths = per_sample("seqlens_k", args.seqlens_k, length - 1, total - 1) + 1
    if total > capacity + length:
        raise ValueError(f"total_sequence_length is {total}; the past has {capacity} rows and {length} are new")
    before = lengths - length
    within("the number of tokens before the new ones", before, 0, capacity)
    chosen = _choices(args, total if others is None else others[0].shape[2])
    if args.do_rotary:
        places = before[:, None] + np.arange(length) if args.position_ids is None else args.position_ids
        turn = Rotary(args, places)
        q, k = turn(q), turn(k)
    sink = sink_scores(args, bool(args.smooth_softmax), q.dtype)
    y = np.zeros_like(q)
    presents, read = [], []
    for x, past, number, name in (
        (k, args.past_key, args.key_scale, "key_scale"),
        (v, args.past_value, args.value_scale, "value_scale"),
    ):
        bits = 8 if past is not None and past.dtype == np.int8 else 0
        quantizer = Quantizer("PER_CHANNEL", number, name, bits, args.kv_num_heads, size)
        kind = declared if past is None else past.dtype
        present = np.zeros((batch, args.kv_num_heads, max(total, capacity), size), kind)
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
                near = slice(max(0, own + 1 - args.local_window_size), own + 1)
                parts.append((read[0][b, near], read[1][b, near]))
        keys, values = (np.concatenate(group) for group in zip(*parts, strict=True))
        seen = np.ones((1, len(keys)), bool)
        y[b, s], _ = attend(q[b, s][None], keys, values, seen, args.scale, 0.0, None, sink)
    kind = np.dtype(ml_dtypes.bfloat16) if args.output_bf16 else declared
    return y.reshape(batch, length, args.num_heads * size).astype(kind), *presents, None


@kernel_of_body("SparsePagedAttention", domain=MICROSOFT, fresh=True)
def sparse_paged_attention(args: Arguments) -> tuple[Array, ...]:
    """One token after another reads the rows that it has selected, and the rows of its window"""
    others = _to_choose_from(args)
    q, k, v = normalized(args, *split(args))
    tokens, _, size = q.shape
    page = args.key_cache.shape[1]
    sample, place, totals = _in_a_row(args)
    room = args.block_table.shape[1] * page
    valid = np.full(len(totals), room)
    if others is not None:
        room, heads = others[0].shape[1:3]
        others = [x.repeat(args.kv_num_heads // heads, axis=2) for x in others]
        valid = np.full(len(totals), room)
        if args.auxiliary_lengths is not None:
            valid = per_sample("auxiliary_lengths", args.auxiliary_lengths, 0, room)
    chosen = _choices(args, room)
    if args.do_rotary:
        turn = Rotary(args, place)
        q, k = turn(q), turn(k)
    slots = _slots(args, sample, place)
    written, read = _written(args, (k, v), slots)
    sink = sink_scores(args, False, q.dtype)
    y = np.zeros_like(q)
    for t in range(tokens):
        b, picked = int(sample[t]), chosen[t]
        last = int(place[t]) + 1 if args.is_causal else int(totals[b])
        parts = []
        if others is not None:
            picked = picked[picked < valid[b]]
            parts.append((others[0][b, picked], others[1][b, picked]))
        spots = picked[picked < last] if others is None else np.zeros(0, np.int64)
        if args.attention_mode == "local_plus_selected":
            spots = np.arange(
                max(0, int(place[t]) + 1 - args.local_window_size) if args.local_window_size > 0 else 0, last
            )
        spots = spots[args.block_table[b, spots // page] >= 0]
        at = args.block_table[b, spots // page], spots % page
        parts.append((read[0][at], read[1][at]))
        keys, values = (np.concatenate(group) for group in zip(*parts, strict=True))
        seen = np.ones((1, len(keys)), bool)
        y[t], _ = attend(q[t : t + 1], keys, values, seen, args.scale, args.softcap, None, sink)
    return y.reshape(tokens, args.num_heads * size).astype(args.query.dtype), *written


def _to_choose_from(args: Arguments) -> list[Array] | None:
    """The auxiliary keys and values, None where the queries choose among the main ones."""
    if args.selected_kv_source == "main":
        return None
    return [wide(args.auxiliary_key), wide(args.auxiliary_key if args.auxiliary_kv_shared else args.auxiliary_value)]


def _choices(args: Arguments, room: int) -> list[Array]:
    """The places that each query has selected, of `room`."""
    indices = args.selected_indices
    counts = per_sample("selected_counts", args.selected_counts, 0, indices.shape[1])
    found = [row[:count].astype(np.int64) for row, count in zip(indices, counts, strict=True)]
    for row in found:
        check_indices(row, room, "selected_indices", lowest=0)
        if len(set(row.tolist())) < len(row):
            raise ValueError(f"selected_indices has {row.tolist()}, which names a place twice")
    return found
