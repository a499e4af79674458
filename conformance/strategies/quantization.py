"""Strategies of quantization. Rounding happens between floats, and no value lies near the middle between two quantised ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import NODE, Case
from refgrad.conformance.cases.quantization import KINDS, chain, is_integer, limits, product
from refgrad.conformance.strategies.convolution import group_or_absent, groups
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy
from refgrad.conformance.strategies.windows import rank_of_image, windows

_OFTEN = (np.int8, np.uint8)  # every version has these, and 16-bit floats hold their values with a fraction


@strategy("QuantizeLinear", oldest=14)
def quantize_linear(d: Drawing) -> Case:
    """Every type of result; a scale per tensor, per index of an axis or, since opset 21, per block; then DequantizeLinear."""
    kind = d.pick(*(_OFTEN if d.dtype.itemsize == 2 else _kinds(d)))
    x, scale, axis, block = _grain(d)
    zero = d.opset < 21 or not d.flag()
    small = not is_integer(kind)
    return _about(
        d,
        chain(
            kind,
            *(x, scale, d.opset),
            shapes=d.shapes,
            zero=zero,
            dtype=d.dtype,
            axis=axis,
            block_size=block,
            far=0.0,  # a number far outside makes the step of the differences too large for the others
            saturate=d.pick(None, 0, 1) if small and d.opset >= 19 else None,
        ),
    )


@strategy("DequantizeLinear")
def dequantize_linear(d: Drawing) -> Case:
    """Of every type; a scale per tensor, per index of an axis and, since opset 21, per block, with and without zero points."""
    kind = d.pick(*_kinds(d))
    x, scale, axis, block = _grain(d)
    low, high = limits(kind)
    values = d.integers(x, max(int(low), -9), min(int(high), 9)).astype(kind)
    zeros = d.optional(lambda: d.integers(scale, max(int(low), -3), min(int(high), 3)).astype(kind))
    if not is_integer(kind):
        zeros = None
    fixed = [] if zeros is None else ["x_zero_point"]
    return d.case(values, d.floats(scale, 0.25, 2), zeros, fixed=fixed, axis=axis, block_size=block)


@strategy("QLinearConv", "ConvInteger", oldest=14)
def convolution(d: Drawing) -> Case:
    """Windows and groups as of Conv; one scale and zero point per filter or for all; with and without zero points and bias."""
    over = windows(d, rank_of_image(d))
    group, channels, filters = groups(d)
    x, w = (d.integer(1, 2), group * channels, *over.image), (group * filters, channels, *over.kernel)
    per_filter = w[:1] if d.flag() else ()
    inputs = _quantized(d, x, w, (), per_filter)
    constants = _zero_points(d, (), per_filter)
    names = ["x", "w", *(["zx", "zw"] if d.flag() else [])]
    if d.op_type == "QLinearConv":
        names = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"]
        if d.flag():
            names.append("B")
            constants["B"] = d.integers(w[:1], -9, 9, np.int32)
    attributes = over.attributes(d, d.shapes == "unknown" or d.flag()) | {"group": group_or_absent(d, group)}
    return _about(d, _product(d, inputs, constants, names, (1, 0), **attributes))


@strategy("QLinearMatMul", "MatMulInteger", oldest=14)
def matmul(d: Drawing) -> Case:
    """Matrices and stacks of them; one scale and zero point per row or column, or for all; with and without zero points."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    stack = d.shape(0, 2, size=2, empty=False)
    a, b = (*stack, rows, inner), (*(stack if d.flag() else ()), inner, columns)
    per_row, per_column = ((rows,), (columns,)) if len(a) == len(b) == 2 and d.flag() else ((), ())
    inputs = _quantized(d, a, b, per_row, per_column)
    constants = _zero_points(d, per_row, per_column)
    names = ["x", "w", *(["zx", "zw"] if d.flag() else [])]
    if d.op_type == "QLinearMatMul":
        names = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"]
    return _about(d, _product(d, inputs, constants, names, (0, len(b) - 1)))


def _quantized(d: Drawing, x: Shape, w: Shape, rows: Shape, columns: Shape) -> dict[str, Any]:
    """The scales, and two factors whose numbers lie a quarter of a step from what they round to."""

    def factor(shape: Shape) -> np.ndarray:
        return 0.25 * (d.integers(shape, -9, 9) + 0.25)

    return {
        "x": factor(x),
        "w": factor(w),
        "sx": np.full(rows, 0.25),
        "sw": np.full(columns, 0.25),
        "sy": 0.17,
        "t": d.pick(1.0, 0.5, -2.0),
    }


def _zero_points(d: Drawing, rows: Shape, columns: Shape) -> dict[str, np.ndarray]:
    """The zero points of the factors, which always serve to quantise them, and of the result."""
    middle = d.pick(0, 3, 128)
    return {
        "zx": np.full(rows, 20 + middle, np.uint8),
        "zw": d.integers(columns, -3, 3, np.int8),
        "zy": np.array(d.integer(-3, 3), np.int8),
    }


def _product(
    d: Drawing,
    feeds: dict[str, Any],
    constants: dict[str, np.ndarray],
    names: list[str],
    axes: tuple[int, int],
    **given: Any,
) -> Case:
    attributes = {name: value for name, value in given.items() if value is not None}
    return product(d.op_type, d.shapes, feeds, constants, names, axes, d.dtype, d.opset, **attributes)


def _kinds(d: Drawing) -> list[Any]:
    return [kind for kind, since in KINDS if since <= max(d.opset, 16)]


def _grain(d: Drawing) -> tuple[Shape, Shape, int, int | None]:
    """The shapes of x and of its scale, the axis, and the size of a block that shares a scale."""
    grain = d.pick("tensor", "axis", *(["block"] if d.opset >= 21 else []))
    if grain == "tensor":
        return d.shape(0, 3, size=3), d.pick((), (1,)), 1, None
    x = d.shape(1, 3, size=4, empty=grain == "axis")
    axis = d.axis(len(x))
    if grain == "axis":
        return x, (x[axis],), axis, None
    block = d.integer(1, x[axis])
    place = axis % len(x)
    return x, (*x[:place], -(-x[axis] // block), *x[place + 1 :]), axis, block


def _about(d: Drawing, case: Case) -> Case:
    """The case, with the first node of the asked operator marked as its subject."""
    next(node for node in case.model.graph.node if node.op_type == d.op_type).name = NODE
    return d.finished(case)
