"""Quantized operators of ONNX Runtime: which of them round, and rules of those that add up whole numbers."""

from __future__ import annotations

from refgrad.protos.domains import MICROSOFT
from refgrad.rules.quantization import INTEGERS
from refgrad.tables.registry import QUANTIZERS

for _name in (
    *("QGemm", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearConcat"),
    *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean", "QLinearWhere", "QLinearConv"),
):
    QUANTIZERS[MICROSOFT, _name] = INTEGERS
