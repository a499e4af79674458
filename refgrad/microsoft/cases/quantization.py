"""Cases of ONNX Runtime's quantizations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, scalar
from refgrad.microsoft.cases.qlinear import rounding, with_constants

KINDS: tuple[Any, ...] = (np.int8, np.uint8, np.int16, np.uint16, ml_dtypes.int4, ml_dtypes.uint4)
iinfo: Any = ml_dtypes.iinfo  # it has no type hints


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        x = array([[-4.1, -0.62, 0.31], [0.87, 1.44, 9.3]])  # clipped at both ends, never halfway between two steps
        scale, zero_point = scalar(0.5), scalar(3.0)
        yield case("FakeQuant", x, scale, zero_point, shapes=shapes, quant_min=0, quant_max=7, outputs=2)
        yield case("FakeQuant", x, array([0.5]), array([3.0]), shapes=shapes, quant_max=15)
        every = [*_linear(shapes), *_ordered(shapes)]
        yield from every
        if shapes == "static":
            yield from with_constants(every)


def rare() -> Iterator[Case]:
    """Tensors of nothing, and scalars."""
    for shape in ((0, 3), ()):
        yield rounding("QuantizeLinear", np.full(shape, 26.0, np.float32), scalar(8.0), np.array(2, np.int8))
        yield rounding("DequantizeLinear", np.full(shape, 5, np.int8), scalar(8.0), np.array(2, np.int8))
        orders: dict[str, Any] = {"order_input": 1, "order_output": 0}
        yield rounding("QuantizeWithOrder", np.full(shape, 26.0, np.float32), scalar(8.0), **orders)
        yield rounding("DequantizeWithOrder", np.full(shape, 5, np.int8), scalar(8.0), to=1, **orders)


def _ordered(shapes: str) -> Iterator[Case]:
    """Between the orders of cublasLt, of sizes that have a tile at least in each."""
    for rows, order, target in ((2, 1, 0), (2, 0, 2), (8, 1, 3), (32, 4, 3)):
        if shapes != "static" and rows == 32:
            continue
        numbers = (np.arange(rows * 32).reshape(rows, 32) * 7 % 9 - 4).astype(np.int8)
        orders: dict[str, Any] = {"order_input": order, "order_output": target, "shapes": shapes}
        x = np.asarray((numbers + 0.25) * 8, np.float32)
        yield rounding("QuantizeWithOrder", x[None] if rows == 2 else x, scalar(8.0), **orders)
        quantize = ("input",) if rows == 8 else ()
        yield rounding("DequantizeWithOrder", numbers, scalar(8.0), to=1, quantize=quantize, **orders)
    if shapes == "static":
        batches = (np.arange(192).reshape(3, 2, 32) * 7 % 11 - 4).astype(np.int8)
        for order, target in ((1, 0), (0, 2)):
            orders = {"order_input": order, "order_output": target}
            yield rounding("DequantizeWithOrder", batches, scalar(8.0), to=1, **orders)
            yield rounding("QuantizeWithOrder", np.asarray((batches + 0.25) * 8, np.float32), scalar(8.0), **orders)
        half = np.asarray(x, np.float16)
        yield rounding("QuantizeWithOrder", half, scalar(8.0), order_input=1, order_output=2)
        made = rounding("DequantizeWithOrder", numbers, scalar(8.0), to=10, order_input=1, order_output=2)
        yield made.changed(wrt=("t",))  # the cotangent of the scale would be rounded to float16


def _linear(shapes: str) -> Iterator[Case]:
    """QuantizeLinear and DequantizeLinear of every type; a scale for all, or one for each index of an axis."""
    small = np.array([[[1, -3], [-2, 0], [3, 2]]])
    per_channel, per_row = array([8.0, 9.0, 12.0]), array([7.0])
    for kind in KINDS:
        low, high = int(iinfo(kind).min), int(iinfo(kind).max)
        middle = 0 if low < 0 else 6
        offsets, offset = (np.array([0, 1, -1]) + middle).astype(kind), np.array(2 + middle, kind)
        far = np.array([[[high + 2.3, low - 8.3], [0, 0], [0, 0]]])  # beyond both ends, whatever the zero point is
        x = np.asarray((small + 0.25 + far * (abs(high) < 300)) * per_channel[:, None], np.float32)
        given: dict[str, Any] = {"shapes": shapes}
        yield rounding("QuantizeLinear", x, per_channel, offsets, axis=1, **given)
        yield rounding("QuantizeLinear", x, per_channel, offsets, axis=-2, **given)
        yield rounding("QuantizeLinear", x[:, :1], scalar(8.0), offset, **given)
        whole = (small + middle).astype(kind)
        quantize = ("x",) if kind in (np.int8, np.uint8) else ()
        yield rounding("DequantizeLinear", whole, per_channel, offsets, axis=-2, quantize=quantize, **given)
        yield rounding("DequantizeLinear", whole, scalar(8.0), offset, **given)
        yield rounding("DequantizeLinear", whole, per_row, axis=0, **given)
    yield rounding("QuantizeLinear", np.asarray(small * 8 + 50, np.float32), scalar(8.2), shapes=shapes)
    yield rounding("DequantizeLinear", small.astype(np.int32), per_row, axis=0, shapes=shapes)
    yield rounding("DequantizeLinear", small[0].astype(np.int32), per_channel, axis=0, shapes=shapes)
    yield rounding("DequantizeLinear", small.astype(np.int32), per_channel, axis=1, shapes=shapes)
    if shapes == "static":
        half = np.float16
        yield rounding("DequantizeLinear", small.astype(np.int8), per_channel.astype(half), axis=1)
        yield rounding("QuantizeLinear", x.astype(half), per_channel.astype(half), offsets, axis=1)
