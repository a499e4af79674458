"""ONNX Runtime's quantizations."""

from __future__ import annotations

import math

import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels import quantization as onnx_kernels
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("FakeQuant", domain=MICROSOFT, in_float32=True, fresh=True)
def fake_quant(args: Arguments) -> tuple[Array, Array]:
    """x quantized and dequantized again, and a mask of the elements that were inside the range"""
    q = np.rint(args.input_tensor / args.scale) + args.zero_point
    return np.asarray((q.clip(args.quant_min, args.quant_max) - args.zero_point) * args.scale), (
        q >= args.quant_min
    ) & (q <= args.quant_max)


@kernel_of_body("QuantizeLinear", domain=MICROSOFT, in_float32=True, fresh=True)
def quantize_linear(args: Arguments) -> Array:
    """As QuantizeLinear of ai.onnx; the division is in float32 at least"""
    _check_alike("y_zero_point", args.y_zero_point, "y_scale", args.y_scale)
    return onnx_kernels.quantize_linear(
        args.x, args.y_scale, args.y_zero_point, axis=1 if args.axis is None else args.axis
    )


@kernel_of_body("DequantizeLinear", domain=MICROSOFT, fresh=True)
def dequantize_linear(args: Arguments) -> Array:
    """As DequantizeLinear of ai.onnx"""
    _check_alike("x_zero_point", args.x_zero_point, "x_scale", args.x_scale)
    return onnx_kernels.dequantize_linear(
        args.x, args.x_scale, args.x_zero_point, axis=1 if args.axis is None else args.axis
    )


def _check_alike(name: str, zero_point: Array | None, beside: str, scale: Array) -> None:
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"{name} has the shape {list(zero_point.shape)} and {beside} {list(scale.shape)}; they have the same"
        )


@kernel_of_body("QuantizeWithOrder", domain=MICROSOFT, in_float32=True, fresh=True)
def quantize_with_order(args: Arguments) -> Array:
    q = onnx_kernels.quantize_linear(args.input, _one(args.scale_input), np.zeros((), np.int8))
    return in_order(in_order(q, args.order_input, back=True), args.order_output)


@kernel_of_body("DequantizeWithOrder", domain=MICROSOFT, fresh=True)
def dequantize_with_order(args: Arguments) -> Array:
    y = in_order(in_order(args.input, args.order_input, back=True), args.order_output) * _one(args.scale_input)
    return np.asarray(y.astype(helper.tensor_dtype_to_np_dtype(args.to)))


def _one(scale: Array) -> Array:
    if scale.size != 1 or scale.ndim > 1:
        raise ValueError(f"a scale has the shape {list(scale.shape)}; it is a scalar, one for the whole tensor")
    return scale.reshape(())


def in_order(x: Array, order: int, back: bool = False) -> Array:
    """Matrices laid out in an order of cublasLt, their shape unchanged; with `back`, matrices in that order laid out in rows.

    The formulas are from cublasLt's documentation: where element (row, column) lies in its tile, and where the tile lies.
    """
    rows, columns = (1, 1, *x.shape)[-2:]
    r, c = np.arange(rows)[:, None], np.arange(columns)
    multiples = {0: (1, 1), 1: (1, 1), 2: (1, 32), 3: (8, 32), 4: (32, 32)}
    if order not in multiples:
        raise ValueError(
            f"the order {order} is not known; there are ORDER_COL (0), ORDER_ROW (1), ORDER_COL32 (2), "
            "ORDER_COL4_4R2_8C (3) and ORDER_COL32_2R_4R4 (4)"
        )
    if rows % multiples[order][0] or columns % multiples[order][1]:
        raise ValueError(
            f"matrices of {rows} rows and {columns} columns do not fit the order {order}: they are multiples of "
            f"{multiples[order][0]} and {multiples[order][1]}"
        )
    if order == 0:
        place = c * rows + r
    elif order == 1:
        place = r * columns + c
    elif order == 2:
        place = c // 32 * (32 * rows) + r * 32 + c % 32
    elif order == 3:
        tile = c // 32 * (32 * rows) + r // 8 * 256
        inner = (c % 32 // 8) * 32 + ((c % 8 >= 4) * 4 + r % 8 // 2) * 4 + c % 4
        place = tile + r % 2 * 128 + inner
    else:
        place = c // 32 * (32 * rows) + r // 32 * 1024 + ((r % 8 // 2 * 4 + r % 32 // 8) * 2 + r % 2) * 32 + c % 32
    flat, places = x.reshape(math.prod(x.shape[:-2]), rows * columns), place.reshape(-1)
    if back:
        return flat[:, places].reshape(x.shape)
    result = np.empty_like(flat)
    result[:, places] = flat
    return result.reshape(x.shape)
