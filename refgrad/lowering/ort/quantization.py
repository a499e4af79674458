"""ONNX Runtime's kernels for quantization, each with the condition under which it is right."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.tables.registry import lowering


@lowering("FakeQuantGrad", dialect="ort")
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str | None:
    return op.com_microsoft("FakeQuantGrad", dY, mask) if op.type(dY) == TensorProto.FLOAT else None
