"""ONNX Runtime's products with weights that are quantised in blocks: some rows of them are made floats at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
_TOGETHER = 2**20  # weights that are floats at a time


@kernel("MatMulNBits", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_nbits(
    A: Array,
    B: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Array:
    """A·Wᵀ + bias with W = (q − zero point)·scale"""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}; there are 2, 4 and 8")
    _check_block_size(block_size)
    if weight_prepacked:
        raise ValueError(f"weight_prepacked is {weight_prepacked}; only 0 is supported")
    _check_columns(A, K)
    if bias is not None:
        check_shape("bias", bias.shape, (N,))
    blocks = -(-K // block_size)
    due = (N, blocks, block_size * bits // 8)
    if 0 in B.shape and len(B.shape) == 3 and all(n in (0, size) for n, size in zip(B.shape, due, strict=True)):
        y = np.zeros((*A.shape[:-1], N), A.dtype)
        return y if bias is None else y + bias
    check_shape("B", B.shape, due)
    scales = _per_block("scales", scales, N, blocks)
    if zero_points is not None and zero_points.dtype == np.uint8:
        packed = _per_block("zero_points", zero_points, N, -(-blocks * bits // 8))
        zero_points = _unpacked(packed, bits)[:, :blocks]
    elif zero_points is not None:
        zero_points = _per_block("zero_points", zero_points, N, blocks)
    groups = np.arange(K) // block_size if g_idx is None else _groups(g_idx, K, blocks, blocks * block_size)

    def rows(some: slice) -> Array:
        q = _unpacked(B[some].reshape(-1, due[1] * due[2]), bits)[:, :K].astype(scales.dtype)
        q -= 2 ** (bits - 1) if zero_points is None else zero_points[some][:, groups]
        q *= scales[some][:, groups]
        return q

    y = _product(A, rows, N, K)
    return y if bias is None else y + bias


def _check_block_size(block_size: int) -> None:
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size is {block_size}; it is a power of 2 from 16 on")


def _check_columns(A: Array, K: int) -> None:
    if A.ndim == 0 or A.shape[-1] != K:
        raise ValueError(f"A has the shape {list(A.shape)}; its last axis has {K} elements")


def _per_block(name: str, parameter: Array, rows: int, columns: int) -> Array:
    """A parameter with a row per row of the weights, or all of them in one."""
    if parameter.shape != (rows * columns,):
        check_shape(name, parameter.shape, (rows, columns))
    return parameter.reshape(rows, columns)


def _groups(g_idx: Array, K: int, blocks: int, stored: int) -> Array:
    if g_idx.shape not in ((K,), (stored,)):
        raise ValueError(f"g_idx has the shape {list(g_idx.shape)}; it has {K} elements")
    if g_idx.size and not (0 <= g_idx.min() and g_idx.max() < blocks):
        raise ValueError(f"g_idx has numbers from {g_idx.min()} to {g_idx.max()}; there are {blocks} blocks")
    return g_idx[:K]


def _unpacked(packed: Array, bits: int) -> Array:
    """The numbers of each row of bytes; a byte holds the first one in its lowest bits."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return (packed[..., None] >> places & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _product(A: Array, rows: Callable[[slice], Array], N: int, K: int) -> Array:
    """A·Wᵀ for `rows`, which makes some rows of W."""
    y = np.empty((*A.shape[:-1], N), A.dtype)
    step = max(_TOGETHER // max(K, 1), 1)
    for first in range(0, N, step):
        some = slice(first, min(first + step, N))
        y[..., some] = A @ rows(some).T
    return y
