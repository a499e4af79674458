"""ONNX Runtime's attentions whose query heads share keys and values, and which keep them in a cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.kv_cache import CACHE, Cache, check_cache
from refgrad.microsoft.bodies.position import check_counts
from refgrad.microsoft.declared import (
    Size,
    check_flags,
    check_pairs,
    check_shape,
    divided,
    first,
    one_number,
    product,
    sizes,
)
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import FLOATS, Shapes

_INT32, _INT64 = ("tensor(int32)",), ("tensor(int64)",)


@dataclass(frozen=True)
class GroupedHeads:
    """Sizes of an attention whose heads share keys, as far as they are known: samples, queries, new keys, width of a head."""

    batch: Size
    queries: Size
    new: Size
    width: Size

    def check_caches(self, shapes: Shapes, args: Arguments, packs: int = 1) -> None:
        """Refuse past_key and past_value that do not have these sizes; `packs` elements of them lie in one."""
        check_pairs(args, "past_key", "past_value")
        capacity = first(sizes(shapes, args.past_key, 4)[2], sizes(shapes, args.past_value, 4)[2])
        stored = None if self.width is None else self.width // packs
        for name in ("past_key", "past_value"):
            check_shape(shapes, name, getattr(args, name), (self.batch, args.kv_num_heads, capacity, stored))

    def check_norms(self, shapes: Shapes, args: Arguments) -> None:
        """Refuse weights and epsilons of the norms of queries and keys that do not fit."""
        check_pairs(args, "q_norm_weight", "k_norm_weight")
        for name in ("q_norm", "k_norm"):
            check_shape(shapes, f"{name}_weight", getattr(args, f"{name}_weight"), (self.width,))
            epsilon = norm_epsilon(args, f"{name}_epsilon")
            if args.q_norm_weight is not None and not 0 < epsilon < math.inf:
                raise UnsupportedFormError(f"the epsilon of {name}_weight is {epsilon}; it is positive")

    def check_rotary(self, shapes: Shapes, args: Arguments) -> None:
        """Refuse caches of cosines and sines that are not of one shape, or have more pairs than a head."""
        if not args.do_rotary:
            return
        offset = getattr(args, "rotary_offset", 0)
        if offset < 0 or offset % 8:
            raise UnsupportedFormError(f"rotary_offset is {offset}; it is a multiple of 8")
        if args.cos_cache is None or args.sin_cache is None:
            raise UnsupportedFormError("do_rotary=1 needs the inputs cos_cache and sin_cache")
        check_shape(shapes, "cos_cache", args.cos_cache, (None, None))
        check_shape(shapes, "sin_cache", args.sin_cache, sizes(shapes, args.cos_cache, 2))
        check_shape(shapes, "position_ids", getattr(args, "position_ids", None), (self.batch, self.queries))
        pairs = sizes(shapes, args.cos_cache, 2)[1]
        if pairs is not None and self.width is not None and offset + 2 * pairs > self.width:
            raise UnsupportedFormError(
                f"its input cos_cache has {pairs} columns; a head of {self.width} elements has at most "
                f"{(self.width - offset) // 2} pairs"
            )


def check_heads(shapes: Shapes, args: Arguments, rank: int = 3) -> GroupedHeads:
    """Refuse a query, keys, values and sinks that do not fit each other; `rank` is 2 where the samples are in a row."""
    query, key, value, N, K = args.query, args.key, args.value, args.num_heads, args.kv_num_heads
    check_counts(num_heads=N, kv_num_heads=K)
    if N % K:
        raise UnsupportedFormError(f"kv_num_heads={K} does not divide num_heads={N}")
    check_pairs(args, "key", "value")
    check_shape(shapes, "query", query, (None,) * rank)
    check_shape(shapes, "head_sink", getattr(args, "head_sink", None), (N,))
    *batch, S, columns = sizes(shapes, query, rank)
    B = batch[0] if batch else None
    if key is None:
        return GroupedHeads(B, S, S, divided("query", columns, N + 2 * K, "num_heads + 2·kv_num_heads"))
    width = divided("query", columns, N, "num_heads")
    T = first(sizes(shapes, key, rank)[-2], sizes(shapes, value, rank)[-2])
    for name, x in (("key", key), ("value", value)):
        check_shape(shapes, name, x, (*batch, T, product(K, width)))
    return GroupedHeads(B, S, T, width)


def norm_epsilon(args: Arguments, name: str) -> float:
    """The epsilon of the norm of queries or of keys, which may have one of its own, called `name`."""
    own = getattr(args, name, None)
    return float(args.qk_norm_epsilon if own is None else own)


def check_windows(args: Arguments) -> None:
    """Refuse a window without a key."""
    if args.local_window_size == 0:
        raise UnsupportedFormError("local_window_size=0 lets no query see a key; use -1 for no window")


def check_per_sample(shapes: Shapes, name: str, value: Any, batch: Size) -> None:
    """Refuse an input that does not have a number for each sample."""
    check_shape(shapes, name, value, (batch,), (batch, 1), (1, batch))


def _check_group_query(shapes: Shapes, args: Arguments) -> None:
    check_flags(args, "causal", "do_rotary", "rotary_interleaved", "sliding_window_cache")
    if args.qk_output not in (0, 1, 2):
        raise UnsupportedFormError(f"qk_output is {args.qk_output}; there are 0, 1 and 2")
    heads = check_heads(shapes, args)
    B, S, T = heads.batch, heads.queries, heads.new
    if args.query_seqlens is not None and (not args.causal or args.past_key is None):
        raise UnsupportedFormError("query_seqlens needs causal=1, past_key and past_value")
    if None not in (S, T) and T != S and (args.past_key is None or T or args.query_seqlens is not None):
        raise UnsupportedFormError(
            f"its input key has {T} rows and query {S}; they have as many, or key has none and past_key all"
        )
    heads.check_caches(shapes, args, 2 if args.k_quant_type != "NONE" and args.kv_cache_bit_width == 4 else 1)
    if args.k_quant_type != args.v_quant_type:
        raise UnsupportedFormError(
            f"k_quant_type is {args.k_quant_type} and v_quant_type {args.v_quant_type}; they are the same"
        )
    for past, scale in (("past_key", "k_scale"), ("past_value", "v_scale")):
        check_cache(shapes, args, past, args.k_quant_type, scale, args.kv_cache_bit_width)
    every = one_number(shapes, "total_sequence_length", args.total_sequence_length)
    check_shape(shapes, "attention_bias", args.attention_bias, ((1, B), (1, args.num_heads), S, every))
    check_per_sample(shapes, "seqlens_k", args.seqlens_k, B)
    check_per_sample(shapes, "query_seqlens", args.query_seqlens, B)
    heads.check_norms(shapes, args)
    heads.check_rotary(shapes, args)
    _check_window(shapes, args)
    several = B not in (None, 1) and S is not None and S > 1 and every not in (None, S)
    if several and args.query_seqlens is None and args.past_key is not None:
        raise UnsupportedFormError(
            f"{B} samples bring {S} queries each to a past, and total_sequence_length is {every}; give query_seqlens, "
            "or one sample"
        )


def _check_window(shapes: Shapes, args: Arguments) -> None:
    """Refuse a window without a key, and a cache that cannot hold it."""
    check_windows(args)
    window = args.local_window_size
    if not args.causal and window != -1:
        raise UnsupportedFormError(f"local_window_size is {window}; with causal=0 it is -1")
    if not args.sliding_window_cache:
        return
    if args.past_key is None or args.qk_output or not args.causal:
        raise UnsupportedFormError("sliding_window_cache=1 needs past_key, past_value, causal=1 and qk_output=0")
    capacity = sizes(shapes, args.past_key, 4)[2]
    if window < 1 or (capacity is not None and capacity < window):
        most = "" if capacity is None else f" to {capacity}, the rows of past_key"
        raise UnsupportedFormError(
            f"local_window_size is {window}; with sliding_window_cache=1 it is from 1{most or ' on'}"
        )


@body(
    "GroupQueryAttention",
    "output",
    optional=["present_key", "present_value", "output_qk"],
    types={
        "seqlens_k": _INT32,
        "total_sequence_length": "seqlens_k",
        "query_seqlens": "seqlens_k",
        "position_ids": _INT64,
        "past_key": CACHE,
        "past_value": CACHE,
        "present_key": "past_key",
        "present_value": "past_value",
        "k_scale": FLOATS,
        "v_scale": "k_scale",
    },
    check=_check_group_query,
    domain=MICROSOFT,
)
def group_query_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    past_key: str | None,
    past_value: str | None,
    seqlens_k: str,
    total_sequence_length: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    position_ids: str | None = None,
    attention_bias: str | None = None,
    head_sink: str | None = None,
    k_scale: str | None = None,
    v_scale: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    query_seqlens: str | None = None,
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
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ + attention_bias)·V, a head of K and V for a group of heads of Q, of the past and the new tokens

    A query that is padding has a result of 0, as have the rows of the cache that hold no token. In a cache of 4 bits, a
    number outside of its range has the gradient 0, whatever the option `quantization` is.
    """
    q, k, v = split(op, query, key, value, num_heads, kv_num_heads)
    window = local_window_size if sliding_window_cache else None
    q, k = with_norms(op, Arguments(**locals()), q, k)

    samples = _samples(op, query, k, seqlens_k, total_sequence_length, query_seqlens)
    if do_rotary:
        at = _positions(op, samples, position_ids, query_seqlens)
        q, k = (rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved) for x in (q, k))
    if past_key is None or past_value is None:
        context = _new_context(op, samples, k, v)
    else:
        layout = _layout(op, samples, past_key, window)
        parts = ((k, past_key, k_scale), (v, past_value, v_scale))
        context = _cached_context(op, samples, layout, parts, k_quant_type, kv_cache_bit_width, query)
        if window is not None and attention_bias is not None:
            attention_bias = _columns(op, attention_bias, context.places, samples.total)

    seen = _seen(op, samples, context.places, causal, local_window_size)
    sink = op.Expand(op.const(0.0, like=query), [num_heads]) if smooth_softmax == 1 else None
    sink = sink if head_sink is None else head_sink
    heads, keys, values = op.Transpose(q, perm=[0, 2, 1, 3]), context.keys, context.values
    shown, real = op.Unsqueeze(seen, [1]), op.Unsqueeze(samples.real, [1])
    attended = attend(
        op, heads, keys, values, shown, real, kv_num_heads, num_heads, scale, softcap, attention_bias, sink
    )
    return _outputs(op, attended, context.presents, query, past_key, seen, samples.real, qk_output)


class _Samples(NamedTuple):
    """The tokens of the samples. A number for each sample has the shape (B, 1), a number for all samples (1)."""

    length: str  # (1): the queries, with padding
    new: str  # (1): the new keys, with padding
    total: str  # (1): the tokens of the longest sample
    tokens: str  # (B, 1): the tokens of each sample, with the new ones
    counts: str  # (B, 1): the queries of each sample
    steps: str  # (S): 0, 1, ... for the queries
    places: str  # (B, S): the queries among the tokens of their sample
    real: str  # (B, S): True if the query is not padding


def _samples(
    op: FunctionEmitter,
    query: str,
    k: str,
    seqlens_k: str,
    total_sequence_length: str,
    query_seqlens: str | None,
) -> _Samples:
    """The tokens of the samples. Without `query_seqlens` a sample has `length` queries, or all its tokens if they are fewer."""
    length, new, total = op.Shape(query, start=1, end=2), op.Shape(k, start=1, end=2), int64(op, total_sequence_length)
    tokens = op.Add(column(op, seqlens_k, query), 1)
    counts = op.Min(tokens, length) if query_seqlens is None else column(op, query_seqlens, query)
    before = op.Sub(tokens, counts)
    steps = op.up_to(length)
    places = op.Add(before, steps)
    return _Samples(length, new, total, tokens, counts, steps, places, op.Less(steps, counts))


def _positions(op: FunctionEmitter, samples: _Samples, position_ids: str | None, query_seqlens: str | None) -> str:
    """The positions (B, S) of the queries for the rotation, 0 for padding."""
    at = samples.places
    if position_ids is not None:
        at = position_ids
        if query_seqlens is None:  # of a first prompt only one number counts
            start = op.Slice(position_ids, [0, 0], [1, 1], [0, 1])
            at = op.Where(op.Equal(samples.total, samples.length), op.Add(start, samples.steps), position_ids)
    return op.Where(samples.real, at, 0)


class _Context(NamedTuple):
    """The keys and the values (B, K, T, H) that the queries attend to, their places (1 or B, T), and the presents."""

    keys: str
    values: str
    places: str
    presents: tuple[str, str]


def _new_context(op: FunctionEmitter, samples: _Samples, k: str, v: str) -> _Context:
    """The new keys and values (B, T, K, H), where there is no past."""
    keys, values = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (k, v))
    places = op.Unsqueeze(op.up_to(samples.new), [0])
    written = op.Unsqueeze(op.Less(places, samples.tokens), [1, 3])
    return _Context(keys, values, places, (op.Where(written, keys, 0), op.Where(written, values, 0)))


class _Layout(NamedTuple):
    """The rows of three caches and the tokens in them: past, staged (the queries attend to it), and present."""

    capacity: str  # (1): the rows of the past
    held: str  # (B, 1): the tokens in the past
    staged: str  # (1): the rows that the queries attend to
    stored: str  # (1): the rows of the present
    kept: str  # (B, 1): the tokens in the present
    first: str | None = None  # (B, 1): the place of the first token in a past that is a window
    shift: str | None = None  # (B, 1): the tokens that the window drops


def _layout(op: FunctionEmitter, samples: _Samples, past: str, window: int | None) -> _Layout:
    """The layout of a cache of all tokens, or of the last ones, at least `window` of them."""
    new, total, tokens = samples.new, samples.total, samples.tokens
    capacity = op.Shape(past, start=2, end=3)
    # a cache that is shared with another layer has the new ones already
    appended = op.Sub(tokens, op.Min(samples.counts, new))
    if window is None:
        return _Layout(capacity, held=appended, staged=total, stored=op.Max(total, capacity), kept=tokens)
    cache = _Window(op, capacity, window)
    held = cache.held(op, appended)
    first, kept = op.Sub(appended, held), cache.held(op, tokens)
    staged = op.Min(total, op.Add(capacity, new))
    shift = op.Sub(op.Sub(tokens, kept), first)
    return _Layout(capacity, held, staged, stored=capacity, kept=kept, first=first, shift=shift)


def _cached_context(
    op: FunctionEmitter,
    samples: _Samples,
    layout: _Layout,
    parts: Iterable[tuple[str, str, str | None]],
    kind: str,
    bits: int,
    query: str,
) -> _Context:
    """The keys and values after a past. `parts` has for each of both the new ones (B, S, K, H), the past and its scale."""
    places = op.Unsqueeze(op.up_to(layout.staged), [0])
    read, presents = [], []
    for x, past, scale in parts:
        cache = Cache(op, kind, bits, scale, past)
        earlier = cache.unpacked(op, op.Transpose(past, perm=[0, 2, 1, 3]))
        rows = op.Concat(earlier, cache.written(op, x, past), axis=1)
        stored, staged = _gathered(op, cache, rows, layout, samples.tokens)
        presents.append(op.Transpose(cache.packed(op, stored), perm=[0, 2, 1, 3]))
        read.append(op.Transpose(cache.read(op, staged, query), perm=[0, 2, 1, 3]))
    if layout.first is not None:
        places = op.Add(places, layout.first)
    return _Context(read[0], read[1], places, (presents[0], presents[1]))


def _gathered(op: FunctionEmitter, cache: Cache, rows: str, layout: _Layout, tokens: str) -> tuple[str, str]:
    """The rows of the present, and the rows that the queries attend to. `rows` are the past and then the new ones."""
    capacity, held, staged, stored, kept, first, shift = layout
    if first is None or shift is None:
        every = cache.gathered(op, rows, capacity, held, op.up_to(stored), kept)
        return every, op.Slice(every, [0], staged, [1])
    every = cache.gathered(op, rows, capacity, held, op.Add(shift, op.up_to(stored)), op.Add(shift, kept))
    return every, cache.gathered(op, rows, capacity, held, op.up_to(staged), op.Sub(tokens, first))


def _seen(op: FunctionEmitter, samples: _Samples, key_places: str, causal: int, local_window_size: int) -> str:
    """True if the query sees the key, (B, S, T)."""
    own, theirs = op.Unsqueeze(samples.places, [2]), op.Unsqueeze(key_places, [1])
    seen = op.LessOrEqual(theirs, own) if causal else op.Less(theirs, op.Unsqueeze(samples.tokens, [2]))
    if local_window_size > 0:
        seen = op.And(seen, op.Greater(theirs, op.Sub(own, local_window_size)))
    return seen


def _outputs(
    op: FunctionEmitter,
    attended: tuple[str, str, str],
    presents: Iterable[str],
    query: str,
    past_key: str | None,
    seen: str,
    real: str,
    qk_output: int,
) -> tuple[str | None, ...]:
    """The outputs in the types of the inputs. output_qk has the scores or the shares, 0 if a query does not see a key."""
    y, scores, shares = attended
    y = op.CastLike(y, query)
    presents = [op.CastLike(x, query if past_key is None else past_key) for x in presents]
    if not qk_output:
        return y, *presents, None
    shown = op.And(op.Unsqueeze(seen, [1]), op.Unsqueeze(real, [1, 3]))
    return y, *presents, op.CastLike(op.Where(shown, scores if qk_output == 1 else shares, 0), query)


def split(
    op: FunctionEmitter, query: str, key: str | None, value: str | None, num_heads: int, kv_num_heads: int
) -> list[str]:
    """Query, key and value, which may all be in `query`, as (B, S, heads, H) in the type to compute in."""
    counts = [num_heads, kv_num_heads, kv_num_heads]
    parts = [query, key, value]
    size = op.Div(op.Shape(query, start=2, end=3), [num_heads if key is not None else sum(counts)])
    if key is None:
        ends = op.Mul(size, np.cumsum([0, *counts]).reshape(4, 1))
        bounds = [op.Gather(ends, op.const(np.array(n)), axis=0) for n in range(4)]
        parts = [op.Slice(query, bounds[n], bounds[n + 1], [2]) for n in range(3)]
    batch = op.Shape(query, end=1)  # of all three: the Reshape fails where one would be broadcast
    return [
        op.Reshape(op.wide(str(x)), op.Concat(batch, op.Shape(x, start=1, end=2), [n], size, axis=0), allowzero=1)
        for x, n in zip(parts, counts, strict=True)
    ]


def int64(op: FunctionEmitter, x: str) -> str:
    """One number, with one axis."""
    return op.Cast(op.Reshape(x, [1]), to=TensorProto.INT64)


def column(op: FunctionEmitter, x: str, beside: str) -> str:
    """A number for each sample as (B, 1), where B is the batch of `beside`."""
    return op.Cast(op.Reshape(x, op.Concat(op.Shape(beside, end=1), [1], axis=0), allowzero=1), to=TensorProto.INT64)


def normalized(op: FunctionEmitter, x: str, weight: str, epsilon: float) -> str:
    """x/√(mean x² + ε)·weight over the last of the 4 axes"""
    root = op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(x, x), [3]), epsilon))
    return op.Mul(op.Div(x, root), op.wide(weight))


def with_norms(op: FunctionEmitter, args: Arguments, q: str, k: str) -> tuple[str, str]:
    """Queries and keys divided by their norms, where these have weights."""
    if args.q_norm_weight is None:
        return q, k
    q = normalized(op, q, args.q_norm_weight, norm_epsilon(args, "q_norm_epsilon"))
    return q, normalized(op, k, args.k_norm_weight, norm_epsilon(args, "k_norm_epsilon"))


def rotated(
    op: FunctionEmitter,
    x: str,
    cos_cache: str | None,
    sin_cache: str | None,
    positions: str,
    interleaved: int,
    first: int = 0,
) -> str:
    """Pairs of the features of x (..., heads, H) from `first` on, turned by the angles of `positions` (...)."""
    cos, sin = (op.Unsqueeze(op.wide(op.Gather(c, positions)), [-2]) for c in (cos_cache, sin_cache))
    pairs = op.Shape(cos_cache, start=1, end=2)
    middle, last = (op.Add(n, [first]) if first else n for n in (pairs, op.Add(pairs, pairs)))
    if interleaved:
        a, b = (op.Slice(x, [first + n], last, [-1], [2]) for n in (0, 1))
    else:
        a, b = op.Slice(x, [first], middle, [-1]), op.Slice(x, middle, last, [-1])
    turned = [op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(a, sin), op.Mul(b, cos))]
    if interleaved:
        woven = op.Concat(*(op.Unsqueeze(t, [-1]) for t in turned), axis=-1)
        turned = [op.Reshape(woven, op.Concat(op.Shape(x, end=-1), op.Add(pairs, pairs), axis=0))]
    before = [op.Slice(x, [0], [first], [-1])] if first else []
    return op.Concat(*before, *turned, op.Slice(x, last, [END], [-1]), axis=-1)


def attend(
    op: FunctionEmitter,
    q: str,
    keys: str,
    values: str,
    seen: str,
    real: str,
    kv_num_heads: int,
    num_heads: int,
    scale: float | None,
    softcap: float = 0.0,
    bias: str | None = None,
    sink: str | None = None,
) -> tuple[str, str, str]:
    """q (B, N, S, H), keys (B, K, T, H), values (B, K, T, Hv) to (B, S, N·Hv); the scores and their shares (B, N, S, T)

    `seen` (B, 1 or N, S, T) says which query sees which key. A query that is not `real` (B, 1 or N, S) has a result of 0.
    """
    length = op.Shape(keys, start=2, end=3)
    if kv_num_heads != num_heads:
        keys, values = (_repeated(op, x, kv_num_heads, num_heads) for x in (keys, values))
    q = op.Mul(q, scale) if scale else op.Div(q, op.Sqrt(op.CastLike(op.Shape(q, start=3, end=4), q)))
    scores = op.MatMul(q, op.Transpose(keys, perm=[0, 1, 3, 2]))
    if softcap > 0:
        scores = op.Mul(op.Tanh(op.Div(scores, softcap)), softcap)
    if bias is not None:
        scores = op.Add(scores, op.CastLike(bias, scores))
    shown = op.Or(seen, op.Not(op.Unsqueeze(real, [3])))  # padding sees everything, so that its shares are finite
    logits = op.Where(shown, scores, op.const(-math.inf, like=scores))
    if sink is not None:
        column = op.Reshape(op.CastLike(sink, q), [1, num_heads, 1, 1])
        one = op.Concat(op.Shape(q, end=3), [1], axis=0)
        logits = op.Concat(logits, op.Expand(column, one), axis=3)
    shares = op.Softmax(logits, axis=3)
    if sink is not None:
        shares = op.Slice(shares, [0], length, [3])
    mixed = op.Where(op.Unsqueeze(real, [3]), op.MatMul(shares, values), 0)
    width = op.Shape(values, start=3, end=4)
    y = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), op.Concat([0, 0], op.Mul(width, [num_heads]), axis=0))
    return y, scores, shares


def sees_any(op: FunctionEmitter, seen: str) -> str:
    """True if a query sees any key, (B, N, S)."""
    return op.Greater(op.Squeeze(op.reduce("ReduceMax", op.Cast(seen, to=TensorProto.INT32), [3]), [3]), np.int32(0))


def _repeated(op: FunctionEmitter, x: str, count: int, wanted: int) -> str:
    """(B, count, T, H) to (B, wanted, T, H): each head as often as the others, one after the other."""
    copies = op.Expand(op.Unsqueeze(x, [2]), op.const(np.array([1, 1, wanted // count, 1, 1])))
    return op.Reshape(copies, op.Concat(op.Shape(x, end=1), [wanted], op.Shape(x, start=2), axis=0), allowzero=1)


def _columns(op: FunctionEmitter, bias: str, places: str, total: str) -> str:
    """The columns of a bias (1 or B, 1 or N, S, total) at `places` (B, T), for each sample its own."""
    samples, heads, rows = (op.Shape(bias, start=n, end=n + 1) for n in range(3))
    samples = op.Max(samples, op.Shape(places, end=1))
    bias = op.Expand(bias, op.Concat(samples, heads, rows, total, axis=0))
    last = op.Sub(total, 1)
    indices = op.Unsqueeze(op.Min(places, last), [2])
    taken = op.GatherND(op.Transpose(bias, perm=[0, 3, 1, 2]), indices, batch_dims=1)
    return op.Transpose(taken, perm=[0, 2, 3, 1])


class _Window:
    """A cache of the last tokens: beyond its capacity it drops `slack` of them at once."""

    def __init__(self, op: FunctionEmitter, capacity: str, size: int) -> None:
        self._capacity, self._slack = capacity, op.Sub(capacity, [size - 1])

    def held(self, op: FunctionEmitter, tokens: str) -> str:
        """How many of `tokens` it holds."""
        excess = op.Max(op.Sub(tokens, self._capacity), [0])
        times = op.Div(op.Sub(op.Add(excess, self._slack), [1]), self._slack)
        return op.Sub(tokens, op.Mul(times, self._slack))
