"""The forward operators that ONNX Runtime's optimizer and its training tools write (com.microsoft)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    elu,
    gelu,
    hard_sigmoid,
    hard_swish,
    leaky_relu,
    quick_gelu,
    relu,
    sigmoid,
    softmax,
    softmax_1,
    softmax_grad_1,
    softplus,
    softsign,
    tanh,
    thresholded_relu,
)
from refgrad.backends.numpy.kernels.attention import by_heads
from refgrad.backends.numpy.kernels.convolution import conv
from refgrad.backends.numpy.kernels.linear import gemm
from refgrad.backends.numpy.kernels.normalization import (
    dropout,
    dropout_grad,
    float_or_double,
    layer_normalization,
    packed_mask,
    simplified_layer_normalization,
)
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, widened
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Numbers = Sequence[float | None]


@kernel("GemmFastGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def gemm_fast_gelu(X: Array, W: Array, bias: Array | None = None) -> Array:
    return gelu(_plus(X @ W, bias), approximate="tanh")


@kernel("BiasSoftmax", domain=MICROSOFT, in_float32=True, fresh=True)
def bias_softmax(data: Array, bias: Array, *, axis: int = 1, is_inner_broadcast: int) -> Array:
    """Softmax of data + bias over all axes from `axis` on, as one"""
    return softmax_1(data + bias, axis=axis)


@kernel("BiasDropout", domain=MICROSOFT, fresh=True)
def bias_dropout(
    data: Array,
    bias: Array,
    residual: Array | None = None,
    ratio: Array | None = None,
    training_mode: Array | None = None,
    *,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Dropout of data + bias, plus the residual"""
    y, mask = dropout(widened(data) + widened(bias), ratio, training_mode, seed=seed)
    return (y if residual is None else y + widened(residual)).astype(data.dtype, copy=False), mask


@kernel("BitmaskBiasDropout", domain=MICROSOFT, fresh=True)
def bitmask_bias_dropout(
    data: Array,
    bias: Array,
    residual: Array | None = None,
    ratio: Array | None = None,
    training_mode: Array | None = None,
    *,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """BiasDropout with the mask packed, see `packed_mask`"""
    y, mask = bias_dropout(data, bias, residual, ratio, training_mode, seed=seed)
    return y, packed_mask(mask)


@kernel("BiasSoftmaxDropout", domain=MICROSOFT)
def bias_softmax_dropout(
    data: Array, bias: Array, ratio: Array | None = None, *, axis: int = 1, is_inner_broadcast: int, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Dropout of BiasSoftmax, always in training; its mask, and what it dropped from"""
    shares = bias_softmax(widened(data), widened(bias), axis=axis, is_inner_broadcast=is_inner_broadcast)
    y, mask = dropout(shares, ratio, np.array(True), seed=seed)
    return y.astype(data.dtype, copy=False), mask, shares.astype(data.dtype, copy=False)


@kernel("SoftmaxDropoutGrad", domain=MICROSOFT, fresh=True)
def softmax_dropout_grad(
    dY: Array, mask: Array, softmax_y: Array, ratio: Array | None = None, *, axis: int, seed: int = 0
) -> Array:
    """The gradient of BiasSoftmaxDropout: DropoutGrad in training, then SoftmaxGrad"""
    d = dropout_grad(widened(dY), mask, ratio, np.array(True))
    return softmax_grad_1(d, widened(softmax_y), axis=axis).astype(dY.dtype, copy=False)


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else np.asarray(x + bias)


def _activated(x: Array, name: str | None, given: Numbers) -> Array:
    """The activation of a fused operator; `given` are its parameters in order, as far as it has them.

    A default is a number of 32 bits, as an attribute that says it is.
    """

    def parameter(position: int, default: float) -> float:
        value = given[position] if position < len(given) else None
        return float(np.float32(default)) if value is None else value

    match name or "":
        case "":
            return x
        case "Relu":
            return relu(x)
        case "Tanh":
            return tanh(x)
        case "Sigmoid":
            return sigmoid(x)
        case "Softplus":
            return softplus(x)
        case "Softsign":
            return softsign(x)
        case "Gelu":
            return gelu(x, approximate="none")
        case "QuickGelu":
            return quick_gelu(x, alpha=parameter(0, 1.702))
        case "LeakyRelu":
            return leaky_relu(x, alpha=parameter(0, 0.01))
        case "ThresholdedRelu":
            return thresholded_relu(x, alpha=parameter(0, 1.0))
        case "Elu":
            return elu(x, alpha=parameter(0, 1.0))
        case "HardSigmoid":
            return hard_sigmoid(x, alpha=parameter(0, 0.2), beta=parameter(1, 0.5))
        case "HardSwish":
            return hard_swish(x)
        case "Clip":
            return np.asarray(np.clip(x, parameter(0, -math.inf), parameter(1, math.inf)))
    raise ValueError(f"activation {name!r} is not supported")


@kernel("FusedGemm", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_gemm(
    A: Array,
    B: Array,
    C: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> Array:
    """An activation of Gemm"""
    y = gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activated(y, activation, (activation_alpha, activation_beta, activation_gamma)).astype(y.dtype, copy=False)


@kernel("FusedConv", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_conv(
    X: Array,
    W: Array,
    B: Array | None = None,
    Z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    """An activation of Conv + Z"""
    window: dict[str, Any] = {"kernel_shape": kernel_shape, "pads": pads, "strides": strides, "dilations": dilations}
    y = _plus(conv(X, W, B, auto_pad=auto_pad, group=group, **window), Z)
    return _activated(y, activation, activation_params or ()).astype(X.dtype, copy=False)


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
    total = _plus(X + (skip[:, None, None] if skip.ndim == 2 else skip), bias)
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
    projected = _plus(input @ weights, bias)
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
    scores = _plus(scores, attention_bias)
    if unidirectional:
        later = np.arange(keys) > np.arange(keys - queries, keys)[:, None]
        scores = np.where(later, scores.dtype.type(-np.inf), scores)
    mixed = np.einsum("bnst,bnth->bsnh", softmax(scores, axis=-1), v)
    return np.asarray(_flat(mixed))


@kernel("FakeQuant", domain=MICROSOFT, in_float32=True, fresh=True)
def fake_quant(
    input_tensor: Array, scale: Array, zero_point: Array, *, quant_min: int = 0, quant_max: int = 255
) -> tuple[Array, Array]:
    """What quantizing and dequantizing again leaves of x, and where it was inside the range"""
    q = np.rint(input_tensor / scale) + zero_point
    return np.asarray((q.clip(quant_min, quant_max) - zero_point) * scale), (q >= quant_min) & (q <= quant_max)
