"""ONNX Runtime's products of matrices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    gelu,
    log_softmax,
    softmax,
)
from refgrad.backends.numpy.kernels.linear import fused_matmul, gemm
from refgrad.backends.numpy.kernels.operands import check_axis
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.activation import activated, plus
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("GemmFastGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def gemm_fast_gelu(args: Arguments) -> Array:
    return gelu(plus(args.X @ args.W, args.bias), approximate="tanh")


@kernel_of_body("FusedMatMulActivation", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_matmul_activation(args: Arguments) -> Array:
    """An activation of FusedMatMul"""
    moved = {
        "transA": args.transA,
        "transB": args.transB,
        "transBatchA": args.transBatchA,
        "transBatchB": args.transBatchB,
    }
    y = np.asarray(fused_matmul(args.A, args.B, alpha=args.alpha, **moved))
    axis = -1 if args.activation_axis is None else args.activation_axis
    if args.activation in ("Softmax", "LogSoftmax"):
        return (softmax if args.activation == "Softmax" else log_softmax)(y, axis=check_axis(axis, y.ndim))
    return activated(y, args.activation, (args.activation_alpha, args.activation_beta, args.activation_gamma)).astype(
        y.dtype, copy=False
    )


@kernel_of_body("FusedGemm", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_gemm(args: Arguments) -> Array:
    """An activation of Gemm"""
    y = gemm(args.A, args.B, args.C, alpha=args.alpha, beta=args.beta, transA=args.transA, transB=args.transB)
    return activated(y, args.activation, (args.activation_alpha, args.activation_beta, args.activation_gamma)).astype(
        y.dtype, copy=False
    )


@kernel_of_body("Inverse", domain=MICROSOFT, in_float32=True, fresh=True)
def inverse(args: Arguments) -> Array:
    if args.X.ndim < 2 or args.X.shape[-1] != args.X.shape[-2]:
        raise ValueError(f"X has the shape {list(args.X.shape)}; it needs square matrices")
    try:
        return np.linalg.inv(args.X)
    except np.linalg.LinAlgError:
        raise ValueError("a matrix of X is singular; it has no inverse") from None


@kernel_of_body("CDist", domain=MICROSOFT, in_float32=True, fresh=True)
def cdist(args: Arguments) -> Array:
    """One row of A after the other"""
    if args.A.ndim != 2 or args.B.ndim != 2 or args.A.shape[1] != args.B.shape[1] or not args.A.shape[1]:
        raise ValueError(
            f"A {list(args.A.shape)} and B {list(args.B.shape)} need to be matrices with as many columns, one or more"
        )
    squared = np.zeros((len(args.A), len(args.B)), args.A.dtype)
    for row, a in enumerate(args.A):
        squared[row] = np.einsum("ij,ij->i", args.B - a, args.B - a)
    return np.sqrt(squared) if args.metric == "euclidean" else squared
