"""ONNX Runtime's attentions to keys in the pages of a cache, or to those that each query has selected."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.grouped_attention import (
    attend,
    check_heads,
    check_per_sample,
    check_windows,
    column,
    int64,
    rotated,
    sees_any,
    split,
    with_norms,
)
from refgrad.microsoft.bodies.kv_cache import CACHE, Cache, check_cache
from refgrad.microsoft.declared import Size, check_flags, check_shape, one_number, product, sizes, total
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import FLOATS, Shapes

_INT32, _INT64 = ("tensor(int32)",), ("tensor(int64)",)
_PAGES: dict[str, Any] = {
    "key_cache": CACHE,
    "value_cache": CACHE,
    "key_cache_out": "key_cache",
    "value_cache_out": "value_cache",
    "k_scale": FLOATS,
    "v_scale": "k_scale",
    "cumulative_sequence_length": _INT32,
    "past_seqlens": "cumulative_sequence_length",
    "block_table": "cumulative_sequence_length",
    "slot_mapping": "cumulative_sequence_length",
    "attention_metadata": "cumulative_sequence_length",
}
_COVERED = "a cache of floats or of int8"


def _check_paged(shapes: Shapes, args: Arguments) -> None:
    latent = args.kv_cache_layout == "LATENT"
    if args.kv_cache_layout not in ("SEPARATE", "LATENT"):
        raise UnsupportedFormError(
            f"kv_cache_layout={args.kv_cache_layout!r} is not known; there are SEPARATE and LATENT"
        )
    if latent and (
        args.key is None or args.value is not None or args.value_cache is not None or args.kv_num_heads != 1
    ):
        raise UnsupportedFormError("LATENT needs key, kv_num_heads=1, and neither value nor value_cache")
    if args.v_head_size and (not latent or not args.scale):
        raise UnsupportedFormError("v_head_size needs kv_cache_layout='LATENT' and scale")
    if not latent and args.value_cache is None:
        raise UnsupportedFormError("it needs value_cache, or kv_cache_layout='LATENT'")
    for of, name in (("key", args.k_cache_dtype), ("value", args.v_cache_dtype)):
        if name in ("int4", "float4e2m1", "float8e4m3fn"):
            raise UnsupportedFormError(f"{of}_cache holds {name}, which is not covered; use {_COVERED}")
    _check_pages(shapes, Arguments(**vars(args) | {"value": args.key}) if latent else args)


def _check_pages(shapes: Shapes, args: Arguments) -> Size:
    """Refuse samples in a row, and pages, that do not fit each other. Returns the width of a head."""
    check_flags(args, "do_rotary", "is_causal", "rotary_interleaved")
    check_windows(args)
    heads = check_heads(shapes, args, 2)
    heads.check_norms(shapes, args)
    heads.check_rotary(shapes, args)
    caches = ("key_cache", "k_scale", args.k_quant_type), ("value_cache", "v_scale", args.v_quant_type)
    for cache, scale, kind in caches[: 1 if args.value_cache is None else 2]:
        if shapes.type(getattr(args, cache)) == TensorProto.UINT8:
            raise UnsupportedFormError(f"{cache} holds uint8, which is not covered; use {_COVERED}")
        check_cache(shapes, args, cache, kind, scale, 8)
        pages = sizes(shapes, args.key_cache, 4)[:2]
        check_shape(shapes, cache, getattr(args, cache), (*pages, args.kv_num_heads, heads.width))
    check_shape(shapes, "cumulative_sequence_length", args.cumulative_sequence_length, (None,))
    batch = total(sizes(shapes, args.cumulative_sequence_length, 1)[0], -1)
    check_per_sample(shapes, "past_seqlens", args.past_seqlens, batch)
    check_shape(shapes, "block_table", args.block_table, (batch, None))
    check_shape(shapes, "slot_mapping", args.slot_mapping, (heads.queries,))
    return heads.width


@body(
    "PagedAttention",
    "output",
    optional=["key_cache_out", "value_cache_out"],
    types=_PAGES,
    writes={1: "key_cache", 2: "value_cache"},
    check=_check_paged,
    domain=MICROSOFT,
)
def paged_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    key_cache: str,
    value_cache: str | None,
    cumulative_sequence_length: str,
    past_seqlens: str,
    block_table: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    slot_mapping: str | None = None,
    head_sink: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    k_scale: str | None = None,
    v_scale: str | None = None,
    attention_metadata: str | None = None,
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
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ)·V, each sample for itself, of tokens in a row and of those in its pages of a cache

    A token that sees no key has a result of 0. attention_metadata only helps to plan.
    """
    latent = kv_cache_layout == "LATENT"
    _, (q, k, v), packed = _in_a_row(op, Arguments(**locals()), key if latent else value)
    pages = _Pages(op, packed, key_cache, block_table, slot_mapping)
    caches, read = [], []
    for x, past, number, kind in ((k, key_cache, k_scale, k_quant_type), (v, value_cache, v_scale, v_quant_type)):
        if past is not None:
            written, rows = pages.written(op, x, past, Cache(op, kind, 8, number, past), query)
            caches.append(written)
            read.append(rows)
    values = read[-1] if not v_head_size else op.Slice(read[0], [0], [v_head_size], [3])
    seen = pages.seen(op, packed, is_causal, local_window_size)
    heads = op.Transpose(packed.padded(op, op.Squeeze(q, [0])), perm=[0, 2, 1, 3])
    y, _, _ = attend(
        op, heads, read[0], values, seen, sees_any(op, seen), kv_num_heads, num_heads, scale, softcap, None, head_sink
    )
    output = packed.flat(op, y)
    return op.CastLike(output, query), *caches, *([None] if latent else [])


def _in_a_row(op: FunctionEmitter, args: Arguments, value: str | None) -> tuple[str, list[str], Packed]:
    """The number of tokens, their queries, keys and values (1, tokens, heads, H), and their samples."""
    tokens = op.Shape(args.query, end=1)
    key, value = (x and op.Unsqueeze(x, [0]) for x in (args.key, value))
    q, k, v = split(op, op.Unsqueeze(args.query, [0]), key, value, args.num_heads, args.kv_num_heads)
    q, k = with_norms(op, args, q, k)
    packed = Packed(op, tokens, args.cumulative_sequence_length, args.past_seqlens)
    if args.do_rotary:
        at = op.Unsqueeze(packed.place, [0])
        q, k = (
            rotated(op, x, args.cos_cache, args.sin_cache, at, args.rotary_interleaved, args.rotary_offset)
            for x in (q, k)
        )
    return tokens, [q, k, v], packed


class Packed:
    """Samples of several lengths in a row: the tokens of one sample after the tokens of another."""

    def __init__(self, op: FunctionEmitter, tokens: str, bounds: str, before: str) -> None:
        bounds, before = (op.Cast(x, to=TensorProto.INT64) for x in (bounds, before))
        self.starts, ends = op.Slice(bounds, [0], [-1], [0]), op.Slice(bounds, [1], [END], [0])
        self.counts, self.ids = op.Sub(ends, self.starts), op.up_to(tokens)
        ended = op.Cast(op.LessOrEqual(ends, op.Unsqueeze(self.ids, [1])), to=TensorProto.INT64)
        self.sample = op.ReduceSum(ended, [1], keepdims=0)  # of each token: as many end before it
        self._within = op.Sub(self.ids, op.Gather(self.starts, self.sample))
        self.place = op.Add(op.Gather(before, self.sample), self._within)  # in its sample
        self._longest = op.Max(op.reduce("ReduceMax", self.counts, [0]), [0])
        self._steps = op.up_to(self._longest)
        self.real = op.Less(self._steps, op.Unsqueeze(self.counts, [1]))  # (B, S)
        self.places = op.Add(op.Unsqueeze(before, [1]), self._steps)
        self.total = op.Add(before, self.counts)

    def padded(self, op: FunctionEmitter, x: str) -> str:
        """(tokens, ...) to (B, S, ...)"""
        return op.Gather(x, op.Where(self.real, op.Add(op.Unsqueeze(self.starts, [1]), self._steps), 0))

    def flat(self, op: FunctionEmitter, y: str) -> str:
        """(B, S, width) to (tokens, width)"""
        width = op.Shape(y, start=2, end=3)
        rows = op.Concat(op.Mul(op.Shape(y, end=1), self._longest), width, axis=0)
        return op.Gather(op.Reshape(y, rows, allowzero=1), op.Add(op.Mul(self.sample, self._longest), self._within))


class _Pages:
    """A cache (pages, rows of a page, heads, H) of which each sample has the pages that a table lists, or -1."""

    def __init__(self, op: FunctionEmitter, packed: Packed, cache: str, table: str, slot_mapping: str | None) -> None:
        table = op.Cast(table, to=TensorProto.INT64)
        page, columns = op.Shape(cache, start=1, end=2), op.Shape(table, start=1)
        self._size = op.Mul(op.Shape(cache, end=1), page)
        if slot_mapping is None:
            cell = op.Add(op.Mul(packed.sample, columns), op.Div(packed.place, page))
            found = op.Gather(op.Reshape(table, [-1]), cell)
            slot = op.Add(op.Mul(found, page), op.Mod(packed.place, page))  # negative where no page is
        else:
            slot = op.Cast(slot_mapping, to=TensorProto.INT64)
        slot = op.Where(op.Less(slot, 0), self._size, slot)  # an extra row takes tokens that are not written
        rows = op.up_to(op.Add(self._size, [1]))
        sources = op.ScatterElements(rows, slot, op.Add(packed.ids, self._size), axis=0)
        self._sources = op.Slice(sources, [0], self._size, [0])
        self.places = op.up_to(op.Mul(columns, page))
        self._found = op.Gather(table, op.Div(self.places, page), axis=1)
        self._rows = op.Add(op.Mul(op.Max(self._found, [0]), page), op.Mod(self.places, page))  # (B, L)

    def written(self, op: FunctionEmitter, x: str, past: str, cache: Cache, query: str) -> tuple[str, str]:
        """The cache with the rows x (1, tokens, heads, H), and what each sample has in its pages, (B, heads, L, H)."""
        flat = op.Reshape(past, op.Concat([1], self._size, op.Shape(past, start=2), axis=0))
        every = op.Gather(op.Concat(flat, cache.written(op, x, past), axis=1), self._sources, axis=1)
        part = cache.read(op, op.Gather(op.Squeeze(every, [0]), self._rows), query)
        return op.Reshape(every, op.Shape(past)), op.Transpose(part, perm=[0, 2, 1, 3])

    def seen(self, op: FunctionEmitter, packed: Packed, causal: int, window: int) -> str:
        """True where a token sees a place, (B, 1, S, L)."""
        held = op.And(op.GreaterOrEqual(self._found, 0), op.Less(self.places, op.Unsqueeze(packed.total, [1])))
        seen = op.And(op.Unsqueeze(held, [1, 2]), op.Unsqueeze(packed.real, [1, 3]))
        own = op.Unsqueeze(packed.places, [1, 3])
        if causal:
            seen = op.And(seen, op.LessOrEqual(self.places, own))
        if window > 0:
            seen = op.And(seen, op.Greater(self.places, op.Sub(own, window)))
        return seen


_MODES = (("selected_only", "main"), ("selected_only", "auxiliary"), ("local_plus_selected", "auxiliary"))


def _check_mode(args: Arguments) -> None:
    """Refuse a mode that is not covered, and one without the keys to choose from."""
    mode, source = args.attention_mode, args.selected_kv_source
    if (mode, source) not in _MODES:
        known = ", ".join(" with ".join(pair) for pair in _MODES)
        raise UnsupportedFormError(
            f"attention_mode={mode!r} with selected_kv_source={source!r} is not covered; there are {known}"
        )
    missing = args.auxiliary_key is None or (args.auxiliary_value is None and not args.auxiliary_kv_shared)
    if source == "auxiliary" and missing:
        raise UnsupportedFormError("it needs auxiliary_key, and auxiliary_value or auxiliary_kv_shared=1")


def _check_selected(shapes: Shapes, args: Arguments, queries: Size) -> None:
    """Refuse choices that are not one for each query."""
    check_shape(shapes, "selected_indices", args.selected_indices, (queries, None))
    check_per_sample(shapes, "selected_counts", args.selected_counts, queries)


def _check_dynamic(shapes: Shapes, args: Arguments) -> None:
    check_flags(args, "do_rotary", "rotary_interleaved", "output_bf16")
    _check_mode(args)
    if not args.is_causal or (args.attention_mode == "local_plus_selected" and args.local_window_size < 1):
        raise UnsupportedFormError("it needs is_causal=1, and local_plus_selected a local_window_size above 0")
    heads = check_heads(shapes, args)
    heads.check_caches(shapes, args)
    heads.check_norms(shapes, args)
    heads.check_rotary(shapes, args)
    _check_selected(shapes, args, product(heads.batch, heads.queries))
    for past, scale in (("past_key", "key_scale"), ("past_value", "value_scale")):
        held = getattr(args, past)
        if held is not None:
            check_cache(shapes, args, past, _kind(shapes, held), scale, 8)
    if args.selected_kv_source == "auxiliary":
        length = sizes(shapes, args.auxiliary_key, 4)[2]
        for name in ("auxiliary_key", "auxiliary_value"):
            shape = heads.batch, args.kv_num_heads, length, heads.width
            check_shape(shapes, name, getattr(args, name), shape)
    check_per_sample(shapes, "seqlens_k", args.seqlens_k, heads.batch)
    one_number(shapes, "total_sequence_length", args.total_sequence_length)


def _kind(shapes: Shapes, past: Any) -> str:
    """The quantization of a past, which DynamicSparseAttention sees by its type."""
    return "PER_CHANNEL" if shapes.type(past) == TensorProto.INT8 else "NONE"


@body(
    "DynamicSparseAttention",
    "output",
    optional=["present_key", "present_value", "validation_status"],
    types={
        "past_key": CACHE,
        "past_value": CACHE,
        "present_key": "past_key",
        "present_value": "past_value",
        "key_scale": FLOATS,
        "value_scale": "key_scale",
        "output": FLOATS,
        "selected_indices": _INT32,
        "selected_counts": "selected_indices",
        "seqlens_k": "selected_indices",
        "total_sequence_length": "selected_indices",
        "committed_length": "selected_indices",
        "validation_status": "selected_indices",
        "position_ids": _INT64,
    },
    check=_check_dynamic,
    domain=MICROSOFT,
)
def dynamic_sparse_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    past_key: str | None,
    past_value: str | None,
    auxiliary_key: str | None,
    auxiliary_value: str | None,
    selected_indices: str,
    selected_counts: str,
    seqlens_k: str,
    total_sequence_length: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    position_ids: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    head_sink: str | None = None,
    committed_length: str | None = None,
    key_scale: str | None = None,
    value_scale: str | None = None,
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
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ)·V over the keys that each query has selected and the keys of its window, if it has one

    A query that sees no key has a result of 0, as have the rows of the cache that hold no token.
    """
    local = attention_mode == "local_plus_selected"
    q, k, v = split(op, query, key, value, num_heads, kv_num_heads)
    q, k = with_norms(op, Arguments(**locals()), q, k)
    length, total, tokens = (
        op.Shape(query, start=1, end=2),
        int64(op, total_sequence_length),
        op.Add(column(op, seqlens_k, query), 1),
    )
    before = op.Sub(tokens, length)
    places = op.Add(before, op.up_to(length))
    if do_rotary:
        at = places if position_ids is None else position_ids
        q, k = (rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved, rotary_offset) for x in (q, k))

    if past_key is None or past_value is None:
        keys, values = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (k, v))
        presents = [op.CastLike(x, query) for x in (keys, values)]
        total = length
    else:
        capacity = op.Shape(past_key, start=2, end=3)
        read, presents = [], []
        for x, past, number in ((k, past_key, key_scale), (v, past_value, value_scale)):
            cache = Cache(op, _kind(op, past), 8, number, past)
            rows = op.Concat(op.Transpose(past, perm=[0, 2, 1, 3]), cache.written(op, x, past), axis=1)
            every = cache.gathered(op, rows, capacity, before, op.up_to(op.Max(total, capacity)), tokens)
            presents.append(op.Transpose(every, perm=[0, 2, 1, 3]))
            read.append(op.Transpose(cache.read(op, op.Slice(every, [0], total, [1]), query), perm=[0, 2, 1, 3]))
        keys, values = read
    at = op.up_to(total)
    own = op.Unsqueeze(places, [1, 3])
    seen = op.LessOrEqual(at, own)
    if local:
        seen = op.And(seen, op.Greater(at, op.Sub(own, local_window_size)))
    if selected_kv_source == "main":
        seen = op.And(
            seen, op.Unsqueeze(_selected(op, selected_indices, selected_counts, total, op.Shape(places)), [1])
        )
    else:
        assert auxiliary_key is not None
        others = [op.wide(x) for x in (auxiliary_key, auxiliary_key if auxiliary_kv_shared else str(auxiliary_value))]
        chosen = _selected(op, selected_indices, selected_counts, op.Shape(others[0], start=2, end=3), op.Shape(places))
        keys, values, seen = _joined(op, local, keys, values, seen, others[0], others[1], op.Unsqueeze(chosen, [1]))
    sink = op.Expand(op.const(0.0, like=query), [num_heads]) if smooth_softmax else None
    sink = sink if head_sink is None else head_sink
    heads = op.Transpose(q, perm=[0, 2, 1, 3])
    y, _, _ = attend(op, heads, keys, values, seen, sees_any(op, seen), kv_num_heads, num_heads, scale, 0.0, None, sink)
    y = op.Cast(y, to=TensorProto.BFLOAT16) if output_bf16 else op.CastLike(y, query)
    return y, *presents, None


def _check_sparse_paged(shapes: Shapes, args: Arguments) -> None:
    if args.auxiliary_cache_layout != "contiguous":
        raise UnsupportedFormError(
            f"auxiliary_cache_layout={args.auxiliary_cache_layout!r} is not known; there is 'contiguous'"
        )
    _check_mode(args)
    width = _check_pages(shapes, args)
    _check_selected(shapes, args, sizes(shapes, args.query, 2)[0])
    if args.selected_kv_source == "auxiliary":
        batch = total(sizes(shapes, args.cumulative_sequence_length, 1)[0], -1)
        _, length, heads, _ = sizes(shapes, args.auxiliary_key, 4)
        for name in ("auxiliary_key", "auxiliary_value"):
            shape = batch, length, 1 if heads == 1 else args.kv_num_heads, width
            check_shape(shapes, name, getattr(args, name), shape)
        check_per_sample(shapes, "auxiliary_lengths", args.auxiliary_lengths, batch)


@body(
    "SparsePagedAttention",
    "output",
    optional=["key_cache_out", "value_cache_out"],
    types=_PAGES
    | dict.fromkeys(("selected_indices", "selected_counts", "auxiliary_lengths"), "cumulative_sequence_length"),
    writes={1: "key_cache", 2: "value_cache"},
    check=_check_sparse_paged,
    domain=MICROSOFT,
)
def sparse_paged_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    key_cache: str,
    value_cache: str,
    cumulative_sequence_length: str,
    past_seqlens: str,
    block_table: str,
    slot_mapping: str | None,
    selected_indices: str,
    selected_counts: str,
    auxiliary_key: str | None = None,
    auxiliary_value: str | None = None,
    auxiliary_lengths: str | None = None,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    head_sink: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    k_scale: str | None = None,
    v_scale: str | None = None,
    attention_metadata: str | None = None,
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
) -> tuple[str, str, str]:
    """softmax(scale·Q·Kᵀ)·V over the keys that each token has selected and the keys of its window, if it has one, in pages

    A token that sees no key has a result of 0. attention_metadata only helps to plan.
    """
    local = attention_mode == "local_plus_selected"
    tokens, (q, k, v), packed = _in_a_row(op, Arguments(**locals()), value)
    pages = _Pages(op, packed, key_cache, block_table, slot_mapping)
    key_out, keys = pages.written(op, k, key_cache, Cache(op, k_quant_type, 8, k_scale, key_cache), query)
    value_out, values = pages.written(op, v, value_cache, Cache(op, v_quant_type, 8, v_scale, value_cache), query)
    seen = pages.seen(op, packed, is_causal, local_window_size if local else -1)
    if selected_kv_source == "main":
        chosen = _selected(op, selected_indices, selected_counts, op.Shape(keys, start=2, end=3), tokens)
        seen = op.And(seen, op.Unsqueeze(packed.padded(op, chosen), [1]))
    else:
        assert auxiliary_key is not None
        given = (auxiliary_key, auxiliary_key if auxiliary_kv_shared else str(auxiliary_value))
        others = [op.Transpose(op.wide(x), perm=[0, 2, 1, 3]) for x in given]
        room = op.Shape(others[0], start=2, end=3)
        others = [op.Expand(x, [1, kv_num_heads, 1, 1]) for x in others]
        chosen = packed.padded(op, _selected(op, selected_indices, selected_counts, room, tokens))
        if auxiliary_lengths is not None:
            valid = op.Less(op.up_to(room), column(op, auxiliary_lengths, past_seqlens))
            chosen = op.And(chosen, op.Unsqueeze(valid, [1]))
        chosen = op.Unsqueeze(op.And(chosen, op.Unsqueeze(packed.real, [2])), [1])
        keys, values, seen = _joined(op, local, keys, values, seen, others[0], others[1], chosen)
    heads = op.Transpose(packed.padded(op, op.Squeeze(q, [0])), perm=[0, 2, 1, 3])
    y, _, _ = attend(
        op, heads, keys, values, seen, sees_any(op, seen), kv_num_heads, num_heads, scale, softcap, None, head_sink
    )
    return op.CastLike(packed.flat(op, y), query), key_out, value_out


def _selected(op: FunctionEmitter, indices: str, counts: str, room: str, rows: str) -> str:
    """True if a query has selected a place: indices (R, M), of which `counts` (R) are valid, as (*rows, room)."""
    indices, counts = (op.Cast(x, to=TensorProto.INT64) for x in (indices, counts))
    order = op.up_to(op.Shape(indices, start=1))
    valid = op.And(op.Less(order, op.Unsqueeze(counts, [1])), op.GreaterOrEqual(indices, 0))
    columns = op.Where(op.And(valid, op.Less(indices, room)), indices, room)  # a column more takes the others
    empty = op.Expand(op.const(np.int32(0)), op.Concat(op.Shape(indices, end=1), op.Add(room, [1]), axis=0))
    marked = op.ScatterElements(empty, columns, op.Expand(op.const(np.int32(1)), op.Shape(columns)), axis=1)
    chosen = op.Cast(op.Slice(marked, [0], room, [1]), to=TensorProto.BOOL)
    return op.Reshape(chosen, op.Concat(rows, room, axis=0), allowzero=1)


def _joined(
    op: FunctionEmitter, local: bool, keys: str, values: str, seen: str, others: str, their_values: str, chosen: str
) -> tuple[str, str, str]:
    """The keys to choose from, their values and mask, after the keys of the window where there is one."""
    if not local:
        return others, their_values, chosen
    return op.Concat(keys, others, axis=2), op.Concat(values, their_values, axis=2), op.Concat(seen, chosen, axis=3)
