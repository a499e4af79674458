"""Matrix products with transposed operands."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.tables.registry import lowering


@lowering("FusedMatMul")
def fused_matmul(op: Emitter, A: str, B: str, transA: int, transB: int) -> str:
    """Both operands have rank 2 or more."""
    return op.MatMul(_transposed(op, A) if transA else A, _transposed(op, B) if transB else B)


def _transposed(op: Emitter, A: str) -> str:
    """`A` with its last two axes exchanged; where its rank is unknown the others become one for a while."""
    rank = op.rank(A)
    if rank is not None:
        perm, node = [*range(rank - 2), rank - 1, rank - 2], op.graph.producer.get(A)
        if node is not None and node.key == ("", "Transpose"):  # exporters transpose the weights
            done = list(node.attributes.get("perm") or reversed(range(rank)))
            if done == perm:
                return node.inputs[0]
        return op.Transpose(A, perm=perm)
    batch, rows, columns = op.Shape(A, end=-2), op.Shape(A, start=-2, end=-1), op.Shape(A, start=-1)
    matrices = op.Reshape(A, op.Concat(op.ReduceProd(batch, keepdims=1), rows, columns, axis=0), allowzero=1)
    exchanged = op.Transpose(matrices, perm=[0, 2, 1])
    return op.Reshape(exchanged, op.Concat(batch, columns, rows, axis=0), allowzero=1)


@lowering("MatrixGrad")
def matrix_grad(op: Emitter, dY: str, A: str, B: str) -> tuple[str, str]:
    """One product over all rows of A, whatever its rank: never a product per batch and then a sum."""
    if op.rank(A) == 2:
        return op.Gemm(dY, B, beta=0.0, transB=1), op.Gemm(A, dY, beta=0.0, transA=1)
    dB = op.Gemm(op.grad.Rows(A), op.grad.Rows(dY), transA=1)
    return op.grad.FusedMatMul(dY, B, transA=0, transB=1), dB


@lowering("Rows")
def rows(op: Emitter, X: str) -> str:
    return op.Flatten(X, axis=-1)


@lowering("BatchGradient")
def batch_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str:
    return op.grad.BroadcastGradient(dY, X, operands)
