"""Matrix products with transposed operands."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import lowering


@lowering("FusedMatMul")
def fused_matmul(op: Emitter, A: str, B: str, transA: int, transB: int) -> str:
    """Both operands have rank 2 or more. Where it is unknown only Einsum can name the last two axes."""
    left, right = _transposed(op, A, transA), _transposed(op, B, transB)
    if left is None or right is None:
        result: str = op.Einsum(A, B, equation=f"...{'ki' if transA else 'ik'},...{'jk' if transB else 'kj'}->...ij")
        return result
    return str(op.MatMul(left, right))


def _transposed(op: Emitter, A: str, trans: int) -> str | None:
    """`A` with its last two axes exchanged where `trans`; None where its rank would have to be known."""
    rank = op.rank(A)
    if not trans:
        return A
    if rank is None:
        return None
    return str(op.Transpose(A, perm=[*range(rank - 2), rank - 1, rank - 2]))
