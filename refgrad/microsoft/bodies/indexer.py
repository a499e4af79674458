"""ONNX Runtime's indexers, which choose for each query the keys that a sparse attention reads, and keep keys for later calls.

The choice has no derivative. The keys that they keep have one: with policy_mode "qsa" they are the inputs or the means of
blocks of them, and with "csa" the means of the slots of a window, weighted by a softmax.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.paged_attention import Packed
from refgrad.microsoft.bodies.position import known_rank
from refgrad.microsoft.declared import Size, check_known, check_shape, one_number, product, sizes, total
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import FLOATS, Shapes

_LIMIT = 2**31  # sizes are of 32 bits


def _check_policy(args: Arguments, buffer: str) -> None:
    """Refuse an unknown policy, and one without its number and inputs, `buffer` among them, or with others' ones."""
    mode, ratio, budget = args.policy_mode, args.compress_ratio, args.token_budget
    check_known(args, "policy_mode", "qsa", "csa")
    if not 1 <= ratio < _LIMIT:
        raise UnsupportedFormError(f"its compress_ratio is {ratio}; it is positive and of 32 bits")
    given, name = (budget, "token_budget") if mode == "qsa" else (args.index_topk, "index_topk")
    if given is None or not 1 <= given < _LIMIT:
        raise UnsupportedFormError(
            f"with policy_mode={mode!r} it needs its attribute {name}, which is positive and of 32 bits"
        )
    others = ("index_topk", "head_weight_scale") if mode == "qsa" else ("token_budget",)
    if any(getattr(args, name) is not None for name in others):
        raise UnsupportedFormError(f"with policy_mode={mode!r} it has no {' and '.join(others)}; leave them out")
    if budget is not None and budget % ratio:
        raise UnsupportedFormError(f"its token_budget is {budget}, which its compress_ratio {ratio} does not divide")
    of_csa = ("gate", "position_bias", "head_weights", "position_ids", buffer)
    given_names = [name for name in of_csa if getattr(args, name) is not None]
    if mode == "qsa" and given_names:
        raise UnsupportedFormError(f"its input {given_names[0]} is of policy_mode='csa'; leave it out")
    if mode == "csa" and len(given_names) < len(of_csa):
        raise UnsupportedFormError(f"with policy_mode='csa' it needs its inputs {', '.join(of_csa)}")
    if mode == "csa" and args.key is None:
        raise UnsupportedFormError("with policy_mode='csa' it needs its input key")


def _check_heads(shapes: Shapes, args: Arguments, batch: Size, rank: int) -> tuple[Size, Size, Size]:
    """Refuse a query, norms and caches that do not fit. Returns the size of a head, the width of a key, and the heads."""
    check_shape(shapes, "query", args.query, (None,) * rank)
    check_shape(shapes, "query_norm_weight", args.query_norm_weight, (None,))
    size = sizes(shapes, args.query_norm_weight, 1)[0]
    check_shape(shapes, "key_norm_weight", args.key_norm_weight, (size,))
    columns, qsa = sizes(shapes, args.query, rank)[-1], args.policy_mode == "qsa"
    if size is not None and args.key is None:
        columns = total(columns, -size)
    if size == 0 or (columns is not None and size is not None and columns % size):
        raise UnsupportedFormError(
            f"its query has {columns} channels; heads of {size} channels, as query_norm_weight has, are needed"
        )
    cos = args.cos_cache
    check_shape(shapes, "cos_cache", cos, (None, None), (batch, None, None))
    if (of_cache := shapes.rank(cos)) is not None:
        *_, rows, angles = table = sizes(shapes, cos, of_cache)
        check_shape(shapes, "sin_cache", args.sin_cache, table)
        turned = product(angles, 1 if qsa else 2)
        if rows == 0 or (turned is not None and ((size is not None and turned > size) or (qsa and turned % 2))):
            raise UnsupportedFormError(
                f"its input cos_cache has {angles} columns, which does not fit heads of {size} channels"
            )
    heads = None if columns is None or size is None else columns // size
    return size, product(size, 1 if qsa else 2), heads


def _check_sparse_attention_indexer(shapes: Shapes, args: Arguments) -> None:
    _check_policy(args, "past_proj_buffer")
    if args.policy_mode == "csa" and args.mask is not None:
        raise UnsupportedFormError("its input mask is of policy_mode='qsa'; leave it out")
    B, S, _ = sizes(shapes, args.query, 3)
    size, width, heads = _check_heads(shapes, args, B, 3)
    check_shape(shapes, "key", args.key, (B, S, width))
    check_shape(shapes, "past_key", args.past_key, (B, None, size))
    valid = sizes(shapes, args.past_key, 3)[1]
    if args.past_sequence_length is not None:
        valid = one_number(shapes, "past_sequence_length", args.past_sequence_length)
    held = sizes(shapes, args.past_proj_buffer, 4)[2]
    for name, *shape in (
        ("mask", B, total(valid, S)),
        ("gate", B, S, width),
        ("position_bias", args.compress_ratio, width),
        ("head_weights", B, S, heads),
        ("position_ids", B, S),
        ("past_proj_buffer", 2, B, None, width),
    ):
        check_shape(shapes, name, getattr(args, name), shape)
    if held is not None and held >= 2 * args.compress_ratio:
        raise UnsupportedFormError(
            f"past_proj_buffer has {held} tokens; it has fewer than {2 * args.compress_ratio}, twice compress_ratio"
        )


@body(
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
    check=_check_sparse_attention_indexer,
    domain=MICROSOFT,
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
    size, past = op.Shape(query_norm_weight), op.wide(past_key)
    query, key = _apart(op, query, key, size)
    batch, length = op.Shape(query, end=1), op.Shape(query, start=1, end=2)
    valid = op.Shape(past, start=1, end=2)
    if past_sequence_length is not None:
        valid = op.Cast(op.Reshape(past_sequence_length, [1]), to=TensorProto.INT64)
    before = op.Slice(past, [0], valid, [1])
    heads = _heads(op, query, query_norm_weight, size, epsilon)
    factor = _factor(op, size, scale)
    caches = cos_cache, sin_cache

    if policy_mode == "qsa":
        assert token_budget is not None
        new, keys = key, op.Concat(before, key, axis=1)
        places = op.Expand(op.Add(valid, op.up_to(length)), op.Concat(batch, length, axis=0))
        heads = _rotated_in_halves(op, heads, caches, places)
        selected = _chosen_tokens(
            op, heads, keys, key_norm_weight, caches, places, mask, factor, epsilon, compress_ratio, token_budget
        )
        buffer = None
    else:
        assert index_topk is not None
        gate, position_bias, head_weights, position_ids, past_proj_buffer = _of_csa(
            gate, position_bias, head_weights, position_ids, past_proj_buffer
        )
        windows = _Windows(op, key, op.wide(gate), op.wide(past_proj_buffer), size, compress_ratio)
        new = _normalized(op, windows.pooled(op, op.wide(position_bias)), key_norm_weight, epsilon)
        ends = op.Mul(op.Add(valid, op.up_to(windows.count)), [compress_ratio])
        starts = op.Expand(ends, op.Concat(batch, windows.count, axis=0))
        new = op.Squeeze(_rotated_in_pairs(op, op.Unsqueeze(new, [2]), caches, starts), [2])
        heads = _rotated_in_pairs(op, heads, caches, position_ids)
        seen = op.Div(op.Add(position_ids, [1]), [compress_ratio])
        keys = op.Unsqueeze(op.Concat(before, new, axis=1), [1])
        weights = _weights(op, head_weights, head_weight_scale)
        best, _ = _best(op, _scores(op, heads, keys, factor, weights), seen, index_topk)
        selected = _padded(op, best, index_topk)
        buffer = op.CastLike(windows.rest(op), past_proj_buffer)
    new = op.CastLike(new, past_key)
    present = op.Concat(past_key, new, axis=1)
    if past_sequence_length is not None:
        room = op.Shape(past_key, start=1, end=2)
        after = op.Slice(past_key, op.Add(valid, op.Shape(new, start=1, end=2)), room, [1])
        present = op.Concat(op.Slice(past_key, [0], valid, [1]), new, after, axis=1)
    return op.Cast(selected, to=TensorProto.INT32), present, buffer


def _check_packed(shapes: Shapes, args: Arguments) -> None:
    _check_policy(args, "past_gate_buffer")
    if not 1 <= args.state_capacity < _LIMIT:
        raise UnsupportedFormError(f"its state_capacity is {args.state_capacity}; it is positive and of 32 bits")
    shared = ("indexshare_mode", "merged_indices", "merged_counts", "merged_status")
    if args.max_output_entries or any(getattr(args, name) is not None for name in shared):
        raise UnsupportedFormError(
            "a selection that is shared (indexshare_mode, max_output_entries and the merged inputs) is not covered: "
            "its schema does not say which rows the other inputs have; leave them out"
        )
    check_known(args, "indexshare_state_policy", "default", "hold", "advance")
    capacity, count, active = args.state_update_capacity, args.state_update_capture_count, args.state_update_active
    if args.policy_mode == "csa" and (capacity or count is not None or active is not None):
        raise UnsupportedFormError("what captures updates of the state is of policy_mode='qsa'; leave it out")
    if not 0 <= capacity <= 8:
        raise UnsupportedFormError(f"its state_update_capacity is {capacity}; it is from 0 to 8")
    if capacity and count is None:
        raise UnsupportedFormError(
            f"with state_update_capacity={capacity} it needs its input state_update_capture_count"
        )
    tokens, room = sizes(shapes, args.query, 2)[0], 2 * args.compress_ratio - 1
    check_shape(shapes, "cumulative_sequence_lengths", args.cumulative_sequence_lengths, (None,))
    batch = total(sizes(shapes, args.cumulative_sequence_lengths, 1)[0], -1)
    size, width, heads = _check_heads(shapes, args, batch, 2)
    for name, *shape in (
        ("key", tokens, width),
        ("past_sequence_lengths", batch),
        ("gate", tokens, width),
        ("position_bias", args.compress_ratio, width),
        ("head_weights", tokens, heads),
        ("position_ids", tokens),
        ("past_key_state", batch, args.state_capacity, size),
        ("past_kv_buffer", batch, room, width),
        ("past_gate_buffer", batch, room, width),
        ("past_state_lengths", batch, 2),
        ("state_update_capture_count", batch),
        ("state_update_active", 1),
    ):
        check_shape(shapes, name, getattr(args, name), shape)


@body(
    "PackedSparseAttentionIndexer",
    "selected_indices",
    "selected_counts",
    "present_key_state",
    "present_kv_buffer",
    optional=["present_gate_buffer", "present_state_lengths", "state_update", "indexshare_status", "state_status"],
    types={
        "selected_indices": ("tensor(int32)",),
        **dict.fromkeys(
            (
                *("selected_counts", "present_state_lengths", "indexshare_status", "state_status"),
                *("cumulative_sequence_lengths", "past_sequence_lengths", "past_state_lengths"),
                *("state_update_capture_count", "state_update_active"),
                *("indexshare_mode", "merged_indices", "merged_counts", "merged_status"),
            ),
            "selected_indices",
        ),
        "position_ids": ("tensor(int64)",),
        "past_key_state": FLOATS,
        "present_key_state": "past_key_state",
    },
    check=_check_packed,
    domain=MICROSOFT,
)
def packed_sparse_attention_indexer(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    query_norm_weight: str,
    key_norm_weight: str,
    cos_cache: str,
    sin_cache: str,
    cumulative_sequence_lengths: str,
    past_sequence_lengths: str,
    gate: str | None,
    position_bias: str | None,
    head_weights: str | None,
    position_ids: str | None,
    past_key_state: str,
    past_kv_buffer: str,
    past_gate_buffer: str | None,
    past_state_lengths: str,
    state_update_capture_count: str | None = None,
    state_update_active: str | None = None,
    indexshare_mode: str | None = None,
    merged_indices: str | None = None,
    merged_counts: str | None = None,
    merged_status: str | None = None,
    *,
    compress_ratio: int,
    epsilon: float = 1e-6,
    head_weight_scale: float | None = None,
    index_topk: int | None = None,
    indexshare_state_policy: str = "default",
    max_output_entries: int = 0,
    policy_mode: str,
    scale: float | None = None,
    state_capacity: int,
    state_update_capacity: int = 0,
    token_budget: int | None = None,
) -> tuple[str | None, ...]:
    """The best entries of each request by scale·Σ ReLU(Q·K) over the heads, where K is of a block or of a window of its tokens

    present_key_state has the new entries of each request after its past ones. Where they are too many, or where the lengths of
    the past do not fit each other, the state of the request stays as it was, and nothing is selected.
    """
    size, ratio, caches = op.Shape(query_norm_weight), compress_ratio, (cos_cache, sin_cache)
    queries, key = _apart(op, query, key, size)
    buffer, past = op.wide(past_kv_buffer), op.wide(past_key_state)
    packed = Packed(op, op.Shape(query, end=1), cumulative_sequence_lengths, past_sequence_lengths)
    keeps = 0 if policy_mode == "qsa" else ratio
    pending = _Pending(op, packed, past_sequence_lengths, past_state_lengths, ratio, keeps, state_capacity)
    heads = packed.padded(op, _heads(op, queries, query_norm_weight, size, epsilon))
    order = op.up_to(op.const([state_capacity]))
    slots = op.Unsqueeze(order, [1])
    new = pending.holds(op, slots)
    own = op.Add(pending.place(op, slots), op.up_to(op.const([ratio])))  # (B, E, ratio)
    at = op.Expand(op.Mul(order, [ratio]), op.Concat(op.Shape(past, end=1), [state_capacity], axis=0))

    gates = weights = None
    if policy_mode == "qsa":
        read = pending.read(op, buffer, key, own, new, 0.0)
        pooled, rotated = op.Squeeze(op.reduce("ReduceMean", read, [2]), [2]), _rotated_in_halves
        places = packed.places
    else:
        gate, position_bias, head_weights, position_ids, past_gate_buffer = _of_csa(
            gate, position_bias, head_weights, position_ids, past_gate_buffer
        )
        held = op.wide(past_gate_buffer), op.wide(gate)
        pooled = _of_windows(op, pending, (buffer, key), held, op.wide(position_bias), size, own, new)
        rotated, places = _rotated_in_pairs, packed.padded(op, position_ids)
        gates = op.CastLike(pending.rest(op, *held), past_gate_buffer)
        weights = packed.padded(op, _weights(op, head_weights, head_weight_scale))
    # a slot without a new entry has ones, of which the norm and its derivative are finite
    entry = _normalized(op, op.Where(new, pooled, 1.0), key_norm_weight, epsilon)
    entry = op.Squeeze(rotated(op, op.Unsqueeze(entry, [2]), caches, at), [2])
    state = op.CastLike(op.Where(new, op.CastLike(entry, past), past), past_key_state)

    keys = op.Unsqueeze(op.CastLike(op.wide(state), heads), [1])
    heads, factor = rotated(op, heads, caches, places), _factor(op, size, scale)
    scores = _scores(op, heads, keys, factor, weights)
    count = op.Where(op.Squeeze(pending.taken, [2]), op.Max(op.Add(places, [1]), [0]), [0])
    if policy_mode == "qsa":
        assert token_budget is not None
        selected, number = _places(op, scores, count, ratio, token_budget)
    else:
        assert index_topk is not None
        seen = op.Min(op.Div(count, [ratio]), op.Squeeze(pending.entries, [2]))
        best, number = _best(op, scores, seen, index_topk)
        selected = _padded(op, best, index_topk)
    update = None
    if state_update_capture_count is not None:
        update = pending.captured(
            op, buffer, key, entry, state_update_capacity, state_update_capture_count, state_update_active
        )
        update = op.CastLike(update, query)
    indices, counts = (op.Cast(packed.flat(op, x), to=TensorProto.INT32) for x in (selected, number))
    rest = op.CastLike(pending.rest(op, buffer, key), past_kv_buffer)
    lengths = op.Squeeze(op.Concat(pending.entries, pending.length, axis=1), [2])
    lengths, status = (op.Cast(x, to=TensorProto.INT32) for x in (lengths, op.Squeeze(pending.status, [1, 2])))
    return indices, op.Squeeze(counts, [1]), state, rest, gates, lengths, update, None, status


def _of_csa(*inputs: str | None) -> list[str]:
    """The inputs of policy_mode "csa", none of which the check lets be left out."""
    return [value for value in inputs if value is not None]


def _apart(op: FunctionEmitter, query: str, key: str | None, size: str) -> tuple[str, str]:
    """Query and key, in the type to compute in; without a key its channels are the last ones of the query."""
    query = op.wide(query)
    if key is not None:
        return query, op.wide(key)
    width = op.Sub(op.Shape(query, start=-1), size)
    return op.Slice(query, [0], width, [-1]), op.Slice(query, width, [END], [-1])


def _heads(op: FunctionEmitter, query: str, weight: str, size: str, epsilon: float) -> str:
    """(..., N·D) as (..., N, D), normalized"""
    shape = op.Concat(op.Shape(query, end=-1), op.Div(op.Shape(query, start=-1), size), size, axis=0)
    return _normalized(op, op.Reshape(query, shape, allowzero=1), weight, epsilon)


def _factor(op: FunctionEmitter, size: str, scale: float | None) -> str | np.float32:
    """The factor of the scores: `scale`, or 1/√size by default."""
    return op.Pow(op.Cast(size, to=TensorProto.FLOAT), np.float32(-0.5)) if scale is None else np.float32(scale)


def _weights(op: FunctionEmitter, head_weights: str, scale: float | None) -> str:
    """The weights of the heads (..., N), scaled."""
    weights = op.wide(head_weights)
    if scale is not None:
        return str(op.Mul(weights, scale))
    count = op.Cast(op.Shape(head_weights, start=-1), to=TensorProto.FLOAT)
    return str(op.Mul(weights, op.CastLike(op.Pow(count, np.float32(-0.5)), weights)))


def _scores(op: FunctionEmitter, heads: str, keys: str, factor: str | np.float32, weights: str | None = None) -> str:
    """Σ ReLU(Q·K) over the heads: (B, S, N, D) and (B, 1 or S, E, D) to (B, S, E); weighted by (B, S, N)"""
    scores = op.Relu(op.MatMul(heads, op.Transpose(keys, perm=[0, 1, 3, 2])))
    scores = op.Mul(scores, op.CastLike(factor, scores))
    if weights is not None:
        scores = op.Mul(scores, op.Unsqueeze(weights, [3]))
    return str(op.Squeeze(op.reduce("ReduceSum", scores, [2]), [2]))


def _normalized(op: FunctionEmitter, x: str, weight: str, epsilon: float) -> str:
    """x/√(mean x² + ε)·weight over the last axis"""
    root = op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(x, x), [-1]), epsilon))
    return str(op.Mul(op.Div(x, root), op.wide(weight)))


def _angles(op: FunctionEmitter, cache: str, positions: str) -> str:
    """The rows of a cache, which may have a batch axis, at the positions (B, M) within it, as (B, M, 1, R)"""
    rank = known_rank(op, "cos_cache or sin_cache", cache)
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
    """The tokens of the best blocks among the tokens that a query sees, and then of the block that is not complete"""
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
    blocks = op.Add(op.Div(total, [ratio]), [1])
    shape = op.Concat(batch, length, blocks, [ratio], axis=0)
    blocked = op.Reshape(op.Slice(listed, [0], op.Mul(blocks, [ratio]), [2]), shape)
    within = op.Min(blocked, op.Sub(total, [1]))
    read = op.GatherND(keys, op.Unsqueeze(within, [4]), batch_dims=1)
    pooled = _normalized(op, op.Squeeze(op.reduce("ReduceMean", read, [3]), [3]), weight, epsilon)
    starts = op.Squeeze(op.Slice(within, [0], [1], [3]), [3])
    each = op.Concat(batch, op.Mul(length, blocks), axis=0)
    flat = op.Reshape(pooled, op.Concat(each, [1], op.Shape(keys, start=2), axis=0), allowzero=1)
    turned = _rotated_in_halves(op, flat, caches, op.Reshape(starts, each, allowzero=1))
    turned = op.Reshape(turned, op.Shape(pooled), allowzero=1)
    at, _ = _places(op, _scores(op, heads, turned, factor), count, ratio, budget)
    return str(op.Where(op.Less(at, [0]), [-1], op.GatherElements(listed, op.Max(at, [0]), axis=2)))


def _places(op: FunctionEmitter, scores: str, count: str, ratio: int, budget: int) -> tuple[str, str]:
    """The tokens that a query chooses of the `count` (B, S) that it sees, −1 after the last one, and their number (B, S, 1)

    They are the tokens of the best blocks by the scores (B, S, E), and then of the block that is not complete.
    """
    complete = op.Div(count, [ratio])
    best, kept = _best(op, scores, complete, budget // ratio)
    first = op.Unsqueeze(best, [3])
    chosen = op.Where(op.Less(first, [0]), [-1], op.Add(op.Mul(first, [ratio]), op.up_to(op.const([ratio]))))
    capacity = budget + ratio - 1
    row = op.Concat(op.Shape(best, end=2), op.Mul(op.Shape(best, start=2), [ratio]), axis=0)
    chosen = _padded(op, op.Reshape(chosen, row, allowzero=1), capacity)
    kept, left = op.Mul(kept, [ratio]), op.Unsqueeze(op.Sub(count, op.Mul(complete, [ratio])), [2])
    behind = op.Sub(op.up_to(op.const([capacity])), kept)
    inside = op.And(op.GreaterOrEqual(behind, [0]), op.Less(behind, left))
    tail = op.Add(op.Unsqueeze(op.Mul(complete, [ratio]), [2]), behind)
    return op.Where(inside, tail, chosen), op.Add(kept, left)


def _mixed(op: FunctionEmitter, keys: str, gates: str) -> str:
    """softmax(gates)·keys over the slots of windows (B, W, slots, D), by channels; 0 where the gates have no softmax"""
    low, high = (op.const(end, like=gates) for end in (-math.inf, math.inf))
    # In ONNX Runtime's CUDA kernel the maximum of −∞ alone is not −∞.
    some = op.reduce("ReduceMax", op.Cast(op.Greater(gates, low), to=TensorProto.FLOAT), [2])
    has = op.And(op.Greater(some, np.float32(0)), op.Less(op.reduce("ReduceMax", gates, [2]), high))
    shares = op.Softmax(op.Where(has, gates, 0.0), axis=2)
    sums = op.reduce("ReduceSum", op.Mul(shares, keys), [2])
    return str(op.Squeeze(op.Where(has, sums, 0.0), [2]))


class _Windows:
    """The windows of `ratio` tokens that are complete, after the windows of the buffer, and the windows before them."""

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
        return _mixed(op, op.Concat(key_before, key, axis=2), gates)

    def rest(self, op: FunctionEmitter) -> str:
        """The keys and gates that the next call needs: the last complete window, and the tokens after it."""
        # Without a complete window the start is -ratio: there are fewer tokens, all of which are taken.
        start = op.Add(self._overlap, op.Mul(op.Sub(self.count, [1]), [self._ratio]))
        return str(op.Slice(self._both, start, [END], [2]))


class _Pending:
    """The tokens of each request that no entry has yet, from its buffer and then its new ones, and the entries they make.

    `ratio` tokens make one. The last `keeps` of those that have made entries stay in the buffer, for the entry after them.
    The numbers of the requests have the shape (B, 1, 1).
    """

    def __init__(
        self,
        op: FunctionEmitter,
        packed: Packed,
        past: str,
        lengths: str,
        ratio: int,
        keeps: int,
        capacity: int,
    ) -> None:
        self._ratio = ratio
        past, lengths = (
            op.Unsqueeze(op.Cast(x, to=TensorProto.INT64), [2]) for x in (op.Unsqueeze(past, [1]), lengths)
        )
        given = [op.Slice(lengths, [n], [n + 1], [1]) for n in (0, 1)]
        most = capacity, ratio + keeps - 1
        self._before, self._held = (op.Min(op.Max(x, [0]), [n]) for x, n in zip(given, most, strict=True))
        valid = op.And(op.Equal(given[0], self._before), op.Equal(given[1], self._held))
        if keeps:
            valid = op.And(valid, op.GreaterOrEqual(past, [0]))
        else:
            valid = op.And(valid, op.Equal(past, op.Add(op.Mul(self._before, [ratio]), self._held)))
        starts, counts = (op.Unsqueeze(x, [1, 2]) for x in (packed.starts, packed.counts))
        begun = op.Mod(self._held, [ratio])
        made = op.Div(op.Add(begun, counts), [ratio])
        fits = op.LessOrEqual(made, op.Sub([capacity], self._before))
        self.status = op.Where(valid, op.Where(fits, [0], [2]), [1])
        self.taken = op.And(valid, fits)
        made, self._counts = (op.Where(self.taken, x, [0]) for x in (made, counts))
        self.entries = op.Add(self._before, made)
        self._overlap = op.Sub(self._held, begun)
        self._start = op.Max(op.Sub(op.Add(self._overlap, op.Mul(made, [ratio])), [keeps]), [0])
        self.length = op.Sub(op.Add(self._held, self._counts), self._start)  # of the buffer afterwards
        self._offset = op.Sub(starts, self._held)

    def holds(self, op: FunctionEmitter, slots: str) -> str:
        """True if a slot of the state has a new entry, (B, E, 1)."""
        return str(op.And(op.GreaterOrEqual(slots, self._before), op.Less(slots, self.entries)))

    def place(self, op: FunctionEmitter, slots: str) -> str:
        """The place of the first token of a slot, (B, E, 1)."""
        return str(op.Add(self._overlap, op.Mul(op.Sub(slots, self._before), [self._ratio])))

    def read(self, op: FunctionEmitter, buffer: str, new: str, places: str, real: str, other: float) -> str:
        """The rows (B, M, n, W) of the tokens at `places` (B, M, n); `other` where they are not real or before the first."""
        batch, room, width = (op.Shape(buffer, start=n, end=n + 1) for n in range(3))
        size = op.Mul(batch, room)
        rows = op.Concat(op.Reshape(buffer, op.Concat(size, width, axis=0), allowzero=1), new, axis=0)
        first = op.Unsqueeze(op.Mul(op.up_to(batch), room), [1, 2])
        first = op.Where(op.Less(places, self._held), first, op.Add(self._offset, size))
        real = op.And(real, op.GreaterOrEqual(places, [0]))
        read = op.Gather(rows, op.Where(real, op.Add(first, places), [0]))
        return str(op.Where(op.Unsqueeze(real, [3]), read, other))

    def rest(self, op: FunctionEmitter, buffer: str, new: str) -> str:
        """The buffer afterwards: the tokens that the next entry needs, and what was there behind them."""
        order = op.Unsqueeze(op.up_to(op.Shape(buffer, start=1, end=2)), [1])
        real = op.Less(order, self.length)
        read = op.Squeeze(self.read(op, buffer, new, op.Add(self._start, order), real, 0.0), [2])
        return str(op.Where(real, read, buffer))

    def captured(
        self, op: FunctionEmitter, buffer: str, key: str, entry: str, capacity: int, count: str, active: str | None
    ) -> str:
        """The updates by the first new tokens (B, capacity, D): the entry that a token completes, or the token; else 0."""
        steps = op.const(np.arange(capacity)[:, None])
        count = op.Unsqueeze(op.Cast(count, to=TensorProto.INT64), [1, 2])
        real = op.Less(steps, op.Min(count, self._counts))
        if active is not None:
            real = op.And(real, op.Not(op.Equal(active, op.const(np.int32(0)))))
        places = op.Add(self._held, steps)
        raw = op.Squeeze(self.read(op, buffer, key, places, real, 0.0), [2])
        ends = op.Add(places, [1])
        whole = op.And(real, op.Equal(op.Mod(ends, [self._ratio]), [0]))
        slots = op.Where(whole, op.Sub(op.Add(self._before, op.Div(ends, [self._ratio])), [1]), [0])
        return str(op.Where(whole, op.GatherND(entry, slots, batch_dims=1), raw))


def _of_windows(
    op: FunctionEmitter,
    pending: _Pending,
    keys: tuple[str, str],
    gates: tuple[str, str],
    bias: str,
    size: str,
    own: str,
    new: str,
) -> str:
    """The entries (B, E, D): mixtures of the last channels of their windows and the first ones of the windows before."""
    mixed: tuple[list[str], list[str]] = [], []
    ratio = op.Shape(bias, end=1)
    for places, begin, end in ((op.Sub(own, ratio), [0], size), (own, size, [END])):
        (held, given), (held_gate, gate) = ([op.Slice(x, begin, end, [-1]) for x in pair] for pair in (keys, gates))
        mixed[0].append(pending.read(op, held, given, places, new, 0.0))
        logits = pending.read(op, held_gate, gate, places, new, -math.inf)
        mixed[1].append(op.Add(logits, op.Slice(bias, begin, end, [1])))
    return _mixed(op, *(op.Concat(*each, axis=2) for each in mixed))
