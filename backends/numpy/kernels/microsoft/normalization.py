"""ONNX Runtime's normalizations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    sigmoid,
)
from refgrad.backends.numpy.kernels.microsoft.activation import plus
from refgrad.backends.numpy.kernels.normalization import (
    float_or_double,
    layer_normalization,
    simplified_layer_normalization,
)
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, widened
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("SkipLayerNormalization", domain=MICROSOFT, fresh=True)
def skip_layer_normalization(
    input: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, ...]:
    """LayerNormalization over the last axis of the sum, and the sum"""
    check_shape("gamma", gamma.shape, input.shape[-1:])
    kind, total = input.dtype, _sum(input, skip, bias)
    check_shape("input + skip + bias", total.shape, input.shape)
    y, mean, r = layer_normalization(total, gamma, beta, axis=-1, epsilon=epsilon, stash_type=float_or_double(total))
    return y.astype(kind, copy=False), mean, r, total.astype(kind, copy=False)


@kernel("SkipSimplifiedLayerNormalization", domain=MICROSOFT, fresh=True)
def skip_simplified_layer_normalization(
    input: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array | None, ...]:
    """SimplifiedLayerNormalization over the last axis of the sum, and the sum"""
    check_shape("gamma", gamma.shape, input.shape[-1:])
    kind, total = input.dtype, _sum(input, skip, bias)
    check_shape("input + skip + bias", total.shape, input.shape)
    y, r = simplified_layer_normalization(total, gamma, axis=-1, epsilon=epsilon)
    return y.astype(kind, copy=False), None, r, total.astype(kind, copy=False)


def _sum(x: Array, *others: Array | None) -> Array:
    return sum((widened(y) for y in others if y is not None), widened(x))


@kernel("GroupNorm", domain=MICROSOFT, in_float32=True, fresh=True)
def group_norm(
    X: Array,
    gamma: Array,
    beta: Array,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> Array:
    """Each group of channels normalized to mean 0 and variance 1, scaled and shifted by channel; then swish or not"""
    x = X if channels_last else np.moveaxis(X, 1, -1)
    n, *space, channels = x.shape
    parts = x.reshape(n, math.prod(space), groups, channels // groups)
    centred = parts - parts.mean((1, 3), keepdims=True)
    normalized = centred / np.sqrt((centred * centred).mean((1, 3), keepdims=True) + epsilon)
    y = normalized.reshape(n, *space, channels) * gamma + beta
    if activation:
        y = y * sigmoid(y)
    return np.asarray(y if channels_last else np.moveaxis(y, -1, 1), X.dtype)


@kernel("SkipGroupNorm", domain=MICROSOFT, in_float32=True, fresh=True)
def skip_group_norm(
    X: Array,
    gamma: Array,
    beta: Array,
    skip: Array,
    bias: Array | None = None,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> tuple[Array, Array]:
    """GroupNorm of X + skip + bias, and that sum; a skip (N, C) is the same everywhere"""
    total = plus(X + (skip[:, None, None] if skip.ndim == 2 else skip), bias)
    settings: dict[str, Any] = {"activation": activation, "epsilon": epsilon, "groups": groups}
    return group_norm(total, gamma, beta, channels_last=channels_last, **settings), total


@kernel("EmbedLayerNormalization", domain=MICROSOFT, fresh=True)
def embed_layer_normalization(
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None = None,
    position_ids: Array | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int | None = None,
) -> tuple[Array, ...]:
    """The sum of three embeddings normalized, how many elements of each mask are 1, and the sum"""
    for name, given in (("segment_ids", segment_ids), ("mask", mask)):
        if given is not None:
            check_shape(name, given.shape, input_ids.shape)
    for name, given in (("gamma", gamma), ("beta", beta)):
        check_shape(name, given.shape, word_embedding.shape[1:])
    positions = np.arange(input_ids.shape[1]) if position_ids is None else position_ids
    check_indices(input_ids, len(word_embedding), "input_ids", lowest=0)
    check_indices(positions, len(position_embedding), "position_ids", lowest=0)
    if segment_ids is not None and segment_embedding is not None:
        check_indices(segment_ids, len(segment_embedding), "segment_ids", lowest=0)
    segments = None if segment_ids is None or segment_embedding is None else segment_embedding[segment_ids]
    kind, total = word_embedding.dtype, _sum(word_embedding[input_ids], position_embedding[positions], segments)
    counted = np.zeros(len(input_ids), np.int32) if mask is None else (mask == 1).sum(1).astype(np.int32)
    y = layer_normalization(total, gamma, beta, axis=-1, epsilon=epsilon, stash_type=float_or_double(total))[0]
    return y.astype(kind, copy=False), counted, total.astype(kind, copy=False)
