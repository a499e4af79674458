"""ONNX Runtime's products of matrices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    gelu,
    log_softmax,
    softmax,
)
from refgrad.backends.numpy.kernels.linear import fused_matmul, gemm
from refgrad.backends.numpy.kernels.microsoft.activation import activated, plus
from refgrad.backends.numpy.kernels.operands import check_axis
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("GemmFastGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def gemm_fast_gelu(X: Array, W: Array, bias: Array | None = None) -> Array:
    return gelu(plus(X @ W, bias), approximate="tanh")


@kernel("FusedMatMulActivation", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_matmul_activation(
    A: Array,
    B: Array,
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
) -> Array:
    """An activation of FusedMatMul"""
    moved = {"transA": transA, "transB": transB, "transBatchA": transBatchA, "transBatchB": transBatchB}
    y = np.asarray(fused_matmul(A, B, alpha=alpha, **moved))
    axis = -1 if activation_axis is None else activation_axis
    if activation in ("Softmax", "LogSoftmax"):
        return (softmax if activation == "Softmax" else log_softmax)(y, axis=check_axis(axis, y.ndim))
    return activated(y, activation, (activation_alpha, activation_beta, activation_gamma)).astype(y.dtype, copy=False)


@kernel("FusedGemm", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_gemm(
    A: Array,
    B: Array,
    C: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> Array:
    """An activation of Gemm"""
    y = gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(y, activation, (activation_alpha, activation_beta, activation_gamma)).astype(y.dtype, copy=False)


@kernel("Inverse", domain=MICROSOFT, in_float32=True, fresh=True)
def inverse(X: Array) -> Array:
    if X.ndim < 2 or X.shape[-1] != X.shape[-2]:
        raise ValueError(f"X has the shape {list(X.shape)}; it needs square matrices")
    try:
        return np.linalg.inv(X)
    except np.linalg.LinAlgError:
        raise ValueError("a matrix of X is singular; it has no inverse") from None


@kernel("CDist", domain=MICROSOFT, in_float32=True, fresh=True)
def cdist(A: Array, B: Array, *, metric: str = "sqeuclidean") -> Array:
    """One row of A after the other"""
    if metric not in ("sqeuclidean", "euclidean"):
        raise ValueError(f"metric={metric!r} is not supported; there are 'sqeuclidean' and 'euclidean'")
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[1] or not A.shape[1]:
        raise ValueError(
            f"A {list(A.shape)} and B {list(B.shape)} need to be matrices with as many columns, one or more"
        )
    squared = np.zeros((len(A), len(B)), A.dtype)
    for row, a in enumerate(A):
        squared[row] = np.einsum("ij,ij->i", B - a, B - a)
    return np.sqrt(squared) if metric == "euclidean" else squared
