"""Quantized operators of ONNX Runtime: which of them round, and rules of those that add up whole numbers."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.rules.linear import matmul
from refgrad.rules.quantization import INTEGERS, ZERO_POINT
from refgrad.tables.registry import QUANTIZED, QUANTIZERS, rule

FLOAT = TensorProto.FLOAT

for _name in (
    *("QGemm", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearConcat"),
    *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean", "QLinearWhere", "QLinearConv"),
    "QuantizeWithOrder",
):
    QUANTIZERS[MICROSOFT, _name] = INTEGERS
QUANTIZED.update((MICROSOFT, _name) for _name in ("MatMulInteger16", "MulInteger", "ReduceSumInteger"))


@rule("MatMulInteger16", domain=MICROSOFT, wrt=["A", "B"])
def matmul_integer16(op: Emitter, d_Y: str, A: str, B: str) -> tuple[str, str]:
    """the adjoints of MatMul"""
    d, a, b = (op.as_type(value, FLOAT) for value in (d_Y, A, B))
    for made, of in ((a, A), (b, B)):
        shape = op.shape(of)
        if shape is not None:
            op.assume(made, shape)
    adjoints: tuple[str, str] = matmul(op, d, a, b)
    return adjoints


@rule(
    "MulInteger",
    domain=MICROSOFT,
    wrt=["A", "B"],
    broadcast=True,
    refused=dict.fromkeys(("A_zero_point", "B_zero_point"), ZERO_POINT),
)
def mul_integer(
    op: Emitter, d_C: str, A: str, A_zero_point: str | None, B: str, B_zero_point: str | None
) -> tuple[str, str]:
    """dA = dC·(B − B_zero_point), dB = dC·(A − A_zero_point)"""
    d = op.as_type(d_C, FLOAT)
    return op.Mul(d, _centred(op, B, B_zero_point)), op.Mul(d, _centred(op, A, A_zero_point))


def _centred(op: Emitter, q: str, zero_point: str | None) -> str:
    x = op.as_type(q, FLOAT)
    return x if zero_point is None else op.Sub(x, op.Reshape(op.as_type(zero_point, FLOAT), []))


@rule("ReduceSumInteger", domain=MICROSOFT, wrt=["data"])
def reduce_sum_integer(op: Emitter, d_reduced: str, data: str, axes: Sequence[int], keepdims: int) -> str:
    """dx = dy along every reduced axis"""
    d = op.as_type(d_reduced, FLOAT)
    return op.Expand(d if keepdims else op.Unsqueeze(d, list(axes)), op.shape_of(data))
