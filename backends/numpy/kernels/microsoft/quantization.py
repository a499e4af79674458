"""ONNX Runtime's quantizations."""

from __future__ import annotations

import numpy as np

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
