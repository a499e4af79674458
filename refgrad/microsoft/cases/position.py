"""Cases of ONNX Runtime's rotary embeddings and position biases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from refgrad.conformance.case import Case
from refgrad.microsoft.cases import case, drawer

BATCH, LENGTH, HEADS, SIZE = 2, 3, 2, 4
POSITIONS = 6


def cases() -> Iterator[Case]:
    """Every attribute and every form of the inputs."""
    floats = drawer(5)
    for shapes in ("static", "symbolic"):
        yield from _rotary(floats, {"shapes": shapes})
        yield from _multimodal(floats, {"shapes": shapes})
        yield from _biases(floats, {"shapes": shapes})
        yield from _normalized(floats, {"shapes": shapes})
    for shapes in ("static", "symbolic", "unknown"):
        states = [floats(BATCH, HEADS, LENGTH, SIZE) for _ in range(4)]
        yield case("GemmaRotaryEmbedding", floats(BATCH, LENGTH, SIZE), *states, outputs=2, shapes=shapes)
        empty = [state[:, :, :0] for state in states]
        yield case("GemmaRotaryEmbedding", floats(BATCH, 0, SIZE), *empty, outputs=2, shapes=shapes)


def _rotary(floats: Any, options: dict[str, Any]) -> Iterator[Case]:
    name = "RotaryEmbedding"
    flat, split = floats(BATCH, LENGTH, HEADS * SIZE), floats(BATCH, HEADS, LENGTH, SIZE)
    each, first = np.array([[0, 5, 3], [1, 1, 4]]), np.array([2])
    whole = floats(POSITIONS, SIZE // 2), floats(POSITIONS, SIZE // 2)
    part = floats(POSITIONS, 1), floats(POSITIONS, 1)
    yield case(name, flat, each, *whole, **options)
    yield case(name, flat, first, *whole, interleaved=1, **options)
    yield case(name, split, each, *whole, interleaved=1, **options)
    yield case(name, split, first, *whole, **options)
    some: dict[str, Any] = {"num_heads": HEADS, "rotary_embedding_dim": 2}
    yield case(name, flat, each, *part, **some, **options)
    yield case(name, flat, first, *part, interleaved=1, **some, **options)
    yield case(name, split, each, *part, **some, **options)
    yield case(name, flat, each, *whole, num_heads=HEADS, scale=0.5, **options)
    yield case(name, flat[:0], each[:0], *whole, **options)
    packed = np.array([[0, 1, 2, 3, 4, 5, 0, 1]])
    yield case(name, floats(1, 8, SIZE), packed, *whole, is_packed_batching=1, **options)


def _multimodal(floats: Any, options: dict[str, Any]) -> Iterator[Case]:
    name, size = "MRotaryEmbedding", 10
    flat, split = floats(BATCH, LENGTH, HEADS * size), floats(BATCH, HEADS, LENGTH, size)
    positions = np.array([[[0, 5, 3], [1, 1, 4]], [[2, 2, 0], [3, 4, 5]], [[1, 0, 0], [2, 5, 3]]])
    whole = floats(POSITIONS, size // 2), floats(POSITIONS, size // 2)
    part = floats(POSITIONS, 3), floats(POSITIONS, 3)
    yield case(name, flat, positions, *whole, num_heads=HEADS, mrope_section=[2, 1, 2], **options)
    yield case(name, split, positions, *whole, mrope_section=[3, 2, 0], mrope_layout=1, interleaved=1, **options)
    some: dict[str, Any] = {"num_heads": HEADS, "rotary_embedding_dim": 6}
    yield case(name, flat, positions, *part, mrope_section=[1, 1, 1], mrope_layout=1, scale=0.5, **some, **options)
    yield case(name, split, positions, *part, mrope_section=[0, 1, 2], interleaved=1, **some, **options)
    yield case(name, flat[:, :0], positions[:, :, :0], *part, mrope_section=[1, 1, 1], **some, **options)
    packed = np.array([[[0, 1, 2, 3, 4, 5, 0]]] * 2 + [[[1, 1, 2, 2, 0, 0, 5]]])
    yield case(
        name,
        floats(1, 1, 7, size),
        packed,
        *whole,
        mrope_section=[1, 2, 2],
        is_packed_batching=1,
        **options,
        constant=["position_ids"],
    )


def _biases(floats: Any, options: dict[str, Any]) -> Iterator[Case]:
    name, lengths = "RelativePositionBias", [np.array([9]), np.array([9])]
    yield case(name, floats(15, HEADS), *lengths, max_distance=11, is_bidirectional=1, **options)
    yield case(name, floats(7, HEADS), *lengths, max_distance=11, **options)
    yield case(name, floats(4, 0), *lengths, max_distance=5, **options)
    none = [np.array([0]), np.array([0])]
    yield case(name, floats(4, HEADS), *none, max_distance=5, constant=["query_length", "key_length"], **options)
    name, width = "GatedRelativePositionBias", HEADS * SIZE
    rest = floats(width), floats(1, HEADS, LENGTH, LENGTH), floats(SIZE, 6), floats(6), floats(1, HEADS, 1, 1)
    yield case(name, floats(BATCH, LENGTH, width), *rest, num_heads=HEADS, **options)
    yield case(name, floats(0, LENGTH, width), *rest, num_heads=HEADS, **options)
    offset = np.array([[0, 1, 3], [4, 5, 2]], np.int32)
    yield case(name, floats(5, width), *rest, offset, num_heads=HEADS, **options)
    yield case(name, floats(5, width), *rest, offset, num_heads=HEADS, constant=["token_offset"], **options)


def _normalized(floats: Any, options: dict[str, Any]) -> Iterator[Case]:
    """With float32 between the steps, and with rounding to bfloat16; results of 16 bits say little of gradients in float32."""
    name, brief = "RMSNormRotary", ml_dtypes.bfloat16
    x, scale = floats(BATCH, LENGTH, HEADS, 8), floats(6)
    each, first = np.array([[0, 5, 3], [1, 1, 4]]), np.array([0])
    caches = floats(POSITIONS, 2), floats(POSITIONS, 2)
    short = [cache.astype(brief) for cache in caches]
    options = {"wrt": ["X"], **options}
    part: dict[str, Any] = {"rotary_embedding_dim": 4, "input_start": 1, "input_width": 6, **options}
    yield case(name, x.astype(np.float16), scale, each, *caches, outputs=2, output_fp16=1, **part)
    yield case(name, x.astype(brief), scale, first, *caches, epsilon=0.1, flatten_batch=1, **part)
    yield case(name, x.astype(brief), floats(8), each, *short, rotary_embedding_dim=4, outputs=2, **options)
    yield case(name, x.astype(brief), scale, each, *short, use_fp32_arithmetic=0, flatten_batch=1, **part)
    yield case(name, x.astype(brief), scale, first, *short, np.array(0, np.int32), **part)
    yield case(name, x[:0].astype(brief), scale, each[:0], *short, **part)
