"""Cases of ONNX Runtime's attentions whose query heads share keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer

BATCH, LENGTH, HEADS, SHARED, SIZE = 2, 3, 4, 2, 8
PAST = 4  # rows of a cache


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        yield from _group_query(drawer(), shapes)


def ints(*values: Any) -> np.ndarray:
    """As int32."""
    return np.array(values, np.int32)


def _group_query(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    heads: dict[str, Any] = {"shapes": shapes, "num_heads": HEADS, "kv_num_heads": SHARED}
    name = "GroupQueryAttention"

    def new(batch: int, length: int, size: int = SIZE) -> list[np.ndarray]:
        return [floats(batch, length, n * size) for n in (HEADS, SHARED, SHARED)]

    def past(batch: int, rows: int = PAST, size: int = SIZE) -> list[np.ndarray | None]:
        return [floats(batch, SHARED, rows, size) for _ in range(2)]

    def lengths(*samples: int, total: int | None = None) -> list[np.ndarray | None]:
        return [ints(*samples) - 1, np.array(total or max(samples), np.int32)]

    def rotary(size: int = SIZE) -> list[np.ndarray | None]:
        return [floats(PAST + LENGTH + 2, size // 2) for _ in range(2)]

    none: list[np.ndarray | None] = [None]
    prompt = [*none * 2, *lengths(LENGTH, LENGTH)]
    yield case(name, *new(BATCH, LENGTH), *prompt, **heads)
    yield case(name, *new(BATCH, LENGTH), *prompt, outputs=3, scale=0.3, softcap=0.7, local_window_size=2, **heads)
    packed = floats(BATCH, LENGTH, (HEADS + 2 * SHARED) * SIZE)
    yield case(name, packed, None, None, *prompt, outputs=3, causal=0, smooth_softmax=1, **heads)
    bias, sink = floats(1, HEADS, LENGTH, LENGTH), floats(HEADS)
    yield case(name, *new(BATCH, LENGTH), *prompt, *none * 3, bias, sink, outputs=4, qk_output=1, **heads)
    # Decoding: a past that grows, and a buffer that is longer than its tokens
    yield case(name, *new(BATCH, 1), *past(BATCH), *lengths(5, 5), outputs=3, **heads)
    bias = floats(BATCH, 1, 1, 4)
    yield case(
        name, *new(BATCH, 1), *past(BATCH, 5), *lengths(4, 2), *none * 3, bias, None, outputs=4, qk_output=2, **heads
    )
    yield case(name, *new(BATCH, LENGTH), *past(BATCH, 5), *prompt[2:], outputs=3, **heads)
    yield case(name, *new(1, LENGTH), *past(1), *lengths(6, total=7), outputs=3, local_window_size=3, **heads)
    query, _, _ = new(1, 2)
    yield case(name, query, *(floats(1, 0, SHARED * SIZE) for _ in range(2)), *past(1), *lengths(3), outputs=3, **heads)
    # Rotary embedding, of which ONNX Runtime wants a multiple of 8 pairs
    turned = {"do_rotary": 1, "outputs": 3} | heads
    alone = turned | {"num_heads": 1, "kv_num_heads": 1}
    yield case(name, *(floats(BATCH, 2, 16) for _ in range(3)), *none * 2, *lengths(2, 2), *rotary(16), **alone)
    positions = np.array([[3, 1], [4, 0]])
    yield case(
        name, *(floats(BATCH, 2, 32) for _ in range(3)), *none * 2, *lengths(2, 2), *rotary(16), positions, **alone
    )
    cache = [floats(BATCH, 1, 3, 16) for _ in range(2)]
    yield case(
        name,
        *(floats(BATCH, 1, 16) for _ in range(3)), *cache, *lengths(4, 3), *rotary(16), positions[:, :1],
        rotary_interleaved=1, **alone,
    )  # fmt: skip
    # A cache of the last tokens, and caches of 8 and 4 bits
    slide = {"sliding_window_cache": 1, "local_window_size": 3, "outputs": 3} | heads
    yield case(name, *new(1, LENGTH), *past(1), *lengths(8), *none * 3, floats(1, 1, LENGTH, 8), **slide)
    for kind, bits in (("PER_TENSOR", 8), ("PER_CHANNEL", 8), ("PER_TENSOR", 4), ("PER_CHANNEL", 4)):
        yield _quantised(floats, kind, bits, heads)
    if shapes == "static":
        return  # of these, ONNX Runtime leaves rows as they come, or it has no kernel
    slide["local_window_size"] = 2
    yield case(name, *new(BATCH, 1), *past(BATCH), *lengths(8, 5), *none * 3, floats(1, 1, 1, 8), **slide)
    yield case(name, *new(BATCH, LENGTH), *none * 2, *lengths(LENGTH, 1), outputs=3, causal=0, **heads)
    weights = [floats(SIZE) for _ in range(2)]
    yield case(
        name,
        *new(BATCH, LENGTH), *prompt, *rotary(4), *none * 5, *weights,
        do_rotary=1, qk_norm_epsilon=0.1, q_norm_epsilon=0.2, k_norm_epsilon=0.3, **heads,
    )  # fmt: skip
    chunk = [*new(BATCH, LENGTH), *past(BATCH, 5), *lengths(4, 1, total=6), *rotary(), *none * 7, ints(2, 0)]
    yield case(name, *chunk, rotary_interleaved=1, **turned)
    constant = ("seqlens_k", "total_sequence_length", "position_ids", "query_seqlens")
    chunk[9] = np.array([[3, 4, 99], [99, 99, 99]])  # of padding, where no angles are
    yield case(name, *chunk, constant=constant, **turned)


def _quantised(floats: Callable[..., np.ndarray], kind: str, bits: int, heads: dict[str, Any]) -> Case:
    """A token after a cache of that many bits; new keys and values lie well between halfways, some beyond 4 bits."""
    shape = (BATCH, SHARED, PAST, SIZE)
    held = np.arange(np.prod(shape)).reshape(shape) * 5 % 16 - 8
    caches = [held.astype(np.int8), held[::-1].astype(np.int8)]
    if bits == 4:
        caches = [((x[..., ::2] + 8) | (x[..., 1::2] + 8) << 4).astype(np.uint8) for x in caches]
    scale = 0.2 * (1 + np.abs(floats(1, SHARED, 1, SIZE))) if kind == "PER_CHANNEL" else np.full(1, 0.2, np.float32)
    scale = scale.astype(np.float32)
    steps = (np.arange(BATCH * SHARED * SIZE).reshape(BATCH, SHARED, 1, SIZE) * 3 % 23 - 11 + 0.2) * scale
    new = steps.astype(np.float32).reshape(BATCH, 1, SHARED * SIZE)
    return case(
        "GroupQueryAttention",
        *(floats(BATCH, 1, HEADS * SIZE), new, new[::-1]), *caches, ints(4, 3), np.array(5, np.int32),
        *[None] * 5, scale, scale,
        k_quant_type=kind, v_quant_type=kind, kv_cache_bit_width=bits, outputs=3, **heads,
    )  # fmt: skip
