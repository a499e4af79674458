"""Cases of ONNX Runtime's operators of matrices of int8 in the orders of cublasLt; see the cases of `qlinear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, scalar
from refgrad.microsoft.cases.qlinear import Drawer, rounding, with_constants


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        every = [*_ordered(shapes)]
        yield from every
        if shapes == "static":
            yield from with_constants(every)


def rare() -> Iterator[Case]:
    """Tensors of nothing, and of the smallest rank."""
    whole, s = Drawer(4), np.int8
    shape: tuple[int, ...]
    orders: dict[str, Any] = {"order_A": 1, "order_B": 0, "order_Y": 1}
    for count in (0, 1):
        right = whole(s, 3, 2), scalar(11.0)
        yield rounding("QOrderedMatMul", whole(s, count, 3), scalar(9.0), *right, scalar(297.0), **orders)
    for shape in ((0, 3), ()):
        yield rounding("QOrderedGelu", np.full(shape, 5, s), scalar(0.3), scalar(0.21))
    for shape in ((0, 3), (3,)):
        x = whole(s, *shape), scalar(2.0)
        yield rounding("QOrderedLayerNormalization", *x, array([1, 2, 0.5]), None, scalar(0.9), epsilon=0.1)
    projection = [*[scalar(27.0)] * 3, *[whole(s, 2, 2)] * 3, *[scalar(1.0)] * 3, *[np.zeros(2, np.float32)] * 3]
    orders = {"order_input": 1, "order_output": 1, "order_weight": 0, "num_heads": 1}
    yield rounding("QOrderedAttention", whole(s, 0, 3, 2), scalar(9.0), *projection, None, None, scalar(99.0), **orders)
    yield longformer(batch=0)


def _ordered(shapes: str) -> Iterator[Case]:
    """Matrices of int8 in the orders of cublasLt."""
    whole = Drawer(7)
    given: dict[str, Any] = {"shapes": shapes}
    kind = np.int8
    orders: dict[str, Any] = {"order_A": 1, "order_B": 0, "order_Y": 1}
    a, b, y = (whole(kind, 2, 2, 3), scalar(9.0)), (whole(kind, 3, 4), scalar(11.0)), scalar(297.0)
    bias = np.array([5, -3, 2, 1], np.float32) * np.float32(99)
    yield rounding("QOrderedMatMul", *a, *b, y, quantize=("A", "B"), **orders, **given)
    c = whole(kind, 1, 2, 4), scalar(99.0)
    yield rounding("QOrderedMatMul", *a, *b, y, bias, *c, quantize=("A", "B", "C"), **orders, **given)
    per_column = array([11.0, 22.0, 33.0, 11.0])
    yield rounding("QOrderedMatMul", *a, b[0], per_column, y, None, *c, **orders, **given)
    x = whole(kind, 2, 3, 4)
    x[x == 0] = 5
    yield rounding("QOrderedGelu", x, scalar(0.3), scalar(0.7), quantize=("X",), **given)
    yield rounding("QOrderedGelu", x, scalar(0.3), scalar(0.7), order_X=2, order_Y=2, **given)
    scale, offset = array([1.0, 2.0, 1.5, 0.5]), array([0.5, -0.5, 0.25, 1.0])
    name = "QOrderedLayerNormalization"
    if shapes != "unknown":
        yield rounding(name, x, scalar(2.0), scale, offset, scalar(0.9), quantize=("X",), **given)
    yield rounding(name, x, scalar(2.0), scale, None, scalar(0.9), axis=2, epsilon=0.1, **given)
    if shapes == "static":
        wide = whole(kind, 2, 3, 64)  # in two tiles
        spread = np.full(64, 3.0, np.float16)
        tiled = rounding(name, wide, scalar(2.0), spread, None, scalar(1.7), order_X=2, order_Y=2, epsilon=0.1)
        yield tiled.changed(wrt=("t",))
    yield from _ordered_attentions(shapes)


def _ordered_attentions(shapes: str) -> Iterator[Case]:
    """With whole numbers of which none is near a middle: Q, K and V are in thirds, the scores far apart."""
    whole, kind = Drawer(8), np.int8
    orders: dict[str, Any] = {"order_input": 1, "order_output": 1, "order_weight": 0, "num_heads": 2}
    x = whole(kind, 2, 3, 3)
    weights = [whole(kind, 3, 4) for _ in range(3)]
    biases = [np.zeros(4, np.float32)] * 3
    gemms, scales = [scalar(27.0), scalar(27.0), scalar(297.0)], [scalar(1.0), scalar(1.0), scalar(11.0)]
    given = x, scalar(9.0), *gemms, *weights, *scales, *biases
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    name = "QOrderedAttention"
    if shapes != "unknown":
        yield rounding(name, *given, None, None, scalar(99.0), quantize=("input", "V_weight"), shapes=shapes, **orders)
        more: dict[str, Any] = {"unidirectional": 1, "shapes": shapes, **orders}
        yield rounding(name, *given, scalar(2187.0), scalar(0.8), scalar(200.0), mask, **more)
        # With scores so near that every key has its share.
        biases = [
            np.array(steps, np.float32) * np.float32(0.02) for steps in ([4, -9, 7, 12], [9, 6, -3, 1], [8, 3, -5, 2])
        ]
        given = x, scalar(0.2), *[scalar(0.06)] * 3, *weights, *[scalar(0.1)] * 3, *biases
        for hidden in (None, np.array([[1, 0, 1], [1, 1, 0]], np.int32)):
            near = rounding(name, *given, None, None, scalar(0.011), hidden, shapes=shapes, **orders)
            yield near.changed(wrt=("t",))  # a thousandth of a scale moves some numbers to the next step
    yield longformer(shapes=shapes, quantize=("input", "weight", "global_weight"))
    yield longformer(heads=1, fine=True, shapes=shapes).changed(wrt=("t",))  # where the mask is 0, the result jumps


def longformer(
    batch: int = 2, heads: int = 2, fine: bool = False, quantize: Sequence[str] = (), shapes: str = "static"
) -> Case:
    """A QOrderedLongformerAttention of 4 tokens; its projections are in thirds.

    The scores are far apart, or near each other where it is `fine`; then each column has a scale and a bias.
    """
    whole, kind, width = Drawer(110 if fine else 9), np.int8, 2  # every sum well between halfways
    thirds = 3 * width
    inputs, first, second = whole(kind, batch, 4, width), whole(kind, width, thirds), whole(kind, width, thirds)
    scales, biases = [np.full((), 1.0, np.float32)] * 2, [np.zeros(thirds, np.float32)] * 2
    unit, step = 9.0, 94.5
    if fine:
        unit, step = 0.02, 0.025
        scales = [whole(kind, thirds, low=1, high=3).astype(np.float32) for _ in range(2)]
        biases = [np.float32(unit) * whole(kind, thirds, low=-20, high=20) for _ in range(2)]
    mask = np.array([[0.25, 0.0 if fine else 0.25, 0.5 if fine else 0.25, -1000], [0.25, 0.25, 0.25, 0.25]], np.float16)
    flags = np.array([[1, 0, 0, 0], [0, 0, 0, 1]], np.int32)[:batch]
    return rounding(
        "QOrderedLongformerAttention",
        *(inputs, scalar(unit), first, scales[0], biases[0], scalar(1.0)),
        *(scalar(3 * unit), mask[:batch], second, scales[1], biases[1], scalar(3 * unit), flags, scalar(step)),
        quantize=quantize,
        shapes=shapes,
        num_heads=heads,
        window=1,
        order_input=1,
        order_output=1,
        order_weight=0,
        order_global_weight=0,
    )
