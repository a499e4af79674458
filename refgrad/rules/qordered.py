"""Quantized operators of ONNX Runtime whose matrices lie in the orders of cublasLt: all of them round."""

from __future__ import annotations

from refgrad.protos.domains import MICROSOFT
from refgrad.rules.quantization import INTEGERS
from refgrad.tables.registry import QUANTIZERS

for _name in (
    *("QOrderedMatMul", "QOrderedGelu", "QOrderedLayerNormalization", "QOrderedAttention"),
    "QOrderedLongformerAttention",
):
    QUANTIZERS[MICROSOFT, _name] = INTEGERS
