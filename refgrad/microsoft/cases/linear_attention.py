"""Cases of ONNX Runtime's attentions whose state is a matrix per head, updated token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer

BATCH, LENGTH, WIDTH, DEPTH = 2, 3, 3, 2
RULES = ("linear", "gated", "delta", "gated_delta")


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        yield from _linear_attention(shapes)
        floats = drawer(3)
        yield case("LinearAttentionGate", floats(2, 3, 4), floats(4), floats(4), shapes=shapes)
        yield case(
            "LinearAttentionGate", *(floats(*s) for s in ((2, 1, 4), (4,), (4,), (2, 1, 4))), outputs=2, shapes=shapes
        )
        yield case("LinearAttentionGate", floats(2, 0, 4), floats(4), floats(4), shapes=shapes)
        yield from _replay(shapes)
        yield from _mamba2_verify(shapes)
        if shapes != "unknown":
            yield from _gated_delta_net(shapes)


def _linear_attention(shapes: str) -> Iterator[Case]:
    floats = drawer(1)

    def made(
        q_heads: int,
        kv_heads: int,
        rule: str,
        past: bool,
        channels: int = 1,
        of_rate: int = 0,
        length: int = LENGTH,
        key_heads: int = 0,
        **options: Any,
    ) -> Case:
        window = options.get("state_window", 0)
        sizes = q_heads * WIDTH, (key_heads or kv_heads) * WIDTH, kv_heads * DEPTH
        inputs: list[np.ndarray | None] = [floats(BATCH, length, n) for n in sizes]
        inputs += [floats(*([window] if window else []), BATCH, kv_heads, WIDTH, DEPTH) if past else None]
        inputs += [-np.abs(floats(BATCH, length, kv_heads * channels)) if "gated" in rule else None]
        inputs += [floats(BATCH, length, of_rate or kv_heads) if "delta" in rule else None]
        while inputs[-1] is None:
            inputs.pop()
        settings = {"q_num_heads": q_heads, "kv_num_heads": kv_heads, "update_rule": rule}
        return case("LinearAttention", *inputs, outputs=2, shapes=shapes, **settings, **options)

    for rule in RULES:
        yield made(2, 2, rule, past=True)
    yield made(4, 2, "gated_delta", past=False, channels=WIDTH, scale=0.7)
    yield made(2, 4, "gated", past=True, channels=WIDTH, chunk_size=16)
    yield made(2, 2, "delta", past=False, of_rate=1)
    yield made(2, 2, "gated_delta", past=True, state_window=2)
    yield made(1, 2, "linear", past=True, state_window=5)
    yield made(2, 2, "gated", past=True, length=0)
    yield made(
        2, 4, "gated_delta", past=True, key_heads=2, length=1
    )  # as a model builder writes it: queries and keys are repeated


def _gated_delta_net(shapes: str) -> Iterator[Case]:
    floats = drawer(2)
    tokens, values = BATCH * LENGTH, 2
    ends, counts = np.array([0, 2, 6], np.int32), np.array([1, 5], np.int32)

    def made(
        *,
        leading: tuple[int, ...] = (tokens,),
        heads: int = 1,
        values: int = values,
        packed: bool = False,
        cu_seqlens: np.ndarray | None = None,
        per_key: bool = False,
        state: bool = True,
        gate: tuple[int, ...] | None = None,
        count: np.ndarray | None = None,
        active: int | None = None,
        rule: str = "gated_delta",
        outputs: int = 2,
        **options: Any,
    ) -> Case:
        parts = [floats(*leading, n, size) for n, size in ((heads, WIDTH), (heads, WIDTH), (values, DEPTH))]
        inputs: list[np.ndarray | None] = [*parts, cu_seqlens]
        if packed:
            inputs = [np.concatenate([x.reshape(*leading, -1) for x in parts], -1), None, None, cu_seqlens]
        inputs += [-np.abs(floats(*leading, values, *([WIDTH] if per_key else []))) if "gated" in rule else None]
        inputs += [floats(*leading, values) if "delta" in rule else None]
        inputs += [floats(BATCH, values, DEPTH, WIDTH) if state else None]
        inputs += [None, None] if gate is None else [floats(values), floats(*gate)]
        inputs += [count, None if active is None else np.array([active], np.int32)]
        while inputs[-1] is None:
            inputs.pop()
        return case("GatedDeltaNet", *inputs, outputs=outputs, shapes=shapes, update_rule=rule, **options)

    for rule in RULES:
        yield made(rule=rule)
    yield made(leading=(BATCH, 1), outputs=1, scale=0.7)
    yield made(packed=True, beta_activation="sigmoid", chunk_size=32)
    yield made(leading=(BATCH, LENGTH), packed=True, per_key=True, heads=2, values=4)
    yield made(cu_seqlens=np.array([0, 1, 4, 6], np.int32), state=False)
    yield made(cu_seqlens=ends, per_key=True, qk_l2_norm=1)
    yield made(gate=(values,), gate_activation="softplus")
    yield made(gate=(values, WIDTH), per_key=True, gate_activation="qwen")
    yield made(gate=(values * WIDTH,), per_key=True, gate_activation="sigmoid", gate_lower_bound=-2.0)
    yield made(gate=(values,), gate_activation="kda", cu_seqlens=ends)
    yield made(count=counts, state_update_capacity=2, outputs=3)
    of_one, more = np.array([0, 1, 6], np.int32), np.array([2, 1], np.int32)
    yield made(count=more, state_update_capacity=2, outputs=3, cu_seqlens=of_one, per_key=True)
    yield made(count=counts, state_update_capacity=4, outputs=3, rule="delta", qk_l2_norm=1)
    yield made(count=counts, state_update_capacity=1, outputs=3, active=0)
    yield made(count=counts, state_update_capacity=1, outputs=3, active=1, packed=True)
    yield made(outputs=3)
    if shapes == "static":
        constant = ["cu_seqlens", "capture_count", "state_update_active"]
        yield made(count=counts, active=1, cu_seqlens=ends, state_update_capacity=2, outputs=3, constant=constant)


def _replay(shapes: str) -> Iterator[Case]:
    floats, name = drawer(7), "GatedDeltaNetStateReplay"
    heads, depth, width, key_heads, capacity = 4, 2, 3, 2, 3
    for channels, kept in ((1, 2), (width, 3)):
        sizes = [capacity * n for n in (heads * channels, key_heads * width, heads * depth)]
        decay_at, key_at, delta_at = 1, 1 + sizes[0], 1 + sizes[0] + sizes[1]
        metadata = [2, 1, decay_at, key_at, delta_at, heads, depth, width, key_heads, capacity, kept]
        capsule = floats(2 + sum(sizes))
        yield case(name, floats(27), capsule, floats(26), np.array(metadata), shapes=shapes)
    if shapes == "static":
        yield case(name, floats(27), capsule, floats(26), np.array(metadata), constant=["metadata"])


def _mamba2_verify(shapes: str) -> Iterator[Case]:
    floats = drawer(8)
    width, depth = 3, 2

    def made(tokens: int, slots: int, row: int, heads: int, groups: int, flat: bool, **options: Any) -> Case:
        inner = heads * depth
        channels = inner + 2 * groups * width
        inputs = [
            floats(tokens, inner + channels + heads),
            floats(slots, channels, 3),
            floats(slots, heads, width, depth),
        ]
        inputs += [floats(channels, *([] if flat else [1]), 4), floats(channels), floats(heads)]
        inputs += [-np.abs(floats(heads)), floats(heads), floats(inner), np.array([row], np.int32)]
        settings = {"heads": heads, "n_groups": groups, "head_dim": depth, "d_state": width}
        return case("Mamba2Verify", *inputs, shapes=shapes, **settings, **options)

    yield made(2, 3, 1, 2, 1, flat=True, outputs=3)
    yield made(3, 2, 0, 2, 2, flat=False, outputs=5, epsilon=0.1, time_step_min=0.7)
    if shapes == "static":
        yield made(1, 1, 0, 1, 1, flat=True, outputs=3, constant=["state_row"])
