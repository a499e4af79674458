"""The element types that ONNX Runtime has kernels for on the CPU."""

from __future__ import annotations

from onnx import TensorProto

# It has no double for these; what it has in float alone runs in float16 between two casts.
NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
SINGLE = (TensorProto.FLOAT, TensorProto.FLOAT16)
WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
