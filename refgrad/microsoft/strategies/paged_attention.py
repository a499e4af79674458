"""Strategies of ONNX Runtime's attentions to keys in the pages of a cache, or to those that each query has selected."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("PagedAttention", domain=MICROSOFT, ranked=True)
def paged_attention(d: Drawing) -> Case:
    """Samples of any lengths; each has pages of its own."""
    batch, shared, group, size, page = d.integer(1, 2), d.integer(1, 2), d.integer(1, 2), d.pick(1, 2), d.integer(1, 2)
    heads = shared * group
    past = [d.integer(0, 3) for _ in range(batch)]
    counts = [d.integer(1, 2) for _ in range(batch)]
    each = -(-max(p + c for p, c in zip(past, counts, strict=True)) // page)
    table = np.array(d.permutation(batch * each), np.int32).reshape(batch, each)
    tokens = sum(counts)
    rotary = size == 2 and d.flag()
    weights = [d.floats((size,), low=0.5) for _ in range(2)] if d.flag() else []
    sink = d.optional(lambda: d.floats((heads,)))
    return d.case(
        *(d.floats((tokens, n * size)) for n in (heads, shared, shared)),
        *(d.floats((batch * each, page, shared, size)) for _ in range(2)),
        np.cumsum([0, *counts], dtype=np.int32), np.array(past, np.int32), table,
        *(d.floats((5, 1)) if rotary else None for _ in range(2)),
        None, sink, *weights,
        num_heads=heads,
        kv_num_heads=shared,
        do_rotary=1 if rotary else None,
        rotary_interleaved=d.pick(None, 1) if rotary else None,
        qk_norm_epsilon=0.1 if weights else None,
        is_causal=d.pick(None, 0),
        local_window_size=d.pick(None, 1, 2),
        scale=d.pick(None, 0.5),
        softcap=d.pick(None, 2.0),
        outputs=d.pick(1, 3),
    )  # fmt: skip


@strategy("DynamicSparseAttention", domain=MICROSOFT, ranked=True)
def dynamic_sparse_attention(d: Drawing) -> Case:
    """Queries that choose any of the earlier keys, or any of others beside a window."""
    batch, shared, group, size = d.integer(1, 2), d.integer(1, 2), d.integer(1, 2), d.pick(1, 2)
    heads, length, past, room = shared * group, d.integer(1, 2), d.integer(0, 2), d.integer(1, 3)
    total = past + length
    mode, source = d.pick(
        ("selected_only", "main"), ("selected_only", "auxiliary"), ("local_plus_selected", "auxiliary")
    )
    indices, counts = _choices(d, batch * length, total if source == "main" else room)
    rotary = size == 2 and d.flag()
    auxiliary = [d.floats((batch, shared, room, size)) if source == "auxiliary" else None for _ in range(2)]
    return d.case(
        *(d.floats((batch, length, n * size)) for n in (heads, shared, shared)),
        *(d.floats((batch, shared, past, size)) if past else None for _ in range(2)),
        *auxiliary, indices, counts,
        np.full(batch, total - 1, np.int32), np.array(total, np.int32),
        *(d.floats((4, 1)) if rotary else None for _ in range(2)), None, None, None,
        d.optional(lambda: d.floats((heads,))),
        num_heads=heads,
        kv_num_heads=shared,
        attention_mode=mode,
        selected_kv_source=source,
        local_window_size=d.integer(1, 2) if mode != "selected_only" else None,
        do_rotary=1 if rotary else None,
        scale=d.pick(None, 0.5),
        smooth_softmax=d.pick(None, 1),
        outputs=d.pick(1, 3),
    )  # fmt: skip


@strategy("SparsePagedAttention", domain=MICROSOFT, ranked=True)
def sparse_paged_attention(d: Drawing) -> Case:
    """One or two samples of any lengths, each with pages of its own."""
    batch, shared, group, size, page = d.integer(1, 2), d.integer(1, 2), d.integer(1, 2), d.pick(1, 2), d.integer(1, 2)
    heads, room = shared * group, d.integer(1, 3)
    past = [d.integer(0, 2) for _ in range(batch)]
    counts = [d.integer(1, 2) for _ in range(batch)]
    each = -(-max(p + c for p, c in zip(past, counts, strict=True)) // page)
    table = np.array(d.permutation(batch * each), np.int32).reshape(batch, each)
    tokens = sum(counts)
    mode, source = d.pick(
        ("selected_only", "main"), ("selected_only", "auxiliary"), ("local_plus_selected", "auxiliary")
    )
    indices, chosen = _choices(d, tokens, each * page if source == "main" else room)
    auxiliary = [d.floats((batch, room, shared, size)) if source == "auxiliary" else None for _ in range(2)]
    return d.case(
        *(d.floats((tokens, n * size)) for n in (heads, shared, shared)),
        *(d.floats((batch * each, page, shared, size)) for _ in range(2)),
        np.cumsum([0, *counts], dtype=np.int32), np.array(past, np.int32), table, None, indices, chosen,
        *auxiliary,
        num_heads=heads,
        kv_num_heads=shared,
        attention_mode=mode,
        selected_kv_source=source,
        local_window_size=d.pick(None, 1, 2) if mode != "selected_only" else None,
        is_causal=d.pick(None, 0),
        scale=d.pick(None, 0.5),
        softcap=d.pick(None, 2.0),
        outputs=d.pick(1, 3),
    )  # fmt: skip


def _choices(d: Drawing, rows: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """For each query some of the places, each once, and how many they are; what follows them is -1."""
    indices, counts = np.full((rows, room), -1, np.int32), np.zeros(rows, np.int32)
    for row in range(rows):
        counts[row] = d.integer(0, room)
        indices[row, : counts[row]] = d.permutation(room)[: counts[row]]
    return indices, counts
