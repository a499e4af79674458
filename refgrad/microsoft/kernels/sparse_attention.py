"""ONNX Runtime's attention to the keys in the blocks that a mask lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.grouped_attention import Rotary, attend, per_sample, split
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("SparseAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def sparse_attention(args: Arguments) -> tuple[Array, Array, Array]:
    """One sample after another: a query sees the earlier keys in the blocks that a row of its head's mask lists"""
    q, k, v = split(args)
    (batch, length, _, size), capacity = q.shape, args.past_key.shape[2]
    layouts = _layouts(args.block_row_indices, args.block_col_indices)
    reach = min(capacity, (args.block_row_indices.shape[1] - 1) * args.sparse_block_size)
    total = args.total_sequence_length.item()
    if not length <= total <= reach:
        raise ValueError(
            f"total_sequence_length is {total}; the caches and masks of blocks of {args.sparse_block_size} "
            f"have room for {reach}, "
            f"and there are {length} queries"
        )
    least = 1 if total == length else length
    lengths = per_sample("key_total_sequence_lengths", args.key_total_sequence_lengths, least, total)
    fresh = np.minimum(length, lengths)
    before = lengths - fresh
    if args.do_rotary:
        steps = np.arange(length)
        turn = Rotary(args, np.where(steps < fresh[:, None], before[:, None] + steps, 0))
        q, k = turn(q), turn(k)
    y, keys, values = np.zeros_like(q), args.past_key.copy(), args.past_value.copy()
    for b in range(batch):
        start, count, end = int(before[b]), int(fresh[b]), int(lengths[b])
        for cache, new in ((keys, k), (values, v)):
            cache[b, :, start:end] = new[b, :count].swapaxes(0, 1)
        seen = np.zeros((args.num_heads, count, end), bool)
        for head in range(args.num_heads):
            rows = layouts[head % len(layouts)]
            for s in range(count):
                for block in rows[(start + s) // args.sparse_block_size]:
                    first = block * args.sparse_block_size
                    seen[head, s, first : min(first + args.sparse_block_size, start + s + 1)] = True
        own_keys, own_values = (x[b, :, :end].swapaxes(0, 1) for x in (keys, values))
        y[b, :count], _ = attend(q[b, :count], own_keys, own_values, seen, args.scale, 0.0, None, None)
    return y.reshape(batch, length, args.num_heads * size), keys, values


def _layouts(rows: Array, columns: Array) -> list[list[list[int]]]:
    """The blocks in each row of each mask."""
    if np.any(rows[:, 0] != 0) or np.any(np.diff(rows) < 0) or np.any(rows > columns.shape[1]):
        raise ValueError(
            f"block_row_indices is {rows.tolist()}; each row starts at 0 and rises to at most {columns.shape[1]}"
        )
    found = []
    for starts, entries in zip(rows, columns, strict=True):
        check_indices(entries[: starts[-1]], len(starts) - 1, "block_col_indices", lowest=0)
        found.append([entries[a:b].tolist() for a, b in pairwise(starts)])
    return found
