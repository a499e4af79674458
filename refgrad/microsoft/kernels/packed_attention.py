"""ONNX Runtime's packed sequences: without their padding, and with it again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from refgrad.backends.numpy.kernels.activation import softmax
from refgrad.backends.numpy.kernels.operands import check_expands, check_shape
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.attention import projections
from refgrad.microsoft.kernels.position import padded
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("RemovePadding", domain=MICROSOFT, fresh=True)
def remove_padding(args: Arguments) -> tuple[Array, ...]:
    """The tokens of every sequence, where they were, where the sequences begin, and how long the longest is"""
    if args.input.ndim != 3:
        raise ValueError(f"input has the shape {list(args.input.shape)}; (batch, sequence, width) is needed")
    batch, length, width = args.input.shape
    check_shape("sequence_token_count", args.sequence_token_count.shape, (batch,))
    counts = args.sequence_token_count.tolist()
    if wrong := [count for count in counts if not 0 <= count <= length]:
        raise ValueError(f"sequence_token_count has {wrong[0]}; a sequence has 0 to {length} tokens")
    real = [row * length + token for row, count in enumerate(counts) for token in range(count)]
    rest = [row * length + token for row, count in enumerate(counts) for token in range(count, length)]
    tokens = np.concatenate(
        [row[:count] for row, count in zip(args.input, counts, strict=True)] or [args.input.reshape(0, width)]
    )
    offset = np.array(real + rest, np.int32).reshape(batch, length)
    return tokens, offset, np.cumsum([0, *counts], dtype=np.int32), np.array([max(counts, default=0)], np.int32)


@kernel_of_body("RestorePadding", domain=MICROSOFT, fresh=True)
def restore_padding(args: Arguments) -> Array:
    """Each token where it was, and 0 elsewhere"""
    return padded(args.input, args.token_offset)


@kernel_of_body("PackedAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def packed_attention(args: Arguments) -> Array:
    """Attention of each sequence to itself"""
    three = projections(args.input, args.weights, args.bias, args.qkv_hidden_sizes)
    return _attend(
        three, args.token_offset, args.cumulative_sequence_length, args.attention_bias, args.num_heads, args.scale
    )


@kernel_of_body("PackedMultiHeadAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def packed_multi_head_attention(args: Arguments) -> Array:
    """Attention of each sequence to itself; query, key and value are projected before"""
    if args.key is None:
        three = [
            args.query[:, :, k].reshape(len(args.query), args.query.shape[1] * args.query.shape[3]) for k in range(3)
        ]
    else:
        three = [args.query, args.key, args.value]
    if args.bias is not None:
        widths = [x.shape[1] for x in three]
        three = [x + piece for x, piece in zip(three, np.split(args.bias, np.cumsum(widths)[:2]), strict=True)]
    return _attend(
        three, args.token_offset, args.cumulative_sequence_length, args.attention_bias, args.num_heads, args.scale
    )


def _attend(
    three: list[Array],
    token_offset: Array,
    cumulative_sequence_length: Array,
    attention_bias: Array | None,
    num_heads: int,
    scale: float | None,
) -> Array:
    """One sequence after the other; no padding is made."""
    batch, longest = token_offset.shape
    ends = cumulative_sequence_length.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != len(three[0]) or any(not 0 <= n <= longest for n in lengths):
        raise ValueError(
            f"cumulative_sequence_length is {ends}; it goes from 0 to the {len(three[0])} tokens in steps of 0 to {longest}"
        )
    places = [row * longest + token for row, count in enumerate(lengths) for token in range(count)]
    if token_offset.reshape(-1)[: ends[-1]].tolist() != places:
        raise ValueError(f"token_offset begins with other places than {places}, where the tokens are")
    if attention_bias is not None:
        check_expands("attention_bias", attention_bias.shape, (batch, num_heads, longest, longest))
        attention_bias = np.broadcast_to(attention_bias, (batch, num_heads, longest, longest))
    y = np.zeros_like(three[2])
    for row, count in enumerate(lengths):
        q, k, v = (x[ends[row] : ends[row + 1]].reshape(count, num_heads, x.shape[1] // num_heads) for x in three)
        scores = np.einsum("snh,tnh->nst", q, k) * q.dtype.type(scale or 1 / np.sqrt(q.shape[2]))
        if attention_bias is not None:
            scores = scores + attention_bias[row, :, :count, :count]
        if count:
            y[ends[row] : ends[row + 1]] = np.einsum("nst,tnh->snh", softmax(scores, axis=-1), v).reshape(
                count, y.shape[1]
            )
    return y
