"""The forward operators of ONNX Runtime (com.microsoft), as its optimizer and its training tools write them.

Each is defined by a function body in ai.onnx operators, through which it is differentiated where it has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import UnsupportedFormError, operator
from refgrad.tables.registry import NO_DERIVATIVE, rule

Ints = Sequence[int]
Floats = Sequence[float]
_SIGMOID_GELU = 1.702  # QuickGelu: x·σ(1.702·x)

for _name in (
    *("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample"),
    *("ReorderInput", "ReorderOutput"),
):
    NO_DERIVATIVE["com.microsoft.nchwc", _name] = (
        "it is in the layout of the processor that it was optimized on: save the model with ORT_ENABLE_EXTENDED or less"
    )

# Activations


@operator("Gelu", "Y")
def gelu_body(op: FunctionEmitter, X: str) -> str:
    """x·Φ(x)"""
    return _gelu(op, X, "none")


@operator("FastGelu", "Y")
def fast_gelu_body(op: FunctionEmitter, X: str, bias: str | None = None) -> str:
    """The tanh form of Gelu at X + bias"""
    return _gelu(op, _plus(op, X, bias), "tanh")


@operator("BiasGelu", "C")
def bias_gelu_body(op: FunctionEmitter, A: str, B: str) -> str:
    """x·Φ(x) at A + B"""
    return _gelu(op, op.Add(A, B), "none")


@operator("GemmFastGelu", "Y")
def gemm_fast_gelu(op: FunctionEmitter, X: str, W: str, bias: str | None = None) -> str:
    """The tanh form of Gelu at X·W + bias"""
    x = _plus(op, op.MatMul(X, W), bias)
    return str(op.Gelu(x, approximate="tanh") if op.opset >= 20 else op.microsoft("FastGelu", x))


@operator("QuickGelu", "Y")
def quick_gelu_body(op: FunctionEmitter, X: str, *, alpha: float = _SIGMOID_GELU) -> str:
    """x·σ(α·x)"""
    return str(op.Mul(X, op.Sigmoid(op.Mul(X, alpha))))


def _gelu(op: FunctionEmitter, x: str, approximate: str) -> str:
    if op.opset >= 20:
        return str(op.Gelu(x, approximate=approximate))
    if approximate == "tanh":
        cubic = op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)
        u = op.Tanh(op.Mul(op.Add(x, cubic), math.sqrt(2 / math.pi)))
    else:
        u = op.Erf(op.Mul(x, math.sqrt(0.5)))
    return str(op.Mul(x, op.Add(op.Mul(u, 0.5), 0.5)))


@rule("Gelu", domain=MICROSOFT)
def gelu(op: Emitter, d_Y: str, X: str) -> str:
    """dx = dy·(Φ(x) + x·φ(x))"""
    return op.grad.GeluGrad(d_Y, X, approximate="none")


@rule("FastGelu", domain=MICROSOFT)
def fast_gelu(op: Emitter, d_Y: str, X: str, bias: str | None) -> tuple[str, str | None]:
    """dx = dy·g'(x + bias) with g the tanh form of Gelu, dbias the same summed over the axes of x that it lacks"""
    _lay_bias(op, X, bias)
    d_X = op.grad.GeluGrad(d_Y, X, bias, approximate="tanh")
    return d_X, None if bias is None else op.grad.BroadcastGradient(d_X, bias, (bias, X))


@rule("BiasGelu", domain=MICROSOFT)
def bias_gelu(op: Emitter, d_C: str, A: str, B: str) -> tuple[str, str]:
    """dA = dC·(Φ(x) + x·φ(x)) at x = A + B, dB the same summed over the axes of A that it lacks"""
    _lay_bias(op, A, B)
    d_A = op.grad.GeluGrad(d_C, A, B, approximate="none")
    return d_A, op.grad.BroadcastGradient(d_A, B, (B, A))


def _lay_bias(op: Emitter, x: str, bias: str | None) -> None:
    """By the definition of these operators a bias has one axis, the last one of x."""
    shape = op.shape(x)
    if bias is not None and shape and op.static(bias) is None:
        op.assume(bias, shape[-1:])


@rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(op: Emitter, d_Y: str, X: str, alpha: float) -> str:
    """dx = dy·s·(1 + α·x·(1 − s)) with s = σ(α·x)"""
    return op.grad.QuickGeluGrad(d_Y, X, alpha=alpha)


@operator("BiasSoftmax", "output")
def bias_softmax(op: FunctionEmitter, data: str, bias: str, *, axis: int = 1, is_inner_broadcast: int) -> str:
    """softmax(data + bias) over all axes from `axis` on, as one"""
    x = op.Add(data, bias)
    rank = op.rank(data)
    if axis == -1 or axis + 1 == rank:
        return str(op.Softmax(x, axis=-1))
    return str(op.Reshape(op.Softmax(op.Flatten(x, axis=axis), axis=1), op.Shape(x), allowzero=1))


@operator("BiasDropout", "output", "mask?", others=("mask", "training_mode"))
def bias_dropout(
    op: FunctionEmitter,
    data: str,
    bias: str,
    residual: str | None = None,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> tuple[str, str]:
    """dropout(data + bias) + residual"""
    y, mask = op.Dropout(op.Add(data, bias), ratio, training_mode, outputs=2, seed=seed)
    return _plus(op, y, residual), mask


def _plus(op: FunctionEmitter, x: str, bias: str | None) -> str:
    return x if bias is None else str(op.Add(x, bias))


def _activated(op: FunctionEmitter, x: str, activation: str | None, parameters: Sequence[float | None]) -> str:
    """The activation of a fused operator: by name, with its parameters in order where it has any."""
    if not activation:
        return x
    if activation in ("Relu", "Tanh", "Sigmoid", "Softplus", "Softsign", "HardSwish"):
        return str(op.emit(activation, "", (x,)))
    if activation == "Gelu":
        return str(op.microsoft("Gelu", x))
    if activation == "QuickGelu":
        return str(op.microsoft("QuickGelu", x, alpha=_or(parameters, 0, _SIGMOID_GELU)))
    if activation == "LeakyRelu":
        return str(op.LeakyRelu(x, alpha=_or(parameters, 0, 0.01)))
    if activation == "Elu":
        return str(op.Elu(x, alpha=_or(parameters, 0, 1.0)))
    if activation == "ThresholdedRelu":
        return str(op.ThresholdedRelu(x, alpha=_or(parameters, 0, 1.0)))
    if activation == "HardSigmoid":
        return str(op.HardSigmoid(x, alpha=_or(parameters, 0, 0.2), beta=_or(parameters, 1, 0.5)))
    if activation == "Clip":
        low, high = (parameters[k] if k < len(parameters) else None for k in (0, 1))
        return str(op.Clip(x, *(None if v is None else op.number(v, x) for v in (low, high))))
    raise UnsupportedFormError(f"its activation {activation!r} is not known here")


def _or(parameters: Sequence[float | None], position: int, default: float) -> float:
    value = parameters[position] if position < len(parameters) else None
    return default if value is None else value


# Products and convolutions


@operator("FusedMatMul", "Y")
def fused_matmul(
    op: FunctionEmitter,
    A: str,
    B: str,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> str:
    """α·A'·B', where trans exchanges the last two axes after transBatch has put the first axis before the last"""
    y = op.MatMul(_arranged(op, A, transA, transBatchA), _arranged(op, B, transB, transBatchB))
    return y if alpha == 1 else str(op.Mul(y, alpha))


@operator("TransposeMatMul", "Y")
def transpose_matmul(
    op: FunctionEmitter, A: str, B: str, *, alpha: float = 1.0, transA: int = 0, transB: int = 0
) -> str:
    """α·A'·B', where trans exchanges the last two axes"""
    return fused_matmul(op, A, B, alpha=alpha, transA=transA, transB=transB)


def _arranged(op: FunctionEmitter, A: str, trans: int, trans_batch: int) -> str:
    rank = op.rank(A)
    if not (trans or trans_batch) or rank == 1:
        return A
    if rank is not None:
        perm = list(range(rank))
        if trans_batch:
            perm = [*perm[1:-1], 0, rank - 1]
        if trans:
            perm[-2:] = perm[:-3:-1]
        return str(op.Transpose(A, perm=perm))
    if trans_batch:
        raise UnsupportedFormError("the rank of an operand that transBatch permutes is unknown; add it to value_info")
    batch, rows, columns = op.Shape(A, end=-2), op.Shape(A, start=-2, end=-1), op.Shape(A, start=-1)
    matrices = op.Reshape(A, op.Concat(op.ReduceProd(batch, keepdims=1), rows, columns, axis=0), allowzero=1)
    exchanged = op.Transpose(matrices, perm=[0, 2, 1])
    return str(op.Reshape(exchanged, op.Concat(batch, columns, rows, axis=0), allowzero=1))


@operator("FusedGemm", "Y")
def fused_gemm(
    op: FunctionEmitter,
    A: str,
    B: str,
    C: str | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> str:
    """activation(α·A'·B' + β·C)"""
    y = op.Gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activated(op, y, activation, (activation_alpha, activation_beta, activation_gamma))


@operator("FusedConv", "Y")
def fused_conv(
    op: FunctionEmitter,
    X: str,
    W: str,
    B: str | None = None,
    Z: str | None = None,
    *,
    activation: str | None = None,
    activation_params: Floats | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """activation(conv(X, W, B) + Z)"""
    window: dict[str, Any] = {"auto_pad": auto_pad, "dilations": dilations, "group": group}
    y = op.Conv(X, W, B, kernel_shape=kernel_shape, pads=pads, strides=strides, **window)
    return _activated(op, _plus(op, y, Z), activation, activation_params or ())


# Normalizations


@operator("SkipLayerNormalization", "output", "mean?", "inv_std_var?", "input_skip_bias_sum?")
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
    total = _plus(op, op.Add(input, skip), bias)
    return (*op.LayerNormalization(total, gamma, beta, outputs=3, axis=-1, epsilon=epsilon), total)


@operator("SkipSimplifiedLayerNormalization", "output", "mean?", "inv_std_var?", "input_skip_bias_sum?")
def skip_simplified_layer_normalization(
    op: FunctionEmitter, input: str, skip: str, gamma: str, bias: str | None = None, *, epsilon: float = 1e-12
) -> tuple[str | None, ...]:
    """x/√(mean x² + ε)·gamma over the last axis, x = input + skip + bias"""
    total = _plus(op, op.Add(input, skip), bias)
    y, r = _by_root_mean_square(op, total, gamma, [-1], epsilon)
    return y, None, r, total


@operator("SimplifiedLayerNormalization", "Y", "inv_std_var?")
def simplified_layer_normalization(
    op: FunctionEmitter, X: str, scale: str, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[str, str]:
    """x/√(mean x² + ε)·scale over the axes from `axis` on"""
    if axis == -1:
        return _by_root_mean_square(op, X, scale, [-1], epsilon)
    y, r = _by_root_mean_square(op, op.Flatten(X, axis=axis), op.Reshape(scale, [-1]), [-1], epsilon)
    end = 0 if axis < 0 else op.rank(X)
    if end is None:
        ones = op.Expand(op.constant(np.ones(1, np.int64)), op.Shape(op.Shape(X, start=axis)))
    else:
        ones = op.constant(np.ones(end - axis, np.int64))
    rows = op.Concat(op.Shape(X, end=axis), ones, axis=0)
    return str(op.Reshape(y, op.Shape(X), allowzero=1)), str(op.Reshape(r, rows, allowzero=1))


def _by_root_mean_square(op: FunctionEmitter, x: str, scale: str, axes: list[int], epsilon: float) -> tuple[str, str]:
    """x·r·scale and r = 1/√(mean x² + ε), which is computed in float for a narrower x."""
    narrow = op.type(x) in SIXTEEN_BIT
    wide = op.Cast(x, to=TensorProto.FLOAT) if narrow else x
    r = op.Reciprocal(op.Sqrt(op.Add(op.mean(op.Mul(wide, wide), axes), epsilon)))
    y = op.Mul(wide, r)
    return str(op.Mul(op.CastLike(y, scale) if narrow else y, scale)), str(r)


@operator("GroupNorm", "Y")
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


@operator("SkipGroupNorm", "Y", "S?")
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
    total = _plus(op, op.Add(X, skip), bias)
    return _group_norm(op, total, gamma, beta, activation, channels_last, epsilon, groups), total


def _group_norm(
    op: FunctionEmitter, X: str, gamma: str, beta: str, activation: int, channels_last: int, epsilon: float, groups: int
) -> str:
    x = op.Transpose(X, perm=[0, 3, 1, 2]) if channels_last else X
    rows = op.Reshape(x, [0, groups, -1])
    centred = op.Sub(rows, op.mean(rows, [2]))
    r = op.Reciprocal(op.Sqrt(op.Add(op.mean(op.Mul(centred, centred), [2]), epsilon)))
    normalized = op.Reshape(op.Mul(centred, r), op.Shape(x), allowzero=1)
    scale, shift = (op.Unsqueeze(op.CastLike(v, X), [1, 2]) for v in (gamma, beta))
    y = op.Add(op.Mul(normalized, scale), shift)
    if activation:
        y = op.Mul(y, op.Sigmoid(y))
    return str(op.Transpose(y, perm=[0, 2, 3, 1]) if channels_last else y)


@operator("BatchNormInternal", "Y", "running_mean?", "running_var?", "saved_mean?", "saved_inv_std?")
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
    batch = op.mean(X, axes)
    centred = op.Sub(X, batch)
    r = op.Reciprocal(op.Sqrt(op.Add(op.mean(op.Mul(centred, centred), axes), epsilon)))
    return y, mean, var, op.Reshape(batch, [-1]), op.Reshape(r, [-1])


# Transformers


@operator(
    "EmbedLayerNormalization",
    "output",
    "mask_index?",
    "embedding_sum?",
    others=("input_ids", "segment_ids", "mask", "position_ids", "mask_index"),
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


_IN_PLACE = "a key-value cache that is written in place serves the generation of text; leave {} out"
_FILTER = -10000.0  # what is added to the score of a key that a mask hides


@operator(
    "MultiHeadAttention",
    "output",
    "present_key?",
    "present_value?",
    "qk?",
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
        taken = [op.Reshape(op.Gather(packed, op.constant(np.array(k)), axis=3), [0, 0, -1]) for k in range(count)]
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
    q = _heads(op, _plus(op, query, parts[0]), num_heads)
    if rank == 4:  # (B, heads, L, H): projected before, and without biases
        k, v = key, value
    else:
        k, v = (_heads(op, _plus(op, x, b), num_heads) for x, b in ((key, parts[1]), (value, parts[2])))
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    y = _attend(op, q, k, v, scale, key_padding_mask, mask_filter_value, attention_bias, unidirectional)
    return y, k, v, None


@operator("Attention", "output", "present?", others=("mask_index", "past_sequence_length"))
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
    projected = _plus(op, op.MatMul(input, weights), bias)
    if qkv_hidden_sizes:
        ends = np.cumsum(qkv_hidden_sizes).tolist()
        bounds: list[tuple[Any, Any]] = [([0], [ends[0]]), ([ends[0]], [ends[1]]), ([ends[1]], [ends[2]])]
    else:
        third = op.Div(op.Shape(projected, start=2, end=3), [3])
        twice = op.Add(third, third)
        bounds = [([0], third), (third, twice), (twice, [END])]
    q, k, v = (_heads(op, op.Slice(projected, start, end, [2]), num_heads) for start, end in bounds)
    if past is not None:
        k, v = (op.Concat(op.Gather(past, op.constant(np.array(n)), axis=0), x, axis=2) for n, x in ((0, k), (1, v)))
    y = _attend(op, q, k, v, scale, mask_index, mask_filter_value, attention_bias, unidirectional)
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


def _heads(op: FunctionEmitter, x: str, num_heads: int) -> str:
    """(B, L, heads·H) to (B, heads, L, H)"""
    return str(op.Transpose(op.Reshape(x, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3]))


def _masked(op: FunctionEmitter, scores: str, mask: str, filter_value: float) -> str:
    """`scores`, lower by `filter_value` where a mask of integers is not above 0."""
    rank = op.rank(mask)
    if rank not in (2, 3):
        known = "unknown" if rank is None else f"of rank {rank}"
        raise UnsupportedFormError(
            f"its mask is {known}; only masks of shape (batch, keys) and (batch, queries, keys) are covered"
        )
    hidden = op.Not(op.Greater(op.Unsqueeze(mask, [1, 2] if rank == 2 else [1]), 0))
    return str(op.Add(scores, op.Mul(op.CastLike(hidden, scores), filter_value)))


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
        zero, one = (op.constant(np.array(n)) for n in (0, 1))
        queries, keys = (op.Squeeze(op.Shape(x, start=2, end=3), [0]) for x in (q, k))
        rows = op.Unsqueeze(op.Range(op.Sub(keys, queries), keys, one), [1])
        columns = op.Range(zero, keys, one)
        scores = op.Where(op.Greater(columns, rows), op.number(-math.inf, scores), scores)
    y = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    return str(op.Reshape(y, [0, 0, -1]))


# Training


@operator("ConcatTraining", "concat_result", "per_input_length?", others=("per_input_length",))
def concat_training(op: FunctionEmitter, *inputs: str, axis: int) -> tuple[str, str]:
    """Concat; besides, the length of each input along the axis"""
    end = None if axis == -1 else axis + 1
    lengths = [op.Shape(x, start=axis, end=end) for x in inputs]
    return op.Concat(*inputs, axis=axis), op.Concat(*lengths, axis=0)


@rule("ConcatTraining", domain=MICROSOFT)
def concat_training_rule(op: Emitter, d_concat_result: str, inputs: list[str], per_input_length: str, axis: int) -> Any:
    """dxᵢ = the part of dy that xᵢ became"""
    return (op.grad.SplitTraining(d_concat_result, per_input_length, axis=axis, count=len(inputs)),)


@operator("ShrunkenGather", "output", others=("indices",))
def shrunken_gather(op: FunctionEmitter, data: str, indices: str, *, axis: int = 0) -> str:
    """Gather with a vector of indices"""
    return str(op.Gather(data, indices, axis=axis))


@rule("ShrunkenGather", domain=MICROSOFT, wrt=["data"])
def shrunken_gather_rule(op: Emitter, d_output: str, data: str, indices: str, axis: int) -> str:
    """dx = Σ dy at the indices it was taken from"""
    return str(op.grad.GatherGrad(op.shape_of(data), indices, d_output, axis=axis))


@operator("ScaledSum", "output")
def scaled_sum(
    op: FunctionEmitter,
    input_0: str,
    input_1: str,
    input_2: str | None = None,
    *,
    scale_0: float,
    scale_1: float,
    scale_2: float | None = None,
) -> str:
    """Σ scaleₖ·inputₖ"""
    total = op.Add(op.Mul(input_0, scale_0), op.Mul(input_1, scale_1))
    return str(total if input_2 is None else op.Add(total, op.Mul(input_2, 1.0 if scale_2 is None else scale_2)))


@operator("PadAndUnflatten", "output", others=("indices", "unflatten_dims"))
def pad_and_unflatten(op: FunctionEmitter, input: str, indices: str, unflatten_dims: str) -> str:
    """Zeros with the rows of input at the indices, their first axis split into unflatten_dims"""
    rest = op.Shape(input, start=1)
    rows = op.Concat(op.ReduceProd(unflatten_dims, keepdims=1), rest, axis=0)
    zeros = op.Expand(op.number(0.0, input), rows)
    padded = op.ScatterND(zeros, op.Unsqueeze(indices, [-1]), input)
    return str(op.Reshape(padded, op.Concat(unflatten_dims, rest, axis=0), allowzero=1))


@operator("FlattenAndUnpad", "output", "unflatten_dims", others=("indices", "unflatten_dims"))
def flatten_and_unpad(op: FunctionEmitter, input: str, indices: str) -> tuple[str, str]:
    """The rows of input, its first two axes flattened, at the indices; besides, the lengths of those axes"""
    count = op.ReduceProd(op.Shape(input, end=2), keepdims=1)
    rows = op.Reshape(input, op.Concat(count, op.Shape(input, start=2), axis=0), allowzero=1)
    return op.Gather(rows, indices, axis=0), op.Shape(input, end=2)


@operator("SoftmaxCrossEntropyLossInternal", "output", "log_prob?", others=("labels", "ignore_index"))
def softmax_cross_entropy_loss_internal(
    op: FunctionEmitter,
    scores: str,
    labels: str,
    weights: str | None = None,
    ignore_index: str | None = None,
    *,
    output_type: int | None = None,
    reduction: str = "mean",
) -> tuple[str, str]:
    """−w·log softmax(scores) at the label, reduced; 0 where the label is ignore_index"""
    log_prob = op.LogSoftmax(scores, axis=1)
    classes, kept = labels, None
    if ignore_index is not None:
        ignored = op.Equal(labels, op.CastLike(ignore_index, labels))
        kept = op.CastLike(op.Not(ignored), scores)
        classes = op.Where(ignored, op.number(0, labels), labels)
    weight = kept if weights is None else op.Gather(weights, classes)
    if weights is not None and kept is not None:
        weight = op.Mul(weight, kept)
    loss = op.Neg(op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(classes, [1]), axis=1), [1]))
    if weight is not None:
        loss = op.Mul(loss, weight)
    if reduction == "sum" or (reduction == "mean" and weight is not None):
        total = op.ReduceSum(loss, keepdims=0)
        if reduction == "mean":
            size = op.ReduceSum(weight, keepdims=0)
            total = op.Div(total, op.Where(op.Equal(size, op.number(0.0, size)), op.number(1.0, size), size))
        loss = total
    elif reduction == "mean":
        loss = op.ReduceMean(loss, keepdims=0)
    if output_type:
        loss, log_prob = (op.Cast(value, to=output_type) for value in (loss, log_prob))
    return loss, log_prob


@operator("FakeQuant", "fake_quantized_tensor", "mask?", others=("mask",))
def fake_quant_body(
    op: FunctionEmitter, input_tensor: str, scale: str, zero_point: str, *, quant_min: int = 0, quant_max: int = 255
) -> tuple[str, str]:
    """(clip(round(x/scale) + zero_point, quant_min, quant_max) − zero_point)·scale"""
    q = op.Add(op.Round(op.Div(input_tensor, scale)), zero_point)
    low, high = (op.number(bound, input_tensor) for bound in (quant_min, quant_max))
    inside = op.And(op.GreaterOrEqual(q, low), op.LessOrEqual(q, high))
    return op.Mul(op.Sub(op.Min(op.Max(q, low), high), zero_point), scale), inside


@rule("FakeQuant", domain=MICROSOFT)
def fake_quant(
    op: Emitter,
    d_fake_quantized_tensor: str,
    input_tensor: str,
    scale: str,
    zero_point: str,
    fake_quantized_tensor: str,
    mask: str,
) -> tuple[str, str, str]:
    """dx = 0, dscale = Σ dy·(q − zero_point), dzero_point = −Σ dy·scale where q was clipped

    With quantization="straight-through" dx = dy and dzero_point = 0, with "clipped" dx = dy where q was not clipped; in both
    dscale is less by dx·x/scale.
    """
    d_y = d_fake_quantized_tensor
    d_zero_point = op.Neg(op.Where(mask, 0.0, op.Mul(d_y, scale)))
    d_scale = op.Div(op.Mul(d_y, fake_quantized_tensor), scale)
    d_x = op.zeros_like(input_tensor)
    if op.quantization != "zero":
        d_x = d_y if op.quantization == "straight-through" else op.grad.FakeQuantGrad(d_y, mask)
        d_scale = op.Sub(d_scale, op.Div(op.Mul(d_x, input_tensor), scale))
    if op.quantization == "straight-through":
        d_zero_point = op.zeros_like(input_tensor)
    sums = (
        op.grad.BroadcastGradient(d, like, (like, input_tensor))
        for d, like in ((d_scale, scale), (d_zero_point, zero_point))
    )
    return (d_x, *sums)
