"""ONNX Runtime's normalizations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    sigmoid,
)
from refgrad.backends.numpy.kernels.normalization import (
    float_or_double,
    layer_normalization,
    simplified_layer_normalization,
)
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, widened
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.activation import plus
from refgrad.microsoft.kernels.arithmetic import by_branch
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("SkipLayerNormalization", domain=MICROSOFT, fresh=True)
def skip_layer_normalization(args: Arguments) -> tuple[Array, ...]:
    """LayerNormalization over the last axis of the sum, and the sum"""
    check_shape("gamma", args.gamma.shape, args.input.shape[-1:])
    kind, total = args.input.dtype, _sum(args.input, args.skip, args.bias)
    check_shape("input + skip + bias", total.shape, args.input.shape)
    y, mean, r = layer_normalization(
        total, args.gamma, args.beta, axis=-1, epsilon=args.epsilon, stash_type=float_or_double(total)
    )
    return y.astype(kind, copy=False), mean, r, total.astype(kind, copy=False)


@kernel_of_body("SkipSimplifiedLayerNormalization", domain=MICROSOFT, fresh=True)
def skip_simplified_layer_normalization(args: Arguments) -> tuple[Array | None, ...]:
    """SimplifiedLayerNormalization over the last axis of the sum, and the sum"""
    check_shape("gamma", args.gamma.shape, args.input.shape[-1:])
    kind, total = args.input.dtype, _sum(args.input, args.skip, args.bias)
    check_shape("input + skip + bias", total.shape, args.input.shape)
    y, r = simplified_layer_normalization(total, args.gamma, axis=-1, epsilon=args.epsilon)
    return y.astype(kind, copy=False), None, r, total.astype(kind, copy=False)


def _sum(x: Array, *others: Array | None) -> Array:
    return sum((widened(y) for y in others if y is not None), widened(x))


@kernel_of_body("GatedRMSNorm", domain=MICROSOFT, in_float32=True, fresh=True)
def gated_rms_norm(args: Arguments) -> Array:
    """Every run of elements as long as scale divided by its root mean square, times scale and the activated gate"""
    if not args.X.ndim or args.scale.ndim != 1 or not args.scale.size or args.X.shape[-1] % args.scale.size:
        raise ValueError(
            f"scale has the shape {list(args.scale.shape)}; it has one axis, which divides the last of {list(args.X.shape)}"
        )
    check_shape("gate", args.gate.shape, args.X.shape)
    rows = args.X.reshape(-1, args.scale.size)
    y = (rows / root_mean_square(rows, args.epsilon) * args.scale).reshape(args.X.shape)
    return np.asarray(y * sigmoid(args.gate) * (1 if args.activation == "sigmoid" else args.gate), args.X.dtype)


@kernel_of_body("BranchwiseRMSNorm", domain=MICROSOFT, fresh=True)
def branchwise_rms_norm(args: Arguments) -> Array:
    """Each branch divided by its root mean square, times its own scale or the scale of all branches"""
    x = by_branch(args.X, args.num_branches)
    y = x / root_mean_square(x, args.epsilon)
    if args.scale is not None:
        branches, width = x.shape[-2:]
        if args.scale.shape not in ((width,), (branches, width), (branches * width,)):
            raise ValueError(
                f"scale has the shape {list(args.scale.shape)}; [{width}], [{branches}, {width}] "
                f"or [{branches * width}] is needed"
            )
        y = y * widened(args.scale).astype(x.dtype, copy=False).reshape(-1, width)
    return np.asarray(y, args.X.dtype).reshape(args.X.shape)


@kernel_of_body("EngramGate", domain=MICROSOFT, in_float32=True, fresh=True)
def engram_gate(args: Arguments, *, _wanted: tuple[bool, ...]) -> tuple[Array, Array | None]:
    """The value times a gate for each hyper-connection, from the scalar product of key and query; and the same normalized"""
    if args.key.ndim != 4:
        raise ValueError(f"key has rank {args.key.ndim}; (batch, sequence, connections, hidden) is needed")
    check_shape("query", args.query.shape, args.key.shape)
    check_shape("value", args.value.shape, (*args.key.shape[:2], args.key.shape[3]))
    for name, scale in (("key", args.key_norm_scale), ("query", args.query_norm_scale), ("conv", args.conv_norm_scale)):
        if scale is not None:
            check_shape(f"{name}_norm_scale", scale.shape, args.key.shape[2:])
    if args.conv_norm_scale is None and len(_wanted) > 1 and _wanted[1]:
        raise ValueError("gated_value_normed needs conv_norm_scale, which is left out")
    k, q = (x / root_mean_square(x, args.epsilon) for x in (args.key, args.query))
    dot = np.einsum("bsmh,bsmh,mh,mh->bsm", k, q, args.key_norm_scale, args.query_norm_scale) / math.sqrt(
        args.key.shape[3]
    )
    gate = sigmoid(np.asarray(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot) * (dot != 0), args.key.dtype))
    gated = gate[..., np.newaxis] * args.value[:, :, np.newaxis]
    normed = (
        None if args.conv_norm_scale is None else gated / root_mean_square(gated, args.epsilon) * args.conv_norm_scale
    )
    return gated, normed


@kernel_of_body("HyperConnectionLowRankMix", domain=MICROSOFT)
def hyper_connection_low_rank_mix(args: Arguments) -> tuple[Array, Array, Array]:
    """The input of the next block and its gates, from streams that the block before may still be added to"""
    kind = args.streams.dtype
    s = by_branch(args.streams, args.num_branches)
    *lead, branches, width = s.shape
    flat, rank = branches * width, args.up_weight.shape[0]
    for name, given, shape in (
        ("norm_scale", args.norm_scale, (flat,)),
        ("down_weight", args.down_weight, (flat, rank)),
        ("up_weight", args.up_weight, (rank, flat)),
        ("inject_weight", args.inject_weight, (flat, branches)),
        ("prev_block_output", args.prev_block_output, (*lead, width)),
        ("prev_post_gate", args.prev_post_gate, (*lead, branches)),
    ):
        if given is not None:
            check_shape(name, given.shape, shape)

    def rounded(x: Array) -> Array:
        return widened(np.asarray(x, kind))

    def product(x: Array, weight: Array) -> Array:
        return rounded(np.einsum("...k,kn->...n", x, widened(weight)))

    if args.prev_block_output is not None and args.prev_post_gate is not None:
        s = rounded(s + np.einsum("...c,...h->...ch", widened(args.prev_post_gate), widened(args.prev_block_output)))
    normalized = rounded(s / root_mean_square(s, args.epsilon) * widened(args.norm_scale).reshape(branches, width))
    rows = normalized.reshape(*lead, flat)
    z = rounded(args.silu_alpha * product(rows, args.down_weight))
    hidden = rounded(z * rounded(sigmoid(z)))
    gates = rounded(sigmoid(product(hidden, args.up_weight))).reshape(s.shape)
    pre_output = args.reduction_scale * np.einsum("...ch,...ch->...h", normalized, gates)
    inject = rounded(product(rows, args.inject_weight) / args.gate_div)
    post_gate = rounded(sigmoid(inject)) * args.gate_mul
    return np.asarray(pre_output, kind), np.asarray(post_gate, kind), np.asarray(s.reshape(args.streams.shape), kind)


def root_mean_square(x: Array, epsilon: float) -> Array:
    """√(mean x² + ε) over the last axis, which it keeps"""
    return np.asarray(
        np.sqrt(np.einsum("...h,...h->...", x, x) / max(x.shape[-1], 1) + epsilon)[..., np.newaxis], x.dtype
    )


@kernel_of_body("GroupNorm", domain=MICROSOFT, in_float32=True, fresh=True)
def group_norm(args: Arguments) -> Array:
    """Each group of channels normalized to mean 0 and variance 1, scaled and shifted by channel; then swish or not"""
    x = args.X if args.channels_last else np.moveaxis(args.X, 1, -1)
    n, *space, channels = x.shape
    parts = x.reshape(n, math.prod(space), args.groups, channels // args.groups)
    centred = parts - parts.mean((1, 3), keepdims=True)
    normalized = centred / np.sqrt((centred * centred).mean((1, 3), keepdims=True) + args.epsilon)
    y = normalized.reshape(n, *space, channels) * args.gamma + args.beta
    if args.activation:
        y = y * sigmoid(y)
    return np.asarray(y if args.channels_last else np.moveaxis(y, -1, 1), args.X.dtype)


@kernel_of_body("SkipGroupNorm", domain=MICROSOFT, in_float32=True, fresh=True)
def skip_group_norm(args: Arguments) -> tuple[Array, Array]:
    """GroupNorm of X + skip + bias, and that sum; a skip (N, C) is the same everywhere"""
    total = plus(args.X + (args.skip[:, None, None] if args.skip.ndim == 2 else args.skip), args.bias)
    settings: dict[str, Any] = {"activation": args.activation, "epsilon": args.epsilon, "groups": args.groups}
    return group_norm(total, args.gamma, args.beta, channels_last=args.channels_last, **settings), total


@kernel_of_body("EmbedLayerNormalization", domain=MICROSOFT, fresh=True)
def embed_layer_normalization(args: Arguments) -> tuple[Array, ...]:
    """The sum of three embeddings normalized, how many elements of each mask are 1, and the sum"""
    for name, given in (("segment_ids", args.segment_ids), ("mask", args.mask)):
        if given is not None:
            check_shape(name, given.shape, args.input_ids.shape)
    for name, given in (("gamma", args.gamma), ("beta", args.beta)):
        check_shape(name, given.shape, args.word_embedding.shape[1:])
    positions = np.arange(args.input_ids.shape[1]) if args.position_ids is None else args.position_ids
    check_indices(args.input_ids, len(args.word_embedding), "input_ids", lowest=0)
    check_indices(positions, len(args.position_embedding), "position_ids", lowest=0)
    if args.segment_ids is not None and args.segment_embedding is not None:
        check_indices(args.segment_ids, len(args.segment_embedding), "segment_ids", lowest=0)
    segments = (
        None if args.segment_ids is None or args.segment_embedding is None else args.segment_embedding[args.segment_ids]
    )
    kind, total = (
        args.word_embedding.dtype,
        _sum(args.word_embedding[args.input_ids], args.position_embedding[positions], segments),
    )
    counted = np.zeros(len(args.input_ids), np.int32) if args.mask is None else (args.mask == 1).sum(1).astype(np.int32)
    y = layer_normalization(
        total, args.gamma, args.beta, axis=-1, epsilon=args.epsilon, stash_type=float_or_double(total)
    )[0]
    return y.astype(kind, copy=False), counted, total.astype(kind, copy=False)
