"""ONNX Runtime's products of matrices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    gelu,
)
from refgrad.backends.numpy.kernels.linear import gemm
from refgrad.backends.numpy.kernels.microsoft.activation import activated, plus
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("GemmFastGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def gemm_fast_gelu(X: Array, W: Array, bias: Array | None = None) -> Array:
    return gelu(plus(X @ W, bias), approximate="tanh")


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
