"""Cases of ONNX Runtime's attention to the keys in the blocks that a mask lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.grouped_attention import BATCH, ints


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        yield from _sparse(drawer(), shapes)


def _sparse(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    """Blocks of two keys: a prompt with one mask, and two tokens after the others with a mask for each head."""
    sizes: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1, "sparse_block_size": 2, "shapes": shapes, "outputs": 3}
    name, none = "SparseAttention", [None, None]
    cache = [floats(BATCH, 1, 6, 8) for _ in range(2)]
    one = [ints([0, 1, 2, 4]), ints([0, 1, 0, 2])]
    two = [ints([0, 1, 1, 3], [0, 1, 3, 5]), ints([0, 0, 1, -1, -1], [0, 0, 1, 0, 2])]  # a row without a block

    def new(length: int, size: int = 8) -> list[np.ndarray]:
        return [floats(BATCH, length, n * size) for n in (2, 1, 1)]

    yield case(name, *new(5), *cache, *one, np.array(5, np.int32), ints(5, 5), **sizes)
    yield case(name, floats(BATCH, 2, 32), *none, *cache, *two, np.array(6, np.int32), ints(6, 3), scale=0.4, **sizes)
    rotary = [floats(8, 4) for _ in range(2)]
    lengths = ("block_row_indices", "block_col_indices", "total_sequence_length", "key_total_sequence_lengths")
    tokens = [np.array(4, np.int32), ints(4, 2)]
    yield case(name, *new(4), *cache, *two, *tokens, *rotary, do_rotary=1, constant=lengths, **sizes)
    part = [x[:, :3] for x in rotary]
    yield case(name, *new(4), *cache, *one, *tokens, *part, do_rotary=1, rotary_interleaved=1, **sizes)
    yield case(name, *(x[:0] for x in (*new(1), *cache)), *one, np.array(4, np.int32), ints(), **sizes)
