"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_expands
from refgrad.backends.numpy.memory import need, owner
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT


def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A @ B. Where B is one matrix, it multiplies all rows of A at once instead of each matrix of A."""
    left, right = _operands(A, B)
    if left.ndim == right.ndim == 2:
        made = _matrix(left, right)
        return made if A.ndim == 2 else made.reshape(*A.shape[:-1], B.shape[1])
    return np.asarray(left @ right)


def _operands(A: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B as BLAS reads them; A as its rows where B is one matrix."""
    if B.ndim == 2 and A.ndim > 2 and A.shape[-1] == B.shape[0]:
        return A.reshape(math.prod(A.shape[:-1]), A.shape[-1]), _for_blas(B)
    return _for_blas(A), _for_blas(B)


def _product_memory(A: np.ndarray, B: np.ndarray, *_: Any, transA: int = 0, transB: int = 0, **__: Any) -> None:
    """Operands that BLAS cannot read as they lie are copied."""
    A, B = A.T if transA else A, B.T if transB else B
    need(sum(x.nbytes for x, given in zip(_operands(A, B), (A, B), strict=True) if owner(x) is not owner(given)))


def _matrix(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A @ B of matrices; in Fortran's order where Bᵀ lies in one piece and A has few rows.

    BLAS turns one of the two round to read it, and the smaller one is cheaper. Where A has at most an
    eighth as many rows as columns, that saves more time than it takes to bring the result into another order.
    """
    if 8 * A.shape[0] <= A.shape[1] and B.flags.f_contiguous and not B.flags.c_contiguous:
        return np.asarray(B.T @ A.T).T
    return np.asarray(A @ B)


def _for_blas(A: np.ndarray) -> np.ndarray:
    """`A`, copied where BLAS cannot read its matrices as they lie: NumPy would then multiply without BLAS."""
    if A.ndim < 2 or A.flags.c_contiguous:
        return A
    (rows, columns), (down, right), size = A.shape[-2:], A.strides[-2:], A.itemsize
    if (right == size and down >= columns * size) or (down == size and right >= rows * size):
        return A
    return A.copy()


@kernel("MatMul", in_float32=True, fresh=True, abstract=_product_memory)
def matmul(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return product(A, B)


@kernel("Det", in_float32=True, fresh=True)
def det(X: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.det(X))


@kernel("Gemm", in_float32=True, fresh=True, abstract=_product_memory)
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
    if A.ndim != 2 or B.ndim != 2:
        raise ValueError(f"A has rank {A.ndim} and B {B.ndim}; both must be matrices")
    Y = product(A.T if transA else A, B.T if transB else B)
    if alpha != 1:
        np.multiply(Y, alpha, out=Y, casting="unsafe")
    if C is not None:
        check_expands("C", C.shape, Y.shape)
    if C is not None and beta != 0:
        np.add(Y, C if beta == 1 else beta * C, out=Y, casting="unsafe")
    return Y


@kernel("FusedMatMul", "TransposeMatMul", domain=MICROSOFT, in_float32=True, fresh=True)
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
    Y = product(_arranged(A, transA, transBatchA), _arranged(B, transB, transBatchB))
    return Y if alpha == 1 else np.multiply(Y, alpha, out=Y, casting="unsafe")


def _arranged(A: np.ndarray, trans: int, trans_batch: int) -> np.ndarray:
    if A.ndim < 2:
        return A
    if trans_batch:
        A = np.moveaxis(A, 0, -2)
    return A.swapaxes(-1, -2) if trans else A


@kernel("Einsum", in_float32=True)
def einsum(*inputs: np.ndarray, equation: str) -> np.ndarray:
    """NumPy has ONNX's notation. Products of pairs, in the best order, pay where there are many products."""
    many = len(inputs) > 1 and _products(equation, inputs) > _MANY
    return np.asarray(np.einsum(equation, *inputs, optimize=many), inputs[0].dtype)


_MANY = 2**16  # what NumPy multiplies in the 15 µs that it takes to find an order


def _products(equation: str, inputs: Sequence[np.ndarray]) -> int:
    """How many elements all axes have together."""
    sizes: dict[str, int] = {}
    others = 1
    for term, x in zip(equation.replace(" ", "").partition("->")[0].split(","), inputs, strict=False):
        before, dots, after = term.partition("...")
        for label, size in (*zip(before, x.shape, strict=False), *zip(after[::-1], x.shape[::-1], strict=False)):
            sizes[label] = max(size, sizes.get(label, 1))
        if dots:
            others = max(others, math.prod(x.shape[len(before) : x.ndim - len(after)]))
    return others * math.prod(sizes.values())
