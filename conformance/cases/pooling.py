"""Cases of poolings. The elements of an input all differ and lie far apart, so no window has two maxima."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.special import Special

NEWEST = 21  # the last opset that every runtime under test knows

WINDOWS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 7), {"kernel_shape": [3]}),
    ((2, 3, 7), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    ((2, 3, 7), {"kernel_shape": [2], "strides": [3], "pads": [1, 0]}),
    ((2, 3, 8), {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}),
    ((2, 3, 8), {"kernel_shape": [3], "strides": [2], "pads": [1, 1], "ceil_mode": 1}),
    ((2, 3, 9), {"kernel_shape": [2], "strides": [4], "ceil_mode": 1}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 2, 1], "dilations": [1, 2]}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 3], "dilations": [2, 3], "ceil_mode": 1}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 7, 8), {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    (
        (1, 2, 7, 8),
        {"kernel_shape": [3, 2], "dilations": [2, 2], "strides": [2, 1], "pads": [1, 0, 2, 1], "ceil_mode": 1},
    ),
    ((1, 1, 3, 3), {"kernel_shape": [1, 3], "strides": [3, 2], "auto_pad": "SAME_LOWER", "ceil_mode": 1}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}),
    ((2, 2, 4, 5, 4), {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}),
    ((2, 2, 4, 4), {"kernel_shape": [4, 4]}),
    ((0, 2, 4, 4), {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}),
)


SPECIAL = (
    Special(
        "MaxPool",
        "infinite",
        ((((-inf, 1.0, -inf, inf),),),),
        ((((0.0, 1.0, 0.0, 1.0),),),),
        attributes={"kernel_shape": [2], "strides": [2]},
    ),
    Special("AveragePool", "overflow", ((((3e38, 3e38),),),), ((((0.5, 0.5),),),), attributes={"kernel_shape": [2]}),
    Special("GlobalAveragePool", "overflow", ((((3e38, 3e38),),),), ((((0.5, 0.5),),),)),
    Special("GlobalMaxPool", "infinite", ((((-inf, 1.0, inf),),),), ((((0.0, 0.0, 1.0),),),)),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every attribute, on static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        for x, window in WINDOWS:
            for choice in (0, 1):
                yield _case("AveragePool", x, shapes=shapes, count_include_pad=choice, **window)
                yield _case("MaxPool", x, shapes=shapes, storage_order=choice, **window)
            if x[0]:
                yield _case("LpPool", x, shapes=shapes, opset=22, **window)
        for p in (1, 2, 3, 4):
            yield _case("LpPool", (2, 3, 7), shapes=shapes, p=p, kernel_shape=[3], strides=[2], pads=[1, 1])
            yield _case("GlobalLpPool", (2, 3, 7), shapes=shapes, p=p)
        for x in ((2, 3, 4), (2, 3, 4, 5), (0, 3, 4), (2, 3, 4, 1, 2)):
            yield _case("GlobalAveragePool", x, shapes=shapes)
            yield _case("GlobalMaxPool", x, shapes=shapes)
        yield from _max_unpools(shapes)
        # Before opset 22 onnx infers one window too many.
        dropped = {"kernel_shape": [2], "strides": [3], "pads": [0, 1], "ceil_mode": 1}
        yield _case("AveragePool", (2, 3, 6), opset=22, shapes=shapes, **dropped)
        yield _case("MaxPool", (2, 3, 6), opset=22, shapes=shapes, **dropped)
    yield _case("AveragePool", (2, 3, 8, 8), opset=16, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    yield _case("MaxPool", (2, 3, 8, 8), opset=16, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)


def _max_unpools(shapes: str) -> Iterator[Case]:
    """Windows apart, and overlapping ones with a common maximum; the shape that the attributes give, and a larger one."""
    distinct = np.array([[[1, 9], [20, 23]], [[24, 33], [46, 47]]])[None]
    repeated = np.array([[1, 3, 3, 8], [10, 13, 13, 13]])[None]
    x = np.random.default_rng(0).standard_normal((1, 2, 2, 2)).astype(np.float32)
    window: dict[str, Any] = {"kernel_shape": [3, 4], "strides": [2, 3], "pads": [1, 0, 0, 1]}
    for opset in (16, 22):
        yield node_case("MaxUnpool", x, distinct, opset=opset, shapes=shapes, **window)
    larger = np.array([1, 2, 6, 6])
    for constant in ((), ("I", "output_shape")):
        yield node_case("MaxUnpool", x, distinct, larger, opset=NEWEST, shapes=shapes, constant=constant, **window)
        rows = x.reshape(1, 2, 4)
        yield node_case(
            "MaxUnpool", rows, repeated, opset=NEWEST, shapes=shapes, constant=constant[:1], kernel_shape=[6]
        )
    apart = np.array([[[1, 8], [15, 23]], [[26, 34], [42, 48]]])[None]
    yield node_case("MaxUnpool", x, apart, larger, opset=NEWEST, shapes=shapes, kernel_shape=[3, 3], strides=[2, 2])
    yield node_case("MaxUnpool", x[:0], distinct[:0], opset=22, shapes=shapes, **window)


def _case(op_type: str, x: tuple[int, ...], opset: int = NEWEST, **arguments: Any) -> Case:
    values = np.random.default_rng(0).permutation(prod(x)).reshape(x)
    return node_case(op_type, (values * 0.1 - 1.95).astype(np.float32), opset=opset, **arguments)
