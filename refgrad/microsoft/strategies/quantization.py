"""Strategies of ONNX Runtime's quantizations."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.microsoft.cases.qlinear import rounding
from refgrad.microsoft.cases.quantization import KINDS, iinfo
from refgrad.protos.domains import MICROSOFT


@strategy("FakeQuant", domain=MICROSOFT)
def fake_quant(d: Drawing) -> Case:
    """Numbers an eighth or a quarter of a step from what they round to, clipped at either end or not.

    The zero point is not a whole number, so no number rounds to the point where clipping starts.
    """
    scale, zero_point = d.pick(0.5, 2.0), d.integer(0, 3) + 0.25
    steps = d.integers(d.shape(), -9, 12) + np.float32(0.125) * d.pick(1, -1, 2)
    shape = d.pick((), (1,))
    offset = np.full(shape, zero_point, d.dtype)
    low, high = d.pick((None, None), (0, 7), (-4, 3))
    x = np.asarray(steps * scale).astype(d.dtype)
    return d.case(x, np.full(shape, scale, d.dtype), offset, quant_min=low, quant_max=high, outputs=d.integer(1, 2))


@strategy("QuantizeLinear", "DequantizeLinear", domain=MICROSOFT)
def linear(d: Drawing) -> Case:
    """Every type; a scale and a zero point for all or for each index of an axis. Floats are a quarter of a step away."""
    kind, shape = d.pick(*KINDS), d.shape(1, 3, size=3)
    axis = d.axis(len(shape)) if d.flag() else None
    of = (shape[axis],) if axis is not None else ()
    middle = 0 if iinfo(kind).min < 0 else 6
    zeros = (d.integers(of, -1, 1) + middle).astype(kind)
    numbers = d.integers(shape, -4, 4)
    scale = np.full(of, 8.0, d.dtype)
    if d.op_type == "QuantizeLinear":
        return _rounding(d, np.asarray((numbers + 0.25) * 8, d.dtype), scale, zeros, axis)
    return _rounding(d, (numbers + middle).astype(kind), scale, d.optional(lambda: zeros), axis)


def _rounding(d: Drawing, x: np.ndarray, scale: np.ndarray, zeros: np.ndarray | None, axis: int | None) -> Case:
    """The case of one of the two."""
    more: dict[str, Any] = {} if axis is None else {"axis": axis}
    given = (x, scale) if zeros is None else (x, scale, zeros)
    return d.finished(rounding(d.op_type, *given, shapes=d.shapes, **more))


@strategy("QuantizeWithOrder", "DequantizeWithOrder", domain=MICROSOFT)
def with_order(d: Drawing) -> Case:
    """Between rows and columns of any sizes, or the tiles of 32 columns."""
    orders = d.pick((1, 0), (0, 1), (1, 2), (2, 0))
    shape = (*d.shape(0, 2, size=2), 32) if 2 in orders else d.shape(0, 3, size=3)
    numbers = d.integers(shape, -4, 4)
    more: dict[str, Any] = {"order_input": orders[0], "order_output": orders[1], "shapes": d.shapes}
    scale = np.full(d.pick((), (1,)), 8.0, np.float32)
    if d.op_type == "QuantizeWithOrder":
        made = rounding(d.op_type, np.asarray((numbers + 0.25) * 8, d.dtype), scale, **more)
    else:
        made = rounding(d.op_type, numbers.astype(np.int8), scale, to=1, **more)
    return d.finished(made)
