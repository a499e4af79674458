"""ONNX Runtime's attention to the keys in the blocks that a mask lists."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.grouped_attention import (
    attend,
    check_heads,
    column,
    int64,
    rotated,
    sees_any,
    split,
)
from refgrad.microsoft.declared import check_flags, check_shape, one_number, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import Shapes

_INT32 = ("tensor(int32)",)


def _check_sparse(shapes: Shapes, args: Arguments) -> None:
    check_flags(args, "do_rotary", "rotary_interleaved")
    if args.sparse_block_size < 1:
        raise UnsupportedFormError(f"sparse_block_size is {args.sparse_block_size}; it is 1 or more")
    heads = check_heads(shapes, args)
    if args.key is not None:
        check_shape(shapes, "key", args.key, (heads.batch, heads.queries, None))
    heads.check_caches(shapes, args)
    heads.check_rotary(shapes, args)
    check_shape(shapes, "block_row_indices", args.block_row_indices, (None, None))
    masks, ends = sizes(shapes, args.block_row_indices, 2)
    if (masks is not None and (masks < 1 or args.num_heads % masks)) or (ends is not None and ends < 2):
        raise UnsupportedFormError(
            f"its input block_row_indices has the shape {list(shapes.shape(args.block_row_indices) or ())}; it is "
            f"[masks, blocks + 1], and masks divide {args.num_heads} heads"
        )
    check_shape(shapes, "block_col_indices", args.block_col_indices, (masks, None))
    one_number(shapes, "total_sequence_length", args.total_sequence_length)
    check_shape(shapes, "key_total_sequence_lengths", args.key_total_sequence_lengths, (heads.batch,))


@body(
    "SparseAttention",
    "output",
    "present_key",
    "present_value",
    types={
        "block_row_indices": _INT32,
        "block_col_indices": "block_row_indices",
        "total_sequence_length": "block_row_indices",
        "key_total_sequence_lengths": "block_row_indices",
    },
    check=_check_sparse,
    domain=MICROSOFT,
)
def sparse_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    past_key: str,
    past_value: str,
    block_row_indices: str,
    block_col_indices: str,
    total_sequence_length: str,
    key_total_sequence_lengths: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sparse_block_size: int,
) -> tuple[str, ...]:
    """softmax(scale·Q·Kᵀ)·V over the earlier keys in the blocks that a mask lists; heads take turns at the masks

    A query that is padding has a result of 0, as one that sees no key. The caches keep the rows where no token is written.
    """
    q, k, v = split(op, query, key, value, num_heads, kv_num_heads)
    tokens = column(op, key_total_sequence_lengths, query)
    steps = op.up_to(op.Shape(query, start=1, end=2))
    count = op.Min(tokens, op.Shape(query, start=1, end=2))
    before = op.Sub(tokens, count)
    places, real = op.Add(before, steps), op.Less(steps, count)
    if do_rotary:
        q, k = (rotated(op, x, cos_cache, sin_cache, places, rotary_interleaved) for x in (q, k))
    total = int64(op, total_sequence_length)
    presents = [_overwritten(op, past, x, before, count) for past, x in ((past_key, k), (past_value, v))]
    keys, values = (op.wide(op.Slice(x, [0], total, [2])) for x in presents)

    masks, blocks = _block_masks(op, block_row_indices, block_col_indices)
    columns = op.up_to(total)
    rows = op.Mul(op.Div(places, [sparse_block_size]), blocks)
    cells = op.Add(op.Unsqueeze(rows, [2]), op.Div(columns, [sparse_block_size]))
    layouts = op.Transpose(op.Gather(masks, cells, axis=1), perm=[1, 0, 2, 3])
    turns = op.Div([num_heads], op.Shape(masks, end=1))
    seen = op.Cast(op.Tile(layouts, op.Concat([1], turns, [1, 1], axis=0)), to=TensorProto.BOOL)
    seen = op.And(seen, op.LessOrEqual(columns, op.Unsqueeze(places, [1, 3])))
    seeing = op.And(op.Unsqueeze(real, [1]), sees_any(op, seen))
    heads = op.Transpose(q, perm=[0, 2, 1, 3])
    y, _, _ = attend(op, heads, keys, values, seen, seeing, kv_num_heads, num_heads, scale)
    return op.CastLike(y, query), *presents


def _overwritten(op: FunctionEmitter, past: str, new: str, before: str, count: str) -> str:
    """A cache (B, K, C, H) with the first `count` rows of `new` (B, S, K, H) from row `before` on."""
    rows = op.up_to(op.Shape(past, start=2, end=3))
    taken = op.Min(op.Max(op.Sub(rows, before), [0]), op.Sub(op.Shape(new, start=1, end=2), [1]))
    laid = op.Transpose(op.GatherND(op.CastLike(new, past), op.Unsqueeze(taken, [2]), batch_dims=1), perm=[0, 2, 1, 3])
    written = op.And(op.GreaterOrEqual(rows, before), op.Less(rows, op.Add(before, count)))
    return op.Where(op.Unsqueeze(written, [1, 3]), laid, past)


def _block_masks(op: FunctionEmitter, row_indices: str, col_indices: str) -> tuple[str, str]:
    """Masks in the CSR format as (layouts, blocks·blocks + 1), 1 where a block is; and the number of blocks in a row.

    The last column takes the padding.
    """
    starts, columns = (op.Cast(x, to=TensorProto.INT64) for x in (row_indices, col_indices))
    blocks = op.Sub(op.Shape(starts, start=1, end=2), [1])
    entries = op.up_to(op.Shape(columns, start=1, end=2))
    ends = op.Unsqueeze(op.Slice(starts, [1], [END], [1]), [1])
    ended = op.Cast(op.LessOrEqual(ends, op.Unsqueeze(entries, [1])), to=TensorProto.INT64)
    row = op.ReduceSum(ended, [2], keepdims=0)  # of each entry: as many rows end before it
    size = op.Mul(blocks, blocks)
    cells = op.Where(op.Less(row, blocks), op.Add(op.Mul(row, blocks), columns), size)
    empty = op.Expand(op.const(np.int32(0)), op.Concat(op.Shape(starts, end=1), op.Add(size, [1]), axis=0))
    return op.ScatterElements(empty, cells, op.Expand(op.const(np.int32(1)), op.Shape(cells)), axis=1), blocks
