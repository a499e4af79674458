"""Matrix products."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.registry import MICROSOFT, kernel


@kernel("MatMul", in_float32=True)
def matmul(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.asarray(A @ B)


@kernel("Det", in_float32=True)
def det(X: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.det(X))


@kernel("Gemm", in_float32=True)
def gemm(
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
    broadcast: int = 1,
) -> np.ndarray:
    """Y = α·A'·B' + β·C"""
    Y = (A.T if transA else A) @ (B.T if transB else B)
    if alpha != 1:
        Y = (alpha * Y).astype(Y.dtype, copy=False)
    if C is None or beta == 0:
        return np.asarray(Y)
    return np.asarray((Y + (C if beta == 1 else beta * C)).astype(Y.dtype, copy=False))


@kernel("FusedMatMul", "TransposeMatMul", domain=MICROSOFT, in_float32=True)
def fused_matmul(
    A: np.ndarray,
    B: np.ndarray,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> np.ndarray:
    """Y = α·A'·B'. transBatch moves the first axis behind the batch axes, before trans swaps the last two."""
    Y = np.asarray(_arranged(A, transA, transBatchA) @ _arranged(B, transB, transBatchB))
    return Y if alpha == 1 else (alpha * Y).astype(Y.dtype, copy=False)


def _arranged(A: np.ndarray, trans: int, trans_batch: int) -> np.ndarray:
    if A.ndim < 2:
        return A
    if trans_batch:
        A = np.moveaxis(A, 0, -2)
    return A.swapaxes(-1, -2) if trans else A
