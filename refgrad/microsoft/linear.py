"""ONNX Runtime's products of matrices."""

from __future__ import annotations

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import activated, plus
from refgrad.tables.definitions import UnsupportedFormError, operator


@operator("GemmFastGelu", "Y")
def gemm_fast_gelu(op: FunctionEmitter, X: str, W: str, bias: str | None = None) -> str:
    """The tanh form of Gelu at X·W + bias"""
    x = plus(op, op.MatMul(X, W), bias)
    return str(op.Gelu(x, approximate="tanh") if op.opset >= 20 else op.com_microsoft("FastGelu", x))


@operator("FusedMatMul", "Y")
def fused_matmul(
    op: FunctionEmitter,
    A: str,
    B: str,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> str:
    """α·A'·B', where trans exchanges the last two axes after transBatch has put the first axis before the last"""
    y = op.MatMul(_arranged(op, A, transA, transBatchA), _arranged(op, B, transB, transBatchB))
    return y if alpha == 1 else op.Mul(y, alpha)


@operator("FusedMatMulActivation", "Y")
def fused_matmul_activation(
    op: FunctionEmitter,
    A: str,
    B: str,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_axis: int | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> str:
    """activation(α·A'·B'), see FusedMatMul"""
    moved = {"transA": transA, "transB": transB, "transBatchA": transBatchA, "transBatchB": transBatchB}
    y = fused_matmul(op, A, B, alpha=alpha, **moved)
    if activation in ("Softmax", "LogSoftmax"):
        return str(op.emit(activation, "", (y,), 1, {"axis": -1 if activation_axis is None else activation_axis}))
    if activation == "Selu":
        return op.Selu(y, alpha=activation_alpha, gamma=activation_gamma)
    return activated(op, y, activation, (activation_alpha, activation_beta, activation_gamma))


@operator("TransposeMatMul", "Y")
def transpose_matmul(
    op: FunctionEmitter, A: str, B: str, *, alpha: float = 1.0, transA: int = 0, transB: int = 0
) -> str:
    """α·A'·B', where trans exchanges the last two axes"""
    return fused_matmul(op, A, B, alpha=alpha, transA=transA, transB=transB)


def _arranged(op: FunctionEmitter, A: str, trans: int, trans_batch: int) -> str:
    rank = op.rank(A)
    if not (trans or trans_batch) or rank in (0, 1):
        return A
    if rank is not None:
        perm = list(range(rank))
        if trans_batch:
            perm = [*perm[1:-1], 0, rank - 1]
        if trans:
            perm[-2:] = perm[:-3:-1]
        return op.Transpose(A, perm=perm)
    if trans_batch:
        raise UnsupportedFormError("the rank of an operand that transBatch permutes is unknown; add it to value_info")
    batch, rows, columns = op.Shape(A, end=-2), op.Shape(A, start=-2, end=-1), op.Shape(A, start=-1)
    matrices = op.Reshape(A, op.Concat(op.ReduceProd(batch, keepdims=1), rows, columns, axis=0), allowzero=1)
    exchanged = op.Transpose(matrices, perm=[0, 2, 1])
    return op.Reshape(exchanged, op.Concat(batch, columns, rows, axis=0), allowzero=1)


@operator("FusedGemm", "Y")
def fused_gemm(
    op: FunctionEmitter,
    A: str,
    B: str,
    C: str | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> str:
    """activation(α·A'·B' + β·C)"""
    y = op.Gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(op, y, activation, (activation_alpha, activation_beta, activation_gamma))
