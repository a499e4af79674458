"""ONNX Runtime's kernels for matrix products, each with the condition under which it is right."""

from __future__ import annotations

from string import ascii_uppercase

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.lowering.onnx.arithmetic import summed_axes
from refgrad.lowering.ort.arithmetic import summed_at_run_time
from refgrad.protos.types import is_unnamed
from refgrad.tables.registry import lowering


@lowering("FusedMatMul", dialect="ort")
def fused_matmul(op: Emitter, A: str, B: str, transA: int, transB: int) -> str | None:
    """ONNX Runtime's builder takes it for every type; on the CPU there is a kernel for float alone.

    Of a Transpose and a MatMul in double its optimizer makes one that it cannot run.
    """
    if op.type(A) == TensorProto.DOUBLE:
        equation = _product(op.rank(A), op.rank(B), transA, transB)
        return op.Einsum(A, B, equation=equation) if equation else None
    if op.type(A) != TensorProto.FLOAT:
        return None
    return op.com_microsoft("FusedMatMul", A, B, transA=transA or None, transB=transB or None)


def _product(rank_a: int | None, rank_b: int | None, trans_a: int, trans_b: int) -> str:
    """The equation of a matrix product; "" where none is known.

    The axes of "..." have to be as many in both. Where neither rank is known they are. Where one rank is known, it has to be
    2, for a matrix; a first operand of unknown rank may then be a vector too.
    """
    rows = "" if rank_a == 1 else "i"
    left, right = "ji" if trans_a else f"{rows}j", "kj" if trans_b else "jk"
    if rank_a is None and rank_b == 2:
        return f"...{left},{right}->...ik" if trans_a else f"...j,{right}->...k"
    if (rank_a is None) != (rank_b is None):
        return f"{left},...{right}->...{rows}k" if rank_a == 2 else ""
    surplus = max(rank_a or 2, 2) - max(rank_b or 2, 2)
    alone = ascii_uppercase[: abs(surplus)]
    left, right = f"{alone if surplus > 0 else ''}...{left}", f"{alone if surplus < 0 else ''}...{right}"
    return f"{left},{right}->{alone}...{rows}k"


@lowering("MatrixGrad", dialect="ort")
def matrix_grad(op: Emitter, dY: str, A: str, B: str) -> tuple[str, str] | None:
    """Of sizes without a name ONNX Runtime's builder asks at run time along which an operand was broadcast."""
    a, b = op.shape(A), op.shape(B)
    if op.type(A) != TensorProto.FLOAT or a is None or b is None or not any(map(is_unnamed, (*a, *b))):
        return None
    if len(a) == 1:  # dB is no product of two vectors
        return None
    dA = op.grad.FusedMatMul(dY, B, transA=0, transB=1)
    op.assume(dA, a)
    dA = summed_at_run_time(op, dA, A, (A, dA))
    if op.static(B) is not None and isinstance(a[-1], int):
        return dA, op.Gemm(op.grad.Rows(A), op.grad.Rows(dY), transA=1)
    dB = op.grad.FusedMatMul(A, dY, transA=1, transB=0)
    op.assume(dB, (*a[:-2], *b))
    return dA, summed_at_run_time(op, dB, B, (dB, B))


@lowering("Rows", dialect="ort")
def rows(op: Emitter, X: str) -> str | None:
    """ONNX Runtime's builder reads a size that is not known off B when the model runs, which fails where it is 0."""
    width = (op.shape(X) or (None,))[-1]
    return op.Reshape(X, [-1, width]) if isinstance(width, int) and width else None


@lowering("BatchGradient", dialect="ort")
def batch_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str | None:
    """ONNX Runtime's builder keeps the axes of A alone, which changes nothing."""
    if any(is_unnamed(dim) for name in operands for dim in op.shape(name) or (None,)):
        return None
    axes = summed_axes(*(op.shape(name) for name in (X, *(name for name in operands if name != X))))
    if axes is None or not any(axes):
        return None
    leading, inner = axes
    keepdims = None if operands[0] == X else 0
    return op.Reshape(op.ReduceSum(dY, inner[::-1] + leading[::-1], keepdims=keepdims), op.measure(X))
