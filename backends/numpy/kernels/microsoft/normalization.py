"""ONNX Runtime's normalizations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    sigmoid,
)
from refgrad.backends.numpy.kernels.microsoft.activation import plus
from refgrad.backends.numpy.kernels.microsoft.arithmetic import by_branch
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


@kernel("GatedRMSNorm", domain=MICROSOFT, in_float32=True, fresh=True)
def gated_rms_norm(X: Array, scale: Array, gate: Array, *, activation: str = "silu", epsilon: float = 1e-5) -> Array:
    """Every run of elements as long as scale divided by its root mean square, times scale and the activated gate"""
    if activation not in ("silu", "swish", "sigmoid"):
        raise ValueError(f"activation {activation!r} is not known; there are 'silu', 'swish' and 'sigmoid'")
    if not X.ndim or scale.ndim != 1 or not scale.size or X.shape[-1] % scale.size:
        raise ValueError(
            f"scale has the shape {list(scale.shape)}; it has one axis, which divides the last of {list(X.shape)}"
        )
    check_shape("gate", gate.shape, X.shape)
    rows = X.reshape(-1, scale.size)
    y = (rows / root_mean_square(rows, epsilon) * scale).reshape(X.shape)
    return np.asarray(y * sigmoid(gate) * (1 if activation == "sigmoid" else gate), X.dtype)


@kernel("BranchwiseRMSNorm", domain=MICROSOFT, fresh=True)
def branchwise_rms_norm(X: Array, scale: Array | None = None, *, epsilon: float = 1e-5, num_branches: int = 0) -> Array:
    """Each branch divided by its root mean square, times its own scale or the scale of all branches"""
    x = by_branch(X, num_branches)
    y = x / root_mean_square(x, epsilon)
    if scale is not None:
        branches, width = x.shape[-2:]
        if scale.shape not in ((width,), (branches, width), (branches * width,)):
            raise ValueError(
                f"scale has the shape {list(scale.shape)}; [{width}], [{branches}, {width}] or [{branches * width}] is needed"
            )
        y = y * widened(scale).astype(x.dtype, copy=False).reshape(-1, width)
    return np.asarray(y, X.dtype).reshape(X.shape)


@kernel("EngramGate", domain=MICROSOFT, in_float32=True, fresh=True)
def engram_gate(
    key: Array,
    query: Array,
    value: Array,
    key_norm_scale: Array,
    query_norm_scale: Array,
    conv_norm_scale: Array | None = None,
    *,
    epsilon: float = 1e-5,
    _wanted: tuple[bool, ...],
) -> tuple[Array, Array | None]:
    """The value times a gate for each hyper-connection, from the scalar product of key and query; and the same normalized"""
    if key.ndim != 4:
        raise ValueError(f"key has rank {key.ndim}; (batch, sequence, connections, hidden) is needed")
    check_shape("query", query.shape, key.shape)
    check_shape("value", value.shape, (*key.shape[:2], key.shape[3]))
    for name, scale in (("key", key_norm_scale), ("query", query_norm_scale), ("conv", conv_norm_scale)):
        if scale is not None:
            check_shape(f"{name}_norm_scale", scale.shape, key.shape[2:])
    if conv_norm_scale is None and len(_wanted) > 1 and _wanted[1]:
        raise ValueError("gated_value_normed needs conv_norm_scale, which is left out")
    k, q = (x / root_mean_square(x, epsilon) for x in (key, query))
    dot = np.einsum("bsmh,bsmh,mh,mh->bsm", k, q, key_norm_scale, query_norm_scale) / math.sqrt(key.shape[3])
    gate = sigmoid(np.asarray(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot) * (dot != 0), key.dtype))
    gated = gate[..., np.newaxis] * value[:, :, np.newaxis]
    normed = None if conv_norm_scale is None else gated / root_mean_square(gated, epsilon) * conv_norm_scale
    return gated, normed


@kernel("HyperConnectionLowRankMix", domain=MICROSOFT)
def hyper_connection_low_rank_mix(
    streams: Array,
    norm_scale: Array,
    down_weight: Array,
    up_weight: Array,
    inject_weight: Array,
    prev_block_output: Array | None = None,
    prev_post_gate: Array | None = None,
    *,
    epsilon: float = 1e-5,
    gate_div: float = 1.0,
    gate_mul: float = 1.0,
    num_branches: int,
    reduction_scale: float = 1.0,
    silu_alpha: float = 1.0,
) -> tuple[Array, Array, Array]:
    """The input of the next block and its gates, from streams that the block before may still be added to"""
    kind = streams.dtype
    if num_branches < 1 or not gate_div or (prev_block_output is None) != (prev_post_gate is None):
        raise ValueError(
            f"num_branches={num_branches} is 1 or more, gate_div={gate_div} is not 0, and prev_block_output and "
            "prev_post_gate are both given or left out"
        )
    s = by_branch(streams, num_branches)
    *lead, branches, width = s.shape
    flat, rank = branches * width, up_weight.shape[0]
    for name, given, shape in (
        ("norm_scale", norm_scale, (flat,)),
        ("down_weight", down_weight, (flat, rank)),
        ("up_weight", up_weight, (rank, flat)),
        ("inject_weight", inject_weight, (flat, branches)),
        ("prev_block_output", prev_block_output, (*lead, width)),
        ("prev_post_gate", prev_post_gate, (*lead, branches)),
    ):
        if given is not None:
            check_shape(name, given.shape, shape)

    def rounded(x: Array) -> Array:
        return widened(np.asarray(x, kind))

    def product(x: Array, weight: Array) -> Array:
        return rounded(np.einsum("...k,kn->...n", x, widened(weight)))

    if prev_block_output is not None and prev_post_gate is not None:
        s = rounded(s + np.einsum("...c,...h->...ch", widened(prev_post_gate), widened(prev_block_output)))
    normalized = rounded(s / root_mean_square(s, epsilon) * widened(norm_scale).reshape(branches, width))
    rows = normalized.reshape(*lead, flat)
    z = rounded(silu_alpha * product(rows, down_weight))
    hidden = rounded(z * rounded(sigmoid(z)))
    gates = rounded(sigmoid(product(hidden, up_weight))).reshape(s.shape)
    pre_output = reduction_scale * np.einsum("...ch,...ch->...h", normalized, gates)
    inject = rounded(product(rows, inject_weight) / gate_div)
    post_gate = rounded(sigmoid(inject)) * gate_mul
    return np.asarray(pre_output, kind), np.asarray(post_gate, kind), np.asarray(s.reshape(streams.shape), kind)


def root_mean_square(x: Array, epsilon: float) -> Array:
    """√(mean x² + ε) over the last axis, which it keeps"""
    return np.asarray(
        np.sqrt(np.einsum("...h,...h->...", x, x) / max(x.shape[-1], 1) + epsilon)[..., np.newaxis], x.dtype
    )


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
