"""ONNX Runtime's products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, rule
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.activation import activated, plus
from refgrad.microsoft.declared import check_known
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import Shapes


@body("GemmFastGelu", "Y", domain=MICROSOFT)
def gemm_fast_gelu(op: FunctionEmitter, X: str, W: str, bias: str | None = None) -> str:
    """The tanh form of Gelu at X·W + bias"""
    x = plus(op, op.MatMul(X, W), bias)
    return str(op.Gelu(x, approximate="tanh") if op.opset >= 20 else op.com_microsoft("FastGelu", x))


@body("FusedMatMul", "Y", domain=MICROSOFT)
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


@body("FusedMatMulActivation", "Y", domain=MICROSOFT)
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
    return activated(op, y, activation, (activation_alpha, activation_beta, activation_gamma))


@body("TransposeMatMul", "Y", domain=MICROSOFT)
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


@body("FusedGemm", "Y", domain=MICROSOFT)
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


@body("Inverse", "Y", domain=MICROSOFT)
def inverse_body(op: FunctionEmitter, X: str) -> str:
    """X⁻¹ of each matrix"""
    x, size, lead = op.wide(X), op.Shape(X, start=-1), op.Shape(X, end=-2)
    matrices = op.Reshape(x, op.Concat(op.ReduceProd(lead, keepdims=1), size, size, axis=0), allowzero=1)
    rows = op.up_to(size)
    unit = op.CastLike(op.Equal(op.Unsqueeze(rows, [1]), rows), x)
    beside = op.Concat(matrices, op.Expand(unit, op.Shape(matrices)), axis=2)

    def step(inner: FunctionEmitter, states: Sequence[str], parts: Sequence[str]) -> list[str]:
        """Gauss-Jordan elimination of column k, after row k and the row with the largest element were exchanged."""
        (M,), (k,) = states, parts
        size = inner.Abs(inner.Gather(M, k, axis=2))
        best = inner.ArgMax(inner.Where(inner.GreaterOrEqual(rows, k), size, -1.0), axis=1, keepdims=1)
        order = inner.Where(inner.Equal(rows, k), best, inner.Where(inner.Equal(rows, best), k, rows))
        M = inner.GatherElements(M, inner.Expand(inner.Unsqueeze(order, [2]), inner.Shape(M)), axis=1)
        column, row = inner.Unsqueeze(inner.Gather(M, k, axis=2), [2]), inner.Unsqueeze(inner.Gather(M, k, axis=1), [1])
        row = inner.Div(row, inner.Gather(column, inner.Unsqueeze(k, [0]), axis=1))
        rest = inner.Sub(M, inner.Mul(column, row))
        return [inner.Where(inner.Unsqueeze(inner.Equal(rows, k), [0, 2]), row, rest)]

    [last] = op.scan(step, [op.ranked(beside, 3)], [op.ranked(rows, 1)])
    return str(op.CastLike(op.Reshape(op.Slice(last, size, [END], [2]), op.Shape(X), allowzero=1), X))


@rule("Inverse", domain=MICROSOFT)
def inverse(op: Emitter, d_Y: str, Y: str) -> str:
    """dX = −Yᵀ·dY·Yᵀ"""
    return op.Neg(op.grad.FusedMatMul(op.grad.FusedMatMul(Y, d_Y, transA=1, transB=0), Y, transA=0, transB=1))


def _check_cdist(shapes: Shapes, args: Arguments) -> None:
    check_known(args, "metric", "sqeuclidean", "euclidean")


@body("CDist", "C", check=_check_cdist, domain=MICROSOFT)
def cdist(op: FunctionEmitter, A: str, B: str, *, metric: str = "sqeuclidean") -> str:
    """The distance of each row of A from each row of B, or its square"""
    difference = op.Sub(op.Unsqueeze(A, [1]), op.Unsqueeze(B, [0]))
    if metric == "sqeuclidean":
        return op.ReduceSum(op.Mul(difference, difference), [2], keepdims=0)
    return op.Squeeze(op.reduce("ReduceL2", difference, [2]), [2])
