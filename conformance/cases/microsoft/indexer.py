"""Cases of ONNX Runtime's indexers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer

BATCH, LENGTH, HEADS, SIZE, PAST = 2, 3, 2, 5, 3


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
        5 + np.arange(length) + np.zeros((BATCH, 1), np.int64),
        None if room is None else np.array([past], np.int32),
        floats(2, BATCH, held, 2 * SIZE),
    ]
    settings = {"policy_mode": "csa", "compress_ratio": ratio, "index_topk": 2, "outputs": 3} | options
    return case("SparseAttentionIndexer", *inputs, **settings)
