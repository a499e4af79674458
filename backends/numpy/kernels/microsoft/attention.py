"""ONNX Runtime's attentions."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    softmax,
)
from refgrad.backends.numpy.kernels.attention import by_heads
from refgrad.backends.numpy.kernels.microsoft.activation import plus
from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("MultiHeadAttention", domain=MICROSOFT, in_float32=True)
def multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Array, ...]:
    """Attention of query (B, S, N·H), or packed (B, S, N, 3, H), to key and value, each head for itself"""
    if key is None:
        query, key, value = (_flat(query[:, :, :, k]) for k in range(3))
    elif value is None:
        key, value = (_flat(key[:, :, :, k]) for k in range(2))
    assert value is not None
    if key.ndim != value.ndim:
        raise ValueError(f"key has the shape {list(key.shape)} and value {list(value.shape)}; ranks are equal")
    parts = [query, key, value]
    if bias is not None:
        width = query.shape[2]
        pieces = np.split(bias, [width, 2 * width])
        parts = [x if x.ndim == 4 else x + b for x, b in zip(parts, pieces, strict=True)]
    q, k, v = (x if x.ndim == 4 else by_heads(x, num_heads) for x in parts)
    if past_key is not None and past_value is not None:
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    y = _attend(q, k, v, scale, key_padding_mask, mask_filter_value, attention_bias, unidirectional)
    return y, k, v


@kernel("Attention", domain=MICROSOFT, in_float32=True, fresh=True)
def attention(
    input: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
    _wanted: tuple[bool, ...],
) -> tuple[Array, ...]:
    """Attention of a sequence to itself: query, key and value are the parts of one projection of it"""
    if do_rotary or past_present_share_buffer:
        raise ValueError("do_rotary and past_present_share_buffer are not supported")
    check_shape("weights", weights.shape, (input.shape[-1], weights.shape[-1]))
    if bias is not None:
        check_shape("bias", bias.shape, weights.shape[1:])
    projected = plus(input @ weights, bias)
    third = projected.shape[2] // 3
    sizes = qkv_hidden_sizes or [third] * 3
    q, k, v = (by_heads(x, num_heads) for x in np.split(projected, np.cumsum(sizes)[:2], 2))
    if past is not None:
        k, v = np.concatenate([past[0], k], 2), np.concatenate([past[1], v], 2)
    y = _attend(q, k, v, scale, mask_index, mask_filter_value, attention_bias, unidirectional)
    return (y, np.stack([k, v])) if any(_wanted[1:]) else (y,)


def _flat(x: Array) -> Array:
    """(B, L, N, H) to (B, L, N·H)"""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _attend(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    mask: Array | None,
    filter_value: float,
    attention_bias: Array | None,
    unidirectional: int,
) -> Array:
    """A key that `mask` hides scores lower by `filter_value`, one that comes later than the query counts for nothing."""
    need(4 * q.size // max(q.shape[3], 1) * k.shape[2] * q.itemsize)
    scores = np.einsum("bnsh,bnth->bnst", q, k) * q.dtype.type(scale or 1 / math.sqrt(q.shape[3]))
    queries, keys = scores.shape[2:]
    if mask is not None:
        if mask.ndim not in (2, 3):
            raise ValueError(f"a mask of shape {mask.shape} is not supported")
        shown = mask[:, None, None] if mask.ndim == 2 else mask[:, None]
        scores = scores + np.where(shown > 0, scores.dtype.type(0), scores.dtype.type(filter_value))
    scores = plus(scores, attention_bias)
    if unidirectional:
        later = np.arange(keys) > np.arange(keys - queries, keys)[:, None]
        scores = np.where(later, scores.dtype.type(-np.inf), scores)
    mixed = np.einsum("bnst,bnth->bsnh", softmax(scores, axis=-1), v)
    return np.asarray(_flat(mixed))
