"""ONNX Runtime's attentions whose state is a matrix per head, updated token by token."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import widened
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("LinearAttention", domain=MICROSOFT, fresh=True)
def linear_attention(args: Arguments) -> tuple[Array, Array]:
    """Head by head, o = scale·Sᵀq with the S that the tokens up to this one have made"""
    most = max(args.q_num_heads, args.kv_num_heads)
    batch, length, columns = args.query.shape
    width, depth = columns // args.q_num_heads, args.value.shape[2] // args.kv_num_heads
    of_queries = args.kv_num_heads > args.q_num_heads and args.key.shape[2] == args.q_num_heads * width
    key_heads = args.q_num_heads if of_queries else args.kv_num_heads
    q, k, v = (
        widened(x).reshape(batch, length, heads, -1 if x.size else x.shape[2] // heads)
        for x, heads in ((args.query, args.q_num_heads), (args.key, key_heads), (args.value, args.kv_num_heads))
    )
    k = k.repeat(args.kv_num_heads // key_heads, 2)
    gates = rates = None
    if "gated" in args.update_rule:
        each = args.decay.shape[-1] == args.kv_num_heads * width
        gates = widened(args.decay).reshape(batch, length, args.kv_num_heads, width if each else 1)
    if "delta" in args.update_rule:
        rates = np.broadcast_to(widened(args.beta), (batch, length, args.kv_num_heads))
    shape = batch, args.kv_num_heads, width, depth
    kind, before = args.query.dtype, np.zeros(shape, q.dtype)
    if args.past_state is not None:
        kind, before = (
            args.past_state.dtype,
            (args.past_state[-1] if args.state_window else args.past_state).astype(q.dtype),
        )
    o = np.zeros((batch, length, most, depth), q.dtype)
    states = np.zeros((args.state_window + length, *shape), q.dtype)
    ends = np.zeros(shape, q.dtype)
    for b in range(batch):
        S = before[b]
        for t in range(length):
            gate = None if gates is None else gates[b, t]
            S, _ = _next(S, k[b, t], v[b, t], gate, None if rates is None else rates[b, t])
            states[args.state_window + t, b] = S
            of_head = S.repeat(most // args.kv_num_heads, 0)
            o[b, t] = np.einsum("hk,hkv->hv", q[b, t].repeat(most // args.q_num_heads, 0), of_head)
        ends[b] = S
    o *= args.scale or 1 / math.sqrt(max(width, 1))
    present = states[len(states) - args.state_window :] if args.state_window else ends
    return o.reshape(batch, length, most * depth).astype(args.query.dtype), present.astype(kind)


@kernel_of_body("LinearAttentionGate", domain=MICROSOFT, fresh=True)
def linear_attention_gate(args: Arguments) -> tuple[Array, Array | None]:
    """decay = decay_scale·log(1 + e^(a + dt_bias)), beta = 1/(1 + e^(−b))"""
    decay = widened(args.decay_scale) * np.logaddexp(0, widened(args.a) + widened(args.dt_bias))
    return decay.astype(args.a.dtype), None if args.b is None else sigmoid(widened(args.b)).astype(args.a.dtype)


@kernel_of_body("GatedDeltaNet", domain=MICROSOFT, fresh=True)
def gated_delta_net(args: Arguments) -> tuple[Array, Array, Array]:
    """For each request, token by token, o = scale·Sᵀq; the last S; and of the first tokens e^decay, k and u"""
    kind, (q, k, v) = args.query.dtype, _split(args)
    leading, heads, depth, width = args.query.shape[: q.ndim - 2], v.shape[-2], v.shape[-1], q.shape[-1]
    shared = heads // q.shape[-2]
    bounds = _bounds(args, leading)
    batch = len(bounds) - 1
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    if args.qk_l2_norm:
        q, k = (x / np.sqrt(np.einsum("nhd,nhd->nh", x, x) + 1e-12)[..., None] for x in (q, k))
    gates = np.zeros((len(q), heads, 1), q.dtype)
    if args.decay is not None:
        gates = args.decay.astype(q.dtype).reshape(len(q), heads, width if args.decay.ndim > len(leading) + 1 else 1)
    gates = _activated(args, gates)
    rates = None
    if args.beta is not None:
        rates = args.beta.astype(q.dtype).reshape(len(q), heads)
        rates = sigmoid(rates) if args.beta_activation == "sigmoid" else rates
    o, deltas = np.zeros_like(v), np.zeros_like(v)
    states = np.zeros((batch, heads, depth, width), q.dtype)
    for b in range(batch):
        S = np.zeros((heads, width, depth), q.dtype)
        if args.initial_state is not None:
            S = args.initial_state[b].astype(q.dtype).swapaxes(1, 2)
        for t in range(bounds[b], bounds[b + 1]):
            S, deltas[t] = _next(S, k[t].repeat(shared, 0), v[t], gates[t], None if rates is None else rates[t])
            o[t] = np.einsum("hk,hkv->hv", q[t].repeat(shared, 0), S)
        states[b] = S.swapaxes(1, 2)
    o *= args.scale or 1 / math.sqrt(max(width, 1))
    update = np.zeros((batch, 0), q.dtype)
    if args.capture_count is not None:
        parts = []
        for x in (np.exp(gates), k, deltas):
            of_x = np.zeros((batch, args.state_update_capacity, *x.shape[1:]), q.dtype)
            for b in range(batch if args.state_update_active is None or args.state_update_active[0] else 0):
                count = min(max(args.capture_count[b], 0), args.state_update_capacity, bounds[b + 1] - bounds[b])
                of_x[b, :count] = x[bounds[b] : bounds[b] + count]
            parts.append(of_x.reshape(batch, math.prod(of_x.shape[1:])))
        update = np.concatenate(parts, 1)
    of_state = q.dtype if args.initial_state is None else args.initial_state.dtype
    return o.reshape(*leading, heads, depth).astype(kind), states.astype(of_state), update.astype(of_state)


def _split(args: Arguments) -> tuple[Array, Array, Array]:
    """Query, key and value with the axes of the tokens, head and channel, in the type to compute in."""
    if args.key is not None:
        return widened(args.query), widened(args.key), widened(args.value)
    _, heads, depth, width = args.initial_state.shape
    x, lead = widened(args.query), args.query.shape[:-1]
    shared = (x.shape[-1] - heads * depth) // (2 * width)
    q, k, v = np.split(x, [shared * width, 2 * shared * width], axis=-1)
    return q.reshape(*lead, shared, width), k.reshape(*lead, shared, width), v.reshape(*lead, heads, depth)


def _bounds(args: Arguments, leading: tuple[int, ...]) -> Array:
    """The bounds of the requests: where each one begins and the last one ends."""
    tokens = math.prod(leading)
    if args.cu_seqlens is not None:
        return check_bounds("cu_seqlens", args.cu_seqlens, tokens)
    batch = leading[0] if len(leading) == 2 else len(args.initial_state)
    return np.arange(batch + 1) * (tokens // batch)


def _activated(args: Arguments, gates: Array) -> Array:
    """The logarithms of the decays"""
    if args.gate_activation == "none":
        return gates
    x = gates + widened(args.dt_bias).reshape(gates.shape[1], -1)
    slope = np.exp(widened(args.a_log))[:, None]
    if args.gate_activation in ("softplus", "qwen"):
        return np.asarray(-slope * np.logaddexp(0, x))
    return np.asarray(args.gate_lower_bound * sigmoid(slope * x))


def _next(S: Array, k: Array, v: Array, gate: Array | None, rate: Array | None) -> tuple[Array, Array]:
    """The state behind a token, and what the token writes along its key; the axes are head and channel."""
    if gate is not None:
        S = np.exp(gate)[..., None] * S
    u = v
    if rate is not None:
        u = rate[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    return S + np.einsum("hk,hv->hkv", k, u), u


def check_bounds(name: str, bounds: Array, tokens: int) -> Array:
    """The bounds of the requests: where each begins and the last one ends. Raises ValueError if they do not fit the tokens."""
    if len(bounds) < 2 or bounds[0] or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{name} is {bounds.tolist()}; it begins with 0, does not fall and ends with the number of tokens, {tokens}"
        )
    return bounds


@kernel_of_body("GatedDeltaNetStateReplay", domain=MICROSOFT, in_float32=True, fresh=True)
def gated_delta_net_state_replay(args: Arguments) -> Array:
    """S ← decay·S + key·deltaᵀ for one head and captured token after the other"""
    source, destination, *parts = args.metadata.tolist()
    decay_at, key_at, delta_at, heads, depth, width, key_heads, capacity, kept = parts
    if min(args.metadata[:5]) < 0 or min(args.metadata[5:]) < 1 or kept > capacity:
        raise ValueError(
            f"metadata is {args.metadata.tolist()}: the offsets must not be below 0, the sizes are 1 or more, "
            f"and kept_count is "
            "at most capacity"
        )
    channels = width if key_at - decay_at == capacity * heads * width else 1
    decay = check_part("decay", args.capsule_backing, decay_at, (capacity, heads, channels))
    key = check_part("key", args.capsule_backing, key_at, (capacity, key_heads, width))
    delta = check_part("delta", args.capsule_backing, delta_at, (capacity, heads, depth))
    states = check_part("state", args.source_backing, source, (heads, depth, width))
    result = np.array(args.destination_backing)
    written = check_part("state", result, destination, states.shape)
    for head, S in enumerate(states):
        for t in range(kept):
            S = S * decay[t, head] + np.outer(delta[t, head], key[t, head * key_heads // heads])
        written[head] = S
    return result


@kernel_of_body("Mamba2Verify", domain=MICROSOFT, fresh=True)
def mamba2_verify(args: Arguments) -> tuple[Array, ...]:
    """Token by token: convolution, swish, the state of each head, readout, gate, and the norm of each group"""
    ssm_state, dt_bias, A_negative, D, norm_weight = (
        args.ssm_state,
        args.dt_bias,
        args.A_negative,
        args.D,
        args.norm_weight,
    )
    tokens, slots, inner = len(args.projection), len(args.conv_state), args.heads * args.head_dim
    channels = inner + 2 * args.n_groups * args.d_state
    kind, wide, of_state = args.projection.dtype, widened(ssm_state).dtype, ssm_state.dtype
    ssm_state, dt_bias, A_negative, D, norm_weight = (
        x.astype(wide) for x in (ssm_state, dt_bias, A_negative, D, norm_weight)
    )
    x_gate, x_taken, x_step = np.split(args.projection.astype(wide), [inner, inner + channels], 1)
    weight, bias = args.conv_weight.reshape(channels, 4).astype(wide), args.conv_bias.astype(wide)
    row = int(args.state_row[0])
    known = 0 <= row < slots
    window = args.conv_state[row].astype(wide) if known else np.full((channels, 3), np.nan, wide)
    S = ssm_state[row] if known else np.full(ssm_state.shape[1:], np.nan, wide)
    Y, xbc = np.zeros((tokens, inner), kind), np.zeros((tokens, channels), kind)
    readout, made = np.zeros((tokens, inner), wide), []
    for t in range(tokens):
        taps = np.column_stack((window, x_taken[t] if known else np.full(channels, np.nan, wide)))
        z = np.einsum("ck,ck->c", weight, taps) + bias
        window, xbc[t] = taps[:, 1:], z * sigmoid(z)
        of_x, of_b, of_c = np.split(xbc[t].astype(wide), [inner, inner + args.n_groups * args.d_state])
        step = np.maximum(np.logaddexp(0, x_step[t] + dt_bias), args.time_step_min)
        after = np.empty_like(S)
        for head in range(args.heads):
            group = head * args.n_groups // args.heads
            x = of_x[head * args.head_dim : (head + 1) * args.head_dim]
            b, c = (y[group * args.d_state : (group + 1) * args.d_state] for y in (of_b, of_c))
            after[head] = np.exp(A_negative[head] * step[head]) * S[head] + np.outer(b, step[head] * x)
            readout[t, head * args.head_dim : (head + 1) * args.head_dim] = D[head] * x + c @ after[head]
        S = after
        made.append((window, S))
        groups = (readout[t] * x_gate[t] * sigmoid(x_gate[t])).reshape(args.n_groups, -1)
        root = np.sqrt((groups * groups).mean(1, keepdims=True) + args.epsilon)
        Y[t] = (groups / root).reshape(-1) * norm_weight
    convolved, states = args.conv_state.copy(), ssm_state.copy()
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
