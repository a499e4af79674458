"""Attention and its relatives, in any float type."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.activation import softmax
from refgrad.backends.numpy.kernels.control_flow import Outer
from refgrad.backends.numpy.kernels.operands import (
    check_axis,
    check_expands,
    check_indices,
    check_shape,
    wide_type,
    widened,
)
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.plan import PlannedGraph
from refgrad.backends.numpy.registry import kernel


def by_heads(X: np.ndarray, heads: int) -> np.ndarray:
    """(batch, sequence, heads·size) as (batch, heads, sequence, size)"""
    if X.ndim != 3 or heads < 1 or X.shape[2] % heads:
        raise ValueError(f"the shape {list(X.shape)} is not (batch, sequence, heads·size) with {heads} heads")
    return X.reshape(*X.shape[:2], heads, X.shape[2] // heads).swapaxes(1, 2)


def _shared(X: np.ndarray, heads: int) -> np.ndarray:
    """Each key or value head once for every query head that reads it."""
    return X if X.shape[1] == heads else X.repeat(heads // X.shape[1], axis=1)


@kernel("Attention")
def attention(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    attn_mask: np.ndarray | None = None,
    past_key: np.ndarray | None = None,
    past_value: np.ndarray | None = None,
    nonpad_kv_seqlen: np.ndarray | None = None,
    *,
    is_causal: int,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float,
    softmax_precision: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Softmax(scale·Q·Kᵀ + mask)·V, a row of zeros where the mask lets no key through."""
    declared, packed = (Q.dtype, V.dtype), Q.ndim == 3
    Q, K, V = widened(Q), widened(K), widened(V)
    kind = Q.dtype
    if not Q.ndim == K.ndim == V.ndim or Q.ndim not in (3, 4):
        raise ValueError(f"Q, K and V have the ranks {Q.ndim}, {K.ndim} and {V.ndim}; all must have 3 or 4")
    if packed and not (q_num_heads and kv_num_heads):
        raise ValueError("q_num_heads and kv_num_heads are required where Q, K and V have 3 axes")
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value go together; one of them is missing")
    if packed:
        Q, K, V = by_heads(Q, q_num_heads or 1), by_heads(K, kv_num_heads or 1), by_heads(V, kv_num_heads or 1)
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        K, V = np.concatenate((widened(past_key), K), 2), np.concatenate((widened(past_value), V), 2)
    heads, length, width = Q.shape[1:]
    total = K.shape[2]
    _check_heads(Q, K, V)
    _need_scores(Q, total, 4)
    root = kind.type(np.sqrt(scale if scale is not None else 1 / math.sqrt(max(width, 1))))
    product = (Q * root) @ (_shared(K, heads) * root).swapaxes(-1, -2)
    capped = product if softcap <= 0 else (np.tanh(product / kind.type(softcap)) * kind.type(softcap)).astype(kind)

    if nonpad_kv_seqlen is not None:
        check_shape("nonpad_kv_seqlen", nonpad_kv_seqlen.shape, Q.shape[:1])
        check_indices(nonpad_kv_seqlen, total + 1, "nonpad_kv_seqlen", lowest=0)
    if attn_mask is not None:
        check_expands("attn_mask", (*attn_mask.shape[:-1], 1), (*Q.shape[:2], length, 1))
        if attn_mask.shape[-1] > total:
            raise ValueError(f"attn_mask {list(attn_mask.shape)} has more columns than there are keys, {total}")
    j, p = np.arange(total), np.arange(length)[:, None] + before
    seen = []
    if nonpad_kv_seqlen is not None:
        lengths = nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
        p = p + (lengths - length)
        seen.append(j < lengths)
    if is_causal:
        seen.append(j <= p)
    if left_window_size >= 0:
        seen.append(j >= p - left_window_size)
    if right_window_size >= 0:
        seen.append(j <= p + right_window_size)
    bias = _bias(reduce(np.logical_and, seen), kind) if seen else kind.type(0)
    if attn_mask is not None:
        added = _bias(attn_mask, kind) if attn_mask.dtype == bool else attn_mask.astype(kind, copy=False)
        if missing := total - added.shape[-1]:
            added = np.concatenate((added, np.full((*added.shape[:-1], missing), -np.inf, kind)), -1)
        bias = bias + added

    logits = capped + bias if bias.ndim else capped
    blind = np.maximum.reduce(bias, -1, keepdims=True, initial=-np.inf) == -np.inf if bias.ndim else np.bool_(False)
    if blind.any():
        probabilities = _softmax(np.where(blind, kind.type(0), logits), softmax_precision)
        probabilities = np.where(blind, kind.type(0), probabilities.astype(kind, copy=False))
    else:
        probabilities = _softmax(logits, softmax_precision).astype(kind, copy=False)
    Y = (probabilities @ _shared(V, heads).astype(kind, copy=False)).astype(kind, copy=False)
    if packed:
        Y = Y.swapaxes(1, 2).reshape(Y.shape[0], length, -1 if Y.size else heads * Y.shape[3])
    scores = (product, capped, logits, probabilities)[qk_matmul_output_mode]
    return tuple(v.astype(declared[i == 2], copy=False) for i, v in enumerate((Y, K, V, scores)))


def _need_scores(Q: np.ndarray, keys: int, copies: int) -> None:
    """Say that some matrices of a score for each query and key are needed."""
    need(copies * math.prod(Q.shape[:-1]) * keys * Q.itemsize)


def _bias(seen: np.ndarray, kind: np.dtype) -> np.ndarray:
    """The addend of the logits: 0, or −∞ where a key is not seen"""
    return np.asarray(np.where(seen, kind.type(0), kind.type(-np.inf)))


def _check_heads(Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> None:
    wrong = None
    if K.shape[:3] != V.shape[:3] or Q.shape[0] != K.shape[0] or Q.shape[3] != K.shape[3]:
        wrong = "batches must be equal, K and V as long, Q and K as wide"
    elif Q.shape[1] % max(K.shape[1], 1):
        wrong = f"{K.shape[1]} heads of K do not divide the {Q.shape[1]} of Q"
    if wrong:
        shapes = f"Q {list(Q.shape)}, K {list(K.shape)} and V {list(V.shape)}"
        raise ValueError(f"{shapes} as (batch, heads, length, width): {wrong}")


def _softmax(scores: np.ndarray, precision: int | None) -> np.ndarray:
    """Softmax of what `precision` holds of the scores, rounded to it again."""
    if not precision:
        return softmax(scores, axis=-1)
    kind = helper.tensor_dtype_to_np_dtype(precision)
    return softmax(widened(scores.astype(kind)), axis=-1).astype(kind, copy=False)


@kernel("FlexAttention", domain="ai.onnx.preview", fresh=True)
def flex_attention(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    *,
    prob_mod: PlannedGraph | None = None,
    scale: float | None = None,
    score_mod: PlannedGraph | None = None,
    softmax_precision: int | None = None,
    _outer: Outer = None,
) -> np.ndarray:
    """prob_mod(Softmax(score_mod(scale·Q·Kᵀ)))·V"""
    _check_heads(Q, K, V)
    declared = Q.dtype
    Q, K, V = widened(Q), widened(K), widened(V)
    precision = helper.tensor_dtype_to_np_dtype(softmax_precision) if softmax_precision else Q.dtype
    heads = Q.shape[1]
    factor = scale if scale is not None else 1 / np.sqrt(max(Q.shape[3], 1))
    root = Q.dtype.type(np.sqrt(abs(factor)))
    _need_scores(Q, K.shape[2], 3)
    product = (Q * Q.dtype.type(np.copysign(root, factor))) @ (_shared(K, heads) * root).swapaxes(-1, -2)
    scores = product.astype(precision)
    probabilities = _modified(prob_mod, softmax(_modified(score_mod, scores, _outer), axis=-1), _outer)
    return np.asarray((probabilities @ _shared(V, heads).astype(precision)).astype(declared))


def _modified(plan: PlannedGraph | None, x: np.ndarray, outer: Outer) -> np.ndarray:
    if plan is None:
        return x
    (result,) = plan(x, outer=outer)
    return np.asarray(result)


@kernel("LinearAttention", fresh=True)
def linear_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    past_state: np.ndarray | None = None,
    decay: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    *,
    chunk_size: int,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float,
    update_rule: str,
) -> tuple[np.ndarray, np.ndarray]:
    """S ← e^g·S + k·uᵀ with u = v, or u = β·(v − (e^g·S)ᵀk) for the delta rules; o = scale·Sᵀq, one token after another"""
    for name, needed, given in (("decay", "gated", decay), ("beta", "delta", beta)):
        if needed in update_rule and given is None:
            raise ValueError(f"update_rule={update_rule!r} needs {name}, which is left out")
    if min(kv_num_heads, q_num_heads) < 1 or q_num_heads % kv_num_heads:
        raise ValueError(f"{q_num_heads} query heads are not a multiple of {kv_num_heads} key and value heads")
    wide = wide_type(query.dtype)
    batch, length, columns = query.shape
    check_shape("key", key.shape, (batch, length, columns // q_num_heads * kv_num_heads))
    check_shape("value", value.shape[:-1], (batch, length))
    q, k, v = (
        by_heads(x, heads).astype(wide)
        for x, heads in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    width = q.shape[3]
    gate = rate = None
    if decay is not None and "gated" in update_rule:
        sizes = (kv_num_heads, kv_num_heads * width)
        check_shape("decay", decay.shape, (batch, length, sizes[decay.shape[-1] == sizes[1]]))
        gate = np.exp(by_heads(decay, kv_num_heads).astype(wide))
    if beta is not None and "delta" in update_rule:
        check_shape("beta", beta.shape, (batch, length, 1 if beta.shape[-1] == 1 else kv_num_heads))
        rate = by_heads(beta, beta.shape[2]).astype(wide)
    shape = batch, kv_num_heads, width, v.shape[3]
    if past_state is not None:
        check_shape("past_state", past_state.shape, shape)
    state = np.zeros(shape, wide) if past_state is None else past_state.astype(wide)
    factor = scale or 1 / np.sqrt(max(width, 1))
    o = np.zeros((batch, q_num_heads, length, v.shape[3]), wide)
    for t in range(length):
        if gate is not None:
            state = state * gate[:, :, t, :, None]
        column, u = k[:, :, t, :, None], v[:, :, t, None, :]
        if rate is not None:
            u = rate[:, :, t, :, None] * (u - column.swapaxes(-1, -2) @ state)
        state = state + column * u
        o[:, :, t] = factor * (q[:, :, t, None, :] @ _shared(state, q_num_heads))[:, :, 0]
    present = state.astype(query.dtype if past_state is None else past_state.dtype)
    return o.swapaxes(1, 2).reshape(batch, length, q_num_heads * v.shape[3]).astype(query.dtype), present


@kernel("CausalConvWithState", in_float32=True, fresh=True)
def causal_conv_with_state(
    input: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    past_state: np.ndarray | None = None,
    *,
    activation: str,
) -> tuple[np.ndarray, np.ndarray]:
    """o_t = Σ_j w_j·x_(t+j) + b, channel by channel, where x begins with the past state; and the end of x"""
    (batch, channels, length), taps = input.shape, weight.shape[-1]
    check_shape("weight", weight.shape, (channels, 1, taps))
    if bias is not None:
        check_shape("bias", bias.shape, (channels,))
    if past_state is not None:
        check_shape("past_state", past_state.shape, (batch, channels, taps - 1))
    past = np.zeros((*input.shape[:2], taps - 1), input.dtype) if past_state is None else past_state
    x = np.concatenate((past, input), 2)
    o = np.zeros_like(input)
    for j in range(taps):
        o = o + weight[:, 0, j, None] * x[:, :, j : j + length]
    if bias is not None:
        o = o + bias[:, None]
    if activation in ("silu", "swish"):
        o = o * (0.5 * (1 + np.tanh(0.5 * o)))
    return o, x[:, :, length:]


@kernel("TensorScatter", fresh=True)
def tensor_scatter(
    past_cache: np.ndarray, update: np.ndarray, write_indices: np.ndarray | None = None, *, axis: int, mode: str
) -> np.ndarray:
    """The cache with the update written along `axis`, from an index of each sample on"""
    along = check_axis(axis, past_cache.ndim)
    size, length = past_cache.shape[axis], update.shape[axis]
    check_shape("update", update.shape, (*past_cache.shape[:along], length, *past_cache.shape[along + 1 :]))
    cache, new = past_cache.copy(), update.swapaxes(along, 1)
    first = np.zeros(len(cache), np.int64) if write_indices is None else write_indices
    places = first[:, None] + np.arange(length)
    check_shape("write_indices", first.shape, (len(cache),))
    if mode == "circular":
        check_indices(first, size, "write_indices", lowest=0)
        places = places % size
    else:
        check_indices(places, size, "the places to write to", lowest=0)
    cache.swapaxes(along, 1)[np.arange(len(cache))[:, None], places] = new
    return cache


@kernel("RotaryEmbedding", in_float32=True, fresh=True)
def rotary_embedding(
    X: np.ndarray,
    cos_cache: np.ndarray,
    sin_cache: np.ndarray,
    position_ids: np.ndarray | None = None,
    *,
    interleaved: int,
    num_heads: int | None = None,
    rotary_embedding_dim: int,
) -> np.ndarray:
    """Pairs (a, b) of the first `rotary_embedding_dim` features, 0 for all, turned to (a·cos − b·sin, a·sin + b·cos).

    X is (batch, heads, sequence, size) or (batch, sequence, heads·size), the caches (positions, pairs), or without
    `position_ids` (batch, sequence, pairs). A pair are two neighbours if interleaved, else an element of each half.
    """
    if X.ndim == 3 and not num_heads:
        raise ValueError("num_heads is required where X has 3 axes")
    if X.ndim not in (3, 4):
        raise ValueError(f"X has the shape {list(X.shape)}; 3 or 4 axes are needed")
    x = by_heads(X, num_heads or 1) if X.ndim == 3 else X
    turned = rotary_embedding_dim or x.shape[-1]
    half = turned // 2
    check_shape("sin_cache", sin_cache.shape, cos_cache.shape)
    if position_ids is not None:
        check_shape("position_ids", position_ids.shape, (X.shape[0], X.shape[X.ndim - 2]))
        check_indices(position_ids, len(cos_cache), "position_ids", lowest=0)
    cos, sin = (c if position_ids is None else c[position_ids] for c in (cos_cache, sin_cache))
    if turned % 2 or cos.shape[-1] != half or sin.shape[-1] != half:
        columns = f"not {cos.shape[-1]} and {sin.shape[-1]}"
        raise ValueError(f"{turned} features need caches of {turned / 2:g} columns, {columns}")
    cos, sin = cos[:, np.newaxis], sin[:, np.newaxis]
    first, second = (slice(0, turned, 2), slice(1, turned, 2)) if interleaved else (slice(half), slice(half, turned))
    a, b = x[..., first], x[..., second]
    Y = np.empty_like(X)
    y = by_heads(Y, num_heads or 1) if X.ndim == 3 else Y
    y[..., turned:] = x[..., turned:]
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return Y
