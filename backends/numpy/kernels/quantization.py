"""Quantization that onnx.reference computes in float32 only."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.registry import kernel


@kernel("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return uint8 values, scale = (max − min)/255 and zero point = round(−min/scale), the range made to hold 0."""
    high, low = x.max(initial=0), x.min(initial=0)
    scale = np.asarray((high - low) / 255 if high > low else 1, x.dtype)
    zero_point = np.rint(-low / scale).clip(0, 255).astype(np.uint8)
    y = (np.rint(x / scale) + zero_point).clip(0, 255).astype(np.uint8)
    return y, scale, np.asarray(zero_point)
