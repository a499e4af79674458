"""ONNX Runtime's quantizations."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels import quantization as onnx_kernels
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("FakeQuant", domain=MICROSOFT, in_float32=True, fresh=True)
def fake_quant(
    input_tensor: Array, scale: Array, zero_point: Array, *, quant_min: int = 0, quant_max: int = 255
) -> tuple[Array, Array]:
    """What quantizing and dequantizing again leaves of x, and where it was inside the range"""
    q = np.rint(input_tensor / scale) + zero_point
    return np.asarray((q.clip(quant_min, quant_max) - zero_point) * scale), (q >= quant_min) & (q <= quant_max)


@kernel("QuantizeLinear", domain=MICROSOFT, in_float32=True, fresh=True)
def quantize_linear(x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int | None = None) -> Array:
    """As that of ai.onnx; the division is in float32 at least"""
    _check_alike("y_zero_point", y_zero_point, "y_scale", y_scale)
    return onnx_kernels.quantize_linear(x, y_scale, y_zero_point, axis=1 if axis is None else axis)


@kernel("DequantizeLinear", domain=MICROSOFT, fresh=True)
def dequantize_linear(x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int | None = None) -> Array:
    """As that of ai.onnx"""
    _check_alike("x_zero_point", x_zero_point, "x_scale", x_scale)
    return onnx_kernels.dequantize_linear(x, x_scale, x_zero_point, axis=1 if axis is None else axis)


def _check_alike(name: str, zero_point: Array | None, beside: str, scale: Array) -> None:
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"{name} has the shape {list(zero_point.shape)} and {beside} {list(scale.shape)}; they have the same"
        )
