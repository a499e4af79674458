"""ONNX Runtime's training operators for quantization, in ai.onnx operators."""

from __future__ import annotations

from refgrad.lowering.microsoft.forms import form
from refgrad.reverse.emit import Emitter


@form("FakeQuantGrad", results="dY")
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str:
    return str(op.grad.FakeQuantGrad(dY, mask))
