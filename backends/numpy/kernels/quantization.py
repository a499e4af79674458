"""Quantization, and the products and convolutions of whole numbers, which doubles hold exactly."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from refgrad.backends.numpy.abstract import without_data
from refgrad.backends.numpy.kernels.arithmetic import narrowed
from refgrad.backends.numpy.kernels.convolution import conv, conv_memory
from refgrad.backends.numpy.kernels.operands import check_axis, widened
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray | None
_FLOATS = frozenset(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))
_iinfo: Any = ml_dtypes.iinfo  # it has no type hints
_DOUBLE = 8  # bytes of a number in double
_SATURATED = 12  # bytes of a number within `saturated`, which has it in double and with 32 bits
_INTEGERS = {  # the least and the greatest number of each
    np.dtype(kind): (float(_iinfo(kind).min), float(_iinfo(kind).max))
    for kind in (
        *(np.int8, np.uint8, np.int16, np.uint16),
        *(ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4),
    )
}


def _quantize_memory(x: Any, y_scale: Any, *_: Any, **__: Any) -> None:
    """The quotients, and `saturated`."""
    need((x.itemsize + _SATURATED) * x.size)


@kernel("QuantizeLinear", fresh=True, abstract=_quantize_memory)
def quantize_linear(
    x: np.ndarray,
    y_scale: np.ndarray,
    y_zero_point: Array = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> np.ndarray:
    """saturate(round(x/scale) + zero point), the division in `precision` or the type of the scale"""
    target = np.dtype(helper.tensor_dtype_to_np_dtype(output_dtype)) if output_dtype else np.dtype(np.uint8)
    if y_zero_point is not None:
        if output_dtype and target != y_zero_point.dtype:
            raise ValueError(f"output_dtype is {target}, the zero point {y_zero_point.dtype}")
        target = y_zero_point.dtype
    kind = y_scale.dtype if y_scale.dtype in _FLOATS else x.dtype if x.dtype in _FLOATS else np.dtype(np.float32)
    if precision:
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(precision))
    ratio = x.astype(kind, copy=False) / _laid(y_scale.astype(kind, copy=False), x.shape, axis, block_size)
    zero_point = 0.0 if y_zero_point is None else _laid(y_zero_point, x.shape, axis, block_size).astype(np.float64)
    if target in _INTEGERS:
        return saturated(ratio, zero_point, target)
    shifted = ratio if y_zero_point is None else (ratio + zero_point).astype(kind)
    return narrowed(shifted, target, bool(saturate))


@kernel("DequantizeLinear", fresh=True)
def dequantize_linear(
    x: np.ndarray,
    x_scale: np.ndarray,
    x_zero_point: Array = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> np.ndarray:
    """(x − zero point)·scale, rounded once, to the type of the scale or `output_dtype`"""
    target = np.dtype(helper.tensor_dtype_to_np_dtype(output_dtype)) if output_dtype else x_scale.dtype
    wide = np.float64 if target == np.float64 else np.float32
    y: Any = x.astype(wide)
    if x_zero_point is not None:
        y -= _laid(x_zero_point, x.shape, axis, block_size).astype(wide)
    y *= _laid(x_scale.astype(wide), x.shape, axis, block_size)
    return np.asarray(y.astype(target, copy=False))


@kernel("DynamicQuantizeLinear", fresh=True, abstract=lambda x, **_: need(x.nbytes))
def dynamic_quantize_linear(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return uint8 values, scale = (max − min)/255 and zero point = round(−min/scale), the range made to hold 0."""
    high, low = x.max(initial=0), x.min(initial=0)
    scale = np.asarray((high - low) / 255 if high > low else 1, x.dtype)
    zero_point = np.rint(-low / scale).clip(0, 255).astype(np.uint8)
    y = np.asarray(x / scale)
    np.rint(y, out=y)
    y += zero_point
    return np.clip(y, 0, 255, out=y).astype(np.uint8), scale, np.asarray(zero_point)


@kernel("QLinearConv", fresh=True)
def qlinear_conv(
    x: np.ndarray,
    x_scale: np.ndarray,
    x_zero_point: np.ndarray,
    w: np.ndarray,
    w_scale: np.ndarray,
    w_zero_point: np.ndarray,
    y_scale: np.ndarray,
    y_zero_point: np.ndarray,
    B: Array = None,
    *,
    auto_pad: str,
    dilations: list[int] | None = None,
    group: int,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> np.ndarray:
    """The whole numbers of ConvInteger + B, times x_scale·w_scale/y_scale, rounded, + zero point"""
    window = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    sums = _conv_integer(x, w, x_zero_point, w_zero_point, B, auto_pad=auto_pad, group=group, **window)
    scale = _laid(x_scale, x.shape, 0) * _laid(w_scale, w.shape, 0).reshape(1, -1, *[1] * (w.ndim - 2))
    return saturated(sums * (scale / _laid(y_scale, sums.shape, 0)), y_zero_point, y_zero_point.dtype)


@kernel("QLinearMatMul", fresh=True)
def qlinear_matmul(
    a: np.ndarray,
    a_scale: np.ndarray,
    a_zero_point: np.ndarray,
    b: np.ndarray,
    b_scale: np.ndarray,
    b_zero_point: np.ndarray,
    y_scale: np.ndarray,
    y_zero_point: np.ndarray,
) -> np.ndarray:
    """The products of MatMulInteger, times a_scale·b_scale/y_scale, rounded, + zero point"""
    products = centred(a, _rows(a_zero_point)) @ centred(b, b_zero_point)
    scale = _rows(widened(a_scale)) * widened(b_scale) / widened(y_scale)
    return saturated((products * scale).reshape(products.shape), y_zero_point, y_zero_point.dtype)


def _centred_memory(*operands: tuple[Any, Any]) -> list[int]:
    """The bytes that `centred` takes for each operand, with the results before it, and at last the bytes of all results."""
    held, taken = 0, []
    for x, zero_point in operands:
        taken.append(held + _DOUBLE * x.size * (1 if zero_point is None else 2))
        held += _DOUBLE * x.size
    return [*taken, held]


def _product_memory(A: Any, B: Any, a_zero_point: Any = None, b_zero_point: Any = None) -> None:
    """Operands and products in double, and the products with 64 bits."""
    *taken, held = _centred_memory((A, a_zero_point), (B, b_zero_point))
    rows, columns = A.shape[:-1], B.shape[-1:]
    products = _DOUBLE * math.prod((*np.broadcast_shapes(rows[:-1], B.shape[:-2]), *rows[-1:], *columns))
    need(max(*taken, held + products, 2 * products) - products // 2)  # the results have 32 bits


@kernel("MatMulInteger", fresh=True, abstract=_product_memory)
def matmul_integer(A: np.ndarray, B: np.ndarray, a_zero_point: Array = None, b_zero_point: Array = None) -> np.ndarray:
    """(A − a_zero_point)·(B − b_zero_point) with 32 bits: doubles hold the sums exactly, the last bits are kept."""
    a_zero_point = None if a_zero_point is None else _rows(a_zero_point)
    return np.asarray((centred(A, a_zero_point) @ centred(B, b_zero_point)).astype(np.int64).astype(np.int32))


def _conv_memory(x: Any, w: Any, x_zero_point: Any = None, w_zero_point: Any = None, **window: Any) -> None:
    """Operands, columns and sums in double, and the sums with 64 bits."""
    *taken, held = _centred_memory((x, x_zero_point), (w, w_zero_point))
    columns, sums = conv_memory(without_data(x.shape, np.dtype(np.float64)), w, **window)
    need(max(*taken, held + columns + _DOUBLE * sums, 2 * _DOUBLE * sums) - _DOUBLE // 2 * sums)


@kernel("ConvInteger", fresh=True, abstract=_conv_memory)
def conv_integer(
    x: np.ndarray,
    w: np.ndarray,
    x_zero_point: Array = None,
    w_zero_point: Array = None,
    *,
    auto_pad: str,
    dilations: list[int] | None = None,
    group: int,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> np.ndarray:
    """Conv(x − x_zero_point, w − w_zero_point) with 32 bits"""
    window = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    sums = _conv_integer(x, w, x_zero_point, w_zero_point, None, auto_pad=auto_pad, group=group, **window)
    return np.asarray(sums.astype(np.int64).astype(np.int32))


@kernel("FakeQuantGrad", domain=MICROSOFT, fresh=True)
def fake_quant_grad(dY: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """dX = dY where the quantized value was inside the range, else 0: rounding passes its gradient on"""
    return np.where(mask, dY, dY.dtype.type(0))


def _conv_integer(
    x: np.ndarray, w: np.ndarray, x_zero_point: Array, w_zero_point: Array, B: Array, **window: Any
) -> np.ndarray:
    """Whole numbers in double. A zero point of the kernel may be one per output channel."""
    zero_points = [None if z is None else _laid(z, q.shape, 0) for q, z in ((x, x_zero_point), (w, w_zero_point))]
    return conv(centred(x, zero_points[0]), centred(w, zero_points[1]), None if B is None else centred(B), **window)


def centred(x: np.ndarray, zero_point: Array = None) -> np.ndarray:
    """X − zero point in double"""
    wide = x.astype(np.float64)
    return wide if zero_point is None else wide - zero_point.astype(np.float64)


def _rows(parameter: np.ndarray) -> np.ndarray:
    """A vector has one number per row."""
    return parameter.reshape(-1, 1) if parameter.ndim == 1 else parameter


def saturated(ratio: np.ndarray, zero_point: Any, target: np.dtype) -> np.ndarray:
    """round(ratio) + zero point, held within the range of an integer type; NaN is the least number."""
    wide = np.array(ratio, np.float64)
    if target not in _INTEGERS:
        return narrowed(wide + np.asarray(zero_point, np.float64), target)
    low, high = _INTEGERS[target]
    np.rint(wide, out=wide)
    wide += zero_point
    np.fmax(wide, low, out=wide)  # the other one where one is NaN
    np.minimum(wide, high, out=wide)
    return np.asarray(wide.astype(np.int32).astype(target))


def _laid(parameter: np.ndarray, shape: tuple[int, ...], axis: int, block_size: int = 0) -> np.ndarray:
    """A scale or zero point in a shape that broadcasts: one for all, one per index along `axis`, or one per block."""
    if parameter.size == 1:
        return parameter.reshape(())
    axis = check_axis(axis, len(shape))
    dims = [1] * len(shape)
    dims[axis] = shape[axis]
    expected: tuple[int, ...] = (shape[axis],)
    if block_size:
        expected = (*shape[:axis], -(-shape[axis] // block_size), *shape[axis + 1 :])
    if parameter.shape != expected:
        raise ValueError(f"a scale or zero point has shape {parameter.shape}, not () or {expected}")
    return parameter.take(np.arange(shape[axis]) // block_size, axis) if block_size else parameter.reshape(dims)
