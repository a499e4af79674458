"""Quantization that is acted out in floats."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.tables.registry import lowering


@lowering("FakeQuantGrad")
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str:
    return op.Where(mask, dY, 0.0)
