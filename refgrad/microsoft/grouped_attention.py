"""ONNX Runtime's attentions whose query heads share keys and values, and which keep them in a cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.declared import Size, check_shape, divided, first, one_number, product, sizes
from refgrad.microsoft.position import check_counts
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import FLOATS, UnsupportedFormError, operator

_INT32, _INT64 = ("tensor(int32)",), ("tensor(int64)",)
CACHE = (*FLOATS, "tensor(int8)", "tensor(uint8)")


@operator(
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
    check_flags(causal=causal, do_rotary=do_rotary)
    check_flags(rotary_interleaved=rotary_interleaved, sliding_window_cache=sliding_window_cache)
    check_pairs(past_key=past_key, past_value=past_value)
    check_pairs(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    _check_attributes(past_key, causal, k_quant_type, local_window_size, qk_output, sliding_window_cache, v_quant_type)
    q, k, v = split(op, query, key, value, num_heads, kv_num_heads)
    declared = _check_grouped(op, query, key, value, num_heads, kv_num_heads)
    declared.check_pasts(op, past_key, past_value, 2 if k_quant_type != "NONE" and kv_cache_bit_width == 4 else 1)
    every = one_number(op, "total_sequence_length", total_sequence_length)
    declared.check(op, every, attention_bias, head_sink, seqlens_k)
    if do_rotary:
        _check_caches(op, cos_cache, sin_cache, query, num_heads if key is not None else num_heads + 2 * kv_num_heads)
    window = local_window_size if sliding_window_cache else None
    _check_window(op, past_key, window)
    _check_samples(op, query, past_key, total_sequence_length, query_seqlens)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = normalized(op, q, q_norm_weight, qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon)
        k = normalized(op, k, k_norm_weight, qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon)

    samples = _samples(op, query, k, seqlens_k, total_sequence_length, query_seqlens)
    if do_rotary:
        at = _positions(op, samples, position_ids, query_seqlens)
        q, k = (rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved) for x in (q, k))
    if past_key is None or past_value is None:
        context = _new_context(op, samples, k, v, k_quant_type)
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


def _check_attributes(
    past_key: str | None,
    causal: int,
    k_quant_type: str,
    local_window_size: int,
    qk_output: int,
    sliding_window_cache: int,
    v_quant_type: str,
) -> None:
    """Refuse attributes of GroupQueryAttention that do not fit each other."""
    if qk_output not in (0, 1, 2):
        raise UnsupportedFormError(f"qk_output is {qk_output}; there are 0, 1 and 2")
    if local_window_size == 0:
        raise UnsupportedFormError("local_window_size=0 lets no query see a key; use -1 for no window")
    if not causal and local_window_size != -1:
        raise UnsupportedFormError(f"local_window_size is {local_window_size}; with causal=0 it is -1")
    if k_quant_type != v_quant_type:
        raise UnsupportedFormError(f"k_quant_type is {k_quant_type} and v_quant_type {v_quant_type}; they are the same")
    if sliding_window_cache and (past_key is None or qk_output or not causal):
        raise UnsupportedFormError("sliding_window_cache=1 needs past_key, past_value, causal=1 and qk_output=0")


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


def _new_context(op: FunctionEmitter, samples: _Samples, k: str, v: str, k_quant_type: str) -> _Context:
    """The new keys and values (B, T, K, H), where there is no past."""
    if k_quant_type != "NONE":
        raise UnsupportedFormError("a quantised cache needs past_key and past_value, which say its type")
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
    check_counts(num_heads=num_heads, kv_num_heads=kv_num_heads)
    if num_heads % kv_num_heads:
        raise UnsupportedFormError(f"kv_num_heads={kv_num_heads} does not divide num_heads={num_heads}")
    check_pairs(key=key, value=value)
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


@dataclass(frozen=True)
class _Grouped:
    """Sizes of GroupQueryAttention, as far as they are declared: of batch, heads, queries, new keys, and elements of a head."""

    batch: Size
    heads: int
    kv_heads: int
    queries: Size
    new: Size
    width: Size

    def check_pasts(self, op: FunctionEmitter, past_key: str | None, past_value: str | None, packs: int = 1) -> None:
        """Refuse caches that do not have these sizes; `packs` elements of them lie in one."""
        capacity = first(sizes(op, past_key, 4)[2], sizes(op, past_value, 4)[2])
        stored = None if self.width is None else self.width // packs
        for name, past in (("past_key", past_key), ("past_value", past_value)):
            check_shape(op, name, past, (self.batch, self.kv_heads, capacity, stored))

    def check(
        self, op: FunctionEmitter, every: Size, attention_bias: str | None, head_sink: str | None, seqlens_k: str
    ) -> None:
        """Refuse what does not have these sizes; `every` token is in the columns of the bias."""
        check_shape(op, "attention_bias", attention_bias, ((1, self.batch), (1, self.heads), self.queries, every))
        check_shape(op, "head_sink", head_sink, (self.heads,))
        check_shape(op, "seqlens_k", seqlens_k, (self.batch,), (self.batch, 1), (1, self.batch))


def _check_grouped(
    op: FunctionEmitter, query: str, key: str | None, value: str | None, num_heads: int, kv_num_heads: int
) -> _Grouped:
    """Refuse a query, keys and values that do not fit each other."""
    check_shape(op, "query", query, (None, None, None))
    B, S, columns = sizes(op, query, 3)
    if key is None:
        width = divided("query", columns, num_heads + 2 * kv_num_heads, "num_heads + 2·kv_num_heads")
        return _Grouped(B, num_heads, kv_num_heads, S, S, width)
    width = divided("query", columns, num_heads, "num_heads")
    T = first(sizes(op, key, 3)[1], sizes(op, value, 3)[1])
    for name, x in (("key", key), ("value", value)):
        check_shape(op, name, x, (B, T, product(kv_num_heads, width)))
    return _Grouped(B, num_heads, kv_num_heads, S, T, width)


def _check_caches(
    op: FunctionEmitter, cos_cache: str | None, sin_cache: str | None, query: str, heads: int, first_: int = 0
) -> None:
    """Refuse caches of cosines and sines that are not of one shape, or have more pairs than a head of `query`."""
    check_shape(op, "cos_cache", cos_cache, (None, None))
    check_shape(op, "sin_cache", sin_cache, sizes(op, cos_cache, 2))
    pairs, columns = sizes(op, cos_cache, 2)[1], sizes(op, query, 3)[2]
    if pairs is not None and columns is not None and first_ + 2 * pairs > columns // heads:
        raise UnsupportedFormError(
            f"its input cos_cache has {pairs} columns; a head of {columns // heads} elements has at most "
            f"{(columns // heads - first_) // 2} pairs"
        )


def _check_window(op: FunctionEmitter, past_key: str | None, window: int | None) -> None:
    """Refuse a cache of a window that cannot hold the window."""
    capacity = sizes(op, past_key, 4)[2]
    if window is not None and (window < 1 or (capacity is not None and capacity < window)):
        most = "" if capacity is None else f" to {capacity}, the rows of past_key"
        raise UnsupportedFormError(
            f"local_window_size is {window}; with sliding_window_cache=1 it is from 1{most or ' on'}"
        )


def _check_samples(
    op: FunctionEmitter, query: str, past_key: str | None, total_sequence_length: str, query_seqlens: str | None
) -> None:
    """Refuse several samples that bring several queries to a past: only query_seqlens says how long each is."""
    if query_seqlens is not None:
        return
    batch, length, _ = sizes(op, query, 3)
    every = one_number(op, "total_sequence_length", total_sequence_length)
    if past_key is None or batch in (None, 1) or length is None or length < 2 or every in (None, length):
        return
    raise UnsupportedFormError(
        f"{batch} samples bring {length} queries each to a past, and total_sequence_length is {every}; give query_seqlens, "
        "or one sample"
    )


def check_flags(**flags: int) -> None:
    """Refuse flags that are not 0 or 1."""
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise UnsupportedFormError(f"{name} is {flag}; there are 0 and 1")


def check_pairs(**inputs: str | None) -> None:
    """Refuse a node that has some of these inputs without the others."""
    if len({value is None for value in inputs.values()}) > 1:
        raise UnsupportedFormError(f"it needs {' and '.join(inputs)}, or neither of them")


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
    if cos_cache is None or sin_cache is None:
        raise UnsupportedFormError("do_rotary=1 needs the inputs cos_cache and sin_cache")
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


@dataclass
class Cache:
    """How keys or values (B, rows, heads, H) are held: as floats, or q = round(x/scale) in 8 bits, or two in a byte."""

    bits: int
    by_channel: bool
    scale: str
    empty: str  # the value that is held where there is no token

    def __init__(self, op: FunctionEmitter, kind: str, width: int, scale: str | None, past: str) -> None:
        known = ("NONE", "PER_TENSOR", "PER_CHANNEL")
        if kind not in known:
            raise UnsupportedFormError(f"its quantization {kind!r} is not known; there are {', '.join(known)}")
        self.bits, self.by_channel, self.scale = 0 if kind == "NONE" else width, kind == "PER_CHANNEL", scale or ""
        if kind != "NONE":
            if width not in (4, 8):
                raise UnsupportedFormError(f"kv_cache_bit_width={width} is not known; there are 4 and 8")
            if not self.scale:
                raise UnsupportedFormError(f"{kind} needs the inputs k_scale and v_scale")
        if self.bits == 8:
            self.empty = op.const(np.int8(0))
        elif self.bits == 4:
            self.empty = op.const(-8.0, like=self.scale)
        else:
            self.empty = op.const(0, like=past)

    def _flat(self, op: FunctionEmitter, x: str) -> str:
        """(B, rows, heads, H) to (B, rows, heads·H)"""
        width = op.Mul(op.Shape(x, start=2, end=3), op.Shape(x, start=3, end=4))
        return op.Reshape(x, op.Concat([0, 0], width, axis=0))

    def unpacked(self, op: FunctionEmitter, rows: str) -> str:
        """Rows of a cache as they are here: two in a byte are two numbers, in floats."""
        if self.bits != 4:
            return rows
        low, high = (f(rows, op.const(np.uint8(16))) for f in (op.Mod, op.Div))
        pairs = op.Concat(op.Unsqueeze(low, [4]), op.Unsqueeze(high, [4]), axis=4)
        width = op.Mul(op.Shape(rows, start=3, end=4), [2])
        numbers = op.CastLike(op.Reshape(pairs, op.Concat([0, 0, 0], width, axis=0)), self.scale)
        return op.Sub(numbers, 8.0)

    def written(self, op: FunctionEmitter, x: str, past: str) -> str:
        """New rows as the cache holds them."""
        if not self.bits:
            return op.CastLike(x, past)
        x, shape = op.CastLike(x, self.scale), op.Shape(x)
        if self.bits == 4:
            one = op.const(1.0, like=self.scale)
            nibbles = op.Clip(op.Div(x, self._laid(op, shape)), op.const(-8.0, like=x), op.const(7.0, like=x))
            zero = op.const(np.int8(0))
            return op.DequantizeLinear(op.QuantizeLinear(nibbles, one, zero), one, zero)
        scale, zero, axis = self._parameters(op)
        q = op.QuantizeLinear(self._flat(op, x), scale, zero, axis=axis)
        return op.Reshape(q, shape)

    def gathered(self, op: FunctionEmitter, rows: str, capacity: str, held: str, wanted: str, end: str) -> str:
        """The rows at `wanted`: rows of the past up to `held`, then the rows after `capacity`; empty ones from `end` on."""
        places = op.Where(op.Less(wanted, held), wanted, op.Add(op.Sub(wanted, held), capacity))
        last = op.Sub(op.Shape(rows, start=1, end=2), [1])
        taken = op.GatherND(rows, op.Unsqueeze(op.Min(places, last), [2]), batch_dims=1)
        return op.Where(op.Unsqueeze(op.Less(wanted, end), [2, 3]), taken, self.empty)

    def packed(self, op: FunctionEmitter, rows: str) -> str:
        """Rows as a cache holds them."""
        if self.bits == 4:
            low, high = (op.Add(op.Slice(rows, [n], [END], [3], [2]), 8.0) for n in (0, 1))
            rows = op.Cast(op.Add(low, op.Mul(high, 16.0)), to=TensorProto.UINT8)
        return rows

    def read(self, op: FunctionEmitter, rows: str, query: str) -> str:
        """Rows as floats, in the type to compute in."""
        if self.bits == 4:
            rows = op.Mul(rows, self._laid(op, op.Shape(rows)))
        elif self.bits == 8:
            scale, zero, axis = self._parameters(op)
            rows = op.Reshape(op.DequantizeLinear(self._flat(op, rows), scale, zero, axis=axis), op.Shape(rows))
        return op.Cast(rows, to=TensorProto.FLOAT) if op.type(query) in SIXTEEN_BIT else op.CastLike(rows, query)

    def _laid(self, op: FunctionEmitter, shape: str) -> str:
        """The scale, so that it broadcasts to rows of that shape."""
        if not self.by_channel:
            return op.Reshape(self.scale, [1])
        return op.Reshape(self.scale, op.Slice(shape, [2], [4], [0]))

    def _parameters(self, op: FunctionEmitter) -> tuple[str, str, int | None]:
        """Scale, zero point and axis of QuantizeLinear."""
        zero = op.const(np.int8(0))
        if not self.by_channel:
            return op.Reshape(self.scale, np.zeros(0, np.int64)), zero, None
        scale = op.Reshape(self.scale, [-1])
        return scale, op.Expand(zero, op.Shape(scale)), 2


@operator(
    "SparseAttention",
    "output",
    "present_key",
    "present_value",
    types={
        "block_row_indices": _INT32,
        "block_col_indices": "block_row_indices",
        "total_sequence_length": "block_row_indices",
        "key_total_sequence_lengths": "block_row_indices",
    },
)
def sparse_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    past_key: str,
    past_value: str,
    block_row_indices: str,
    block_col_indices: str,
    total_sequence_length: str,
    key_total_sequence_lengths: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float | None = None,
    sparse_block_size: int,
) -> tuple[str, ...]:
    """softmax(scale·Q·Kᵀ)·V over the earlier keys in the blocks that a mask lists; heads take turns at the masks

    A query that is padding has a result of 0, as one that sees no key. The caches keep the rows where no token is written.
    """
    check_flags(do_rotary=do_rotary, rotary_interleaved=rotary_interleaved)
    if sparse_block_size < 1:
        raise UnsupportedFormError(f"sparse_block_size is {sparse_block_size}; it is 1 or more")
    q, k, v = split(op, query, key, value, num_heads, kv_num_heads)
    _check_grouped(op, query, key, value, num_heads, kv_num_heads).check_pasts(op, past_key, past_value)
    if do_rotary:
        _check_caches(op, cos_cache, sin_cache, query, num_heads if key is not None else num_heads + 2 * kv_num_heads)
    tokens = column(op, key_total_sequence_lengths, query)
    steps = op.up_to(op.Shape(query, start=1, end=2))
    count = op.Min(tokens, op.Shape(query, start=1, end=2))
    before = op.Sub(tokens, count)
    places, real = op.Add(before, steps), op.Less(steps, count)
    if do_rotary:
        q, k = (rotated(op, x, cos_cache, sin_cache, places, rotary_interleaved) for x in (q, k))
    total = int64(op, total_sequence_length)
    presents = [_overwritten(op, past, x, before, count) for past, x in ((past_key, k), (past_value, v))]
    keys, values = (op.wide(op.Slice(x, [0], total, [2])) for x in presents)

    masks, blocks = _block_masks(op, block_row_indices, block_col_indices)
    columns = op.up_to(total)
    rows = op.Mul(op.Div(places, [sparse_block_size]), blocks)
    cells = op.Add(op.Unsqueeze(rows, [2]), op.Div(columns, [sparse_block_size]))
    layouts = op.Transpose(op.Gather(masks, cells, axis=1), perm=[1, 0, 2, 3])
    turns = op.Div([num_heads], op.Shape(masks, end=1))
    seen = op.Cast(op.Tile(layouts, op.Concat([1], turns, [1, 1], axis=0)), to=TensorProto.BOOL)
    seen = op.And(seen, op.LessOrEqual(columns, op.Unsqueeze(places, [1, 3])))
    seeing = op.And(op.Unsqueeze(real, [1]), sees_any(op, seen))
    heads = op.Transpose(q, perm=[0, 2, 1, 3])
    y, _, _ = attend(op, heads, keys, values, seen, seeing, kv_num_heads, num_heads, scale)
    return op.CastLike(y, query), *presents


def _overwritten(op: FunctionEmitter, past: str, new: str, before: str, count: str) -> str:
    """A cache (B, K, C, H) with the first `count` rows of `new` (B, S, K, H) from row `before` on."""
    rows = op.up_to(op.Shape(past, start=2, end=3))
    taken = op.Min(op.Max(op.Sub(rows, before), [0]), op.Sub(op.Shape(new, start=1, end=2), [1]))
    laid = op.Transpose(op.GatherND(op.CastLike(new, past), op.Unsqueeze(taken, [2]), batch_dims=1), perm=[0, 2, 1, 3])
    written = op.And(op.GreaterOrEqual(rows, before), op.Less(rows, op.Add(before, count)))
    return op.Where(op.Unsqueeze(written, [1, 3]), laid, past)


def sees_any(op: FunctionEmitter, seen: str) -> str:
    """True if a query sees any key, (B, N, S)."""
    return op.Greater(op.Squeeze(op.reduce("ReduceMax", op.Cast(seen, to=TensorProto.INT32), [3]), [3]), np.int32(0))


def _block_masks(op: FunctionEmitter, row_indices: str, col_indices: str) -> tuple[str, str]:
    """Masks in the CSR format as (layouts, blocks·blocks + 1), 1 where a block is; and the number of blocks in a row.

    The last column takes the padding.
    """
    starts, columns = (op.Cast(x, to=TensorProto.INT64) for x in (row_indices, col_indices))
    blocks = op.Sub(op.Shape(starts, start=1, end=2), [1])
    entries = op.up_to(op.Shape(columns, start=1, end=2))
    ends = op.Unsqueeze(op.Slice(starts, [1], [END], [1]), [1])
    ended = op.Cast(op.LessOrEqual(ends, op.Unsqueeze(entries, [1])), to=TensorProto.INT64)
    row = op.ReduceSum(ended, [2], keepdims=0)  # of each entry: as many rows end before it
    size = op.Mul(blocks, blocks)
    cells = op.Where(op.Less(row, blocks), op.Add(op.Mul(row, blocks), columns), size)
    empty = op.Expand(op.const(np.int32(0)), op.Concat(op.Shape(starts, end=1), op.Add(size, [1]), axis=0))
    return op.ScatterElements(empty, cells, op.Expand(op.const(np.int32(1)), op.Shape(cells)), axis=1), blocks
