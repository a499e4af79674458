"""ONNX Runtime's attentions whose query heads share keys and values, and which keep them in a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices, widened
from refgrad.backends.numpy.memory import need
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.bodies.grouped_attention import norm_epsilon
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("GroupQueryAttention", domain=MICROSOFT, fresh=True)
def group_query_attention(args: Arguments, *, _wanted: tuple[bool, ...]) -> tuple[Array | None, ...]:
    """One sample after another: its new keys join the keys of its cache, and each query sees the keys up to its own place"""
    declared = args.query.dtype
    kinds = [declared if past is None else past.dtype for past in (args.past_key, args.past_value)]
    q, k, v = normalized(args, *split(args))
    samples = _samples(args, k.shape[1])
    if args.do_rotary:
        turn = Rotary(args, _positions(args, samples))
        q, k = turn(q), k if samples.shared else turn(k)

    (batch, length, _, size), total = q.shape, samples.total
    bits = 0 if args.k_quant_type == "NONE" else args.kv_cache_bit_width
    stored = size // 2 if bits == 4 else size
    bias, sink = wide(args.attention_bias), sink_scores(args, args.smooth_softmax == 1, q.dtype)
    y = np.zeros_like(q)
    presents = [np.zeros((batch, args.kv_num_heads, samples.rows, stored), kind) for kind in kinds]
    inner = np.zeros((batch, args.num_heads, length, total), q.dtype) if len(_wanted) > 3 and _wanted[3] else None
    caches = [
        (past, present, Quantizer(args.k_quant_type, scale, name, bits, args.kv_num_heads, size))
        for past, present, scale, name in zip(
            map(wide, (args.past_key, args.past_value)),
            presents,
            (args.k_scale, args.v_scale),
            ("k_scale", "v_scale"),
            strict=True,
        )
    ]
    for b in range(batch):
        end, start, count = int(samples.lengths[b]), int(samples.before[b]), int(samples.fresh[b])
        keys, values = (
            _extended(samples, b, x[b, : 0 if samples.shared else count], *cache)
            for x, cache in zip((k, v), caches, strict=True)
        )
        places = np.arange(end - len(keys), end)
        own = np.arange(start, start + count)[:, None]
        seen = places <= own if args.causal else np.ones((count, len(places)), bool)
        if args.local_window_size > 0:
            seen &= places > own - args.local_window_size
        added = None if bias is None else bias[min(b, len(bias) - 1)][:, :count, places]
        y[b, :count], middle = attend(
            q[b, :count], keys, values, seen, args.scale, args.softcap, added, sink, args.qk_output
        )
        if inner is not None:
            inner[b, :, :count, places[0] : end] = middle
    output = y.reshape(batch, length, args.num_heads * size).astype(declared)
    return output, *presents, inner.astype(declared) if args.qk_output and inner is not None else None


@dataclass(frozen=True)
class _Samples:
    """The tokens of the samples, and the rows of the cache: `slack` of a window's are dropped at once."""

    total: int  # the tokens of the longest sample
    lengths: Array  # of each sample, with the new tokens
    fresh: Array  # the queries of each
    shared: bool  # the keys are all in the past
    capacity: int
    rows: int
    slack: int

    @property
    def before(self) -> Array:
        """The place of the first query of each sample."""
        return np.asarray(self.lengths - self.fresh)

    def resident(self, tokens: int) -> int:
        """How many of `tokens` the cache still holds: those beyond its capacity go `slack` at a time."""
        return tokens - max(-(-(tokens - self.capacity) // self.slack), 0) * self.slack if self.slack else tokens


def _samples(args: Arguments, new: int) -> _Samples:
    """The tokens of the samples, each of which brings `new` keys. Raises ValueError where the cache does not hold them."""
    length = args.query.shape[1]
    shared, sliding = length > 0 and not new, bool(args.sliding_window_cache)
    total, capacity = args.total_sequence_length.item(), 0 if args.past_key is None else args.past_key.shape[2]
    lengths = per_sample("seqlens_k", args.seqlens_k, 0, total - 1) + 1
    if total < 1:
        raise ValueError(f"total_sequence_length is {total}; it must be positive")
    if sliding and shared:
        raise ValueError("sliding_window_cache=1 needs new keys")
    if not sliding:
        _check_total(total, capacity, length, new, args.query_seqlens is not None)
    fresh = np.minimum(length, lengths)
    if args.query_seqlens is not None:
        fresh = per_sample("query_seqlens", args.query_seqlens, 0, length)
    rows, slack = (capacity, capacity - args.local_window_size + 1) if sliding else (max(total, capacity), 0)
    samples = _Samples(total, lengths, fresh, shared, capacity, rows, slack)
    before = samples.before.tolist()
    if min(before, default=0) < 0:
        raise ValueError(f"query_seqlens {fresh.tolist()} are more than the {lengths.tolist()} tokens of seqlens_k + 1")
    if not sliding and args.query_seqlens is not None and np.any((fresh > 0) & (samples.before + length > rows)):
        raise ValueError(f"the chunks of {length} rows after {before} do not fit into {rows} rows of the cache")
    if not sliding and not shared and max(before, default=0) > capacity:
        raise ValueError(f"seqlens_k counts {before} tokens before the new ones; the past has {capacity} rows")
    return samples


def _check_total(total: int, capacity: int, length: int, new: int, counted: bool) -> None:
    """Raise ValueError if the new rows and the cache do not hold `total` tokens."""
    if total < max(new, length):
        raise ValueError(f"total_sequence_length is {total}, less than the {length} queries")
    if total > capacity and total != capacity + new and not counted:
        raise ValueError(
            f"total_sequence_length is {total}; the past has {capacity} rows, which hold the tokens or grow by {new}"
        )
    if total > capacity + new:
        raise ValueError(f"total_sequence_length is {total}; the past has {capacity} rows and {new} are new")


def _positions(args: Arguments, samples: _Samples) -> Array:
    """The positions (B, S) of the queries for the rotation, 0 for padding."""
    batch, length = args.query.shape[:2]
    steps = np.arange(length)
    positions = samples.before[:, None] + steps
    if args.position_ids is not None:
        first = args.query_seqlens is None and samples.total == length
        positions = args.position_ids[:1, :1] + steps if first and batch else args.position_ids
    return np.where(steps >= samples.fresh[:, None], 0, positions)


def _extended(samples: _Samples, b: int, new: Array, past: Array | None, present: Array, quantizer: Quantizer) -> Array:
    """The keys or values of a sample, first the past, then the new ones. It writes them to `present` too."""
    end, start = int(samples.lengths[b]), int(samples.before[b])
    held = end if samples.shared else samples.resident(start)
    rows = quantizer.to_cache(new)
    if past is not None:
        rows = np.concatenate([past[b, :, :held].swapaxes(0, 1), rows])
    kept = samples.resident(end)
    present[b, :, :kept] = rows[len(rows) - kept :].swapaxes(0, 1)
    return quantizer.read(rows)


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


def split(args: Arguments) -> list[Array]:
    """Query, key and value, which may all be in `query`, as (..., heads, size) in the type to compute in."""
    query, key, value = map(wide, (args.query, args.key, args.value))
    heads = [args.num_heads, args.kv_num_heads, args.kv_num_heads]
    if key is None:
        size = query.shape[-1] // sum(heads)
        return np.split(query.reshape(*query.shape[:-1], sum(heads), size), np.cumsum(heads)[:2], -2)
    size = query.shape[-1] // args.num_heads
    return [x.reshape(*x.shape[:-1], n, size) for x, n in zip((query, key, value), heads, strict=True)]


class Rotary:
    """Turns pairs of features by the angles of the positions (batch, sequence)."""

    def __init__(self, args: Arguments, positions: Array) -> None:
        check_indices(positions, len(args.cos_cache), "the positions", lowest=0)
        self._cos, self._sin = (wide(cache)[positions][..., None, :] for cache in (args.cos_cache, args.sin_cache))
        self._pairs = args.cos_cache.shape[1]
        self._interleaved, self._first = args.rotary_interleaved, getattr(args, "rotary_offset", 0)

    def __call__(self, x: Array) -> Array:
        """x (batch, sequence, heads, size), turned."""
        low, high = self._first, self._first + 2 * self._pairs
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
            assert scale is not None
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


def normalized(args: Arguments, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Query and key divided by their norms, where they have weights; and the value as it is."""
    if args.q_norm_weight is None:
        return q, k, v
    q, k = (
        x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + x.dtype.type(epsilon)) * wide(weight)
        for x, epsilon, weight in (
            (q, norm_epsilon(args, "q_norm_epsilon"), args.q_norm_weight),
            (k, norm_epsilon(args, "k_norm_epsilon"), args.k_norm_weight),
        )
    )
    return q, k, v


def sink_scores(args: Arguments, smooth: bool, kind: np.dtype[Any]) -> Array | None:
    """A score for each head whose key has no value; 0 where it is only `smooth`."""
    if args.head_sink is None and smooth:
        return np.zeros(args.num_heads, kind)
    return None if args.head_sink is None else np.asarray(wide(args.head_sink))


def per_sample(name: str, x: Array, low: int, high: int) -> Array:
    """One number for each sample, from `low` to `high`."""
    within(name, x, low, high)
    return x.reshape(-1).astype(np.int64)


def within(name: str, x: Array, low: int, high: int) -> None:
    if x.size and not low <= x.min() <= x.max() <= high:
        raise ValueError(f"{name} is {x.tolist()}; each number is in {low}..{high}")
