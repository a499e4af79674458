"""Cases of ONNX Runtime's normalizations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, drawer


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        x = floats(2, 3, 4)
        scale, shift, bias = floats(4) + np.float32(1), floats(4), floats(4)
        skip = "SkipLayerNormalization"
        yield case(skip, x, floats(2, 3, 4), scale, shapes=shapes, epsilon=1e-3)
        yield case(skip, x, floats(2, 3, 4), scale, shift, bias, shapes=shapes, outputs=4)
        yield case(skip, x, floats(3, 4), scale, None, bias, shapes=shapes)
        skip = "SkipSimplifiedLayerNormalization"
        yield case(skip, x, floats(2, 3, 4), scale, shapes=shapes, epsilon=1e-3)
        yield case(skip, x, floats(1, 3, 4), scale, bias, shapes=shapes)
        simple = "SimplifiedLayerNormalization"
        yield case(simple, x, scale, shapes=shapes, epsilon=1e-3, outputs=2)
        for axis in (1, -2):
            yield case(simple, x, floats(3, 4), shapes=shapes, axis=axis, outputs=2)
        yield case(simple, x, floats(2, 3, 4), shapes=shapes, axis=0, outputs=2)
        yield case(simple, floats(2, 0, 4), scale, shapes=shapes, axis=2, outputs=2)
        for dtype in (np.float64, np.float16):  # the squares overflow in float16
            yield case(simple, (300 * x).astype(dtype), scale.astype(dtype), shapes=shapes)
        image = floats(2, 4, 3, 2)
        last = np.moveaxis(image, 1, -1)
        for activation in (0, 1):
            options: dict[str, Any] = {"activation": activation, "groups": 2}
            yield case("GroupNorm", last, scale, shift, shapes=shapes, epsilon=1e-2, **options)
            yield case("GroupNorm", image, scale, shift, shapes=shapes, channels_last=0, **options)
        if shapes != "unknown":
            yield case(
                "SkipGroupNorm", last, scale, shift, floats(2, 3, 2, 4), bias, shapes=shapes, outputs=2, **options
            )
            yield case("SkipGroupNorm", last, scale, shift, floats(2, 4), shapes=shapes, **options)
            statistics = floats(4), np.abs(floats(4)) + np.float32(0.5)
            for outputs in (1, 5):
                yield case(
                    "BatchNormInternal", image, scale, shift, *statistics, shapes=shapes, outputs=outputs, momentum=0.7
                )
        yield from _of_branches(shapes)
        words, segments = np.array([[0, 3, 1], [4, 4, 2]], np.int32), np.array([[0, 0, 1], [1, 0, 1]], np.int32)
        tables = floats(5, 4), floats(6, 4), floats(2, 4)
        scale, shift = floats(4) + np.float32(1), floats(4)
        embed = "EmbedLayerNormalization"
        mask = np.array([[1, 1, 0], [1, 0, 0]], np.int32)
        yield case(embed, words, segments, *tables, scale, shift, mask, shapes=shapes, outputs=3)
        positions = np.array([[5, 0, 1], [2, 2, 3]], np.int32)
        yield case(
            embed, words, None, *tables[:2], None, scale, shift, None, positions, shapes=shapes, epsilon=1e-3, outputs=2
        )


def _of_branches(shapes: str) -> Iterator[Case]:
    """Cases of the root mean squares of heads and of branches."""
    floats = drawer(2)
    x, scale = floats(2, 3, 4), floats(4) + np.float32(1)
    gated, branches = "GatedRMSNorm", "BranchwiseRMSNorm"
    yield case(gated, x, scale, floats(2, 3, 4), shapes=shapes)
    yield case(gated, x, scale[:2], floats(2, 3, 4), shapes=shapes, activation="sigmoid", epsilon=1e-2)
    yield case(gated, floats(4), scale, floats(4), shapes=shapes, activation="swish")
    yield case(gated, floats(0, 4), scale, floats(0, 4), shapes=shapes)
    yield case(branches, x, shapes=shapes, epsilon=1e-2)
    for size in ((4,), (3, 4), (12,)):
        yield case(branches, x, floats(*size), shapes=shapes)
        yield case(branches, floats(2, 12), floats(*size), shapes=shapes, num_branches=3)
    yield case(branches, floats(6), shapes=shapes, num_branches=3)
    yield case(branches, floats(0, 3, 4), floats(4), shapes=shapes)
    key = floats(1, 2, 3, 4)
    query = np.array([1, -1, 1], np.float32)[:, np.newaxis] * key + floats(1, 2, 3, 4) / 4  # no product is close to 0
    engram = key, query, floats(1, 2, 4), floats(3, 4) / 4 + np.float32(1), floats(3, 4) / 4 + np.float32(1)
    yield case("EngramGate", *engram, shapes=shapes)
    yield case("EngramGate", *engram, floats(3, 4), shapes=shapes, epsilon=1e-2, outputs=2)
    ones, across = np.ones((1, 2, 1, 4), np.float32), array([[[[1 + 4e-7, -1, 1, -1]], [[1 + 4e-7, -1, 1, -1]]]])
    smallest = ones, across, 8 * floats(1, 2, 4), ones[0, 0], ones[0, 0]  # a product below 10⁻⁶
    yield case("EngramGate", *smallest, shapes=shapes, wrt=("value",))
    empty = floats(1, 0, 3, 4), floats(1, 0, 3, 4), floats(1, 0, 4)
    yield case("EngramGate", *empty, *engram[3:], shapes=shapes)
    mix, options = "HyperConnectionLowRankMix", dict[str, Any](num_branches=3, shapes=shapes)
    weights = floats(12), floats(12, 2), floats(2, 12), floats(12, 3)
    further = {"epsilon": 1e-2, "gate_div": 2.0, "gate_mul": 1.5, "reduction_scale": 0.5, "silu_alpha": 1.7}
    yield case(mix, floats(2, 12), *weights, outputs=2, **options)
    yield case(mix, floats(2, 1, 12), *weights, floats(2, 1, 4), floats(2, 1, 3), outputs=3, **options, **further)
    yield case(mix, floats(12), *weights, outputs=3, **options)
    yield case(mix, floats(0, 12), *weights, outputs=3, **options)
