"""Strategies of ONNX Runtime's indexers. No two scores are the same, or nearly so: all numbers are drawn from a continuum."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("SparseAttentionIndexer", domain=MICROSOFT, ranked=True)
def sparse_attention_indexer(d: Drawing) -> Case:
    """Both policies, with caches that grow and caches that have room."""
    qsa, batch, length, heads, past = d.flag(), d.integer(1, 2), d.integer(1, 4), d.integer(1, 2), d.integer(0, 3)
    ratio, size, held, packed = d.integer(1, 3), 4, d.integer(0, 1), d.flag()
    room = d.optional(lambda: past + length + d.integer(0, 1))
    width = size if qsa else 2 * size
    rows = (batch, 12) if d.flag() else (12,)
    packed = packed and qsa

    def floats(*shape: int) -> np.ndarray:
        return d.normal(shape).astype(np.float32)

    inputs = [
        floats(batch, length, (heads + packed) * size),
        None if packed else floats(batch, length, width),
        *(1 + floats(size) for _ in range(2)),
        *(floats(*rows, 2) for _ in range(2)),
        d.optional(lambda: d.integers((batch, past + length), 0, 1)) if qsa else None,
        floats(batch, past if room is None else room, size),
        *([None] * 3 if qsa else [floats(batch, length, width), floats(ratio, width), floats(batch, length, heads)]),
        None if qsa else d.integers((batch, length), 0, 11),
        None if room is None else np.array([past], np.int32),
        None if qsa else floats(2, batch, held, width),
    ]
    return d.case(
        *inputs,
        policy_mode="qsa" if qsa else "csa",
        compress_ratio=ratio,
        token_budget=ratio * d.integer(1, 2) if qsa else None,
        index_topk=None if qsa else d.integer(1, 3),
        scale=d.pick(None, 0.5),
        head_weight_scale=None if qsa else d.pick(None, 0.5),
        outputs=2 if qsa else 3,
    )


@strategy("PackedSparseAttentionIndexer", domain=MICROSOFT, ranked=True)
def packed_sparse_attention_indexer(d: Drawing) -> Case:
    """Both policies; requests of any lengths, whose states may be full."""
    qsa, ratio, heads, size, room = d.flag(), d.integer(1, 3), d.integer(1, 2), 4, d.integer(1, 4)
    batch = d.integer(1, 3)
    counts = [d.integer(0, 4) for _ in range(batch)]
    held = [d.integer(0, (ratio if qsa else 2 * ratio) - 1) for _ in range(batch)]
    entries = [d.integer(0, room) for _ in range(batch)]
    tokens, width, joined = sum(counts), size if qsa else 2 * size, qsa and d.flag()
    rows = (batch, 12) if d.flag() else (12,)
    capture = d.integer(1, 3) if qsa and d.flag() else None

    def floats(*shape: int) -> np.ndarray:
        return d.normal(shape).astype(np.float32)

    def ints(values: object) -> np.ndarray:
        return np.array(values, np.int32)

    inputs = [
        floats(tokens, (heads + joined) * size),
        None if joined else floats(tokens, width),
        *(1 + floats(size) for _ in range(2)),
        *(floats(*rows, 2) for _ in range(2)),
        np.cumsum([0, *counts], dtype=np.int32),
        ints([n * ratio + m for n, m in zip(entries, held, strict=True)]),
        *([None] * 4 if qsa else [floats(tokens, width), floats(ratio, width), floats(tokens, heads)]),
        *([] if qsa else [d.integers((tokens,), 0, 11)]),
        floats(batch, room, size),
        floats(batch, 2 * ratio - 1, width),
        None if qsa else floats(batch, 2 * ratio - 1, width),
        ints(list(zip(entries, held, strict=True))),
        None if capture is None else d.integers((batch,), 0, 4, np.int32),
        None if capture is None else d.optional(lambda: ints([d.integer(0, 1)])),
    ]
    return d.case(
        *inputs,
        policy_mode="qsa" if qsa else "csa",
        compress_ratio=ratio,
        state_capacity=room,
        state_update_capacity=capture,
        token_budget=ratio * d.integer(1, 2) if qsa else None,
        index_topk=None if qsa else d.integer(1, 3),
        scale=d.pick(None, 0.5),
        head_weight_scale=None if qsa else d.pick(None, 0.5),
        outputs=(0, 1, 2, 3, 5, 8)
        if qsa and capture is None
        else (0, 1, 2, 3, 5, 6, 8)
        if qsa
        else (0, 1, 2, 3, 4, 5, 8),
    )
