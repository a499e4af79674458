"""ONNX Runtime's attentions whose state is a matrix per head, updated token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.position import check_counts, known_rank
from refgrad.microsoft.declared import (
    Size,
    check_flags,
    check_known,
    check_pairs,
    check_shape,
    divided,
    first,
    product,
    sizes,
    total,
)
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import FLOATS, Shapes

_RULES = ("linear", "gated", "delta", "gated_delta")
_GATES = {"none": "none", "softplus": "softplus", "qwen": "softplus", "sigmoid": "sigmoid", "kda": "sigmoid"}
_NORM_EPSILON = 1e-12  # what keeps the norm of a vector of zeros from 0


def check_up_to_8(args: Arguments, name: str) -> None:
    """Refuse a number of states to keep that is not from 0 to 8."""
    if not 0 <= (given := getattr(args, name)) <= 8:
        raise UnsupportedFormError(f"{name}={given} is not known; there are 0 to 8")


def check_captures(args: Arguments) -> None:
    """Refuse numbers of tokens to capture without a capacity, and a capacity without them."""
    check_up_to_8(args, "state_update_capacity")
    if (args.capture_count is not None) != (args.state_update_capacity > 0):
        raise UnsupportedFormError("it needs capture_count exactly where state_update_capacity is above 0")


def _check_rule(args: Arguments) -> None:
    """Refuse a rule that does not exist, and one that lacks what it reads."""
    check_known(args, "update_rule", *_RULES)
    for name, reads in (("decay", "gated"), ("beta", "delta")):
        if getattr(args, name) is None and reads in args.update_rule:
            raise UnsupportedFormError(f"update_rule={args.update_rule!r} needs {name}, which is left out")


def _check_linear_attention(shapes: Shapes, args: Arguments) -> None:
    query_heads, heads, rule = args.q_num_heads, args.kv_num_heads, args.update_rule
    _check_rule(args)
    if min(query_heads, heads) < 1 or max(query_heads, heads) % min(query_heads, heads):
        raise UnsupportedFormError(
            f"q_num_heads={query_heads} and kv_num_heads={heads} do not fit: one has to be a multiple of the other"
        )
    check_up_to_8(args, "state_window")
    check_counts(q_num_heads=query_heads, kv_num_heads=heads)
    for name in ("query", "key", "value"):
        check_shape(shapes, name, getattr(args, name), (None, None, None))
    B, T, columns = sizes(shapes, args.query, 3)
    width = divided("query", columns, query_heads, "q_num_heads")
    depth = divided("value", sizes(shapes, args.value, 3)[2], heads, "kv_num_heads")
    own = (product(query_heads, width),) if heads > query_heads else ()
    check_shape(shapes, "key", args.key, (B, T, (product(heads, width), *own)))
    check_shape(shapes, "value", args.value, (B, T, None))
    if "gated" in rule:
        check_shape(shapes, "decay", args.decay, (B, T, (heads, product(heads, width))))
    if "delta" in rule:
        check_shape(shapes, "beta", args.beta, (B, T, (1, heads)))
    window = (args.state_window,) if args.state_window else ()
    check_shape(shapes, "past_state", args.past_state, (*window, B, heads, width, depth))


@body(
    "LinearAttention",
    "output",
    "present_state",
    types={"past_state": FLOATS, "present_state": "past_state"},
    check=_check_linear_attention,
    domain=MICROSOFT,
)
def linear_attention(
    op: FunctionEmitter,
    query: str,
    key: str,
    value: str,
    past_state: str | None = None,
    decay: str | None = None,
    beta: str | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[str, str]:
    """S = e^decay·S + k·uᵀ with u = v, or u = beta·(v − (e^decay·S)ᵀk) for the delta rules; output = scale·Sᵀq"""
    q, v = (apart(op, op.wide(x), heads) for x, heads in ((query, q_num_heads), (value, kv_num_heads)))
    if kv_num_heads > q_num_heads:
        width = op.Div(op.Shape(query, start=2), [q_num_heads])
        heads = op.Div(
            op.Shape(key, start=2), op.Max(width, [1])
        )  # as many as the values have, or as there are queries
        sizes = op.Concat(op.Shape(key, end=2), heads, width, axis=0)
        k = op.Transpose(op.Reshape(op.wide(key), sizes, allowzero=1), perm=[1, 0, 2, 3])
        k = repeated(op, k, op.Div([kv_num_heads], op.Max(heads, [1])))
        q = repeated(op, q, op.const([kv_num_heads // q_num_heads]))
    else:
        k = apart(op, op.wide(key), kv_num_heads)
    gate = rate = None
    if decay is not None and "gated" in update_rule:
        gate = apart(op, op.wide(decay), kv_num_heads)
    if beta is not None and "delta" in update_rule:
        rate = op.Unsqueeze(op.Transpose(op.wide(beta), perm=[1, 0, 2]), [3])  # of every head, or of all
    if past_state is not None:
        state = op.Cast(past_state, to=op.type(q))
        if state_window:
            state = op.Gather(state, op.const(np.array(state_window - 1)), axis=0)
    else:
        sizes = op.Concat(op.Shape(query, end=1), [kv_num_heads], op.Shape(k, start=3), op.Shape(v, start=3), axis=0)
        state = op.Expand(op.const(0.0, like=q), sizes)
    state, o, _, states = recurrence(op, state, q, k, v, gate, rate, every_state=state_window > 0)
    if state_window:
        empty = op.Expand(op.const(0.0, like=q), op.Concat([state_window], op.Shape(state), axis=0))
        state = op.Slice(op.Concat(empty, states, axis=0), [-state_window], [END], [0])
    o = scaled(op, o, scale, op.Shape(q, start=3))
    sizes = op.Concat(op.Shape(query, end=2), op.ReduceProd(op.Shape(o, start=2), keepdims=1), axis=0)
    output = op.Reshape(op.Transpose(o, perm=[1, 0, 2, 3]), sizes, allowzero=1)
    return op.CastLike(output, query), op.CastLike(state, query if past_state is None else past_state)


def _check_gate(shapes: Shapes, args: Arguments) -> None:
    check_shape(shapes, "a", args.a, (None, None, None))
    a = sizes(shapes, args.a, 3)
    for name in ("dt_bias", "decay_scale"):
        check_shape(shapes, name, getattr(args, name), a[2:])
    check_shape(shapes, "b", args.b, a)


@body(
    "LinearAttentionGate",
    "decay",
    optional=["beta"],
    types={"dt_bias": FLOATS, "decay_scale": "dt_bias"},
    check=_check_gate,
    domain=MICROSOFT,
)
def linear_attention_gate(
    op: FunctionEmitter, a: str, dt_bias: str, decay_scale: str, b: str | None = None
) -> tuple[str, str | None]:
    """decay = decay_scale·softplus(a + dt_bias), beta = σ(b)"""
    bias = op.wide(dt_bias)
    inner = op.Softplus(op.Add(op.CastLike(a, bias), bias))
    decay = op.CastLike(op.Mul(inner, op.wide(decay_scale)), a)
    return decay, None if b is None else op.CastLike(op.Sigmoid(op.wide(b)), a)


def recurrence(
    op: FunctionEmitter,
    state: str,
    q: str,
    k: str,
    v: str,
    decay: str | None,
    rate: str | None,
    *,
    every_state: bool = False,
    every_delta: bool = False,
) -> tuple[str, str, str | None, str | None]:
    """The last state, the products Sᵀq, and where they are wanted the u and the S of every token.

    The state has the axes batch, head, channel of the keys, channel of the values. The others have time, batch, head and
    channel; q may have several heads for each of the state. `decay` has one channel or as many as the keys, `rate` one.
    """
    shape = op.Shape(q, end=2)
    group = op.Div(op.Shape(q, start=2, end=3), op.Shape(state, start=1, end=2))
    q = op.Reshape(
        q, op.Concat(shape, op.Shape(state, start=1, end=2), group, op.Shape(q, start=3), axis=0), allowzero=1
    )
    # ONNX Runtime's Scan takes a step at least: where there is no token, one of zeros, which leaves the state as it is.
    length = op.Shape(q, end=1)
    missing = op.Max(op.Sub([1], length), op.const([0]))
    q, k, v, *gates = (
        op.Concat(x, op.Expand(op.const(0.0, like=x), op.Concat(missing, op.Shape(x, start=1), axis=0)), axis=0)
        for x in (q, k, v, decay, rate)
        if x is not None
    )

    def step(inner: FunctionEmitter, states: Sequence[str], parts: Sequence[str]) -> list[str]:
        """One token; the step writes the outer product of k and u."""
        (S,), (q, k, v, *of_gates) = states, parts
        if decay is not None:
            S = inner.Mul(S, inner.Exp(inner.Unsqueeze(of_gates[0], [3])))
        u = inner.Unsqueeze(v, [2])
        if rate is not None:
            u = inner.Mul(inner.Sub(u, inner.MatMul(inner.Unsqueeze(k, [2]), S)), inner.Unsqueeze(of_gates[-1], [3]))
        S = inner.Add(S, inner.Mul(inner.Unsqueeze(k, [3]), u))
        deltas, every = [inner.Squeeze(u, [2])] if every_delta else [], [S] if every_state else []
        return [S, inner.MatMul(q, S), *deltas, *every]

    slices = [op.ranked(q, 5), *(op.ranked(x, 4) for x in (k, v, *gates))]
    last, o, *more = op.scan(step, [op.ranked(state, 4)], slices)
    o, *more = (op.Slice(x, [0], length, [0]) for x in (o, *more))
    heads = op.Mul(op.Shape(o, start=2, end=3), op.Shape(o, start=3, end=4))
    o = op.Reshape(o, op.Concat(shape, heads, op.Shape(o, start=4), axis=0), allowzero=1)
    return last, o, more[0] if every_delta else None, more[-1] if every_state else None


def apart(op: FunctionEmitter, x: str, heads: int) -> str:
    """(batch, time, heads·channels) to (time, batch, head, channel)"""
    sizes = op.Concat(op.Shape(x, end=2), [heads], op.Div(op.Shape(x, start=2), [heads]), axis=0)
    return op.Transpose(op.Reshape(x, sizes, allowzero=1), perm=[1, 0, 2, 3])


def repeated(op: FunctionEmitter, x: str, times: str) -> str:
    """`x` with each head of its third axis that often, one after the other."""
    several = op.Expand(op.Unsqueeze(x, [3]), op.Concat([1, 1, 1], times, [1], axis=0))
    sizes = op.Concat(op.Shape(x, end=2), op.Mul(op.Shape(x, start=2, end=3), times), op.Shape(x, start=3), axis=0)
    return op.Reshape(several, sizes, allowzero=1)


def scaled(op: FunctionEmitter, o: str, scale: float, width: str) -> str:
    """scale·o, by default o/√width"""
    return op.Mul(o, scale) if scale else op.Div(o, op.Sqrt(op.CastLike(width, o)))


def _check_gated_delta_net(shapes: Shapes, args: Arguments) -> None:
    _check_rule(args)
    check_known(args, "gate_activation", *_GATES)
    check_known(args, "beta_activation", "none", "sigmoid")
    check_captures(args)
    check_flags(args, "qk_l2_norm")
    for name, reads in (("decay", "gated"), ("beta", "delta")):
        if getattr(args, name) is not None and reads not in args.update_rule:
            raise UnsupportedFormError(f"update_rule={args.update_rule!r} reads no {name}; leave it out")
    _check_activation(args)
    check_pairs(args, "key", "value")
    ragged = args.cu_seqlens is not None
    if args.initial_state is None and (not ragged or args.key is None):
        raise UnsupportedFormError(
            "it needs initial_state where cu_seqlens is left out, and where query holds key and value"
        )
    rank, least = shapes.rank(args.query), 2 if args.key is None else 3
    if rank is None:
        return
    if rank not in (least, least + (not ragged)):
        form = "without key and value" if args.key is None else "with a key"
        raise UnsupportedFormError(
            f"its query is of rank {rank}; {form} it has rank {least}, or {least + 1} without cu_seqlens"
        )
    lead, (heads, shared, depth, width) = (
        sizes(shapes, args.query, rank)[: rank - least + 1],
        _heads(shapes, args, rank),
    )
    check_shape(shapes, "key", args.key, (*lead, shared, width))
    check_shape(shapes, "value", args.value, (*lead, heads, depth))
    check_shape(shapes, "cu_seqlens", args.cu_seqlens, (None,))
    batch = first(lead[0] if len(lead) == 2 else None, sizes(shapes, args.initial_state, 4)[0])
    if ragged:
        batch = total(sizes(shapes, args.cu_seqlens, 1)[0], -1)
    elif batch == 0 or (batch is not None and len(lead) == 1 and lead[0] is not None and lead[0] % batch):
        raise UnsupportedFormError(f"{lead[0]} tokens do not make {batch} requests of one length")
    check_shape(shapes, "initial_state", args.initial_state, (batch, heads, depth, width))
    check_shape(shapes, "decay", args.decay, (*lead, heads), (*lead, heads, width))
    check_shape(shapes, "beta", args.beta, (*lead, heads))
    check_shape(shapes, "a_log", args.a_log, (heads,))
    each = width if args.decay is not None and shapes.rank(args.decay) == len(lead) + 2 else 1
    check_shape(shapes, "dt_bias", args.dt_bias, (heads,), (heads, each), (product(heads, each),))
    check_shape(shapes, "capture_count", args.capture_count, (batch,))


def _check_activation(args: Arguments) -> None:
    """Refuse a gate without the inputs that it reads, and inputs that it does not read."""
    if _GATES[args.gate_activation] == "none":
        if args.a_log is not None or args.dt_bias is not None:
            raise UnsupportedFormError("its inputs a_log and dt_bias need gate_activation=softplus or sigmoid")
        return
    if args.a_log is None or args.dt_bias is None:
        raise UnsupportedFormError(f"gate_activation={args.gate_activation} needs a_log and dt_bias")
    if not -math.inf < args.gate_lower_bound < 0:
        raise UnsupportedFormError(f"gate_lower_bound={args.gate_lower_bound} is not a number below 0")


def _heads(shapes: Shapes, args: Arguments, rank: int) -> tuple[Size, Size, Size, Size]:
    """The heads of values and of queries, and the channels of values and of keys, as far as they are known."""
    check_shape(shapes, "initial_state", args.initial_state, (None,) * 4)
    if args.key is not None:
        (heads, depth), (shared, width) = (sizes(shapes, x, rank)[-2:] for x in (args.value, args.query))
    else:
        _, heads, depth, width = sizes(shapes, args.initial_state, 4)
        shared, columns = None, sizes(shapes, args.query, rank)[-1]
        if columns is not None and heads is not None and depth is not None and width is not None:
            shared, rest = divmod(columns - heads * depth, 2 * width) if width else (0, 1)
            if rest or shared < 1:
                raise UnsupportedFormError(
                    f"its query has {columns} columns; beside {heads} heads of {depth} channels of the value there are "
                    f"as many of the query and of the key, in heads of {width}"
                )
    if heads is not None and shared is not None and (min(heads, shared) < 1 or heads % shared):
        raise UnsupportedFormError(
            f"{heads} heads of the value are not a multiple of {shared} heads of the query and the key"
        )
    return heads, shared, depth, width


@body(
    "GatedDeltaNet",
    "output",
    optional=["final_state", "state_update"],
    others=("cu_seqlens", "capture_count", "state_update_active"),
    types={
        "decay": FLOATS,
        "beta": "decay",
        "initial_state": FLOATS,
        "a_log": "initial_state",
        "dt_bias": "initial_state",
        "final_state": "initial_state",
        "state_update": "initial_state",
    },
    check=_check_gated_delta_net,
    domain=MICROSOFT,
)
def gated_delta_net(
    op: FunctionEmitter,
    query: str,
    key: str | None = None,
    value: str | None = None,
    cu_seqlens: str | None = None,
    decay: str | None = None,
    beta: str | None = None,
    initial_state: str | None = None,
    a_log: str | None = None,
    dt_bias: str | None = None,
    capture_count: str | None = None,
    state_update_active: str | None = None,
    *,
    beta_activation: str = "none",
    chunk_size: int = 64,
    gate_activation: str = "none",
    gate_lower_bound: float = -5.0,
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    state_update_capacity: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[str, str, str]:
    """S = e^decay·S + k·uᵀ with u = v, or u = beta·(v − (e^decay·S)ᵀk) for the delta rules; output = scale·Sᵀq"""
    at = Packing(op, query, key, value, cu_seqlens, initial_state)
    q, k, v = (at.timed(x, 2) for x in at.unpacked)
    if qk_l2_norm:
        q, k = (_normalized(op, x) for x in (q, k))
    gate = rate = None
    if decay is not None and "gated" in update_rule:
        gate = at.timed(at.converted(decay), 2 if _per_key(op, decay, at) else 1)
        gate = gate if _per_key(op, decay, at) else op.Unsqueeze(gate, [3])
        gate = _activated_gate(op, gate, gate_activation, gate_lower_bound, at, a_log, dt_bias)
    if beta is not None and "delta" in update_rule:
        rate = op.Unsqueeze(at.timed(at.converted(beta), 1), [3])
        rate = op.Sigmoid(rate) if beta_activation == "sigmoid" else rate
    written = at.inside(k)
    times = op.Div(op.Shape(v, start=2, end=3), op.Shape(k, start=2, end=3))
    last, o, deltas, _ = recurrence(
        op,
        at.state(),
        repeated(op, q, times),
        repeated(op, written, times),
        v,
        None if gate is None else at.inside(gate),
        rate,
        every_delta=state_update_capacity > 0,
    )
    output = op.CastLike(at.packed(scaled(op, o, scale, op.Shape(q, start=3))), query)
    kind = at.kind if initial_state is None else op.type(initial_state)
    update = None
    if capture_count is None or deltas is None:
        update = op.Expand(op.const(0.0, like=last), op.Concat(op.Shape(last, end=1), [0], axis=0))
    else:
        kept = (
            op.Exp(gate)
            if gate is not None
            else op.Expand(op.const(1.0, like=v), op.Concat(op.Shape(v, end=3), [1], axis=0))
        )
        update = at.captured((kept, k, deltas), capture_count, state_update_active, state_update_capacity)
    return output, op.Cast(op.Transpose(last, perm=[0, 1, 3, 2]), to=kind), op.Cast(update, to=kind)


class Packing:
    """The places of the tokens of GatedDeltaNet: one request after the other, of one length or, with `cu_seqlens`, of any.

    The recurrence takes the axes time, batch, head, channel. A request that is shorter than the longest one is continued by
    tokens that leave its state as it is: their keys and the logarithms of their decays are 0.
    """

    def __init__(
        self, op: FunctionEmitter, query: str, key: str | None, value: str | None, ends: str | None, before: str | None
    ) -> None:
        self.op, self.query, self.before = op, query, before
        self.kind = op.type(op.wide(query)) or int(TensorProto.FLOAT)
        self.leading = known_rank(op, "query", query) - (1 if key is None else 2)
        self.unpacked = self._unpacked(key, value)
        tokens = op.Shape(query, end=1)
        self.ends: str | None = None
        if ends is not None:
            offsets = op.Cast(ends, to=TensorProto.INT64)
            self.starts, self.ends = op.Slice(offsets, [0], [-1], [0]), op.Slice(offsets, [1], [END], [0])
            self.lengths = op.Sub(self.ends, self.starts)
            self.length = op.Reshape(op.reduce("ReduceMax", self.lengths, [0]), [1])
            self.batch = op.Shape(self.lengths)
            place = op.Unsqueeze(op.up_to(self.length), [1])
            self.valid = op.Less(place, self.lengths)
            self.places = op.Where(self.valid, op.Add(place, self.starts), op.const(np.array(0)))
        elif self.leading == 2:
            self.batch, self.length = tokens, op.Shape(query, start=1, end=2)
        else:
            self.batch = op.Shape(before, start=0, end=1)
            self.length = op.Div(tokens, self.batch)

    def converted(self, x: str) -> str:
        """`x` in the type that is computed in."""
        return x if self.op.type(x) == self.kind else str(self.op.Cast(x, to=self.kind))

    def timed(self, x: str, trailing: int) -> str:
        """`x`, whose last `trailing` axes are no tokens, with the axes time and batch first."""
        op = self.op
        if self.ends is not None:
            return str(op.Gather(x, self.places, axis=0))
        sizes = op.Concat(self.batch, self.length, op.Shape(x, start=-trailing), axis=0)
        return str(op.Transpose(op.Reshape(x, sizes, allowzero=1), perm=[1, 0, *range(2, 2 + trailing)]))

    def packed(self, x: str) -> str:
        """The inverse of `timed`, for 2 trailing axes."""
        op = self.op
        sizes = op.Concat(op.Shape(self.query, end=self.leading), op.Shape(x, start=2), axis=0)
        if self.ends is None:
            return str(op.Reshape(op.Transpose(x, perm=[1, 0, 2, 3]), sizes, allowzero=1))
        token = op.up_to(op.Shape(self.query, end=1))
        passed = op.Cast(op.GreaterOrEqual(op.Unsqueeze(token, [1]), self.ends), to=TensorProto.INT64)
        request = op.ReduceSum(passed, [1], keepdims=0)
        rows = op.Reshape(x, op.Concat(op.Mul(self.length, self.batch), op.Shape(x, start=2), axis=0), allowzero=1)
        return str(op.Gather(rows, op.Add(op.Mul(op.Sub(token, op.Gather(self.starts, request)), self.batch), request)))

    def inside(self, x: str) -> str:
        """`x`, 0 behind the end of a request."""
        return x if self.ends is None else str(self.op.Where(self.op.Unsqueeze(self.valid, [2, 3]), x, 0.0))

    def state(self) -> str:
        """The state before the first tokens, with the channels of the keys before the channels of the values."""
        op = self.op
        if self.before is not None:
            return str(op.Transpose(self.converted(self.before), perm=[0, 1, 3, 2]))
        q, _, v = self.unpacked
        sizes = op.Concat(self.batch, op.Shape(v, start=1, end=2), op.Shape(q, start=2), op.Shape(v, start=2), axis=0)
        return str(op.Expand(op.const(0.0, like=q), sizes))

    def captured(self, parts: Sequence[str], count: str, active: str | None, capacity: int) -> str:
        """The first tokens of each part, as many as `count` says, in one row for each request."""
        op = self.op
        places = op.const(np.arange(capacity)[:, None])
        kept = op.And(
            op.Less(places, op.Cast(count, to=TensorProto.INT64)),
            op.Less(places, self.length if self.ends is None else self.lengths),
        )
        if active is not None:
            kept = op.And(kept, op.Not(op.Equal(active, 0)))
        kept = op.Unsqueeze(kept, [2, 3])
        rows = []
        for x in parts:
            sizes = op.Concat([capacity], op.Shape(x, start=1), axis=0)
            longer = op.Concat(x, op.Expand(op.const(0.0, like=x), sizes), axis=0)
            first = op.Where(kept, op.Slice(longer, [0], [capacity], [0]), 0.0)
            width = op.Mul(op.ReduceProd(op.Shape(x, start=2), keepdims=1), [capacity])
            sizes = op.Concat(op.Shape(x, start=1, end=2), width, axis=0)
            rows.append(op.Reshape(op.Transpose(first, perm=[1, 0, 2, 3]), sizes, allowzero=1))
        return str(op.Concat(*rows, axis=1))

    def _unpacked(self, key: str | None, value: str | None) -> tuple[str, str, str]:
        """Query, key and value with heads and channels as their last axes."""
        op = self.op
        if key is not None and value is not None:
            return self.converted(self.query), self.converted(key), self.converted(value)
        assert self.before is not None
        x, of_value = self.converted(self.query), op.Shape(self.before, start=1, end=3)
        width = op.Shape(self.before, start=3)
        whole = op.Shape(x, start=self.leading)
        each = op.Div(op.Sub(whole, op.ReduceProd(of_value, keepdims=1)), [2])
        twice, axis, lead = op.Add(each, each), [self.leading], op.Shape(x, end=self.leading)
        of_key = op.Concat(op.Div(each, width), width, axis=0)
        bounds = (([0], each, of_key), (each, twice, of_key), (twice, whole, of_value))
        q, k, v = (
            str(op.Reshape(op.Slice(x, start, end, axis), op.Concat(lead, sizes, axis=0), allowzero=1))
            for start, end, sizes in bounds
        )
        return q, k, v


def _normalized(op: FunctionEmitter, x: str) -> str:
    """x/‖x‖ along the last axis"""
    return str(op.Div(x, op.Sqrt(op.Add(op.ReduceSum(op.Mul(x, x), [-1]), _NORM_EPSILON))))


def _per_key(op: FunctionEmitter, decay: str, at: Packing) -> bool:
    """True if there is a decay for each channel of the keys, and not only one for each head."""
    return known_rank(op, "decay", decay) == at.leading + 2


def _activated_gate(
    op: FunctionEmitter, gate: str, activation: str, bound: float, at: Packing, a_log: str | None, dt_bias: str | None
) -> str:
    """The logarithm of the decay"""
    if a_log is None or dt_bias is None:
        return gate
    factor = op.Exp(op.Unsqueeze(at.converted(a_log), [1]))
    heads = op.Shape(a_log)
    bias = op.Reshape(at.converted(dt_bias), op.Concat(heads, op.Div(op.Reshape(op.Size(dt_bias), [1]), heads), axis=0))
    x = op.Add(gate, bias)
    if _GATES[activation] == "softplus":
        return str(op.Neg(op.Mul(factor, op.Softplus(x))))
    return str(op.Mul(op.Sigmoid(op.Mul(factor, x)), bound))


def _check_replay(shapes: Shapes, args: Arguments) -> None:
    check_backings(shapes, args, "capsule_backing", 11)


def check_backings(shapes: Shapes, args: Arguments, captured: str, numbers: int) -> None:
    """Refuse tensors that are read and written by offsets, and have more than one axis; and metadata of another length."""
    for name in ("source_backing", captured, "destination_backing"):
        check_shape(shapes, name, getattr(args, name), (None,))
    check_shape(shapes, "metadata", args.metadata, (numbers,))


@body("GatedDeltaNetStateReplay", "destination_out", others=("metadata",), check=_check_replay, domain=MICROSOFT)
def gated_delta_net_state_replay(
    op: FunctionEmitter, source_backing: str, capsule_backing: str, destination_backing: str, metadata: str
) -> str:
    """destination_backing with the state S = decay·S + key·deltaᵀ, after the first captured tokens, written into it"""
    source, destination, *parts = (op.Slice(metadata, [k], [k + 1], [0]) for k in range(11))
    decay_at, key_at, delta_at, heads, depth, width, key_heads, capacity, kept = parts
    capsule, per_head = op.wide(capsule_backing), op.Mul(capacity, heads)
    per_key = op.Equal(op.Sub(key_at, decay_at), op.Mul(per_head, width))
    channels = op.Where(per_key, width, op.const([1]))

    def rows(at: str, *sizes: str) -> str:
        """The first tokens of a part of the capsule"""
        shape = op.Concat(kept, *sizes, axis=0)
        return op.Reshape(section(op, capsule, at, op.ReduceProd(shape, keepdims=1)), shape, allowzero=1)

    shape = op.Concat(heads, depth, width, axis=0)
    state = op.Reshape(
        section(op, op.wide(source_backing), source, op.ReduceProd(shape, keepdims=1)), shape, allowzero=1
    )
    owner = op.Div(op.Mul(op.up_to(heads), key_heads), heads)
    decays, deltas = rows(decay_at, heads, channels), rows(delta_at, heads, depth)
    keys = op.Gather(rows(key_at, key_heads, width), owner, axis=1)

    def step(inner: FunctionEmitter, states: Sequence[str], taken: Sequence[str]) -> list[str]:
        """One token"""
        (S,), (decay, key, delta) = states, taken
        outer = inner.Mul(inner.Unsqueeze(delta, [2]), inner.Unsqueeze(key, [1]))
        return [inner.Add(inner.Mul(S, inner.Unsqueeze(decay, [1])), outer)]

    [last] = op.scan(step, [op.ranked(state, 3)], [op.ranked(x, 3) for x in (decays, keys, deltas)])
    return written(op, destination_backing, destination, op.CastLike(op.Reshape(last, [-1]), destination_backing))


def _check_mamba(shapes: Shapes, args: Arguments) -> None:
    heads, n_groups, d_state, head_dim = args.heads, args.n_groups, args.d_state, args.head_dim
    if min(heads, n_groups, d_state, head_dim) < 1 or heads % n_groups:
        raise UnsupportedFormError(f"n_groups={n_groups} does not divide heads={heads}")
    inner = heads * head_dim
    channels = inner + 2 * n_groups * d_state
    given = f"heads={heads}, head_dim={head_dim}, n_groups={n_groups} and d_state={d_state}"
    if inner + channels + heads >= 2**31:
        raise UnsupportedFormError(
            f"{given} make {inner + channels + heads} columns of projection; it has up to {2**31 - 1}"
        )
    tokens, slots = sizes(shapes, args.projection, 2)[0], sizes(shapes, args.conv_state, 3)[0]
    if 0 in (tokens, slots):
        raise UnsupportedFormError("there is no token, or no slot of a state")
    for name, *valid in (
        ("projection", (tokens, inner + channels + heads)),
        ("conv_state", (slots, channels, 3)),
        ("ssm_state", (slots, heads, d_state, head_dim)),
        ("conv_weight", (channels, 4), (channels, 1, 4)),
        ("conv_bias", (channels,)),
        ("dt_bias", (heads,)),
        ("A_negative", (heads,)),
        ("D", (heads,)),
        ("norm_weight", (inner,)),
        ("state_row", (1,)),
    ):
        check_shape(shapes, name, getattr(args, name), *valid, given=given)


@body(
    "Mamba2Verify",
    "Y",
    "conv_snapshots",
    "ssm_snapshots",
    optional=["xbc", "readout"],
    others=("state_row",),
    types={
        "ssm_state": FLOATS,
        **dict.fromkeys(("dt_bias", "A_negative", "D", "norm_weight", "ssm_snapshots", "readout"), "ssm_state"),
    },
    check=_check_mamba,
    domain=MICROSOFT,
)
def mamba2_verify(
    op: FunctionEmitter,
    projection: str,
    conv_state: str,
    ssm_state: str,
    conv_weight: str,
    conv_bias: str,
    dt_bias: str,
    A_negative: str,
    D: str,
    norm_weight: str,
    state_row: str,
    *,
    d_state: int = 128,
    epsilon: float = 1e-5,
    head_dim: int = 64,
    heads: int,
    n_groups: int,
    time_step_min: float = 0.001,
) -> tuple[str, ...]:
    """RMS norm of (D·x + Sᵀc)·swish(gate) in groups, S = e^(A·dt)·S + b·(dt·x)ᵀ, (x, b, c) = swish of a causal convolution"""
    inner, of_group, taps = heads * head_dim, n_groups * d_state, 4
    tokens, slots = op.Shape(projection, end=1), op.Shape(conv_state, end=1)
    row = op.Cast(state_row, to=TensorProto.INT64)
    there = op.And(op.GreaterOrEqual(row, 0), op.Less(row, slots))
    row = op.Squeeze(op.Where(there, row, op.const([0])), [0])

    state = op.wide(ssm_state)

    def converted(x: str) -> str:
        return op.CastLike(x, state)

    nan = op.Where(there, op.const(0.0, like=state), np.nan)  # without the row, all that follows is NaN
    packed = op.Add(converted(projection), nan)
    bounds = np.cumsum([0, inner, inner + 2 * of_group, heads]).tolist()
    gate, taken, raw = (op.Slice(packed, [a], [b], [1]) for a, b in pairwise(bounds))
    before = op.Add(op.Transpose(op.Gather(converted(conv_state), row, axis=0), perm=[1, 0]), nan)
    whole = op.Concat(before, taken, axis=0)
    weight = op.Reshape(converted(conv_weight), op.Concat(op.Shape(conv_weight, end=1), [taps], axis=0))
    terms = [
        op.Mul(op.Slice(whole, [tap], op.Add(tokens, [tap]), [0]), op.Gather(weight, op.const(np.array(tap)), axis=1))
        for tap in range(taps)
    ]
    z = op.Add(op.Sum(*terms), converted(conv_bias))
    xbc = op.CastLike(op.Mul(z, op.Sigmoid(z)), projection)
    bounds = np.cumsum([0, inner, of_group, of_group]).tolist()
    x, b, c = (op.Slice(converted(xbc), [start], [end], [1]) for start, end in pairwise(bounds))
    x = op.Reshape(x, op.Concat(tokens, [1, heads, head_dim], axis=0), allowzero=1)
    b, c = (
        repeated(
            op,
            op.Reshape(y, op.Concat(tokens, [1, n_groups, d_state], axis=0), allowzero=1),
            op.const([heads // n_groups]),
        )
        for y in (b, c)
    )
    steps = op.Max(op.Softplus(op.Add(raw, converted(dt_bias))), op.const(time_step_min, like=state))
    decay, steps = op.Unsqueeze(op.Mul(steps, converted(A_negative)), [1, 3]), op.Unsqueeze(steps, [1, 3])
    start = op.Unsqueeze(op.Gather(state, row, axis=0), [0])
    _, o, _, states = recurrence(op, start, c, b, op.Mul(steps, x), decay, None, every_state=True)
    assert states is not None
    flat = op.Concat(tokens, [inner], axis=0)
    readout = op.Reshape(op.Add(o, op.Mul(op.Unsqueeze(converted(D), [1]), x)), flat, allowzero=1)
    gated = op.Mul(readout, op.Mul(gate, op.Sigmoid(gate)))
    groups = op.Reshape(gated, op.Concat(tokens, [n_groups, inner // n_groups], axis=0), allowzero=1)
    mean = op.reduce("ReduceMean", op.Mul(groups, groups), [2])
    normalized = op.Reshape(op.Div(groups, op.Sqrt(op.Add(mean, epsilon))), flat, allowzero=1)
    Y = op.CastLike(op.Mul(normalized, converted(norm_weight)), projection)
    ends = op.Add(op.Unsqueeze(op.up_to(tokens), [1]), op.const(np.arange(1, taps)))
    convolved = op.CastLike(op.Transpose(op.Gather(whole, ends, axis=0), perm=[0, 2, 1]), conv_state)

    def snapshots(made: str, old: str) -> str:
        """The last of what the tokens made, and where there are fewer of them, the old rows behind."""
        rows = op.Concat(made, op.Slice(old, tokens, [END], [0]), axis=0)
        return op.Slice(rows, op.Neg(slots), [END], [0])

    return (
        Y,
        snapshots(convolved, conv_state),
        snapshots(op.CastLike(op.Squeeze(states, [1]), ssm_state), ssm_state),
        xbc,
        op.CastLike(readout, ssm_state),
    )


def section(op: FunctionEmitter, backing: str, offset: str, count: str) -> str:
    """As many elements of `backing` from `offset` on."""
    return str(op.Slice(backing, offset, op.Add(offset, count), [0]))


def written(op: FunctionEmitter, backing: str, offset: str, values: str) -> str:
    """`backing` with `values` in the place of its elements from `offset` on."""
    after = op.Add(offset, op.Shape(values))
    return str(op.Concat(op.Slice(backing, [0], offset, [0]), values, op.Slice(backing, after, [END], [0]), axis=0))
