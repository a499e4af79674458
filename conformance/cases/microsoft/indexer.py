"""Cases of ONNX Runtime's indexers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer

BATCH, LENGTH, HEADS, SIZE, PAST = 2, 3, 2, 4, 3


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; the ranks of the caches have to be known."""
    for shapes in SHAPES:
        if shapes == "unknown":
            continue
        mask = np.array([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]])
        yield qsa(shapes=shapes)
        yield qsa(mask=mask, shapes=shapes, epsilon=0.01, scale=0.7)
        yield qsa(packed=True, each=True, shapes=shapes, compress_ratio=1, token_budget=2)
        yield qsa(room=7, shapes=shapes, token_budget=4)
        yield csa(shapes=shapes)
        yield csa(held=3, room=6, shapes=shapes, epsilon=0.01)
        yield csa(each=True, shapes=shapes, scale=0.7, head_weight_scale=1.3, index_topk=4)
        if shapes == "static":
            yield qsa(batch=0)
            yield qsa(batch=1, length=1, past=0)
            yield csa(held=0, length=1)  # no window is complete
            yield qsa(mask=mask, constant=["mask"])
            yield qsa(room=7, constant=["past_sequence_length"])
            yield csa(constant=["position_ids"])


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
    rows = past + length + 1
    query = floats(batch, length, (HEADS + packed) * SIZE)
    key = None if packed else floats(batch, length, SIZE)
    caches = [floats(*((batch, rows) if each else (rows,)), 2) for _ in range(2)]
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
    **options: Any,
) -> Case:
    """Windows of 2 tokens; `held` are in the buffer, `past` windows in the cache."""
    floats, past, ratio = drawer(6), 2, 2
    rows = 9
    inputs = [
        floats(BATCH, length, HEADS * SIZE),
        floats(BATCH, length, 2 * SIZE),
        *(1 + floats(SIZE) for _ in range(2)),
        *(floats(*((BATCH, rows) if each else (rows,)), 1) for _ in range(2)),
        None,
        floats(BATCH, past if room is None else room, SIZE),
        floats(BATCH, length, 2 * SIZE),
        floats(ratio, 2 * SIZE),
        floats(BATCH, length, HEADS),
        5 + np.arange(length) + np.zeros((BATCH, 1), np.int64),
        None if room is None else np.array([past], np.int32),
        floats(2, BATCH, held, 2 * SIZE),
    ]
    settings = {"policy_mode": "csa", "compress_ratio": ratio, "index_topk": 2, "outputs": 3} | options
    return case("SparseAttentionIndexer", *inputs, **settings)
