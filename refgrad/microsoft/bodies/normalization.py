"""ONNX Runtime's normalizations, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form
from refgrad.formulas.normalization import by_normalized
from refgrad.formulas.types import of_shape, widest
from refgrad.microsoft.bodies.activation import plus, scaled_silu
from refgrad.microsoft.bodies.arithmetic import by_branch
from refgrad.microsoft.declared import check_known, check_pairs
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.rewrites.results import like
from refgrad.tables.definitions import FLOATS, Shapes

GATES = ("silu", "swish", "sigmoid")


@body("SkipLayerNormalization", "output", optional=["mean", "inv_std_var", "input_skip_bias_sum"], domain=MICROSOFT)
def skip_layer_normalization(
    op: FunctionEmitter,
    input: str,
    skip: str,
    gamma: str,
    beta: str | None = None,
    bias: str | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[str, ...]:
    """layer_normalization(input + skip + bias) over the last axis"""
    total = plus(op, op.Add(input, skip), bias)
    return (*op.LayerNormalization(total, gamma, beta, outputs=3, axis=-1, epsilon=epsilon), total)


@body(
    "SkipSimplifiedLayerNormalization",
    "output",
    optional=["mean", "inv_std_var", "input_skip_bias_sum"],
    domain=MICROSOFT,
)
def skip_simplified_layer_normalization(
    op: FunctionEmitter, input: str, skip: str, gamma: str, bias: str | None = None, *, epsilon: float = 1e-12
) -> tuple[str | None, ...]:
    """x/√(mean x² + ε)·gamma over the last axis, x = input + skip + bias"""
    total = plus(op, op.Add(input, skip), bias)
    y, r = _by_root_mean_square(op, total, gamma, [-1], epsilon)
    return y, None, r, total


@body("SimplifiedLayerNormalization", "Y", optional=["inv_std_var"], domain=MICROSOFT)
def simplified_layer_normalization(
    op: FunctionEmitter, X: str, scale: str, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[str, str]:
    """x/√(mean x² + ε)·scale over the axes from `axis` on"""
    if (rank := op.rank(X)) is not None and not -rank <= axis < rank:
        raise UnsupportedFormError(f"axis is {axis}; X has {rank} axes")
    if axis < 0 or rank is not None:
        axes = list(range(axis, 0 if axis < 0 else rank or 0))
        return _by_root_mean_square(op, X, scale, axes, epsilon)
    x = op.wide(X)
    r = _reciprocal_root(op, op.Flatten(x, axis=axis), [1], epsilon)
    ones = op.Expand(op.const(np.ones(1, np.int64)), op.Shape(op.Shape(X, start=axis)))
    r = op.Reshape(r, op.Concat(op.Shape(X, end=axis), ones, axis=0), allowzero=1)
    return _scaled(op, X, op.Mul(x, r), scale), r


def _by_root_mean_square(op: FunctionEmitter, x: str, scale: str, axes: list[int], epsilon: float) -> tuple[str, str]:
    """x·r·scale and r = 1/√(mean x² + ε), which is computed in float for a narrower x."""
    wide = op.wide(x)
    r = _reciprocal_root(op, wide, axes, epsilon)
    return _scaled(op, x, op.Mul(wide, r), scale), r


def _reciprocal_root(op: FunctionEmitter, x: str, axes: list[int], epsilon: float) -> str:
    """1/√(mean x² + ε) over the axes, which stay"""
    return op.Reciprocal(op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(x, x), axes), epsilon)))


def _scaled(op: FunctionEmitter, x: str, normalized: str, scale: str) -> str:
    """normalized·scale in the type of scale; what was made of a narrower x is rounded to it first"""
    return op.Mul(op.CastLike(normalized, scale) if op.type(x) in SIXTEEN_BIT else normalized, scale)


def _check_gate(shapes: Shapes, args: Arguments) -> None:
    check_known(args, "activation", *GATES)


@body("GatedRMSNorm", "Y", check=_check_gate, domain=MICROSOFT)
def gated_rms_norm(
    op: FunctionEmitter, X: str, scale: str, gate: str, *, activation: str = "silu", epsilon: float = 1e-5
) -> str:
    """x/√(mean x² + ε)·scale·activation(gate), over every run of elements as long as scale"""
    x, factor, z = (op.wide(x) for x in (X, scale, gate))
    width = op.Shape(factor)
    count = op.Div(op.Shape(x, start=-1), width)
    rows = op.Reshape(x, op.Concat(op.Shape(x, end=-1), count, width, axis=0), allowzero=1)
    y = op.Reshape(op.Mul(_normalized(op, rows, epsilon), factor), op.Shape(x), allowzero=1)
    opened = op.Sigmoid(z)
    return op.CastLike(op.Mul(y, opened if activation == "sigmoid" else op.Mul(z, opened)), X)


@body("BranchwiseRMSNorm", "Y", types={"scale": FLOATS}, domain=MICROSOFT)
def branchwise_rms_norm(
    op: FunctionEmitter, X: str, scale: str | None = None, *, epsilon: float = 1e-5, num_branches: int = 0
) -> str:
    """x/√(mean x² + ε)·scale, branch by branch"""
    if num_branches < 0:
        raise UnsupportedFormError(f"num_branches={num_branches}: it is 0 for grouped input, else how many there are")
    x = op.wide(X)
    if num_branches:
        x = by_branch(op, x, [num_branches])
    y = _normalized(op, x, epsilon)
    if scale is not None:  # of each branch, or the same for all
        factor = op.wide(scale)
        rows = op.Reshape(factor, op.Concat([-1], op.Shape(y, start=-1), axis=0))
        y = op.Mul(y, op.CastLike(rows, y))
    return op.CastLike(op.Reshape(y, op.Shape(X), allowzero=1) if num_branches else y, X)


@body("EngramGate", "output", optional=["gated_value_normed"], domain=MICROSOFT)
def engram_gate(
    op: FunctionEmitter,
    key: str,
    query: str,
    value: str,
    key_norm_scale: str,
    query_norm_scale: str,
    conv_norm_scale: str | None = None,
    *,
    epsilon: float = 1e-5,
) -> tuple[str, str | None]:
    """σ(sign d·√max(|d|, 10⁻⁶))·value, d = Σ rms(key)·rms(query)/√H; and that normalized"""
    k, q, v, k_scale, q_scale = (op.wide(x) for x in (key, query, value, key_norm_scale, query_norm_scale))
    products = op.Mul(op.Mul(_normalized(op, k, epsilon), k_scale), op.Mul(_normalized(op, q, epsilon), q_scale))
    root = op.Sqrt(op.CastLike(op.Shape(k, start=-1), k))
    dot = op.Div(op.reduce("ReduceSum", products, [-1]), root)
    size = op.Sqrt(op.Max(op.Abs(dot), op.const(1e-6, like=k)))
    gated = op.Mul(op.Sigmoid(op.Mul(op.Sign(dot), size)), op.Unsqueeze(v, [2]))
    if conv_norm_scale is None:
        return op.CastLike(gated, key), None
    scale = op.wide(conv_norm_scale)
    return op.CastLike(gated, key), op.CastLike(op.Mul(_normalized(op, gated, epsilon), scale), key)


def _check_low_rank_mix(shapes: Shapes, args: Arguments) -> None:
    if args.num_branches < 1:
        raise UnsupportedFormError(f"num_branches={args.num_branches}: it is how many streams there are, 1 or more")
    if not args.gate_div:
        raise UnsupportedFormError("gate_div is 0, and a divisor")
    check_pairs(args, "prev_block_output", "prev_post_gate")


@body(
    "HyperConnectionLowRankMix",
    "pre_output",
    "post_gate",
    optional=["streams_out"],
    check=_check_low_rank_mix,
    domain=MICROSOFT,
)
def hyper_connection_low_rank_mix(
    op: FunctionEmitter,
    streams: str,
    norm_scale: str,
    down_weight: str,
    up_weight: str,
    inject_weight: str,
    prev_block_output: str | None = None,
    prev_post_gate: str | None = None,
    *,
    epsilon: float = 1e-5,
    gate_div: float = 1.0,
    gate_mul: float = 1.0,
    num_branches: int,
    reduction_scale: float = 1.0,
    silu_alpha: float = 1.0,
) -> tuple[str, str, str]:
    """reduction_scale·Σ n[c]·σ(silu(n·down)·up)[c] over the branches, n their rms; gate_mul·σ(n·inject/gate_div); the streams

    The streams are those given plus prev_post_gate[c]·prev_block_output.
    """
    shape = op.Shape(streams)
    total = by_branch(op, streams, [num_branches])
    if prev_block_output is not None and prev_post_gate is not None:
        x, gate, block = (op.wide(x) for x in (total, prev_post_gate, prev_block_output))
        added = op.Mul(op.Unsqueeze(gate, [-1]), op.Unsqueeze(block, [-2]))
        total = op.CastLike(op.Add(x, added), streams)
    x, scale = (op.wide(x) for x in (total, norm_scale))
    normalized = op.Reshape(_normalized(op, x, epsilon), shape, allowzero=1)
    normalized = op.CastLike(op.Mul(normalized, scale), streams)
    hidden = scaled_silu(op, op.MatMul(normalized, down_weight), silu_alpha)
    gates = op.Sigmoid(op.MatMul(hidden, up_weight))
    kept = op.Mul(op.wide(normalized), op.wide(gates))
    pre_output = op.Squeeze(op.reduce("ReduceSum", by_branch(op, kept, [num_branches]), [-2]), [-2])
    pre_output = op.CastLike(op.Mul(pre_output, reduction_scale), streams)
    inject = op.MatMul(normalized, inject_weight)
    post_gate = op.Mul(op.Sigmoid(op.Div(inject, gate_div)), gate_mul)
    return pre_output, post_gate, op.Reshape(total, shape, allowzero=1)


def _normalized(op: FunctionEmitter, x: str, epsilon: float) -> str:
    """x/√(mean x² + ε) over the last axis"""
    return op.Mul(x, _reciprocal_root(op, x, [-1], epsilon))


@body("GroupNorm", "Y", domain=MICROSOFT)
def group_norm(
    op: FunctionEmitter,
    X: str,
    gamma: str,
    beta: str,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> str:
    """(x − mean)/√(var + ε)·gamma + beta group by group; then swish, with activation"""
    return _group_norm(op, X, gamma, beta, activation, channels_last, epsilon, groups)


@body("SkipGroupNorm", "Y", optional=["S"], domain=MICROSOFT)
def skip_group_norm(
    op: FunctionEmitter,
    X: str,
    gamma: str,
    beta: str,
    skip: str,
    bias: str | None = None,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> tuple[str, str]:
    """GroupNorm of X + skip + bias"""
    if op.rank(skip) == 2:  # (N, C), the same everywhere
        skip = op.Unsqueeze(skip, [1, 2])
    elif op.rank(skip) is None:
        raise UnsupportedFormError("the rank of its input skip is unknown; add it to value_info")
    if not channels_last:
        raise UnsupportedFormError("channels_last=0 has no meaning with skip and bias; use channels_last=1")
    total = plus(op, op.Add(X, skip), bias)
    return _group_norm(op, total, gamma, beta, activation, channels_last, epsilon, groups), total


def _group_norm(
    op: FunctionEmitter, X: str, gamma: str, beta: str, activation: int, channels_last: int, epsilon: float, groups: int
) -> str:
    x = op.Transpose(X, perm=[0, 3, 1, 2]) if channels_last else X
    rows = op.Reshape(x, [0, groups, -1])
    centred = op.Sub(rows, op.reduce("ReduceMean", rows, [2]))
    r = op.Reciprocal(op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(centred, centred), [2]), epsilon)))
    normalized = op.Reshape(op.Mul(centred, r), op.Shape(x), allowzero=1)
    scale, shift = (op.Unsqueeze(op.CastLike(v, X), [1, 2]) for v in (gamma, beta))
    y = op.Add(op.Mul(normalized, scale), shift)
    if activation:
        y = op.Mul(y, op.Sigmoid(y))
    return str(op.Transpose(y, perm=[0, 2, 3, 1]) if channels_last else y)


@body(
    "BatchNormInternal",
    "Y",
    optional=["running_mean", "running_var", "saved_mean", "saved_inv_std"],
    writes={1: "input_mean", 2: "input_var"},
    domain=MICROSOFT,
)
def batch_norm_internal(
    op: FunctionEmitter,
    X: str,
    scale: str,
    B: str,
    input_mean: str,
    input_var: str,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> tuple[str, ...]:
    """BatchNormalization, in training by default; then, besides, the batch's mean and r = 1/√(var + ε)"""
    if not training_mode:
        return (op.BatchNormalization(X, scale, B, input_mean, input_var, epsilon=epsilon),)
    settings: dict[str, Any] = {"epsilon": epsilon, "momentum": momentum, "training_mode": training_mode}
    y, mean, var = op.BatchNormalization(X, scale, B, input_mean, input_var, outputs=3, **settings)
    rank = op.rank(X)
    if rank is None:  # the axes behind the channels become one
        inner = op.ReduceProd(op.Shape(X, start=2), keepdims=1)
        X, rank = op.Reshape(X, op.Concat(op.Shape(X, end=2), inner, axis=0), allowzero=1), 3
    axes = [0, *range(2, rank)]
    batch = op.reduce("ReduceMean", X, axes)
    centred = op.Sub(X, batch)
    r = op.Reciprocal(op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(centred, centred), axes), epsilon)))
    return y, mean, var, op.Reshape(batch, [-1]), op.Reshape(r, [-1])


@body(
    "EmbedLayerNormalization",
    "output",
    optional=["mask_index", "embedding_sum"],
    others=("input_ids", "segment_ids", "mask", "position_ids", "mask_index"),
    domain=MICROSOFT,
)
def embed_layer_normalization(
    op: FunctionEmitter,
    input_ids: str,
    segment_ids: str | None,
    word_embedding: str,
    position_embedding: str,
    segment_embedding: str | None,
    gamma: str,
    beta: str,
    mask: str | None = None,
    position_ids: str | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int | None = None,
) -> tuple[str, ...]:
    """layer_normalization(word_embedding[input_ids] + position_embedding[position_ids] + segment_embedding[segment_ids])"""
    if position_ids is None:
        length = op.Shape(input_ids, start=1, end=2)
        positions = op.Slice(position_embedding, [0], length, [0])
    else:
        positions = op.Gather(position_embedding, position_ids)
    total = op.Add(op.Gather(word_embedding, input_ids), positions)
    if segment_ids is not None and segment_embedding is not None:
        total = op.Add(total, op.Gather(segment_embedding, segment_ids))
    counted = op.Cast(op.Equal(mask, 1) if mask else op.Mul(input_ids, 0), to=TensorProto.INT32)
    y = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)
    return y, op.ReduceSum(counted, [1], keepdims=0), total


@form("LayerNormalizationGrad", results=[like("X"), like("scale"), like("scale")])
def layer_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    mean: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str, str]:
    return op.grad.LayerNormalizationGrad(dY, X, scale, None, mean, inv_std_dev, axis=axis, epsilon=epsilon)


@form("InvertibleLayerNormalizationGrad", results=[like("Y"), like("scale"), like("scale")])
def invertible_layer_normalization_grad(
    op: Emitter,
    dY: str,
    Y: str,
    scale: str,
    bias: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str, str]:
    """LayerNormalizationGrad from the result: x̂ = (Y − bias)/scale"""
    normalized = op.Div(op.Sub(Y, bias), scale)
    return by_normalized(op, dY, normalized, Y, scale, inv_std_dev, axis, centred=True)


@form("SimplifiedLayerNormalizationGrad", results=[like("X"), like("scale")])
def simplified_layer_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str]:
    """x̂ = X·r and g = dY·scale: dX = r·(g − x̂·mean(g·x̂)), dscale = Σ dY·x̂"""
    wide = widest(op, X, inv_std_dev)
    normalized = op.Mul(op.as_type(X, wide), op.as_type(inv_std_dev, wide))
    return by_normalized(op, dY, normalized, X, scale, inv_std_dev, axis, centred=False)[:2]


@form("BatchNormalizationGrad", results=[like("X"), like("scale"), like("scale")])
def batch_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    mean: str,
    inv_std_dev: str,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> tuple[str, str, str]:
    """The statistics have one number per channel."""
    shape, wide = op.shape(X), widest(op, X, scale, mean)
    if wide in SIXTEEN_BIT:
        wide = TensorProto.FLOAT  # for the range of r² and of the sums
    d, x = of_shape(op, X, wide, dY, X)
    factor, centre, r = (op.as_type(value, wide) for value in (scale, mean, inv_std_dev))
    axes = [0, *range(2, 3 if shape is None else len(shape))]
    centre, r = (op.Unsqueeze(value, axes) for value in (centre, r))
    dX, dScale, dB = op.grad.BatchNormalizationGrad(d, x, factor, None, centre, r, epsilon=epsilon)
    return op.as_type(dX, op.type(X)), op.as_type(dScale, op.type(scale)), op.as_type(dB, op.type(scale))
