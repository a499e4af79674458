"""ONNX Runtime's attentions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import plus
from refgrad.tables.definitions import Ints, UnsupportedFormError, operator

_IN_PLACE = "a key-value cache that is written in place serves the generation of text; leave {} out"
_FILTER = -10000.0  # what is added to the score of a key that a mask hides


@operator(
    "MultiHeadAttention",
    "output",
    optional=["present_key", "present_value", "qk"],
    others=("key_padding_mask", "past_sequence_length", "cache_indirection"),
)
def multi_head_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None = None,
    value: str | None = None,
    bias: str | None = None,
    key_padding_mask: str | None = None,
    attention_bias: str | None = None,
    past_key: str | None = None,
    past_value: str | None = None,
    past_sequence_length: str | None = None,
    cache_indirection: str | None = None,
    *,
    mask_filter_value: float = _FILTER,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ + mask + attention_bias)·V, head by head, of query, key and value plus their parts of the bias"""
    for name, given in (("past_sequence_length", past_sequence_length), ("cache_indirection", cache_indirection)):
        if given is not None:
            raise UnsupportedFormError(_IN_PLACE.format(name))
    rank = op.rank(query if key is None else key)
    if rank is None:
        raise UnsupportedFormError(
            f"the rank of its input {'query' if key is None else 'key'} is unknown; add it to value_info"
        )
    parts: list[str | None] = [None, None, None]
    if key is None or rank == 5:  # (B, L, heads, 3 or 2, H): packed
        packed, count = (query, 3) if key is None else (key, 2)
        taken = [op.Reshape(op.Gather(packed, op.const(np.array(k)), axis=3), [0, 0, -1]) for k in range(count)]
        query, key, value = taken if count == 3 else (query, *taken)
    assert key is not None
    assert value is not None
    if bias is not None:
        width = op.Shape(query, start=2, end=3)
        twice = op.Add(width, width)
        parts = [
            op.Slice(bias, [0], width, [0]),
            op.Slice(bias, width, twice, [0]),
            op.Slice(bias, twice, [END], [0]),
        ]
    q = _heads(op, plus(op, query, parts[0]), num_heads)
    if rank == 4:  # (B, heads, L, H): projected before, and without biases
        k, v = key, value
    else:
        k, v = (_heads(op, plus(op, x, b), num_heads) for x, b in ((key, parts[1]), (value, parts[2])))
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    y = _attend(op, q, k, v, scale, key_padding_mask, mask_filter_value, attention_bias, unidirectional)
    return y, k, v, None


@operator("Attention", "output", optional=["present"], others=("mask_index", "past_sequence_length"))
def attention(
    op: FunctionEmitter,
    input: str,
    weights: str,
    bias: str | None = None,
    mask_index: str | None = None,
    past: str | None = None,
    attention_bias: str | None = None,
    past_sequence_length: str | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = _FILTER,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Ints | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[str, str]:
    """softmax(scale·Q·Kᵀ + mask + attention_bias)·V, head by head; Q, K and V are the parts of input·weights + bias"""
    if past_sequence_length is not None or past_present_share_buffer:
        raise UnsupportedFormError(_IN_PLACE.format("past_sequence_length"))
    if do_rotary:
        raise UnsupportedFormError("do_rotary=1 is not covered; apply RotaryEmbedding to the query and the key")
    projected = plus(op, op.MatMul(input, weights), bias)
    if qkv_hidden_sizes:
        ends = np.cumsum(qkv_hidden_sizes).tolist()
        bounds: list[tuple[Any, Any]] = [([0], [ends[0]]), ([ends[0]], [ends[1]]), ([ends[1]], [ends[2]])]
    else:
        third = op.Div(op.Shape(projected, start=2, end=3), [3])
        twice = op.Add(third, third)
        bounds = [([0], third), (third, twice), (twice, [END])]
    q, k, v = (_heads(op, op.Slice(projected, start, end, [2]), num_heads) for start, end in bounds)
    if past is not None:
        k, v = (op.Concat(op.Gather(past, op.const(np.array(n)), axis=0), x, axis=2) for n, x in ((0, k), (1, v)))
    y = _attend(op, q, k, v, scale, mask_index, mask_filter_value, attention_bias, unidirectional)
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


def _heads(op: FunctionEmitter, x: str, num_heads: int) -> str:
    """(B, L, heads·H) to (B, heads, L, H)"""
    return op.Transpose(op.Reshape(x, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3])


def _masked(op: FunctionEmitter, scores: str, mask: str, filter_value: float) -> str:
    """`scores`, lower by `filter_value` where a mask of integers is not above 0."""
    rank = op.rank(mask)
    if rank not in (2, 3):
        known = "unknown" if rank is None else f"of rank {rank}"
        raise UnsupportedFormError(
            f"its mask is {known}; only masks of shape (batch, keys) and (batch, queries, keys) are covered"
        )
    hidden = op.Not(op.Greater(op.Unsqueeze(mask, [1, 2] if rank == 2 else [1]), 0))
    return op.Add(scores, op.Mul(op.CastLike(hidden, scores), filter_value))


def _attend(
    op: FunctionEmitter,
    q: str,
    k: str,
    v: str,
    scale: float | None,
    mask: str | None,
    filter_value: float,
    attention_bias: str | None,
    unidirectional: int,
) -> str:
    """q (B, heads, S, H), k (B, heads, T, H), v (B, heads, T, Hv) to (B, S, heads·Hv)"""
    root = None if scale else op.Sqrt(op.CastLike(op.Shape(q, start=3, end=4), q))
    q = op.Mul(q, scale) if root is None else op.Div(q, root)
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    if mask is not None:
        scores = _masked(op, scores, mask, filter_value)
    if attention_bias is not None:
        scores = op.Add(scores, attention_bias)
    if unidirectional:
        zero, one = (op.const(np.array(n)) for n in (0, 1))
        queries, keys = (op.Squeeze(op.Shape(x, start=2, end=3), [0]) for x in (q, k))
        rows = op.Unsqueeze(op.Range(op.Sub(keys, queries), keys, one), [1])
        columns = op.Range(zero, keys, one)
        scores = op.Where(op.Greater(columns, rows), op.const(-math.inf, like=scores), scores)
    y = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    return op.Reshape(y, [0, 0, -1])
