"""ONNX Runtime's attentions whose query heads share keys and values, and which keep them in a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, widened
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray

QUANTIZATIONS = ("NONE", "PER_TENSOR", "PER_CHANNEL")


@kernel("GroupQueryAttention", domain=MICROSOFT, fresh=True)
def group_query_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    seqlens_k: Array | None = None,
    total_sequence_length: Array | None = None,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    query_seqlens: Array | None = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    k_norm_epsilon: float | None = None,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    q_norm_epsilon: float | None = None,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    _wanted: tuple[bool, ...],
) -> tuple[Array | None, ...]:
    """One sample after another: its new keys join the keys of its cache, and each query sees the keys up to its own place"""
    assert seqlens_k is not None
    assert total_sequence_length is not None
    flags = {"causal": causal, "do_rotary": do_rotary, "rotary_interleaved": rotary_interleaved}
    for name, flag in (flags | {"sliding_window_cache": sliding_window_cache}).items():
        among(name, flag, (0, 1))
    among("qk_output", qk_output, (0, 1, 2))
    if local_window_size == 0:
        raise ValueError("local_window_size is 0; a window has at least one key, and -1 means no window")
    if not causal and local_window_size != -1:
        raise ValueError(f"local_window_size is {local_window_size}; it must be -1 with causal=0")
    declared, kinds = query.dtype, [query.dtype if past is None else past.dtype for past in (past_key, past_value)]
    query, key, value, past_key, past_value = map(wide, (query, key, value, past_key, past_value))
    cos_cache, sin_cache, attention_bias, head_sink = map(wide, (cos_cache, sin_cache, attention_bias, head_sink))
    q_norm_weight, k_norm_weight = map(wide, (q_norm_weight, k_norm_weight))
    q, k, v = split(query, key, value, num_heads, kv_num_heads)
    (batch, length, _, size), new = q.shape, k.shape[1]
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value go together; one of them is missing")
    if new != length and (past_key is None or new or query_seqlens is not None):
        raise ValueError(f"key has {new} rows and query {length}; they have as many, or key has none and past_key all")
    shared = length > 0 and not new  # the keys are all in the past

    bits = _bits(k_quant_type, v_quant_type, kv_cache_bit_width, past_key)
    stored = size // 2 if bits == 4 else size
    capacity = 0 if past_key is None else past_key.shape[2] if past_key.ndim == 4 else -1
    for name, past in (("past_key", past_key), ("past_value", past_value)):
        if past is not None:
            check_shape(name, past.shape, (batch, kv_num_heads, capacity, stored))
    total = one_number("total_sequence_length", total_sequence_length)
    lengths = per_sample("seqlens_k", seqlens_k, batch, 0, total - 1) + 1
    _check_total(total, capacity, length, new, bool(sliding_window_cache), query_seqlens is not None)
    if query_seqlens is None:
        fresh = np.minimum(length, lengths)
        if length > 1 and past_key is not None and total != length and batch != 1:
            raise ValueError(
                f"{batch} samples bring {length} queries each to a past; give query_seqlens, or one sample"
            )
    else:
        if not causal or past_key is None:
            raise ValueError("query_seqlens needs causal=1, past_key and past_value")
        fresh = per_sample("query_seqlens", query_seqlens, batch, 0, length)
    before = lengths - fresh  # the position of the first query
    if np.any(before < 0):
        raise ValueError(f"query_seqlens {fresh.tolist()} are more than the {lengths.tolist()} tokens of seqlens_k + 1")
    rows = max(total, capacity)
    slack = 0
    if sliding_window_cache:
        rows = capacity
        slack = _slack(capacity, local_window_size, past_key is None)
        if shared or qk_output:
            raise ValueError("sliding_window_cache=1 needs new keys, and qk_output=0")
    elif query_seqlens is not None and np.any(np.where(fresh > 0, before + length > rows, False)):
        raise ValueError(
            f"the chunks of {length} rows after {before.tolist()} do not fit into {rows} rows of the cache"
        )
    if not sliding_window_cache and not shared and np.any(before > capacity):
        raise ValueError(f"seqlens_k counts {before.tolist()} tokens before the new ones; the past has {capacity} rows")

    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together; one of them is missing")
    if q_norm_weight is not None and k_norm_weight is not None:
        q = normalized("q_norm_weight", q, q_norm_weight, qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon)
        k = normalized("k_norm_weight", k, k_norm_weight, qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon)
    if do_rotary:
        positions = before[:, None] + np.arange(length)
        if position_ids is not None:
            check_shape("position_ids", position_ids.shape, (batch, length))
            first = query_seqlens is None and total == length
            positions = position_ids[:1, :1] + np.arange(length) if first and batch else position_ids
        padded = np.arange(length) >= fresh[:, None]
        turn = Rotary(cos_cache, sin_cache, np.where(padded, 0, positions), rotary_interleaved)
        q, k = turn(q), k if shared else turn(k)

    bias = _bias(attention_bias, batch, num_heads, length, total)
    sink = sink_scores(head_sink, num_heads, smooth_softmax == 1, q.dtype)
    y = np.zeros_like(q)
    presents = [np.zeros((batch, kv_num_heads, rows, stored), kind) for kind in kinds]
    inner = np.zeros((batch, num_heads, length, total), q.dtype) if len(_wanted) > 3 and _wanted[3] else None
    quantizers = [
        Quantizer(*form, bits, kv_num_heads, size)
        for form in ((k_quant_type, k_scale, "k_scale"), (v_quant_type, v_scale, "v_scale"))
    ]
    for b in range(batch):
        end, start, count = int(lengths[b]), int(before[b]), int(fresh[b])
        held = end if shared else _resident(start, capacity, slack) if slack else start
        every = []
        for x, past, present, quantizer in zip((k, v), (past_key, past_value), presents, quantizers, strict=True):
            fresh_rows = quantizer.to_cache(x[b, : 0 if shared else count])
            rows_ = fresh_rows if past is None else np.concatenate([past[b, :, :held].swapaxes(0, 1), fresh_rows])
            kept = _resident(end, capacity, slack) if slack else end
            present[b, :, :kept] = rows_[len(rows_) - kept :].swapaxes(0, 1)
            every.append(quantizer.read(rows_))
        keys, values = every
        places = np.arange(end - len(keys), end)
        own = np.arange(start, start + count)[:, None]
        seen = places <= own if causal else np.ones((count, len(places)), bool)
        if local_window_size > 0:
            seen &= places > own - local_window_size
        added = None if bias is None else bias[min(b, len(bias) - 1)][:, :count, places]
        y[b, :count], middle = attend(q[b, :count], keys, values, seen, scale, softcap, added, sink, qk_output)
        if inner is not None:
            inner[b, :, :count, places[0] : end] = middle
    output = y.reshape(batch, length, num_heads * size).astype(declared)
    return output, *presents, inner.astype(declared) if qk_output and inner is not None else None


def attend(
    q: Array,
    keys: Array,
    values: Array,
    seen: Array,
    scale: float | None,
    softcap: float,
    bias: Array | None,
    sink: Array | None,
    qk_output: int = 0,
) -> tuple[Array, Array]:
    """q (S, N, H), keys (T, K, H) and values (T, K, Hv) to (S, N, Hv); and the scores, 1, or probabilities, (N, S, T).

    `seen` (S, T), or (N, S, T), says which query sees which key; one that sees none has a row of zeros.
    """
    group = q.shape[1] // keys.shape[1]
    need(5 * len(q) * len(keys) * q.itemsize)  # one head after another
    factor = q.dtype.type(scale or 1 / math.sqrt(max(q.shape[2], 1)))
    y = np.zeros((*q.shape[:2], values.shape[2]), q.dtype)
    inner = np.zeros((q.shape[1], len(q), len(keys)) if qk_output else (0, 0, 0), q.dtype)
    for head in range(q.shape[1]):
        scores = np.einsum("sh,th->st", q[:, head], keys[:, head // group]) * factor
        if softcap > 0:
            scores = np.tanh(scores / q.dtype.type(softcap)) * q.dtype.type(softcap)
        if bias is not None:
            scores = scores + bias[min(head, len(bias) - 1)]
        visible = seen[head] if seen.ndim == 3 else seen
        hidden = np.where(visible, scores, q.dtype.type(-np.inf))
        top = np.max(hidden, axis=1, keepdims=True, initial=-np.inf)
        if sink is not None:
            top = np.maximum(top, sink[head])
        top = np.where(visible.any(1, keepdims=True), top, np.maximum(top, q.dtype.type(0)))
        weights = np.exp(hidden - top)
        whole = weights.sum(1, keepdims=True)
        if sink is not None:
            whole = whole + np.exp(sink[head] - top)
        weights = weights / np.where(whole == 0, q.dtype.type(1), whole)
        y[:, head] = np.einsum("st,th->sh", weights, values[:, head // group])
        if qk_output:
            inner[head] = np.where(visible, scores, q.dtype.type(0)) if qk_output == 1 else weights
    return y, inner


def wide(x: Any) -> Any:
    """Floats of 16 bits as float32."""
    return None if x is None else widened(x)


def split(
    query: Array, key: Array | None, value: Array | None, num_heads: int, kv_num_heads: int
) -> tuple[Array, Array, Array]:
    """Query, key and value, which may all be in `query`, as (..., heads, size)."""
    if min(num_heads, kv_num_heads) < 1 or num_heads % kv_num_heads:
        raise ValueError(f"kv_num_heads={kv_num_heads} does not divide num_heads={num_heads}")
    if (key is None) != (value is None):
        raise ValueError("key and value go together; one of them is missing")
    heads = [num_heads, kv_num_heads, kv_num_heads]
    if query.ndim != 3:
        raise ValueError(f"query has the shape {list(query.shape)}; (batch, sequence, heads·size) is needed")
    width, parts = query.shape[2], num_heads if key is not None else sum(heads)
    if width % parts:
        raise ValueError(f"query has {width} columns, which are not {parts} heads")
    size = width // parts
    if key is None or value is None:
        q, k, v = np.split(query.reshape(*query.shape[:2], parts, size), [num_heads, num_heads + kv_num_heads], 2)
        return q, k, v
    for name, x in (("key", key), ("value", value)):
        check_shape(name, x.shape, (len(query), key.shape[1] if key.ndim == 3 else -1, kv_num_heads * size))
    q, k, v = (x.reshape(*x.shape[:2], n, size) for x, n in zip((query, key, value), heads, strict=True))
    return q, k, v


class Rotary:
    """Turns pairs of features by the angles of the positions (batch, sequence)."""

    def __init__(
        self, cos_cache: Array | None, sin_cache: Array | None, positions: Array, interleaved: int, first: int = 0
    ) -> None:
        if first < 0 or first % 8:
            raise ValueError(f"rotary_offset is {first}; it must be a multiple of 8")
        if cos_cache is None or sin_cache is None:
            raise ValueError("do_rotary=1 needs cos_cache and sin_cache")
        if cos_cache.ndim != 2:
            raise ValueError(f"cos_cache has the shape {list(cos_cache.shape)}; (positions, pairs) is needed")
        check_shape("sin_cache", sin_cache.shape, cos_cache.shape)
        check_indices(positions, len(cos_cache), "the positions", lowest=0)
        self._cos, self._sin = cos_cache[positions][..., None, :], sin_cache[positions][..., None, :]
        self._pairs = cos_cache.shape[1]
        self._interleaved, self._first = interleaved, first

    def __call__(self, x: Array) -> Array:
        """x (batch, sequence, heads, size), turned."""
        low, high = self._first, self._first + 2 * self._pairs
        if high > x.shape[-1]:
            raise ValueError(
                f"cos_cache has {self._pairs} columns; from feature {low} on, a head has {x.shape[-1] - low}"
            )
        y = x.copy()
        pairs = y[..., low:high]
        a, b = (
            (slice(0, None, 2), slice(1, None, 2))
            if self._interleaved
            else (slice(self._pairs), slice(self._pairs, None))
        )
        c = x[..., low:high]
        pairs[..., a] = c[..., a] * self._cos - c[..., b] * self._sin
        pairs[..., b] = c[..., a] * self._sin + c[..., b] * self._cos
        return y


class Quantizer:
    """How rows (T, heads, size) are written to a cache and read from it: q = round(x/scale), held in 8 or 4 bits."""

    def __init__(self, kind: str, scale: Array | None, name: str, bits: int, heads: int, size: int) -> None:
        self._bits, self._scale = bits, np.ones((1, 1), np.float32)
        if bits:
            if scale is None:
                raise ValueError(f"a quantised cache needs {name}")
            count = 1 if kind == "PER_TENSOR" else heads * size
            if scale.size != count:
                raise ValueError(f"{name} has the shape {list(scale.shape)}; {kind} needs {count} numbers")
            self._scale = scale.reshape((1, 1) if count == 1 else (heads, size))

    def to_cache(self, x: Array) -> Array:
        """As the cache holds it."""
        if not self._bits:
            return x
        q = np.rint(x / self._scale)
        if self._bits == 8:
            return np.clip(q, -128, 127).astype(np.int8)
        nibbles = (np.clip(q, -8, 7) + 8).astype(np.uint8)
        return np.asarray(nibbles[..., ::2] | nibbles[..., 1::2] << 4)

    def read(self, rows: Array) -> Array:
        """As floats."""
        if not self._bits:
            return rows
        if self._bits == 4:
            rows = np.stack([rows & 15, rows >> 4], -1).reshape(*rows.shape[:-1], -1).astype(np.int8) - 8
        return np.asarray(rows * self._scale)


def _bits(k_quant_type: str, v_quant_type: str, width: int, past: Array | None) -> int:
    """How many bits a number of the cache has, 0 where it is a float."""
    among("k_quant_type", k_quant_type, QUANTIZATIONS)
    if v_quant_type != k_quant_type:
        raise ValueError(f"k_quant_type is {k_quant_type} and v_quant_type {v_quant_type}; they must be the same")
    if k_quant_type == "NONE":
        if past is not None and past.dtype.kind in "iu":
            raise ValueError(f"past_key holds {past.dtype}; set k_quant_type and v_quant_type")
        return 0
    among("kv_cache_bit_width", width, (4, 8))
    if past is None:
        raise ValueError("a quantised cache needs past_key and past_value, which say its type")
    due = np.dtype(np.int8 if width == 8 else np.uint8)
    if past.dtype != due:
        raise ValueError(f"past_key holds {past.dtype}; a cache of {width} bits holds {due}")
    return width


def _check_total(total: int, capacity: int, length: int, new: int, sliding: bool, counted: bool) -> None:
    """Raise ValueError if the new rows and the cache do not hold `total` tokens."""
    if total < 1:
        raise ValueError(f"total_sequence_length is {total}; it must be positive")
    if sliding:
        return
    if total < max(new, length):
        raise ValueError(f"total_sequence_length is {total}, less than the {length} queries")
    if total > capacity and total != capacity + new and not counted:
        raise ValueError(
            f"total_sequence_length is {total}; the past has {capacity} rows, which hold the tokens or grow by {new}"
        )
    if total > capacity + new:
        raise ValueError(f"total_sequence_length is {total}; the past has {capacity} rows and {new} are new")


def _slack(capacity: int, window: int, missing: bool) -> int:
    """How many tokens a cache of a window drops at once."""
    if window < 1 or missing or capacity < window:
        raise ValueError(
            f"sliding_window_cache=1 needs past_key with at least local_window_size rows; it has {capacity} for {window}"
        )
    return capacity - window + 1


def _resident(tokens: int, capacity: int, slack: int) -> int:
    """How many of `tokens` a cache of a window still holds: those beyond its capacity go `slack` at a time."""
    return tokens - max(-(-(tokens - capacity) // slack), 0) * slack


def normalized(name: str, x: Array, weight: Array, epsilon: float) -> Array:
    check_shape(name, weight.shape, x.shape[-1:])
    if not 0 < epsilon < math.inf:
        raise ValueError(f"the epsilon of {name} is {epsilon}; it must be positive")
    return np.asarray(x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + x.dtype.type(epsilon)) * weight)


def _bias(bias: Array | None, batch: int, heads: int, length: int, total: int) -> Array | None:
    """Checked: (1 or batch, 1 or heads, length, total)"""
    if bias is None:
        return None
    if bias.ndim != 4 or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        raise ValueError(
            f"attention_bias has the shape {list(bias.shape)}; ({batch} or 1, {heads} or 1, {length}, {total})"
        )
    check_shape("attention_bias", bias.shape[2:], (length, total))
    return bias


def sink_scores(sink: Array | None, heads: int, smooth: bool, kind: np.dtype[Any]) -> Array | None:
    """A score for each head whose key has no value; 0 where it is only `smooth`."""
    if sink is not None:
        check_shape("head_sink", sink.shape, (heads,))
        return sink
    return np.zeros(heads, kind) if smooth else None


def one_number(name: str, x: Array) -> int:
    if x.size != 1:
        raise ValueError(f"{name} has the shape {list(x.shape)}; it is one number")
    return int(x.reshape(-1)[0])


def per_sample(name: str, x: Array, batch: int, low: int, high: int) -> Array:
    """One number for each sample, from `low` to `high`."""
    if not x.ndim or x.size != batch:
        raise ValueError(f"{name} has the shape {list(x.shape)}; {[batch]} is needed")
    within(name, x, low, high)
    return x.reshape(-1).astype(np.int64)


def within(name: str, x: Array, low: int, high: int) -> None:
    if x.size and not low <= x.min() <= x.max() <= high:
        raise ValueError(f"{name} is {x.tolist()}; each number is in {low}..{high}")


def among(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; there are {', '.join(map(repr, known))}")


@kernel("SparseAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def sparse_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array,
    past_value: Array,
    block_row_indices: Array,
    block_col_indices: Array,
    total_sequence_length: Array,
    key_total_sequence_lengths: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sparse_block_size: int,
) -> tuple[Array, Array, Array]:
    """One sample after another: a query sees the earlier keys in the blocks that a row of its head's mask lists"""
    for name, flag in (("do_rotary", do_rotary), ("rotary_interleaved", rotary_interleaved)):
        among(name, flag, (0, 1))
    q, k, v = split(query, key, value, num_heads, kv_num_heads)
    batch, length, _, size = q.shape
    check_shape("key", k.shape[:2], (batch, length))
    capacity = past_key.shape[2] if past_key.ndim == 4 else -1
    for name, past in (("past_key", past_key), ("past_value", past_value)):
        check_shape(name, past.shape, (batch, kv_num_heads, capacity, size))
    layouts = _layouts(block_row_indices, block_col_indices, num_heads)
    reach = min(capacity, (block_row_indices.shape[1] - 1) * sparse_block_size)
    total = one_number("total_sequence_length", total_sequence_length)
    if sparse_block_size < 1 or not length <= total <= reach:
        raise ValueError(
            f"total_sequence_length is {total}; the caches and masks of blocks of {sparse_block_size} have room for {reach}, "
            f"and there are {length} queries"
        )
    least = 1 if total == length else length
    check_shape("key_total_sequence_lengths", key_total_sequence_lengths.shape, (batch,))
    lengths = per_sample("key_total_sequence_lengths", key_total_sequence_lengths, batch, least, total)
    fresh = np.minimum(length, lengths)
    before = lengths - fresh
    if do_rotary:
        steps = np.arange(length)
        turn = Rotary(
            cos_cache, sin_cache, np.where(steps < fresh[:, None], before[:, None] + steps, 0), rotary_interleaved
        )
        q, k = turn(q), turn(k)
    y, keys, values = np.zeros_like(q), past_key.copy(), past_value.copy()
    for b in range(batch):
        start, count, end = int(before[b]), int(fresh[b]), int(lengths[b])
        for cache, new in ((keys, k), (values, v)):
            cache[b, :, start:end] = new[b, :count].swapaxes(0, 1)
        seen = np.zeros((num_heads, count, end), bool)
        for head in range(num_heads):
            rows = layouts[head % len(layouts)]
            for s in range(count):
                for block in rows[(start + s) // sparse_block_size]:
                    first = block * sparse_block_size
                    seen[head, s, first : min(first + sparse_block_size, start + s + 1)] = True
        own_keys, own_values = (x[b, :, :end].swapaxes(0, 1) for x in (keys, values))
        y[b, :count], _ = attend(q[b, :count], own_keys, own_values, seen, scale, 0.0, None, None)
    return y.reshape(batch, length, num_heads * size), keys, values


def _layouts(rows: Array, columns: Array, heads: int) -> list[list[list[int]]]:
    """The blocks in each row of each mask."""
    if rows.ndim != 2 or rows.shape[1] < 2 or not len(rows) or heads % len(rows):
        raise ValueError(
            f"block_row_indices has the shape {list(rows.shape)}; (masks, blocks + 1) is needed, and masks divide {heads} heads"
        )
    if columns.ndim != 2:
        raise ValueError(f"block_col_indices has the shape {list(columns.shape)}; (masks, entries) is needed")
    check_shape("block_col_indices", columns.shape, (len(rows), columns.shape[1]))
    if np.any(rows[:, 0] != 0) or np.any(np.diff(rows) < 0) or np.any(rows > columns.shape[1]):
        raise ValueError(
            f"block_row_indices is {rows.tolist()}; each row starts at 0 and rises to at most {columns.shape[1]}"
        )
    found = []
    for starts, entries in zip(rows, columns, strict=True):
        check_indices(entries[: starts[-1]], len(starts) - 1, "block_col_indices", lowest=0)
        found.append([entries[a:b].tolist() for a, b in pairwise(starts)])
    return found
