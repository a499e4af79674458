"""Cases of ONNX Runtime's indexers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer

BATCH, LENGTH, HEADS, SIZE, PAST = 2, 3, 2, 5, 3
PACKED_SIZE = 4


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; the ranks of the caches have to be known."""
    for shapes in SHAPES:
        if shapes == "unknown":
            continue
        mask = np.array([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]])
        yield qsa(shapes=shapes, epsilon=0.1)
        yield qsa(mask=mask, shapes=shapes, epsilon=0.01, scale=-0.7)
        yield qsa(packed=True, each=True, shapes=shapes, compress_ratio=1, token_budget=2)
        yield qsa(room=7, shapes=shapes, compress_ratio=3, token_budget=9)
        yield csa(shapes=shapes)
        yield csa(held=3, room=6, shapes=shapes, epsilon=0.01, head_weight_scale=-1.3)
        yield csa(held=2, each=True, shapes=shapes, scale=-0.7, index_topk=4)
        if shapes == "static":
            yield qsa(batch=0)
            yield qsa(batch=1, length=1, past=0)
            yield csa(held=0, length=1)  # no window is complete
            yield qsa(mask=mask, constant=["mask"])
            yield qsa(room=7, constant=["past_sequence_length"])
            yield csa(infinite=True, constant=["position_ids", "position_bias"])
            yield csa(first=-4)  # where no window is complete
        yield from _packed(shapes)


def _packed(shapes: str) -> Iterator[Case]:
    """Requests whose tokens complete entries, one without tokens, one with a token alone, and one whose state is full."""
    yield packed_qsa(shapes=shapes)
    yield packed_qsa(joined=True, each=True, turned=4, shapes=shapes, epsilon=0.01, scale=-0.7, token_budget=4)
    yield packed_qsa(ratio=3, token_budget=3, shapes=shapes)
    yield packed_qsa(capture=[3, 0, 1, 5], shapes=shapes, state_update_capacity=3)
    yield packed_qsa(ratio=1, token_budget=2, shapes=shapes, capture=[1, 1, 1, 1], active=1, state_update_capacity=2)
    yield packed_csa(shapes=shapes)
    yield packed_csa(each=True, shapes=shapes, epsilon=0.01, scale=0.7, head_weight_scale=-1.3, index_topk=4)
    yield packed_csa(heads=3, size=5, turned=2, shapes=shapes)
    yield packed_csa(ratio=3, held=(5, 2, 0, 3), shapes=shapes, indexshare_state_policy="hold")
    if shapes == "static":
        lengths = ["cumulative_sequence_lengths", "past_sequence_lengths", "past_state_lengths"]
        yield packed_qsa(counts=(0, 0, 0, 0))
        yield packed_qsa(constant=lengths)
        yield packed_csa(counts=(0, 0, 0, 0))
        yield packed_csa(constant=[*lengths, "position_ids"])
        capture = ["state_update_capture_count", "state_update_active"]
        yield packed_qsa(capture=[2, -1, 1, 5], active=1, state_update_capacity=8, constant=capture)
        yield packed_qsa(capture=[2, 2, 2, 2], active=0, state_update_capacity=2)
        yield packed_qsa(lengths=[[1, 1], [2, 1], [0, 2], [5, 0]])  # the last three do not fit the past
        yield packed_csa(lengths=[[1, 1], [2, 4], [-1, 0], [5, 0]])
        yield packed_csa(past=(3, 0, -1, 8), first=-3)
        yield packed_csa(epsilon=0.0)
        yield packed_csa(infinite=True)


def packed_qsa(
    joined: bool = False,
    each: bool = False,
    turned: int = 2,
    ratio: int = 2,
    counts: tuple[int, ...] = (4, 0, 1, 3),
    past: tuple[int, ...] = (3, 4, 0, 4),
    lengths: Any = None,
    capture: Any = None,
    active: int | None = None,
    **options: Any,
) -> Case:
    """Requests of `counts` tokens after `past` ones; `joined` has the key behind the query, `lengths` replace the true ones."""
    floats, batch, tokens = drawer(7), len(counts), sum(counts)
    room = 3 if ratio > 1 else 7
    given = [(n // ratio, n % ratio) for n in past] if lengths is None else lengths
    inputs = [
        floats(tokens, (HEADS + joined) * PACKED_SIZE),
        None if joined else floats(tokens, PACKED_SIZE),
        *(1 + floats(PACKED_SIZE) for _ in range(2)),
        *(floats(*((batch, 9) if each else (9,)), turned) for _ in range(2)),
        np.cumsum((0, *counts), dtype=np.int32),
        np.array(past, np.int32),
        *[None] * 4,
        floats(batch, room, PACKED_SIZE),
        floats(batch, 2 * ratio - 1, PACKED_SIZE),
        None,
        np.array(given, np.int32),
    ]
    inputs += [] if capture is None else [np.array(capture, np.int32)]
    inputs += [] if active is None else [np.array([active], np.int32)]
    settings = {"policy_mode": "qsa", "compress_ratio": ratio, "state_capacity": room, "token_budget": 2} | options
    settings["outputs"] = (0, 1, 2, 3, 5, *([] if capture is None else [6]), 8)
    return case("PackedSparseAttentionIndexer", *inputs, **settings)


def packed_csa(
    held: tuple[int, ...] = (3, 1, 0, 2),
    each: bool = False,
    heads: int = HEADS,
    size: int = PACKED_SIZE,
    turned: int = 1,
    infinite: bool = False,
    ratio: int = 2,
    counts: tuple[int, ...] = (4, 0, 1, 3),
    past: tuple[int, ...] = (3, 4, 0, 8),
    lengths: Any = None,
    first: int = 4,
    **options: Any,
) -> Case:
    """As `packed_qsa`, with `held` tokens in the buffers, after 1, 2, 0 and 3 entries; `infinite` has a gate of ∞."""
    floats, batch, tokens, room = drawer(8), len(counts), sum(counts), 3
    gate = floats(tokens, 2 * size)
    if infinite:
        gate[0, -1] = math.inf  # of a window that is then complete
    inputs = [
        floats(tokens, heads * size),
        floats(tokens, 2 * size),
        *(1 + floats(size) for _ in range(2)),
        *(floats(*((batch, 9) if each else (9,)), turned) for _ in range(2)),
        np.cumsum((0, *counts), dtype=np.int32),
        np.array(past, np.int32),
        gate,
        floats(ratio, 2 * size),
        floats(tokens, heads),
        first + np.arange(tokens),
        floats(batch, room, size),
        *(floats(batch, 2 * ratio - 1, 2 * size) for _ in range(2)),
        np.array([*zip((1, 2, 0, 3), held, strict=True)] if lengths is None else lengths, np.int32),
    ]
    settings = {"policy_mode": "csa", "compress_ratio": ratio, "state_capacity": room, "index_topk": 2} | options
    return case("PackedSparseAttentionIndexer", *inputs, outputs=(0, 1, 2, 3, 4, 5, 8), **settings)


def qsa(
    packed: bool = False,
    each: bool = False,
    mask: Any = None,
    room: int | None = None,
    batch: int = BATCH,
    length: int = LENGTH,
    past: int = PAST,
    **options: Any,
) -> Case:
    """Blocks of tokens; `packed` has the key behind the query, `each` a rotary cache for each sample."""
    floats = drawer(5)
    rows = max(past + length - 1, 1)  # the last position reads the last row
    query = floats(batch, length, (HEADS + packed) * SIZE)
    key = None if packed else floats(batch, length, SIZE)
    caches = [floats(*((batch, rows) if each else (rows,)), 4 if each else 2) for _ in range(2)]
    before = floats(batch, past if room is None else room, SIZE)
    inputs = [query, key, *(1 + floats(SIZE) for _ in range(2)), *caches, mask, before]
    if room is not None:
        inputs += [None, None, None, None, np.array([past], np.int32)]
    settings = {"policy_mode": "qsa", "compress_ratio": 2, "token_budget": 2, "outputs": 2} | options
    return case("SparseAttentionIndexer", *inputs, **settings)


def csa(
    held: int = 1,
    each: bool = False,
    room: int | None = None,
    length: int = LENGTH,
    first: int = 5,
    infinite: bool = False,
    **options: Any,
) -> Case:
    """Windows of 2 tokens; `held` are in the buffer, `past` windows in the cache.

    `each` has a rotary cache for each sample, `infinite` biases for which two channels have no softmax.
    """
    floats, past, ratio = drawer(6), 2, 2
    rows = 7
    bias = floats(ratio, 2 * SIZE)
    if infinite:
        bias[:, 1::SIZE], bias[0, 2::SIZE] = -np.inf, np.inf
    inputs = [
        floats(BATCH, length, HEADS * SIZE),
        floats(BATCH, length, 2 * SIZE),
        *(1 + floats(SIZE) for _ in range(2)),
        *(floats(*((BATCH, rows) if each else (rows,)), 2 if each else 1) for _ in range(2)),
        None,
        floats(BATCH, past if room is None else room, SIZE),
        floats(BATCH, length, 2 * SIZE),
        bias,
        floats(BATCH, length, HEADS),
        first + np.arange(length) + np.zeros((BATCH, 1), np.int64),
        None if room is None else np.array([past], np.int32),
        floats(2, BATCH, held, 2 * SIZE),
    ]
    settings = {"policy_mode": "csa", "compress_ratio": ratio, "index_topk": 2, "outputs": 3} | options
    return case("SparseAttentionIndexer", *inputs, **settings)
