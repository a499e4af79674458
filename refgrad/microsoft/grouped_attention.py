"""ONNX Runtime's attentions whose query heads share keys and values, and which keep them in a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.declared import Size, check_shape, divided, first, one_number, product, sizes
from refgrad.microsoft.position import check_counts
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import FLOATS, UnsupportedFormError, operator

_INT32, _INT64 = ("tensor(int32)",), ("tensor(int64)",)
_CACHE = (*FLOATS, "tensor(int8)", "tensor(uint8)")


@operator(
    "GroupQueryAttention",
    "output",
    optional=["present_key", "present_value", "output_qk"],
    types={
        "seqlens_k": _INT32,
        "total_sequence_length": "seqlens_k",
        "query_seqlens": "seqlens_k",
        "position_ids": _INT64,
        "past_key": _CACHE,
        "past_value": _CACHE,
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
    _check_flags(
        causal=causal,
        do_rotary=do_rotary,
        rotary_interleaved=rotary_interleaved,
        sliding_window_cache=sliding_window_cache,
    )
    _check_pairs(past_key=past_key, past_value=past_value)
    _check_pairs(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
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
    q, k, v = _split(op, query, key, value, num_heads, kv_num_heads)
    asked = _check_grouped(op, query, key, value, num_heads, kv_num_heads)
    asked.check_pasts(op, past_key, past_value, 2 if k_quant_type != "NONE" and kv_cache_bit_width == 4 else 1)
    asked.check(
        op,
        one_number(op, "total_sequence_length", total_sequence_length),
        attention_bias,
        head_sink,
        seqlens_k,
    )
    if do_rotary:
        _check_caches(op, cos_cache, sin_cache, query, num_heads if key is not None else num_heads + 2 * kv_num_heads)
    if sliding_window_cache:
        _check_window(op, past_key, local_window_size)
    if query_seqlens is None:
        _check_samples(op, query, past_key, total_sequence_length)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = _normalized(op, q, q_norm_weight, qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon)
        k = _normalized(op, k, k_norm_weight, qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon)

    length, new, total = op.Shape(query, start=1, end=2), op.Shape(k, start=1, end=2), _int64(op, total_sequence_length)
    tokens = op.Add(_column(op, seqlens_k, query), 1)  # (B, 1): of each sample, with the new ones
    count = op.Min(tokens, length) if query_seqlens is None else _column(op, query_seqlens, query)
    before = op.Sub(tokens, count)
    steps = op.up_to(length)
    places = op.Add(before, steps)  # (B, S): of the queries
    real = op.Less(steps, count)
    if do_rotary:
        at = places
        if position_ids is not None:
            at = position_ids
            if query_seqlens is None:  # of a first prompt only one number counts
                start = op.Slice(position_ids, [0, 0], [1, 1], [0, 1])
                at = op.Where(op.Equal(total, length), op.Add(start, steps), position_ids)
        at = op.Where(real, at, 0)
        q, k = (_rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved) for x in (q, k))

    if past_key is None or past_value is None:
        if k_quant_type != "NONE" or v_quant_type != "NONE":
            raise UnsupportedFormError("a quantised cache needs past_key and past_value, which say its type")
        keys, values = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (k, v))
        key_places = op.Unsqueeze(op.up_to(new), [0])
        written = op.Unsqueeze(op.Less(key_places, tokens), [1, 3])
        presents = [op.Where(written, x, 0) for x in (keys, values)]
    else:
        capacity = op.Shape(past_key, start=2, end=3)
        appended = op.Sub(
            tokens, op.Min(count, new)
        )  # a cache that is shared with another layer has the new ones already
        if sliding_window_cache:
            window = _Window(op, capacity, local_window_size)
            held = window.held(op, appended)
            first, kept = op.Sub(appended, held), window.held(op, tokens)
            staged = op.Min(total, op.Add(capacity, new))
            stored, shift = capacity, op.Sub(op.Sub(tokens, kept), first)
        else:
            held, first, kept, staged = appended, None, tokens, total
            stored, shift = op.Max(total, capacity), None
        key_places = op.Unsqueeze(op.up_to(staged), [0])
        read, presents = [], []
        for x, past, number, kind in ((k, past_key, k_scale, k_quant_type), (v, past_value, v_scale, v_quant_type)):
            cache = _Cache(op, kind, kv_cache_bit_width, number, past)
            earlier = cache.unpacked(op, op.Transpose(past, perm=[0, 2, 1, 3]))
            rows = op.Concat(earlier, cache.written(op, x, past), axis=1)
            if shift is None:
                every = cache.gathered(op, rows, capacity, held, op.up_to(stored), kept)
                part = op.Slice(every, [0], staged, [1])
            else:
                every = cache.gathered(op, rows, capacity, held, op.Add(shift, op.up_to(stored)), op.Add(shift, kept))
                part = cache.gathered(op, rows, capacity, held, op.up_to(staged), op.Sub(tokens, first))
            presents.append(op.Transpose(cache.packed(op, every), perm=[0, 2, 1, 3]))
            read.append(op.Transpose(cache.read(op, part, query), perm=[0, 2, 1, 3]))
        keys, values = read
        if first is not None:
            key_places = op.Add(key_places, first)
            if attention_bias is not None:
                attention_bias = _columns(op, attention_bias, key_places, total)

    own, theirs = op.Unsqueeze(places, [2]), op.Unsqueeze(key_places, [1])
    seen = op.LessOrEqual(theirs, own) if causal else op.Less(theirs, op.Unsqueeze(tokens, [2]))
    if local_window_size > 0:
        seen = op.And(seen, op.Greater(theirs, op.Sub(own, local_window_size)))
    sink = op.Expand(op.const(0.0, like=query), [num_heads]) if smooth_softmax == 1 else None
    sink = sink if head_sink is None else head_sink
    heads = op.Transpose(q, perm=[0, 2, 1, 3])
    y, scores, shares = _attend(
        op,
        heads,
        keys,
        values,
        op.Unsqueeze(seen, [1]),
        op.Unsqueeze(real, [1]),
        kv_num_heads,
        num_heads,
        scale,
        softcap,
        attention_bias,
        sink,
    )
    y = op.CastLike(y, query)
    presents = [op.CastLike(x, query if past_key is None else past_key) for x in presents]
    if not qk_output:
        return y, *presents, None
    shown = op.And(op.Unsqueeze(seen, [1]), op.Unsqueeze(real, [1, 3]))
    return y, *presents, op.CastLike(op.Where(shown, scores if qk_output == 1 else shares, 0), query)


def _split(
    op: FunctionEmitter, query: str, key: str | None, value: str | None, num_heads: int, kv_num_heads: int
) -> list[str]:
    """Query, key and value, which may all be in `query`, as (B, S, heads, H) in the type to compute in."""
    check_counts(num_heads=num_heads, kv_num_heads=kv_num_heads)
    if num_heads % kv_num_heads:
        raise UnsupportedFormError(f"kv_num_heads={kv_num_heads} does not divide num_heads={num_heads}")
    _check_pairs(key=key, value=value)
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


def _check_window(op: FunctionEmitter, past_key: str | None, local_window_size: int) -> None:
    """Refuse a cache of a window that cannot hold the window."""
    capacity = sizes(op, past_key, 4)[2]
    if local_window_size < 1 or (capacity is not None and capacity < local_window_size):
        most = "" if capacity is None else f" to {capacity}, the rows of past_key"
        raise UnsupportedFormError(
            f"local_window_size is {local_window_size}; with sliding_window_cache=1 it is from 1{most or ' on'}"
        )


def _check_samples(op: FunctionEmitter, query: str, past_key: str | None, total_sequence_length: str) -> None:
    """Refuse several samples that bring several queries to a past: only query_seqlens says how long each is."""
    batch, length, _ = sizes(op, query, 3)
    every = one_number(op, "total_sequence_length", total_sequence_length)
    if past_key is None or batch in (None, 1) or length is None or length < 2 or every in (None, length):
        return
    raise UnsupportedFormError(
        f"{batch} samples bring {length} queries each to a past, and total_sequence_length is {every}; give query_seqlens, "
        "or one sample"
    )


def _check_flags(**flags: int) -> None:
    """That each is 0 or 1."""
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise UnsupportedFormError(f"{name} is {flag}; there are 0 and 1")


def _check_pairs(**inputs: str | None) -> None:
    """That the node has all of these inputs, or none of them."""
    if len({value is None for value in inputs.values()}) > 1:
        raise UnsupportedFormError(f"it needs {' and '.join(inputs)}, or neither of them")


def _int64(op: FunctionEmitter, x: str) -> str:
    """One number, with one axis."""
    return op.Cast(op.Reshape(x, [1]), to=TensorProto.INT64)


def _column(op: FunctionEmitter, x: str, beside: str) -> str:
    """A number for each sample as (B, 1), where B is that of `beside`."""
    return op.Cast(op.Reshape(x, op.Concat(op.Shape(beside, end=1), [1], axis=0), allowzero=1), to=TensorProto.INT64)


def _normalized(op: FunctionEmitter, x: str, weight: str, epsilon: float) -> str:
    """x/√(mean x² + ε)·weight over the last of the 4 axes"""
    root = op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(x, x), [3]), epsilon))
    return op.Mul(op.Div(x, root), op.wide(weight))


def _rotated(
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


def _attend(
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
class _Cache:
    """How keys or values (B, rows, heads, H) are held: as floats, or q = round(x/scale) in 8 bits, or two in a byte."""

    bits: int
    by_channel: bool
    scale: str
    empty: str  # what is held where there is no token

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
        """The rows at `wanted`, those of the past up to `held`, then those after `capacity`; empty ones from `end` on."""
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
    _check_flags(do_rotary=do_rotary, rotary_interleaved=rotary_interleaved)
    if sparse_block_size < 1:
        raise UnsupportedFormError(f"sparse_block_size is {sparse_block_size}; it is 1 or more")
    q, k, v = _split(op, query, key, value, num_heads, kv_num_heads)
    _check_grouped(op, query, key, value, num_heads, kv_num_heads).check_pasts(op, past_key, past_value)
    if do_rotary:
        _check_caches(op, cos_cache, sin_cache, query, num_heads if key is not None else num_heads + 2 * kv_num_heads)
    tokens = _column(op, key_total_sequence_lengths, query)
    steps = op.up_to(op.Shape(query, start=1, end=2))
    count = op.Min(tokens, op.Shape(query, start=1, end=2))
    before = op.Sub(tokens, count)
    places, real = op.Add(before, steps), op.Less(steps, count)
    if do_rotary:
        q, k = (_rotated(op, x, cos_cache, sin_cache, places, rotary_interleaved) for x in (q, k))
    total = _int64(op, total_sequence_length)
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
    seeing = op.And(op.Unsqueeze(real, [1]), _any(op, seen))
    heads = op.Transpose(q, perm=[0, 2, 1, 3])
    y, _, _ = _attend(op, heads, keys, values, seen, seeing, kv_num_heads, num_heads, scale)
    return op.CastLike(y, query), *presents


def _overwritten(op: FunctionEmitter, past: str, new: str, before: str, count: str) -> str:
    """A cache (B, K, C, H) with the first `count` rows of `new` (B, S, K, H) from row `before` on."""
    rows = op.up_to(op.Shape(past, start=2, end=3))
    taken = op.Min(op.Max(op.Sub(rows, before), [0]), op.Sub(op.Shape(new, start=1, end=2), [1]))
    laid = op.Transpose(op.GatherND(op.CastLike(new, past), op.Unsqueeze(taken, [2]), batch_dims=1), perm=[0, 2, 1, 3])
    written = op.And(op.GreaterOrEqual(rows, before), op.Less(rows, op.Add(before, count)))
    return op.Where(op.Unsqueeze(written, [1, 3]), laid, past)


def _any(op: FunctionEmitter, seen: str) -> str:
    """Whether a query sees any key, (B, N, S)."""
    return op.Greater(op.Squeeze(op.reduce("ReduceMax", op.Cast(seen, to=TensorProto.INT32), [3]), [3]), np.int32(0))


def _block_masks(op: FunctionEmitter, row_indices: str, col_indices: str) -> tuple[str, str]:
    """Masks in the CSR format as (layouts, blocks·blocks + 1), 1 where a block is; and the number of blocks in a row.

    The last column takes what is padding.
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


@operator(
    "PagedAttention",
    "output",
    optional=["key_cache_out", "value_cache_out"],
    types={
        "key_cache": _CACHE,
        "value_cache": _CACHE,
        "key_cache_out": "key_cache",
        "value_cache_out": "value_cache",
        "k_scale": FLOATS,
        "v_scale": "k_scale",
        "cumulative_sequence_length": _INT32,
        "past_seqlens": "cumulative_sequence_length",
        "block_table": "cumulative_sequence_length",
        "slot_mapping": "cumulative_sequence_length",
        "attention_metadata": "cumulative_sequence_length",
    },
    writes={1: "key_cache", 2: "value_cache"},
)
def paged_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    key_cache: str,
    value_cache: str | None,
    cumulative_sequence_length: str,
    past_seqlens: str,
    block_table: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    slot_mapping: str | None = None,
    head_sink: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    k_scale: str | None = None,
    v_scale: str | None = None,
    attention_metadata: str | None = None,
    *,
    do_rotary: int = 0,
    is_causal: int = 1,
    k_cache_dtype: str = "",
    k_quant_type: str = "NONE",
    kv_cache_layout: str = "SEPARATE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    v_cache_dtype: str = "",
    v_head_size: int = 0,
    v_quant_type: str = "NONE",
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ)·V, each sample for itself, of tokens in a row and of those in its pages of a cache

    A token that sees no key has a result of 0. attention_metadata only helps to plan.
    """
    _check_flags(do_rotary=do_rotary, is_causal=is_causal, rotary_interleaved=rotary_interleaved)
    _check_pairs(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    latent = kv_cache_layout == "LATENT"
    if kv_cache_layout not in ("SEPARATE", "LATENT"):
        raise UnsupportedFormError(f"kv_cache_layout={kv_cache_layout!r} is not known; there are SEPARATE and LATENT")
    if latent and (key is None or value is not None or value_cache is not None or kv_num_heads != 1):
        raise UnsupportedFormError("LATENT needs key, kv_num_heads=1, and neither value nor value_cache")
    if v_head_size and (not latent or not scale):
        raise UnsupportedFormError("v_head_size needs kv_cache_layout='LATENT' and scale")
    if not latent and value_cache is None:
        raise UnsupportedFormError("it needs value_cache, or kv_cache_layout='LATENT'")
    for of, cache_, name, kind in (
        ("key", key_cache, k_cache_dtype, k_quant_type),
        ("value", value_cache, v_cache_dtype, v_quant_type),
    ):
        held = cache_ and op.type(cache_)
        if held == TensorProto.UINT8 or name in ("int4", "float4e2m1", "float8e4m3fn"):
            raise UnsupportedFormError(
                f"{of}_cache of 4 bits or of float8 is not covered; use a cache of floats or of int8"
            )
        if held and (held == TensorProto.INT8) != (kind != "NONE"):
            raise UnsupportedFormError(
                f"{of[0]}_quant_type={kind} does not fit the type of {of}_cache; int8 is quantised"
            )
    if local_window_size == 0:
        raise UnsupportedFormError("local_window_size=0 lets no query see a key; use -1 for no window")
    tokens = op.Shape(query, end=1)
    parts = [x and op.Unsqueeze(x, [0]) for x in (key, key if latent else value)]
    q, k, v = _split(op, op.Unsqueeze(query, [0]), parts[0], parts[1], num_heads, kv_num_heads)  # (1, tokens, heads, H)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (_normalized(op, x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))

    packed = Packed(op, tokens, cumulative_sequence_length, past_seqlens)
    if do_rotary:
        at = op.Unsqueeze(packed.place, [0])
        q, k = (_rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved, rotary_offset) for x in (q, k))
    pages = _Pages(op, packed, key_cache, block_table, slot_mapping)
    caches, read = [], []
    for x, past, number, kind in ((k, key_cache, k_scale, k_quant_type), (v, value_cache, v_scale, v_quant_type)):
        if past is not None:
            written, rows = pages.written(op, x, past, _Cache(op, kind, 8, number, past), query)
            caches.append(written)
            read.append(rows)
    values = read[-1] if not v_head_size else op.Slice(read[0], [0], [v_head_size], [3])
    seen = pages.seen(op, packed, is_causal, local_window_size)
    heads = op.Transpose(packed.padded(op, op.Squeeze(q, [0])), perm=[0, 2, 1, 3])
    y, _, _ = _attend(
        op, heads, read[0], values, seen, _any(op, seen), kv_num_heads, num_heads, scale, softcap, None, head_sink
    )
    output = packed.flat(op, y)
    return op.CastLike(output, query), *caches, *([None] if latent else [])


class Packed:
    """Samples of several lengths in a row: the tokens of one after those of another."""

    def __init__(self, op: FunctionEmitter, tokens: str, bounds: str, before: str) -> None:
        bounds, before = (op.Cast(x, to=TensorProto.INT64) for x in (bounds, before))
        self.starts, ends = op.Slice(bounds, [0], [-1], [0]), op.Slice(bounds, [1], [END], [0])
        self.counts, self.ids = op.Sub(ends, self.starts), op.up_to(tokens)
        ended = op.Cast(op.LessOrEqual(ends, op.Unsqueeze(self.ids, [1])), to=TensorProto.INT64)
        self.sample = op.ReduceSum(ended, [1], keepdims=0)  # of each token: as many end before it
        self._within = op.Sub(self.ids, op.Gather(self.starts, self.sample))
        self.place = op.Add(op.Gather(before, self.sample), self._within)  # in its sample
        self._longest = op.Max(op.reduce("ReduceMax", self.counts, [0]), [0])
        self._steps = op.up_to(self._longest)
        self.real = op.Less(self._steps, op.Unsqueeze(self.counts, [1]))  # (B, S)
        self.places = op.Add(op.Unsqueeze(before, [1]), self._steps)
        self.total = op.Add(before, self.counts)

    def padded(self, op: FunctionEmitter, x: str) -> str:
        """(tokens, ...) to (B, S, ...)"""
        return op.Gather(x, op.Where(self.real, op.Add(op.Unsqueeze(self.starts, [1]), self._steps), 0))

    def flat(self, op: FunctionEmitter, y: str) -> str:
        """(B, S, width) to (tokens, width)"""
        width = op.Shape(y, start=2, end=3)
        rows = op.Concat(op.Mul(op.Shape(y, end=1), self._longest), width, axis=0)
        return op.Gather(op.Reshape(y, rows, allowzero=1), op.Add(op.Mul(self.sample, self._longest), self._within))


class _Pages:
    """A cache (pages, rows of a page, heads, H) of which each sample has the pages that a table lists, or -1."""

    def __init__(self, op: FunctionEmitter, packed: Packed, cache: str, table: str, slot_mapping: str | None) -> None:
        table = op.Cast(table, to=TensorProto.INT64)
        page, columns = op.Shape(cache, start=1, end=2), op.Shape(table, start=1)
        self._size = op.Mul(op.Shape(cache, end=1), page)
        if slot_mapping is None:
            cell = op.Add(op.Mul(packed.sample, columns), op.Div(packed.place, page))
            found = op.Gather(op.Reshape(table, [-1]), cell)
            slot = op.Add(op.Mul(found, page), op.Mod(packed.place, page))  # negative where no page is
        else:
            slot = op.Cast(slot_mapping, to=TensorProto.INT64)
        slot = op.Where(op.Less(slot, 0), self._size, slot)  # a row more takes what is not written
        rows = op.up_to(op.Add(self._size, [1]))
        sources = op.ScatterElements(rows, slot, op.Add(packed.ids, self._size), axis=0)
        self._sources = op.Slice(sources, [0], self._size, [0])
        self.places = op.up_to(op.Mul(columns, page))
        self._found = op.Gather(table, op.Div(self.places, page), axis=1)
        self._rows = op.Add(op.Mul(op.Max(self._found, [0]), page), op.Mod(self.places, page))  # (B, L)

    def written(self, op: FunctionEmitter, x: str, past: str, cache: _Cache, query: str) -> tuple[str, str]:
        """The cache with the rows x (1, tokens, heads, H), and what each sample has in its pages, (B, heads, L, H)."""
        flat = op.Reshape(past, op.Concat([1], self._size, op.Shape(past, start=2), axis=0))
        every = op.Gather(op.Concat(flat, cache.written(op, x, past), axis=1), self._sources, axis=1)
        part = cache.read(op, op.Gather(op.Squeeze(every, [0]), self._rows), query)
        return op.Reshape(every, op.Shape(past)), op.Transpose(part, perm=[0, 2, 1, 3])

    def seen(self, op: FunctionEmitter, packed: Packed, causal: int, window: int) -> str:
        """Which token sees which place, (B, 1, S, L)."""
        held = op.And(op.GreaterOrEqual(self._found, 0), op.Less(self.places, op.Unsqueeze(packed.total, [1])))
        seen = op.And(op.Unsqueeze(held, [1, 2]), op.Unsqueeze(packed.real, [1, 3]))
        own = op.Unsqueeze(packed.places, [1, 3])
        if causal:
            seen = op.And(seen, op.LessOrEqual(self.places, own))
        if window > 0:
            seen = op.And(seen, op.Greater(self.places, op.Sub(own, window)))
        return seen


_MODES = (("selected_only", "main"), ("selected_only", "auxiliary"), ("local_plus_selected", "auxiliary"))


@operator(
    "DynamicSparseAttention",
    "output",
    optional=["present_key", "present_value", "validation_status"],
    types={
        "past_key": _CACHE,
        "past_value": _CACHE,
        "present_key": "past_key",
        "present_value": "past_value",
        "key_scale": FLOATS,
        "value_scale": "key_scale",
        "output": FLOATS,
        "selected_indices": _INT32,
        "selected_counts": "selected_indices",
        "seqlens_k": "selected_indices",
        "total_sequence_length": "selected_indices",
        "committed_length": "selected_indices",
        "validation_status": "selected_indices",
        "position_ids": _INT64,
    },
)
def dynamic_sparse_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    past_key: str | None,
    past_value: str | None,
    auxiliary_key: str | None,
    auxiliary_value: str | None,
    selected_indices: str,
    selected_counts: str,
    seqlens_k: str,
    total_sequence_length: str,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    position_ids: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    head_sink: str | None = None,
    committed_length: str | None = None,
    key_scale: str | None = None,
    value_scale: str | None = None,
    *,
    attention_mode: str = "selected_only",
    auxiliary_kv_shared: int = 0,
    do_rotary: int = 0,
    is_causal: int = 1,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    output_bf16: int = 0,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float | None = None,
    selected_kv_source: str = "main",
    smooth_softmax: int = 0,
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ)·V over the keys that each query has selected, and with them those of a window

    A query that sees no key has a result of 0, as have the rows of the cache that hold no token.
    """
    _check_flags(do_rotary=do_rotary, rotary_interleaved=rotary_interleaved)
    _check_pairs(past_key=past_key, past_value=past_value)
    _check_pairs(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    _check_mode(attention_mode, selected_kv_source, auxiliary_key, auxiliary_value, auxiliary_kv_shared)
    local = attention_mode == "local_plus_selected"
    if not is_causal or (local and local_window_size < 1):
        raise UnsupportedFormError("it needs is_causal=1, and local_plus_selected a local_window_size above 0")
    q, k, v = _split(op, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (_normalized(op, x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    length, total, tokens = (
        op.Shape(query, start=1, end=2),
        _int64(op, total_sequence_length),
        op.Add(_column(op, seqlens_k, query), 1),
    )
    before = op.Sub(tokens, length)
    places = op.Add(before, op.up_to(length))
    if do_rotary:
        at = places if position_ids is None else position_ids
        q, k = (_rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved, rotary_offset) for x in (q, k))

    if past_key is None or past_value is None:
        keys, values = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (k, v))
        presents = [op.CastLike(x, query) for x in (keys, values)]
        total = length
    else:
        capacity = op.Shape(past_key, start=2, end=3)
        read, presents = [], []
        for x, past, number in ((k, past_key, key_scale), (v, past_value, value_scale)):
            cache = _Cache(op, "PER_CHANNEL" if op.type(past) == TensorProto.INT8 else "NONE", 8, number, past)
            rows = op.Concat(op.Transpose(past, perm=[0, 2, 1, 3]), cache.written(op, x, past), axis=1)
            every = cache.gathered(op, rows, capacity, before, op.up_to(op.Max(total, capacity)), tokens)
            presents.append(op.Transpose(every, perm=[0, 2, 1, 3]))
            read.append(op.Transpose(cache.read(op, op.Slice(every, [0], total, [1]), query), perm=[0, 2, 1, 3]))
        keys, values = read
    at = op.up_to(total)
    own = op.Unsqueeze(places, [1, 3])
    seen = op.LessOrEqual(at, own)
    if local:
        seen = op.And(seen, op.Greater(at, op.Sub(own, local_window_size)))
    if selected_kv_source == "main":
        seen = op.And(
            seen, op.Unsqueeze(_selected(op, selected_indices, selected_counts, total, op.Shape(places)), [1])
        )
    else:
        assert auxiliary_key is not None
        others = [op.wide(x) for x in (auxiliary_key, auxiliary_key if auxiliary_kv_shared else str(auxiliary_value))]
        chosen = _selected(op, selected_indices, selected_counts, op.Shape(others[0], start=2, end=3), op.Shape(places))
        keys, values, seen = _joined(op, local, keys, values, seen, others[0], others[1], op.Unsqueeze(chosen, [1]))
    sink = op.Expand(op.const(0.0, like=query), [num_heads]) if smooth_softmax else None
    sink = sink if head_sink is None else head_sink
    heads = op.Transpose(q, perm=[0, 2, 1, 3])
    y, _, _ = _attend(op, heads, keys, values, seen, _any(op, seen), kv_num_heads, num_heads, scale, 0.0, None, sink)
    y = op.Cast(y, to=TensorProto.BFLOAT16) if output_bf16 else op.CastLike(y, query)
    return y, *presents, None


@operator(
    "SparsePagedAttention",
    "output",
    optional=["key_cache_out", "value_cache_out"],
    types={
        "key_cache": _CACHE,
        "value_cache": _CACHE,
        "key_cache_out": "key_cache",
        "value_cache_out": "value_cache",
        "k_scale": FLOATS,
        "v_scale": "k_scale",
        "cumulative_sequence_length": _INT32,
        "past_seqlens": "cumulative_sequence_length",
        "block_table": "cumulative_sequence_length",
        "slot_mapping": "cumulative_sequence_length",
        "selected_indices": "cumulative_sequence_length",
        "selected_counts": "cumulative_sequence_length",
        "auxiliary_lengths": "cumulative_sequence_length",
        "attention_metadata": "cumulative_sequence_length",
    },
    writes={1: "key_cache", 2: "value_cache"},
)
def sparse_paged_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    key_cache: str,
    value_cache: str,
    cumulative_sequence_length: str,
    past_seqlens: str,
    block_table: str,
    slot_mapping: str | None,
    selected_indices: str,
    selected_counts: str,
    auxiliary_key: str | None = None,
    auxiliary_value: str | None = None,
    auxiliary_lengths: str | None = None,
    cos_cache: str | None = None,
    sin_cache: str | None = None,
    head_sink: str | None = None,
    q_norm_weight: str | None = None,
    k_norm_weight: str | None = None,
    k_scale: str | None = None,
    v_scale: str | None = None,
    attention_metadata: str | None = None,
    *,
    attention_mode: str = "selected_only",
    auxiliary_cache_layout: str = "contiguous",
    auxiliary_kv_shared: int = 0,
    do_rotary: int = 0,
    is_causal: int = 1,
    k_quant_type: str = "NONE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float | None = None,
    selected_kv_source: str = "main",
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> tuple[str, str, str]:
    """softmax(scale·Q·Kᵀ)·V over the keys that each token has selected, and with them those of a window, in pages

    A token that sees no key has a result of 0. attention_metadata only helps to plan.
    """
    _check_flags(do_rotary=do_rotary, is_causal=is_causal, rotary_interleaved=rotary_interleaved)
    _check_pairs(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    _check_mode(attention_mode, selected_kv_source, auxiliary_key, auxiliary_value, auxiliary_kv_shared)
    if auxiliary_cache_layout != "contiguous":
        raise UnsupportedFormError(
            f"auxiliary_cache_layout={auxiliary_cache_layout!r} is not known; there is 'contiguous'"
        )
    if local_window_size == 0:
        raise UnsupportedFormError("local_window_size=0 lets no query see a key; use -1 for no window")
    local = attention_mode == "local_plus_selected"
    tokens = op.Shape(query, end=1)
    parts = [x and op.Unsqueeze(x, [0]) for x in (key, value)]
    q, k, v = _split(op, op.Unsqueeze(query, [0]), parts[0], parts[1], num_heads, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (_normalized(op, x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    packed = Packed(op, tokens, cumulative_sequence_length, past_seqlens)
    if do_rotary:
        at = op.Unsqueeze(packed.place, [0])
        q, k = (_rotated(op, x, cos_cache, sin_cache, at, rotary_interleaved, rotary_offset) for x in (q, k))
    pages = _Pages(op, packed, key_cache, block_table, slot_mapping)
    key_out, keys = pages.written(op, k, key_cache, _Cache(op, k_quant_type, 8, k_scale, key_cache), query)
    value_out, values = pages.written(op, v, value_cache, _Cache(op, v_quant_type, 8, v_scale, value_cache), query)
    seen = pages.seen(op, packed, is_causal, local_window_size if local else -1)
    if selected_kv_source == "main":
        chosen = _selected(op, selected_indices, selected_counts, op.Shape(keys, start=2, end=3), tokens)
        seen = op.And(seen, op.Unsqueeze(packed.padded(op, chosen), [1]))
    else:
        assert auxiliary_key is not None
        given = (auxiliary_key, auxiliary_key if auxiliary_kv_shared else str(auxiliary_value))
        others = [op.Transpose(op.wide(x), perm=[0, 2, 1, 3]) for x in given]
        room = op.Shape(others[0], start=2, end=3)
        others = [op.Expand(x, [1, kv_num_heads, 1, 1]) for x in others]
        chosen = packed.padded(op, _selected(op, selected_indices, selected_counts, room, tokens))
        if auxiliary_lengths is not None:
            valid = op.Less(op.up_to(room), _column(op, auxiliary_lengths, past_seqlens))
            chosen = op.And(chosen, op.Unsqueeze(valid, [1]))
        chosen = op.Unsqueeze(op.And(chosen, op.Unsqueeze(packed.real, [2])), [1])
        keys, values, seen = _joined(op, local, keys, values, seen, others[0], others[1], chosen)
    heads = op.Transpose(packed.padded(op, op.Squeeze(q, [0])), perm=[0, 2, 1, 3])
    y, _, _ = _attend(
        op, heads, keys, values, seen, _any(op, seen), kv_num_heads, num_heads, scale, softcap, None, head_sink
    )
    return op.CastLike(packed.flat(op, y), query), key_out, value_out


def _check_mode(mode: str, source: str, key: str | None, value: str | None, shared: int) -> None:
    """That the keys to choose from are there."""
    if (mode, source) not in _MODES:
        known = ", ".join(" with ".join(pair) for pair in _MODES)
        raise UnsupportedFormError(
            f"attention_mode={mode!r} with selected_kv_source={source!r} is not covered; there are {known}"
        )
    if source == "auxiliary" and (key is None or (value is None and not shared)):
        raise UnsupportedFormError("it needs auxiliary_key, and auxiliary_value or auxiliary_kv_shared=1")


def _selected(op: FunctionEmitter, indices: str, counts: str, room: str, rows: str) -> str:
    """Whether a query has selected a place: indices (R, M), of which `counts` (R) are valid, as (*rows, room)."""
    indices, counts = (op.Cast(x, to=TensorProto.INT64) for x in (indices, counts))
    order = op.up_to(op.Shape(indices, start=1))
    valid = op.And(op.Less(order, op.Unsqueeze(counts, [1])), op.GreaterOrEqual(indices, 0))
    columns = op.Where(op.And(valid, op.Less(indices, room)), indices, room)  # a column more takes the others
    empty = op.Expand(op.const(np.int32(0)), op.Concat(op.Shape(indices, end=1), op.Add(room, [1]), axis=0))
    marked = op.ScatterElements(empty, columns, op.Expand(op.const(np.int32(1)), op.Shape(columns)), axis=1)
    chosen = op.Cast(op.Slice(marked, [0], room, [1]), to=TensorProto.BOOL)
    return op.Reshape(chosen, op.Concat(rows, room, axis=0), allowzero=1)


def _joined(
    op: FunctionEmitter, local: bool, keys: str, values: str, seen: str, others: str, their_values: str, chosen: str
) -> tuple[str, str, str]:
    """The keys to choose from, after those of the window where there is one."""
    if not local:
        return others, their_values, chosen
    return op.Concat(keys, others, axis=2), op.Concat(values, their_values, axis=2), op.Concat(seen, chosen, axis=3)
