"""ONNX Runtime's packed sequences: without their padding, and with it again."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.activation import plus
from refgrad.microsoft.bodies.attention import check_projection, heads_of, lowest, mixed, parts, projected, scores_of
from refgrad.microsoft.bodies.position import check_counts, with_padding
from refgrad.microsoft.declared import check_pairs, check_shape, divided, product, sizes, total
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import Ints, Shapes

_OTHERS = ("token_offset", "cumulative_sequence_length")


@body(
    "RemovePadding",
    "output",
    "token_offset",
    "cumulated_seq_len",
    "max_seq_len",
    others=("sequence_token_count", "token_offset", "cumulated_seq_len", "max_seq_len"),
    domain=MICROSOFT,
)
def remove_padding(op: FunctionEmitter, input: str, sequence_token_count: str) -> tuple[str, ...]:
    """The first sequence_token_count tokens of each sequence, one sequence behind the other"""
    count = op.Cast(sequence_token_count, to=TensorProto.INT64)
    zero, one = (op.const(np.array(n)) for n in (0, 1))
    length = op.Shape(input, start=1, end=2)
    real = op.Less(op.Range(zero, op.Squeeze(length, [0]), one), op.Unsqueeze(count, [1]))
    tokens, padding = (op.Reshape(op.NonZero(op.Reshape(x, [-1])), [-1]) for x in (real, op.Not(real)))
    offset = op.Reshape(op.Concat(tokens, padding, axis=0), op.Shape(input, end=2), allowzero=1)
    ends = op.Concat(op.const([0]), op.CumSum(count, zero), axis=0)
    most = op.reduce("ReduceMax", op.Concat(op.const([0]), count, axis=0), [0])
    small = (op.Cast(x, to=TensorProto.INT32) for x in (offset, ends, most))
    return op.Gather(_rows(op, input), tokens, axis=0), *small


@body("RestorePadding", "output", others=("token_offset",), domain=MICROSOFT)
def restore_padding(op: FunctionEmitter, input: str, token_offset: str) -> str:
    """Each token at its place in the padded sequences, and 0 where there is none"""
    return with_padding(op, input, token_offset)


def _check_sequences(shapes: Shapes, args: Arguments) -> None:
    """Refuse places and ends of another number of sequences."""
    check_shape(shapes, "token_offset", args.token_offset, (None, None))
    ends = total(sizes(shapes, args.token_offset, 2)[0], 1)
    check_shape(shapes, "cumulative_sequence_length", args.cumulative_sequence_length, (ends,))


def _check_packed(shapes: Shapes, args: Arguments) -> None:
    check_projection(shapes, args.input, args.weights, args.bias, args.qkv_hidden_sizes, args.num_heads)
    _check_sequences(shapes, args)


def _check_packed_multi_head(shapes: Shapes, args: Arguments) -> None:
    N = args.num_heads
    check_counts(num_heads=N)
    check_pairs(args, "key", "value")
    if args.key is None:
        check_shape(shapes, "query", args.query, (None, N, 3, None))
        width = columns = product(N, sizes(shapes, args.query, 4)[3])
    else:
        check_shape(shapes, "query", args.query, (None, None))
        tokens, columns = sizes(shapes, args.query, 2)
        check_shape(shapes, "key", args.key, (tokens, columns))
        check_shape(shapes, "value", args.value, (tokens, None))
        width = sizes(shapes, args.value, 2)[1]
        divided("query", columns, N, "num_heads")
        divided("value", width, N, "num_heads")
    check_shape(shapes, "bias", args.bias, (total(columns, columns, width),))
    _check_sequences(shapes, args)


@body("PackedAttention", "output", others=_OTHERS, check=_check_packed, domain=MICROSOFT)
def packed_attention(
    op: FunctionEmitter,
    input: str,
    weights: str,
    bias: str,
    token_offset: str,
    cumulative_sequence_length: str,
    attention_bias: str | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Ints | None = None,
    scale: float | None = None,
) -> str:
    """Attention in each of the sequences that lie behind one another"""
    three = projected(op, input, weights, bias, qkv_hidden_sizes)
    return _attend(op, three, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale)


@body("PackedMultiHeadAttention", "output", others=_OTHERS, check=_check_packed_multi_head, domain=MICROSOFT)
def packed_multi_head_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    bias: str | None,
    token_offset: str,
    cumulative_sequence_length: str,
    attention_bias: str | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
) -> str:
    """MultiHeadAttention in each of the sequences that lie behind one another

    Padding is no key at all, so there is nothing that mask_filter_value would be added to.
    """
    if key is None:
        joined = op.Mul(op.Shape(query, start=1, end=2), op.Shape(query, start=3))  # (tokens, heads, 3, size)
        shape = op.Concat(op.Shape(query, end=1), joined, axis=0)
        three = [op.Reshape(op.Gather(query, op.const(np.array(k)), axis=2), shape, allowzero=1) for k in range(3)]
    else:
        three = [query, key, str(value)]
    if bias is not None:
        pieces = parts(op, bias, op.Shape(three[0], start=1), 0)
        three = [plus(op, x, piece) for x, piece in zip(three, pieces, strict=True)]
    return _attend(op, three, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale)


def _attend(
    op: FunctionEmitter,
    three: list[str],
    token_offset: str,
    cumulative_sequence_length: str,
    attention_bias: str | None,
    num_heads: int,
    scale: float | None,
) -> str:
    """Queries, keys and values, each (tokens, width): they are padded, attend, and are packed again."""
    q, k, v = (heads_of(op, with_padding(op, x, token_offset), num_heads) for x in three)
    scores = plus(op, scores_of(op, q, k, scale), attention_bias)
    ends = op.Slice(cumulative_sequence_length, [1], [END], [0])
    lengths = op.Sub(ends, op.Slice(cumulative_sequence_length, [0], [-1], [0]))
    number = op.Cast(op.up_to(op.Shape(token_offset, start=1, end=2)), to=TensorProto.INT32)
    padding = op.GreaterOrEqual(number, op.Unsqueeze(lengths, [1, 2, 3]))
    y = mixed(op, op.Where(padding, lowest(op, scores), scores), v)
    return removed(op, y, token_offset, op.Shape(three[0], end=1))


def removed(op: FunctionEmitter, padded: str, token_offset: str, count: str) -> str:
    """(batch, sequence, width) to (tokens, width): `count` of them."""
    return op.Gather(_rows(op, padded), op.Slice(op.Reshape(token_offset, [-1]), [0], count, [0]), axis=0)


def _rows(op: FunctionEmitter, padded: str) -> str:
    """(batch, sequence, width) to (batch·sequence, width)"""
    count = op.Mul(op.Shape(padded, end=1), op.Shape(padded, start=1, end=2))
    return op.Reshape(padded, op.Concat(count, op.Shape(padded, start=2), axis=0), allowzero=1)
