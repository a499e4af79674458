"""ONNX Runtime's indexers, which choose for each query the keys that a sparse attention reads, and keep keys for later calls.

What they choose has no derivative. The keys that they keep have one: those of policy_mode "qsa" are the inputs, and those of
"csa" are what a softmax over the slots of a window makes of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.tables.definitions import UnsupportedFormError, operator

_OF_CSA = ("gate", "position_bias", "head_weights", "position_ids", "past_proj_buffer")


@operator(
    "SparseAttentionIndexer",
    "selected_indices",
    "present_key",
    optional=["present_proj_buffer"],
    types={
        "selected_indices": ("tensor(int32)",),
        "past_sequence_length": "selected_indices",
        "mask": ("tensor(int64)",),
        "position_ids": "mask",
    },
)
def sparse_attention_indexer(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    query_norm_weight: str,
    key_norm_weight: str,
    cos_cache: str,
    sin_cache: str,
    mask: str | None,
    past_key: str,
    gate: str | None = None,
    position_bias: str | None = None,
    head_weights: str | None = None,
    position_ids: str | None = None,
    past_sequence_length: str | None = None,
    past_proj_buffer: str | None = None,
    *,
    compress_ratio: int,
    epsilon: float = 1e-6,
    head_weight_scale: float | None = None,
    index_topk: int | None = None,
    policy_mode: str,
    scale: float | None = None,
    token_budget: int | None = None,
) -> tuple[str | None, ...]:
    """The best blocks by scale·Σ ReLU(Q·K) over the heads, where K is the mean of a block or the softmax(gate)·key of a window

    Q and K are normalized and rotated. present_key has the new keys of "qsa", or the compressed ones of "csa", after the past.
    """
    if policy_mode not in ("qsa", "csa"):
        raise UnsupportedFormError(f"its policy_mode {policy_mode!r} is not known; there are 'qsa' and 'csa'")
    if compress_ratio < 1:
        raise UnsupportedFormError(f"its compress_ratio is {compress_ratio}; it is positive")
    query, past = op.wide(query), op.wide(past_key)
    key = None if key is None else op.wide(key)
    size, batch, length = op.Shape(query_norm_weight), op.Shape(query, end=1), op.Shape(query, start=1, end=2)
    valid = op.Shape(past, start=1, end=2)
    if past_sequence_length is not None:
        valid = op.Cast(op.Reshape(past_sequence_length, [1]), to=TensorProto.INT64)
    before = op.Slice(past, [0], valid, [1])
    if policy_mode == "qsa" and key is None:
        width = op.Sub(op.Shape(query, start=2), size)
        query, key = op.Slice(query, [0], width, [2]), op.Slice(query, width, [END], [2])
    if key is None:
        raise UnsupportedFormError("with policy_mode='csa' it needs its input key")
    heads = op.Reshape(query, op.Concat(batch, length, [-1], size, axis=0))
    heads = _normalized(op, heads, query_norm_weight, epsilon)
    factor = op.Pow(op.Cast(size, to=TensorProto.FLOAT), np.float32(-0.5)) if scale is None else np.float32(scale)
    caches = cos_cache, sin_cache

    if policy_mode == "qsa":
        _check("qsa", token_budget, "token_budget", (index_topk, head_weight_scale))
        assert token_budget is not None
        if token_budget % compress_ratio:
            raise UnsupportedFormError(
                f"its token_budget is {token_budget}, which its compress_ratio {compress_ratio} does not divide"
            )
        given = dict(zip(_OF_CSA, (gate, position_bias, head_weights, position_ids, past_proj_buffer), strict=True))
        if extra := [name for name, value in given.items() if value is not None]:
            raise UnsupportedFormError(f"its input {extra[0]} is of policy_mode='csa'; leave it out")
        new, keys = key, op.Concat(before, key, axis=1)
        places = op.Expand(op.Add(valid, op.up_to(length)), op.Concat(batch, length, axis=0))
        heads = _rotated_in_halves(op, heads, caches, places)
        selected = _chosen_tokens(
            op, heads, keys, key_norm_weight, caches, places, mask, factor, epsilon, compress_ratio, token_budget
        )
        buffer = None
    else:
        _check("csa", index_topk, "index_topk", (token_budget,))
        assert index_topk is not None
        if mask is not None:
            raise UnsupportedFormError("its input mask is of policy_mode='qsa'; leave it out")
        if (
            gate is None
            or position_bias is None
            or head_weights is None
            or position_ids is None
            or past_proj_buffer is None
        ):
            raise UnsupportedFormError(f"with policy_mode='csa' it needs its inputs {', '.join(_OF_CSA)}")
        windows = _Windows(op, key, op.wide(gate), op.wide(past_proj_buffer), size, compress_ratio)
        new = _normalized(op, windows.pooled(op, op.wide(position_bias)), key_norm_weight, epsilon)
        ends = op.Mul(op.Add(valid, op.up_to(windows.count)), [compress_ratio])
        starts = op.Expand(ends, op.Concat(batch, windows.count, axis=0))
        new = op.Squeeze(_rotated_in_pairs(op, op.Unsqueeze(new, [2]), caches, starts), [2])
        heads = _rotated_in_pairs(op, heads, caches, position_ids)
        seen = op.Div(op.Add(position_ids, [1]), [compress_ratio])
        weights = op.Unsqueeze(op.wide(head_weights), [3])
        if head_weight_scale is None:
            count = op.Cast(op.Shape(head_weights, start=2), to=TensorProto.FLOAT)
            weights = op.Mul(weights, op.CastLike(op.Pow(count, np.float32(-0.5)), weights))
        else:
            weights = op.Mul(weights, head_weight_scale)
        keys = op.Concat(before, new, axis=1)
        scores = op.MatMul(heads, op.Unsqueeze(op.Transpose(keys, perm=[0, 2, 1]), [1]))
        scores = op.Mul(op.Relu(scores), op.CastLike(factor, scores))
        total = op.Squeeze(op.reduce("ReduceSum", op.Mul(scores, weights), [2]), [2])
        best, _ = _best(op, total, seen, index_topk)
        selected = _padded(op, best, index_topk)
        buffer = op.CastLike(windows.rest(op), past_proj_buffer)
    new = op.CastLike(new, past_key)
    present = op.Concat(past_key, new, axis=1)
    if past_sequence_length is not None:
        room = op.Shape(past_key, start=1, end=2)
        after = op.Slice(past_key, op.Add(valid, op.Shape(new, start=1, end=2)), room, [1])
        present = op.Concat(op.Slice(past_key, [0], valid, [1]), new, after, axis=1)
    return op.Cast(selected, to=TensorProto.INT32), present, buffer


def _check(mode: str, given: int | None, name: str, others: tuple[float | None, ...]) -> None:
    """That it has the number that its mode chooses, and none that another mode has."""
    if given is None or given < 1:
        raise UnsupportedFormError(f"with policy_mode={mode!r} it needs its attribute {name}, which is positive")
    if any(value is not None for value in others):
        names = "index_topk and head_weight_scale" if mode == "qsa" else "token_budget"
        raise UnsupportedFormError(f"with policy_mode={mode!r} it has no {names}; leave them out")


def _normalized(op: FunctionEmitter, x: str, weight: str, epsilon: float) -> str:
    """x/√(mean x² + ε)·weight over the last axis"""
    root = op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(x, x), [-1]), epsilon))
    return str(op.Mul(op.Div(x, root), op.wide(weight)))


def _angles(op: FunctionEmitter, cache: str, positions: str) -> str:
    """The rows of a cache, which may have a batch axis, at the positions (B, M) within it, as (B, M, 1, R)"""
    rank = op.rank(cache)
    if rank not in (2, 3):
        raise UnsupportedFormError(
            "the rank of its cos_cache or sin_cache is not known to be 2 or 3; add it to value_info"
        )
    last = op.Sub(op.Shape(cache, start=rank - 2, end=rank - 1), [1])
    places = op.Min(op.Max(positions, [0]), last)
    cache = op.wide(cache)
    rows = op.Gather(cache, places) if rank == 2 else op.GatherND(cache, op.Unsqueeze(places, [2]), batch_dims=1)
    return str(op.Unsqueeze(rows, [2]))


def _rotated_in_halves(op: FunctionEmitter, x: str, caches: tuple[str, str], positions: str) -> str:
    """The first R channels of x (B, M, N, D), turned; the second half of them belongs to the first."""
    cos, sin = (_angles(op, cache, positions) for cache in caches)
    width = op.Shape(cos, start=3)
    half = op.Div(width, [2])
    a, b = op.Slice(x, [0], half, [3]), op.Slice(x, half, width, [3])
    turned = op.Add(
        op.Mul(op.Slice(x, [0], width, [3]), cos), op.Mul(op.Concat(op.Neg(b), a, axis=3), op.CastLike(sin, x))
    )
    return str(op.Concat(turned, op.Slice(x, width, [END], [3]), axis=3))


def _rotated_in_pairs(op: FunctionEmitter, x: str, caches: tuple[str, str], positions: str) -> str:
    """The last 2·R channels of x (B, M, N, D), turned; the odd of them belong to the even."""
    cos, sin = (_angles(op, cache, positions) for cache in caches)
    first = op.Sub(op.Shape(x, start=3), op.Mul(op.Shape(cos, start=3), [2]))
    a, b = (op.Slice(x, op.Add(first, [n]), [END], [3], [2]) for n in (0, 1))
    turned = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
    woven = op.Concat(*(op.Unsqueeze(t, [4]) for t in turned), axis=4)
    woven = op.Reshape(woven, op.Concat(op.Shape(x, end=3), op.Mul(op.Shape(cos, start=3), [2]), axis=0), allowzero=1)
    return str(op.Concat(op.Slice(x, [0], first, [3]), woven, axis=3))


def _best(op: FunctionEmitter, scores: str, seen: str, most: int) -> tuple[str, str]:
    """The places of the highest of the first `seen` (B, S) scores (B, S, E), −1 where there are not as many; and their number

    A column more takes part, so that there is one.
    """
    entries = op.Shape(scores, start=2)
    count = op.Unsqueeze(op.Min(seen, entries), [2])
    none = op.Expand(op.const(-math.inf, like=scores), op.Concat(op.Shape(scores, end=2), [1], axis=0))
    low = op.const(-math.inf, like=scores)
    visible = op.Concat(op.Where(op.Less(op.up_to(entries), count), scores, low), none, axis=2)
    _, best = op.TopK(visible, op.Min([most], op.Add(entries, [1])), axis=2, outputs=2)
    op.types[best] = TensorProto.INT64, 3
    return op.Where(op.Less(best, count), best, op.const(np.int64(-1))), op.Min(count, [most])


def _padded(op: FunctionEmitter, indices: str, width: int) -> str:
    """`indices` (B, S, K) with −1 up to the width."""
    rest = op.Expand(op.const(np.int64(-1)), op.Concat(op.Shape(indices, end=2), [width], axis=0))
    return str(op.Slice(op.Concat(indices, rest, axis=2), [0], [width], [2]))


def _chosen_tokens(
    op: FunctionEmitter,
    heads: str,
    keys: str,
    weight: str,
    caches: tuple[str, str],
    places: str,
    mask: str | None,
    factor: str | np.float32,
    epsilon: float,
    ratio: int,
    budget: int,
) -> str:
    """The tokens of the best blocks of what a query sees, and then those of the block that is not complete"""
    batch, length, total = op.Shape(heads, end=1), op.Shape(heads, start=1, end=2), op.Shape(keys, start=1, end=2)
    tokens = op.up_to(total)
    visible = op.LessOrEqual(tokens, op.Unsqueeze(places, [2]))
    if mask is not None:
        visible = op.And(visible, op.Unsqueeze(op.Not(op.Equal(mask, op.const(np.int64(0)))), [1]))
    listed, _ = op.TopK(op.Where(visible, tokens, total), total, axis=2, largest=0, outputs=2)
    op.types[listed] = TensorProto.INT64, 3
    filled = op.Expand(total, op.Concat(batch, length, [ratio], axis=0))
    listed = op.Concat(listed, filled, axis=2)
    count = op.Squeeze(op.reduce("ReduceSum", op.Cast(visible, to=TensorProto.INT64), [2]), [2])
    complete = op.Div(count, [ratio])
    blocks = op.Add(op.Div(total, [ratio]), [1])
    shape = op.Concat(batch, length, blocks, [ratio], axis=0)
    blocked = op.Reshape(op.Slice(listed, [0], op.Mul(blocks, [ratio]), [2]), shape)
    within = op.Min(blocked, op.Sub(total, [1]))
    read = op.GatherND(keys, op.Unsqueeze(within, [4]), batch_dims=1)
    pooled = _normalized(op, op.Squeeze(op.reduce("ReduceMean", read, [3]), [3]), weight, epsilon)
    starts = op.Squeeze(op.Slice(within, [0], [1], [3]), [3])
    each = op.Concat(batch, [-1], axis=0)
    flat = op.Reshape(pooled, op.Concat(each, [1], op.Shape(keys, start=2), axis=0))
    turned = _rotated_in_halves(op, flat, caches, op.Reshape(starts, each))
    turned = op.Reshape(turned, op.Shape(pooled))
    scores = op.Relu(op.MatMul(heads, op.Transpose(turned, perm=[0, 1, 3, 2])))
    scores = op.Squeeze(op.reduce("ReduceSum", op.Mul(scores, op.CastLike(factor, scores)), [2]), [2])
    best, kept = _best(op, scores, complete, budget // ratio)
    rows = op.Expand(op.Unsqueeze(op.Max(best, [0]), [3]), op.Concat(op.Shape(best), [ratio], axis=0))
    chosen = op.Where(op.Less(op.Unsqueeze(best, [3]), [0]), [-1], op.GatherElements(blocked, rows, axis=2))
    capacity = budget + ratio - 1
    chosen = _padded(op, op.Reshape(chosen, op.Concat(batch, length, [-1], axis=0)), capacity)
    kept = op.Mul(kept, [ratio])
    behind = op.Sub(op.const(np.arange(capacity)), kept)
    at = op.Add(op.Mul(op.Unsqueeze(complete, [2]), [ratio]), behind)
    inside = op.And(op.GreaterOrEqual(behind, [0]), op.Less(at, op.Unsqueeze(count, [2])))
    tail = op.GatherElements(listed, op.Where(inside, at, [0]), axis=2)
    return str(op.Where(inside, tail, chosen))


class _Windows:
    """The windows of `ratio` tokens that are complete, after those of the buffer, and the windows before them."""

    def __init__(self, op: FunctionEmitter, key: str, gate: str, buffer: str, size: str, ratio: int) -> None:
        self._size, self._ratio = size, ratio
        held = op.Shape(buffer, start=2, end=3)
        self._overlap = op.Where(op.GreaterOrEqual(held, [ratio]), [ratio], [0])
        self._both = op.Concat(buffer, op.Concat(op.Unsqueeze(key, [0]), op.Unsqueeze(gate, [0]), axis=0), axis=2)
        pending = op.Sub(op.Shape(self._both, start=2, end=3), self._overlap)
        self.count = op.Div(pending, [ratio])

    def pooled(self, op: FunctionEmitter, bias: str) -> str:
        """softmax(gate + bias)·key of each window (B, W, D), by channels; 0 where the gates of a channel have no softmax"""
        ratio, tokens = [self._ratio], op.Mul(self.count, [self._ratio])
        missing = op.Sub(ratio, self._overlap)
        start = op.Concat(op.Shape(self._both, end=2), missing, op.Shape(self._both, start=3), axis=0)
        values = op.Concat(op.Expand(op.const(0.0, like=self._both), start), self._both, axis=2)
        slots = []
        of_channels: tuple[tuple[Any, Any], ...] = (([0], self._size), (self._size, [END]))
        for first, (begin, end) in zip(([0], ratio), of_channels, strict=True):
            rows = op.Slice(values, first, op.Add(tokens, first), [2])
            rows = op.Slice(rows, begin, end, [3])
            sizes = op.Concat(op.Shape(values, end=2), self.count, ratio, self._size, axis=0)
            slots.append((op.Reshape(rows, sizes, allowzero=1), op.Slice(bias, begin, end, [1])))
        absent = op.Less(op.up_to(tokens), missing)
        absent = op.Reshape(absent, op.Concat(self.count, ratio, [1], axis=0), allowzero=1)
        (before, before_bias), (own, own_bias) = slots
        low = op.const(-math.inf, like=bias)
        key_before, gate_before = (op.Gather(before, op.const(np.array(n)), axis=0) for n in (0, 1))
        key, gate = (op.Gather(own, op.const(np.array(n)), axis=0) for n in (0, 1))
        gates = op.Concat(op.Where(absent, low, op.Add(gate_before, before_bias)), op.Add(gate, own_bias), axis=2)
        most = op.reduce("ReduceMax", gates, [2])
        has = op.And(op.Greater(most, low), op.Less(most, op.const(math.inf, like=bias)))
        shares = op.Softmax(op.Where(has, gates, 0.0), axis=2)
        sums = op.reduce("ReduceSum", op.Mul(shares, op.Concat(key_before, key, axis=2)), [2])
        return str(op.Squeeze(op.Where(has, sums, 0.0), [2]))

    def rest(self, op: FunctionEmitter) -> str:
        """The keys and gates that the next call needs: the last complete window, and the tokens after it."""
        # Without a complete window the start is -ratio: there are fewer tokens, all of which are taken.
        start = op.Add(self._overlap, op.Mul(op.Sub(self.count, [1]), [self._ratio]))
        return str(op.Slice(self._both, start, [END], [2]))
