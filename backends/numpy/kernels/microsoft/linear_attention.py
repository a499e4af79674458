"""ONNX Runtime's attentions whose state is a matrix per head, updated token by token."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray

_RULES = ("linear", "gated", "delta", "gated_delta")


@kernel("LinearAttention", domain=MICROSOFT, fresh=True)
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """Head by head, o = scale·Sᵀq with the S that the tokens up to this one have made"""
    check_choice("update_rule", update_rule, _RULES)
    check_range("state_window", state_window)
    least, most = sorted((q_num_heads, kv_num_heads))
    if least < 1 or most % least:
        raise ValueError(
            f"q_num_heads={q_num_heads} and kv_num_heads={kv_num_heads}: one has to be a multiple of the other"
        )
    check_rank(3, query=query, key=key, value=value)
    batch, length, columns = query.shape
    if columns % q_num_heads or value.shape[2] % kv_num_heads:
        raise ValueError(
            f"query {list(query.shape)} and value {list(value.shape)} do not fit {q_num_heads} and "
            f"{kv_num_heads} heads: they have a multiple of them as their last size"
        )
    width, depth = columns // q_num_heads, value.shape[2] // kv_num_heads
    of_queries = kv_num_heads > q_num_heads and key.shape[2] == q_num_heads * width
    key_heads = q_num_heads if of_queries else kv_num_heads
    check_shape("key", key.shape, (batch, length, key_heads * width))
    check_shape("value", value.shape, (batch, length, kv_num_heads * depth))
    q, k, v = (
        widened(x).reshape(batch, length, heads, -1 if x.size else x.shape[2] // heads)
        for x, heads in ((query, q_num_heads), (key, key_heads), (value, kv_num_heads))
    )
    k = k.repeat(kv_num_heads // key_heads, 2)
    gates = rates = None
    if "gated" in update_rule:
        decay = _needed("decay", decay, update_rule)
        each = decay.shape[-1] == kv_num_heads * width
        check_shape("decay", decay.shape, (batch, length, kv_num_heads * (width if each else 1)))
        gates = widened(decay).reshape(batch, length, kv_num_heads, width if each else 1)
    if "delta" in update_rule:
        beta = _needed("beta", beta, update_rule)
        one = beta.shape[-1] == 1
        check_shape("beta", beta.shape, (batch, length, 1 if one else kv_num_heads))
        rates = np.broadcast_to(widened(beta), (batch, length, kv_num_heads))
    shape = batch, kv_num_heads, width, depth
    window = (state_window,) if state_window else ()
    kind, before = query.dtype, np.zeros(shape, q.dtype)
    if past_state is not None:
        check_shape("past_state", past_state.shape, window + shape)
        kind, before = past_state.dtype, (past_state[-1] if state_window else past_state).astype(q.dtype)
    o = np.zeros((batch, length, most, depth), q.dtype)
    states = np.zeros((state_window + length, *shape), q.dtype)
    ends = np.zeros(shape, q.dtype)
    for b in range(batch):
        S = before[b]
        for t in range(length):
            gate = None if gates is None else gates[b, t]
            S, _ = _next(S, k[b, t], v[b, t], gate, None if rates is None else rates[b, t])
            states[state_window + t, b] = S
            of_head = S.repeat(most // kv_num_heads, 0)
            o[b, t] = np.einsum("hk,hkv->hv", q[b, t].repeat(most // q_num_heads, 0), of_head)
        ends[b] = S
    o *= scale or 1 / math.sqrt(max(width, 1))
    present = states[len(states) - state_window :] if state_window else ends
    return o.reshape(batch, length, most * depth).astype(query.dtype), present.astype(kind)


@kernel("LinearAttentionGate", domain=MICROSOFT, fresh=True)
def linear_attention_gate(
    a: Array, dt_bias: Array, decay_scale: Array, b: Array | None = None
) -> tuple[Array, Array | None]:
    """decay = decay_scale·log(1 + e^(a + dt_bias)), beta = 1/(1 + e^(−b))"""
    check_rank(3, a=a)
    check_shape("dt_bias", dt_bias.shape, a.shape[2:])
    check_shape("decay_scale", decay_scale.shape, a.shape[2:])
    if b is not None:
        check_shape("b", b.shape, a.shape)
    decay = widened(decay_scale) * np.logaddexp(0, widened(a) + widened(dt_bias))
    return decay.astype(a.dtype), None if b is None else sigmoid(widened(b)).astype(a.dtype)


@kernel("GatedDeltaNet", domain=MICROSOFT, fresh=True)
def gated_delta_net(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    cu_seqlens: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    initial_state: Array | None = None,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    capture_count: Array | None = None,
    state_update_active: Array | None = None,
    *,
    beta_activation: str = "none",
    chunk_size: int = 64,
    gate_activation: str = "none",
    gate_lower_bound: float = -5.0,
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    state_update_capacity: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array, Array]:
    """For each request, token by token, o = scale·Sᵀq; the last S; and of the first tokens e^decay, k and u"""
    check_choice("update_rule", update_rule, _RULES)
    check_choice("gate_activation", gate_activation, ("none", "softplus", "qwen", "sigmoid", "kda"))
    check_choice("beta_activation", beta_activation, ("none", "sigmoid"))
    check_range("state_update_capacity", state_update_capacity)
    if qk_l2_norm not in (0, 1):
        raise ValueError(f"qk_l2_norm={qk_l2_norm} is not known; there are 0 and 1")
    if (capture_count is None) != (state_update_capacity == 0):
        raise ValueError("capture_count is needed exactly where state_update_capacity is above 0")
    for name, given, reads in (("decay", decay, "gated"), ("beta", beta, "delta")):
        if given is not None and reads not in update_rule:
            raise ValueError(f"update_rule={update_rule!r} reads no {name}; leave it out")
    kind, ragged = query.dtype, cu_seqlens is not None
    q, k, v = _split(query, key, value, initial_state, ragged)
    leading, heads, depth, width = query.shape[: q.ndim - 2], v.shape[-2], v.shape[-1], q.shape[-1]
    check_shape("key", k.shape, (*leading, q.shape[-2], width))
    check_shape("value", v.shape, (*leading, heads, depth))
    shared = heads // max(q.shape[-2], 1)
    if not shared or heads % q.shape[-2]:
        raise ValueError(
            f"{heads} heads of the value are not a multiple of {q.shape[-2]} heads of the query and the key"
        )
    bounds = _bounds(leading, cu_seqlens, initial_state)
    batch = len(bounds) - 1
    if initial_state is not None:
        check_shape("initial_state", initial_state.shape, (batch, heads, depth, width))
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    if qk_l2_norm:
        q, k = (x / np.sqrt(np.einsum("nhd,nhd->nh", x, x) + 1e-12)[..., None] for x in (q, k))
    gates = np.zeros((len(q), heads, 1), q.dtype)
    if "gated" in update_rule:
        decay = _needed("decay", decay, update_rule)
        per_key = decay.ndim > len(leading) + 1
        check_shape("decay", decay.shape, (*leading, heads, *([width] if per_key else [])))
        gates = decay.astype(q.dtype).reshape(len(q), heads, width if per_key else 1)
    gates = _activated(gates, gate_activation, gate_lower_bound, a_log, dt_bias)
    rates = None
    if "delta" in update_rule:
        beta = _needed("beta", beta, update_rule)
        check_shape("beta", beta.shape, (*leading, heads))
        rates = beta.astype(q.dtype).reshape(len(q), heads)
        rates = sigmoid(rates) if beta_activation == "sigmoid" else rates
    o, deltas = np.zeros_like(v), np.zeros_like(v)
    states = np.zeros((batch, heads, depth, width), q.dtype)
    for b in range(batch):
        S = np.zeros((heads, width, depth), q.dtype)
        if initial_state is not None:
            S = initial_state[b].astype(q.dtype).swapaxes(1, 2)
        for t in range(bounds[b], bounds[b + 1]):
            S, deltas[t] = _next(S, k[t].repeat(shared, 0), v[t], gates[t], None if rates is None else rates[t])
            o[t] = np.einsum("hk,hkv->hv", q[t].repeat(shared, 0), S)
        states[b] = S.swapaxes(1, 2)
    o *= scale or 1 / math.sqrt(max(width, 1))
    update = np.zeros((batch, 0), q.dtype)
    if capture_count is not None:
        check_shape("capture_count", capture_count.shape, (batch,))
        parts = []
        for x in (np.exp(gates), k, deltas):
            of_x = np.zeros((batch, state_update_capacity, *x.shape[1:]), q.dtype)
            for b in range(batch if state_update_active is None or state_update_active[0] else 0):
                count = min(max(capture_count[b], 0), state_update_capacity, bounds[b + 1] - bounds[b])
                of_x[b, :count] = x[bounds[b] : bounds[b] + count]
            parts.append(of_x.reshape(batch, math.prod(of_x.shape[1:])))
        update = np.concatenate(parts, 1)
    of_state = q.dtype if initial_state is None else initial_state.dtype
    return o.reshape(*leading, heads, depth).astype(kind), states.astype(of_state), update.astype(of_state)


def _split(
    query: Array, key: Array | None, value: Array | None, state: Array | None, ragged: bool
) -> tuple[Array, Array, Array]:
    """Query, key and value with the axes of the tokens, head and channel, in the type to compute in."""
    if key is not None and value is not None:
        if query.ndim != 3 and (query.ndim != 4 or ragged):
            raise ValueError(f"query has rank {query.ndim}; it has rank 3, or rank 4 without cu_seqlens")
        check_rank(query.ndim, key=key, value=value)
        return widened(query), widened(key), widened(value)
    if key is not None or value is not None:
        raise ValueError("key and value are both needed, or neither of them")
    if query.ndim != 2 and (query.ndim != 3 or ragged):
        raise ValueError(f"query has rank {query.ndim}; without key it has rank 2, or rank 3 without cu_seqlens")
    if state is None:
        raise ValueError("initial_state is needed where query holds the key and the value too")
    check_rank(4, initial_state=state)
    _, heads, depth, width = state.shape
    both, rest = divmod(query.shape[-1] - heads * depth, 2 * width) if width else (0, 1)
    if rest or both < 1:
        raise ValueError(
            f"query has {query.shape[-1]} columns; beside {heads} heads of {depth} channels of the value there are "
            f"as many of the query and of the key, in heads of {width}"
        )
    x, lead = widened(query), query.shape[:-1]
    q, k, v = np.split(x, [both * width, 2 * both * width], axis=-1)
    return q.reshape(*lead, both, width), k.reshape(*lead, both, width), v.reshape(*lead, heads, depth)


def _bounds(leading: tuple[int, ...], cu_seqlens: Array | None, state: Array | None) -> Array:
    """The bounds of the requests: where each one begins and the last one ends."""
    tokens = math.prod(leading)
    if cu_seqlens is not None:
        return check_bounds("cu_seqlens", cu_seqlens, tokens)
    if state is None:
        raise ValueError("initial_state is needed where cu_seqlens is left out: it tells the number of requests")
    batch = leading[0] if len(leading) == 2 else state.shape[0]
    if not batch or tokens % batch:
        raise ValueError(f"{tokens} tokens do not make {batch} requests of one length")
    return np.arange(batch + 1) * (tokens // batch)


def _activated(gates: Array, activation: str, bound: float, a_log: Array | None, dt_bias: Array | None) -> Array:
    """The logarithms of the decays"""
    if activation == "none":
        if a_log is not None or dt_bias is not None:
            raise ValueError("a_log and dt_bias need gate_activation='softplus' or 'sigmoid'")
        return gates
    if a_log is None or dt_bias is None:
        raise ValueError(f"gate_activation={activation!r} needs a_log and dt_bias")
    _, heads, each = gates.shape
    check_shape("a_log", a_log.shape, (heads,))
    if dt_bias.shape not in ((heads,), (heads, each), (heads * each,)):
        raise ValueError(
            f"dt_bias has the shape {list(dt_bias.shape)}; there are {[heads]}, {[heads, each]}, {[heads * each]}"
        )
    if not (math.isfinite(bound) and bound < 0):
        raise ValueError(f"gate_lower_bound={bound} is not a number below 0")
    x, slope = gates + widened(dt_bias).reshape(heads, -1), np.exp(widened(a_log))[:, None]
    decay = -slope * np.logaddexp(0, x) if activation in ("softplus", "qwen") else bound * sigmoid(slope * x)
    return np.asarray(decay)


def _next(S: Array, k: Array, v: Array, gate: Array | None, rate: Array | None) -> tuple[Array, Array]:
    """The state behind a token, and what the token writes along its key; the axes are head and channel."""
    if gate is not None:
        S = np.exp(gate)[..., None] * S
    u = v
    if rate is not None:
        u = rate[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    return S + np.einsum("hk,hv->hkv", k, u), u


def _needed(name: str, given: Array | None, update_rule: str) -> Array:
    if given is None:
        raise ValueError(f"update_rule={update_rule!r} needs {name}, which is left out")
    return given


def check_bounds(name: str, bounds: Array, tokens: int) -> Array:
    """The bounds of the requests: where each begins and the last one ends. Raises ValueError if they do not fit the tokens."""
    check_rank(1, **{name: bounds})
    if len(bounds) < 2 or bounds[0] or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{name} is {bounds.tolist()}; it begins with 0, does not fall and ends with the number of tokens, {tokens}"
        )
    return bounds


def check_choice(name: str, given: str, known: tuple[str, ...]) -> None:
    """Raise ValueError for an attribute that has none of the known values."""
    if given not in known:
        raise ValueError(f"{name}={given!r} is not known; there are {', '.join(map(repr, known))}")


def check_range(name: str, given: int) -> None:
    """Raise ValueError for an attribute outside 0 to 8."""
    if not 0 <= given <= 8:
        raise ValueError(f"{name}={given} is not known; there are 0 to 8")


def check_rank(rank: int, **given: Array) -> None:
    """Raise ValueError for an input of another rank."""
    for name, x in given.items():
        if x.ndim != rank:
            raise ValueError(f"{name} has rank {x.ndim}; rank {rank} is needed")


@kernel("GatedDeltaNetStateReplay", domain=MICROSOFT, in_float32=True, fresh=True)
def gated_delta_net_state_replay(
    source_backing: Array, capsule_backing: Array, destination_backing: Array, metadata: Array
) -> Array:
    """S ← decay·S + key·deltaᵀ for one head and captured token after the other"""
    check_rank(
        1, source_backing=source_backing, capsule_backing=capsule_backing, destination_backing=destination_backing
    )
    check_shape("metadata", metadata.shape, (11,))
    source, destination, *parts = metadata.tolist()
    decay_at, key_at, delta_at, heads, depth, width, key_heads, capacity, kept = parts
    if min(metadata[:5]) < 0 or min(metadata[5:]) < 1 or kept > capacity:
        raise ValueError(
            f"metadata is {metadata.tolist()}: the offsets must not be below 0, the sizes are 1 or more, and kept_count is "
            "at most capacity"
        )
    channels = width if key_at - decay_at == capacity * heads * width else 1
    decay = check_part("decay", capsule_backing, decay_at, (capacity, heads, channels))
    key = check_part("key", capsule_backing, key_at, (capacity, key_heads, width))
    delta = check_part("delta", capsule_backing, delta_at, (capacity, heads, depth))
    states = check_part("state", source_backing, source, (heads, depth, width))
    result = destination_backing.copy()
    written = check_part("state", result, destination, states.shape)
    for head, S in enumerate(states):
        for t in range(kept):
            S = S * decay[t, head] + np.outer(delta[t, head], key[t, head * key_heads // heads])
        written[head] = S
    return result


@kernel("Mamba2Verify", domain=MICROSOFT, fresh=True)
def mamba2_verify(
    projection: Array,
    conv_state: Array,
    ssm_state: Array,
    conv_weight: Array,
    conv_bias: Array,
    dt_bias: Array,
    A_negative: Array,
    D: Array,
    norm_weight: Array,
    state_row: Array,
    *,
    d_state: int = 128,
    epsilon: float = 1e-5,
    head_dim: int = 64,
    heads: int,
    n_groups: int,
    time_step_min: float = 0.001,
) -> tuple[Array, ...]:
    """Token by token: convolution, swish, the state of each head, readout, gate, and the norm of each group"""
    if min(heads, n_groups, d_state, head_dim) < 1 or heads % n_groups:
        raise ValueError(f"n_groups={n_groups} does not divide heads={heads}")
    check_rank(2, projection=projection)
    check_rank(3, conv_state=conv_state)
    tokens, slots, inner = len(projection), len(conv_state), heads * head_dim
    channels = inner + 2 * n_groups * d_state
    if not (tokens and slots):
        raise ValueError("there is no token, or no slot of a state")
    for name, x, needed in (
        ("projection", projection, (tokens, inner + channels + heads)),
        ("conv_state", conv_state, (slots, channels, 3)),
        ("ssm_state", ssm_state, (slots, heads, d_state, head_dim)),
        ("conv_bias", conv_bias, (channels,)),
        ("dt_bias", dt_bias, (heads,)),
        ("A_negative", A_negative, (heads,)),
        ("D", D, (heads,)),
        ("norm_weight", norm_weight, (inner,)),
        ("state_row", state_row, (1,)),
    ):
        check_shape(name, x.shape, needed)
    if conv_weight.shape not in ((channels, 4), (channels, 1, 4)):
        raise ValueError(
            f"conv_weight has the shape {list(conv_weight.shape)}; there are [{channels}, 4], [{channels}, 1, 4]"
        )
    kind, wide, of_state = projection.dtype, widened(ssm_state).dtype, ssm_state.dtype
    ssm_state, dt_bias, A_negative, D, norm_weight = (
        x.astype(wide) for x in (ssm_state, dt_bias, A_negative, D, norm_weight)
    )
    x_gate, x_taken, x_step = np.split(projection.astype(wide), [inner, inner + channels], 1)
    weight, bias = conv_weight.reshape(channels, 4).astype(wide), conv_bias.astype(wide)
    row = int(state_row[0])
    known = 0 <= row < slots
    window = conv_state[row].astype(wide) if known else np.full((channels, 3), np.nan, wide)
    S = ssm_state[row] if known else np.full(ssm_state.shape[1:], np.nan, wide)
    Y, xbc = np.zeros((tokens, inner), kind), np.zeros((tokens, channels), kind)
    readout, made = np.zeros((tokens, inner), wide), []
    for t in range(tokens):
        taps = np.column_stack((window, x_taken[t] if known else np.full(channels, np.nan, wide)))
        z = np.einsum("ck,ck->c", weight, taps) + bias
        window, xbc[t] = taps[:, 1:], z * sigmoid(z)
        of_x, of_b, of_c = np.split(xbc[t].astype(wide), [inner, inner + n_groups * d_state])
        step = np.maximum(np.logaddexp(0, x_step[t] + dt_bias), time_step_min)
        after = np.empty_like(S)
        for head in range(heads):
            group = head * n_groups // heads
            x = of_x[head * head_dim : (head + 1) * head_dim]
            b, c = (y[group * d_state : (group + 1) * d_state] for y in (of_b, of_c))
            after[head] = np.exp(A_negative[head] * step[head]) * S[head] + np.outer(b, step[head] * x)
            readout[t, head * head_dim : (head + 1) * head_dim] = D[head] * x + c @ after[head]
        S = after
        made.append((window, S))
        groups = (readout[t] * x_gate[t] * sigmoid(x_gate[t])).reshape(n_groups, -1)
        root = np.sqrt((groups * groups).mean(1, keepdims=True) + epsilon)
        Y[t] = (groups / root).reshape(-1) * norm_weight
    convolved, states = conv_state.copy(), ssm_state.copy()
    for slot, (window, S) in enumerate(made[max(tokens - slots, 0) :]):
        convolved[slot], states[slot] = window, S
    return Y, convolved, states.astype(of_state), xbc, readout.astype(of_state)


def check_part(name: str, backing: Array, start: int, shape: tuple[int, ...]) -> Array:
    """The elements of a backing tensor from `start` on, as an array. Raises ValueError where it has fewer."""
    count = math.prod(shape)
    if start + count > backing.size:
        raise ValueError(
            f"{name} {list(shape)} from element {start} on leaves the {backing.size} elements of its tensor"
        )
    return backing[start : start + count].reshape(shape)
