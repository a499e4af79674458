"""Cases of ONNX Runtime's packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.microsoft.cases import case, drawer

BATCH, LENGTH, HEADS, SIZE = 3, 4, 2, 2
WIDTH = HEADS * SIZE
COUNT = np.array([1, 2, 4], np.int32)
OFFSET = np.array([[0, 4, 5, 8], [9, 10, 11, 1], [2, 3, 6, 7]], np.int32)
ENDS = np.array([0, 1, 3, 7], np.int32)
TOKENS = 7


def cases() -> Iterator[Case]:
    """Every attribute and every form of the inputs; integers fed and constant."""
    floats = drawer(6)
    for shapes in ("static", "symbolic"):
        options: dict[str, Any] = {"shapes": shapes}
        yield case("RemovePadding", floats(BATCH, LENGTH, 3), COUNT, outputs=4, **options)
        yield case(
            "RemovePadding", floats(BATCH, LENGTH, 3), COUNT, outputs=4, constant=["sequence_token_count"], **options
        )
        yield case("RemovePadding", floats(0, LENGTH, 3), COUNT[:0], outputs=4, **options)
        yield case("RestorePadding", floats(TOKENS, 3), OFFSET, **options)
        yield case("RestorePadding", floats(TOKENS, 3), OFFSET, constant=["token_offset"], **options)
        yield case("RestorePadding", floats(0, 3), OFFSET, **options)
        yield from _attentions(floats, options)


def _attentions(floats: Any, options: dict[str, Any]) -> Iterator[Case]:
    heads: dict[str, Any] = {"num_heads": HEADS, **options}
    constant = {"constant": ["token_offset", "cumulative_sequence_length"]}
    addend = floats(1, HEADS, LENGTH, LENGTH)
    name, x = "PackedAttention", floats(TOKENS, 5)
    yield case(name, x, floats(5, 3 * WIDTH), floats(3 * WIDTH), OFFSET, ENDS, **heads)
    sizes = [WIDTH, WIDTH, 3 * HEADS]
    uneven = floats(5, sum(sizes)), floats(sum(sizes))
    yield case(name, x, *uneven, OFFSET, ENDS, addend, qkv_hidden_sizes=sizes, scale=0.3, **heads, **constant)
    yield case(name, x[:0], floats(5, 3 * WIDTH), floats(3 * WIDTH), OFFSET, 0 * ENDS, **heads)
    name, three = "PackedMultiHeadAttention", [floats(TOKENS, width) for width in sizes]
    yield case(name, *three, None, OFFSET, ENDS, **heads)
    yield case(name, *three, floats(sum(sizes)), OFFSET, ENDS, addend, scale=0.3, mask_filter_value=-1.5, **heads)
    yield case(name, floats(TOKENS, HEADS, 3, SIZE), None, None, None, OFFSET, ENDS, **heads, **constant)
    yield case(name, floats(TOKENS, HEADS, 3, SIZE), None, None, floats(3 * WIDTH), OFFSET, ENDS, **heads)
    yield case(name, *(part[:0] for part in three), None, OFFSET, 0 * ENDS, **heads)
