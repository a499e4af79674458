"""Strategies of ONNX Runtime's attentions whose state is a matrix per head, updated token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.microsoft.cases.linear_attention import RULES
from refgrad.protos.domains import MICROSOFT


@strategy("LinearAttention", domain=MICROSOFT)
def linear_attention(d: Drawing) -> Case:
    """Every rule, with as many heads of the query or more or fewer, with and without a past and a window of states."""
    batch, length, width, depth, rule = *(d.integer(1, 3) for _ in range(4)), d.pick(*RULES)
    q_heads, kv_heads = d.pick((1, 1), (2, 2), (2, 1), (1, 2))
    window = d.pick(0, 1, 2)
    state = batch, kv_heads, width, depth
    inputs = [d.floats((batch, length, n), -1, 1) for n in (q_heads * width, kv_heads * width, kv_heads * depth)]
    past = d.optional(lambda: d.floats((*([window] if window else []), *state), -1, 1))
    decay = d.floats((batch, length, kv_heads * d.pick(1, width)), -2, 0) if "gated" in rule else None
    beta = d.floats((batch, length, d.pick(1, kv_heads)), 0, 1) if "delta" in rule else None
    settings: dict[str, Any] = {"scale": d.pick(None, 0.5), "state_window": window or d.pick(None, 0)}
    settings |= {"update_rule": rule if rule != "gated_delta" else d.pick(None, rule)}
    return d.case(*inputs, past, decay, beta, q_num_heads=q_heads, kv_num_heads=kv_heads, outputs=2, **settings)


@strategy("LinearAttentionGate", domain=MICROSOFT)
def linear_attention_gate(d: Drawing) -> Case:
    """With and without a rate."""
    shape = d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    b = d.optional(lambda: d.floats(shape))
    vectors = [d.floats(shape[2:]).astype(np.float32) for _ in range(2)]
    return d.case(d.floats(shape), *vectors, b, outputs=1 if b is None else 2)


@strategy("GatedDeltaNet", domain=MICROSOFT, ranked=True)
def gated_delta_net(d: Drawing) -> Case:
    """Every rule and activation; requests of one length and of several, apart and packed; what the first tokens write."""
    batch, length, width, depth, rule = *(d.integer(1, 3) for _ in range(4)), d.pick(*RULES)
    heads, shared = d.integer(1, 2), d.integer(1, 2)
    values, ragged, packed = heads * shared, d.flag(), d.flag()
    leading = (batch, length) if not ragged and d.flag() else (batch * length,)
    parts = [d.floats((*leading, n, size), -1, 1) for n, size in ((heads, width), (heads, width), (values, depth))]
    inputs: list[np.ndarray | None] = [*parts]
    if packed:
        inputs = [np.concatenate([x.reshape(*leading, -1) for x in parts], -1), None, None]
    ends = sorted(d.integer(0, batch * length) for _ in range(batch - 1))
    inputs.append(np.array([0, *ends, batch * length], np.int32) if ragged else None)
    per_key, activation = d.flag(), d.pick("none", "softplus", "sigmoid", "kda", "qwen")
    decay = d.floats((*leading, values, *([width] if per_key else [])), -2, 0) if "gated" in rule else None
    inputs += [decay, d.floats((*leading, values), 0, 1) if "delta" in rule else None]
    state = packed or not ragged or d.flag()
    inputs.append(d.floats((batch, values, depth, width), -1, 1).astype(np.float32) if state else None)
    settings: dict[str, Any] = {"scale": d.pick(None, 0.5), "beta_activation": d.pick(None, "none", "sigmoid")}
    settings |= {"update_rule": rule if rule != "gated_delta" else d.pick(None, rule)}
    if decay is not None and activation != "none":
        bias = d.floats(d.pick((values,), (values, width), (values * width,)) if per_key else (values,))
        inputs += [d.floats((values,), -1, 1).astype(np.float32), bias.astype(np.float32)]
        settings |= {"gate_activation": activation, "gate_lower_bound": d.pick(None, -2.0)}
    else:
        inputs += [None, None]
    capacity = d.pick(0, 1, 2)
    inputs.append(d.integers((batch,), 0, 3, np.int32) if capacity else None)
    inputs.append(d.optional(lambda: d.integers((1,), 0, 1, np.int32)) if capacity else None)
    settings["state_update_capacity"] = capacity or d.pick(None, 0)
    return d.case(*inputs, outputs=3 if capacity else d.integer(1, 3), **settings)


@strategy("GatedDeltaNetStateReplay", domain=MICROSOFT)
def gated_delta_net_state_replay(d: Drawing) -> Case:
    """A decay for each head or for each channel of the keys, anywhere in the tensors."""
    key_heads, depth, width, capacity = (d.integer(1, 2) for _ in range(4))
    heads, channels = key_heads * d.integer(1, 2), d.pick(1, width)
    sizes = [capacity * n for n in (heads * channels, key_heads * width, heads * depth)]
    state, at, into, first = heads * depth * width, *(d.integer(0, 2) for _ in range(3))
    places = [at, into, first, first + sizes[0], first + sizes[0] + sizes[1]]
    metadata = [*places, heads, depth, width, key_heads, capacity, d.integer(1, capacity)]
    tensors = [d.floats((n,), -1, 1) for n in (at + state, first + sum(sizes), into + state + d.integer(0, 1))]
    return d.case(*tensors, np.array(metadata))


@strategy("Mamba2Verify", domain=MICROSOFT)
def mamba2_verify(d: Drawing) -> Case:
    """More tokens than slots and fewer, any row to begin with."""
    tokens, slots, depth, width, groups = (d.integer(1, 3) for _ in range(5))
    heads = groups * d.integer(1, 2)
    inner = heads * depth
    channels, row = inner + 2 * groups * width, d.integer(0, slots - 1)
    inputs = [d.normal((tokens, inner + channels + heads)), d.normal((slots, channels, 3))]
    inputs += [d.normal((slots, heads, width, depth)).astype(np.float32), d.normal((channels, *d.pick([], [1]), 4))]
    inputs += [
        d.normal((channels,)),
        d.normal((heads,)).astype(np.float32),
        -np.abs(d.normal((heads,))).astype(np.float32),
    ]
    inputs += [d.normal((heads,)).astype(np.float32), d.normal((inner,)).astype(np.float32), np.array([row], np.int32)]
    settings: dict[str, Any] = {"heads": heads, "n_groups": groups, "head_dim": depth, "d_state": width}
    settings |= {"epsilon": d.pick(None, 0.1), "time_step_min": d.pick(None, 0.01)}
    return d.case(*inputs, outputs=d.pick(3, 4, 5), **settings)
