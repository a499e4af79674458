"""ONNX Runtime's training operators for quantization, in ai.onnx operators."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.lowering.microsoft.forms import form


@form("FakeQuantGrad", results="dY")
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str:
    return str(op.grad.FakeQuantGrad(dY, mask))
