"""Cases of ONNX Runtime's attentions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer

BATCH, LENGTH, HEADS, SIZE = 2, 3, 2, 4
WIDTH = HEADS * SIZE


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        if shapes == "unknown":
            continue
        heads: dict[str, Any] = {"shapes": shapes, "num_heads": HEADS}
        q, k, v = floats(BATCH, LENGTH, WIDTH), floats(BATCH, LENGTH + 1, WIDTH), floats(BATCH, LENGTH + 1, 2 * HEADS)
        name = "MultiHeadAttention"
        yield case(name, q, k, v, **heads)
        yield case(name, q, k, v, floats(2 * WIDTH + 2 * HEADS), scale=0.3, **heads)
        hidden = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], np.int32)
        offset = floats(1, HEADS, LENGTH, LENGTH + 1)
        yield case(name, q, k, v, None, hidden, offset, **heads)
        per_query = (
            (np.arange(BATCH * LENGTH * (LENGTH + 1)) % 3 > 0).astype(np.int32).reshape(BATCH, LENGTH, LENGTH + 1)
        )
        yield case(name, q, k, v, None, per_query, mask_filter_value=-1.5, **heads)
        past = [floats(BATCH, HEADS, 2, SIZE) for _ in range(2)]
        same = [floats(BATCH, LENGTH, WIDTH) for _ in range(2)]
        yield case(name, q, *same, None, None, None, *past, outputs=3, unidirectional=1, **heads)
        yield case(name, q, *(floats(BATCH, HEADS, LENGTH + 1, SIZE) for _ in range(2)), **heads)
        yield case(name, q, floats(BATCH, LENGTH + 1, HEADS, 2, SIZE), **heads)
        yield case(name, floats(BATCH, LENGTH, HEADS, 3, SIZE), **heads)
        x, weights, bias = floats(BATCH, LENGTH, 5), floats(5, 3 * WIDTH), floats(3 * WIDTH)
        name = "Attention"
        yield case(name, x, weights, bias, outputs=2, **heads)
        yield case(name, x, weights, bias, np.array([[1, 1, 0], [1, 0, 0]], np.int32), scale=0.3, **heads)
        yield case(name, x, weights, bias, unidirectional=1, **heads)
        sizes = [WIDTH, WIDTH, 2 * HEADS]
        uneven = floats(5, sum(sizes)), floats(sum(sizes))
        yield case(name, x, *uneven, None, None, floats(BATCH, HEADS, LENGTH, LENGTH), qkv_hidden_sizes=sizes, **heads)
        yield case(name, x, weights, bias, None, floats(2, BATCH, HEADS, 2, SIZE), outputs=2, unidirectional=1, **heads)
