"""Cases of normalizations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

NEWEST = 21  # the last opset that every runtime under test knows

# shape of X, axis, shape of Scale, shape of B or None
LAYER: tuple[tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((2, 3, 4), -1, (4,), (4,)),
    ((2, 3, 4), -1, (4,), None),
    ((2, 3, 4), 1, (3, 4), (3, 4)),
    ((2, 3, 4), -2, (4,), (3, 1)),
    ((2, 3, 4), 0, (2, 3, 4), (1,)),
    ((0, 3, 4), -1, (4,), (4,)),
)


def cases() -> Iterator[Case]:
    """Every attribute and optional input and output, on static, symbolic and unknown shapes."""
    x: tuple[int, ...]
    for shapes in SHAPES:
        for x in ((2, 3, 4), (2, 3), (2, 3, 4, 2), (0, 3, 2)):
            yield batch(x, shapes=shapes)
            if x[0]:
                yield batch(x, shapes=shapes, training_mode=1, outputs=3, momentum=0.7)
        yield batch((2, 3, 4), opset=16, shapes=shapes)
        for x in ((2, 3, 4), (2, 3, 4, 2)):
            yield node_case(
                "InstanceNormalization", numbers(*x), numbers(3), numbers(3), epsilon=0.1, opset=NEWEST, shapes=shapes
            )
            yield node_case("LRN", numbers(*x), size=3, opset=NEWEST, shapes=shapes)
            yield node_case("LRN", numbers(*x), size=2, alpha=0.3, beta=0.6, bias=1.5, opset=NEWEST, shapes=shapes)
        for p in (1, 2):
            for axis in (0, 1, -1):
                yield node_case("LpNormalization", numbers(2, 3, 4), p=p, axis=axis, opset=NEWEST, shapes=shapes)
        for x, axis, scale, bias in LAYER:
            for outputs in (1, 2, 3):
                yield layer(x, axis, scale, bias, shapes=shapes, outputs=outputs)
        yield layer((2, 3, 4), -1, (4,), (4,), shapes=shapes, opset=17)
        for x in ((2, 4, 3), (2, 4, 3, 2), (2, 4), (0, 4, 3)):
            channels = numbers(4), numbers(4)
            yield node_case(
                "GroupNormalization", numbers(*x), *channels, num_groups=2, epsilon=0.1, opset=NEWEST, shapes=shapes
            )
        yield node_case(
            "GroupNormalization",
            numbers(2, 6, 3),
            numbers(6),
            1 - numbers(6),
            num_groups=2,
            opset=NEWEST,
            shapes=shapes,
        )
        yield node_case("MeanVarianceNormalization", numbers(2, 3, 4, 2), axes=[0, 2, 3], opset=16, shapes=shapes)
        yield node_case("MeanVarianceNormalization", numbers(2, 3, 4), axes=[-1], opset=NEWEST, shapes=shapes)
        for axis, scale in ((-1, (4,)), (1, (3, 4)), (-2, (3, 1)), (0, (2, 3, 4)), (-1, (1,))):
            yield node_case(
                "RMSNormalization", numbers(2, 3, 4), numbers(*scale), axis=axis, epsilon=0.1, opset=23, shapes=shapes
            )
    yield node_case("RMSNormalization", numbers(0, 3), numbers(3), opset=23)


def batch(x: tuple[int, ...], opset: int = NEWEST, **arguments: Any) -> Case:
    """BatchNormalization of three channels."""
    per_channel = numbers(4, 3)
    parameters = (per_channel[0], per_channel[1], per_channel[2], positive(3))
    return node_case("BatchNormalization", numbers(*x), *parameters, epsilon=0.1, opset=opset, **arguments)


def layer(
    x: tuple[int, ...],
    axis: int,
    scale: tuple[int, ...],
    bias: tuple[int, ...] | None,
    opset: int = NEWEST,
    **arguments: Any,
) -> Case:
    """LayerNormalization. Its epsilon is large, because the smallest variances would magnify the error of differences."""
    third = () if bias is None else (numbers(*bias),)
    return node_case(
        "LayerNormalization", numbers(*x), numbers(*scale), *third, axis=axis, epsilon=0.1, opset=opset, **arguments
    )


def numbers(*shape: int) -> np.ndarray:
    """Float32 numbers of the given shape, the same in every run."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    """Float32 numbers well above 0."""
    return np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float32)
