"""A strategy of ONNX Runtime's attention to the keys in the blocks that a mask lists."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("SparseAttention", domain=MICROSOFT, ranked=True)
def sparse_attention(d: Drawing) -> Case:
    """Any mask of blocks that has the diagonal, or one for each head."""
    batch, shared, group, size = d.integer(1, 2), d.integer(1, 2), d.integer(1, 2), d.pick(1, 2)
    heads, blocks = shared * group, d.integer(1, 3)
    length = d.integer(1, 2 * blocks)
    total = d.integer(length, 2 * blocks)
    masks = [np.tril(d.bools((blocks, blocks)) | np.eye(blocks, dtype=bool)) for _ in range(d.pick(1, heads))]
    most = max(int(mask.sum()) for mask in masks)
    rows = [[0, *np.cumsum(mask.sum(1))] for mask in masks]
    columns = [[*np.nonzero(mask)[1], *[-1] * (most - int(mask.sum()))] for mask in masks]
    rotary = size == 2 and d.flag()
    return d.case(
        *(d.floats((batch, length, n * size)) for n in (heads, shared, shared)),
        *(d.floats((batch, shared, 2 * blocks, size)) for _ in range(2)),
        np.array(rows, np.int32), np.array(columns, np.int32),
        np.array(total, np.int32), np.full(batch, total, np.int32),
        *(d.floats((total, 1)) if rotary else None for _ in range(2)),
        num_heads=heads,
        kv_num_heads=shared,
        sparse_block_size=2,
        do_rotary=1 if rotary else None,
        rotary_interleaved=d.pick(None, 1) if rotary else None,
        scale=d.pick(None, 0.5),
        outputs=3,
    )  # fmt: skip
