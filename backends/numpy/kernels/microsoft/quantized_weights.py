"""ONNX Runtime's products with weights that are quantised in blocks: some rows of them are made floats at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.activation import gelu
from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
_INTEGERS = tuple(np.dtype(kind) for kind in (ml_dtypes.int4, ml_dtypes.uint4))
_GEMM = {np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)}
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
    if N < 1 or K < 1:
        raise ValueError(f"N is {N} and K is {K}; both are 1 or more")
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


@kernel("MatMulNBitsMlp", domain=MICROSOFT, in_float32=True)
def matmul_nbits_mlp(
    A: Array,
    skip: Array | None,
    norm_scale: Array | None,
    gate_B: Array,
    gate_scales: Array,
    gate_bias: Array | None,
    up_B: Array,
    up_scales: Array,
    up_bias: Array | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    activation: str,
    bits: int = 4,
    block_size: int,
    epsilon: float = 1e-5,
) -> tuple[Array, ...]:
    """activation(gate of A) times its projection; A is normalized first where norm_scale is given"""
    if activation not in ("relu", "silu"):
        raise ValueError(f"activation is {activation!r}; there are 'relu' and 'silu'")
    x, total = _normalized(A, skip, norm_scale, epsilon)
    sizes: dict[str, Any] = {"K": K, "N": N, "bits": bits, "block_size": block_size}
    gate, up = (
        matmul_nbits(x, *given, **sizes)
        for given in ((gate_B, gate_scales, None, None, gate_bias), (up_B, up_scales, None, None, up_bias))
    )
    slope = gate > 0 if activation == "relu" else 0.5 + 0.5 * np.tanh(0.5 * gate)
    return gate * slope * up, total


@kernel("MatMulNBitsQkv", domain=MICROSOFT, in_float32=True)
def matmul_nbits_qkv(
    A: Array,
    skip: Array | None,
    norm_scale: Array,
    q_B: Array,
    q_scales: Array,
    q_bias: Array | None,
    k_B: Array,
    k_scales: Array,
    k_bias: Array | None,
    v_B: Array,
    v_scales: Array,
    v_bias: Array | None = None,
    *,
    K: int,
    Nkv: int,
    Nq: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    epsilon: float = 1e-6,
) -> tuple[Array, ...]:
    """The query, the key and the value that A, normalized, is projected to"""
    x, total = _normalized(A, skip, norm_scale, epsilon)
    each = ((q_B, q_scales, q_bias, Nq), (k_B, k_scales, k_bias, Nkv), (v_B, v_scales, v_bias, Nkv))
    sizes: dict[str, Any] = {"K": K, "bits": bits, "block_size": block_size}
    return *(matmul_nbits(x, B, scales, None, None, bias, N=N, **sizes) for B, scales, bias, N in each), total


def _normalized(A: Array, skip: Array | None, scale: Array | None, epsilon: float) -> tuple[Array, Array]:
    """A + skip over its root mean square, and A + skip."""
    if scale is None:
        if skip is not None:
            raise ValueError("skip is given without norm_scale")
        return A, A
    check_shape("norm_scale", scale.shape, A.shape[-1:])
    if skip is not None:
        check_shape("skip", skip.shape, A.shape)
    total = A if skip is None else A + skip
    squares = np.einsum("...k,...k->...", total, total)[..., None] / A.dtype.type(max(A.shape[-1], 1))
    return total / np.sqrt(squares + A.dtype.type(epsilon)) * scale, total


@kernel("MatMulNBitsQLoRA", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_nbits_qlora(
    X: Array,
    W: Array,
    scales: Array,
    lora_A: Array,
    lora_A_scales: Array,
    lora_B: Array,
    lora_B_scales: Array,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int = 32,
    lora_bits: int = 8,
    lora_block_size: int = 32,
) -> Array:
    """X·Wᵀ + (X·Aᵀ)·Bᵀ"""
    if lora_A_scales.ndim != 2:
        raise ValueError(f"lora_A_scales has the shape {list(lora_A_scales.shape)}; it has two axes, the first of R")
    rank = len(lora_A_scales)
    base = matmul_nbits(X, W, scales, K=K, N=N, bits=bits, block_size=block_size)
    sizes: dict[str, Any] = {"bits": lora_bits, "block_size": lora_block_size}
    down = matmul_nbits(X, lora_A, lora_A_scales, K=K, N=rank, **sizes)
    return np.asarray(base + matmul_nbits(down, lora_B, lora_B_scales, K=rank, N=N, **sizes))


@kernel("GatherBlockQuantized", domain=MICROSOFT, in_float32=True, fresh=True)
def gather_block_quantized(
    data: Array,
    indices: Array,
    scales: Array,
    zero_points: Array | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Array:
    """The chosen slices of (data − zero point)·scale; zeros where an index is out of range"""
    packed = data.dtype == np.uint8
    floats = not packed and data.dtype not in _INTEGERS
    rank = data.ndim
    for name, axis in (("gather_axis", gather_axis), ("quantize_axis", quantize_axis)):
        if not -rank <= axis < rank:
            raise ValueError(f"{name} is {axis}; data has {rank} axes")
    gather_axis, quantize_axis = gather_axis % rank, quantize_axis % rank
    if block_size or not floats:
        _check_block_size(block_size)
    if floats and zero_points is not None:
        raise ValueError("data in floats has no zero_points")
    if packed and bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}; there are 2, 4 and 8")
    if packed and (gather_axis or quantize_axis != rank - 1 or gather_axis == quantize_axis):
        raise ValueError("data of uint8 has gather_axis 0, and quantize_axis is the last axis, another one")
    shape = (*data.shape[:-1], data.shape[-1] * 8 // bits) if packed else data.shape
    size = shape[quantize_axis]
    due = list(shape)
    due[quantize_axis] = -(-size // block_size) if block_size else 1
    broadcast = [n == 1 and floats and k != quantize_axis for k, n in enumerate(scales.shape)]
    if scales.ndim != rank or any(n != d and not b for n, d, b in zip(scales.shape, due, broadcast, strict=True)):
        raise ValueError(f"scales has the shape {list(scales.shape)}; {due} is needed")
    if zero_points is not None:
        filled = (*due[:-1], -(-due[-1] * bits // 8)) if packed else tuple(due)
        check_shape("zero_points", zero_points.shape, filled)
    chosen = np.where(indices < 0, indices + shape[gather_axis], indices)
    inside = (chosen >= 0) & (chosen < shape[gather_axis])
    chosen = np.where(inside, chosen, 0)
    step = block_size or max(size, 1)

    def taken(table: Array) -> Array:
        """The slices of `table` at `chosen`. If all of them share one slice, that one is taken for each."""
        return np.take(table, chosen if table.shape[gather_axis] > 1 else np.zeros_like(chosen), gather_axis)

    def numbers(table: Array) -> Array:
        return _unpacked(table.reshape(-1, table.shape[-1]), bits).reshape(*table.shape[:-1], -1) if packed else table

    groups = np.arange(size) // step
    scale = np.take(scales, groups, quantize_axis)
    zero: Array | float = 2.0 ** (bits - 1) if packed else 0.0
    if zero_points is not None:
        zero = taken(np.take(numbers(zero_points).astype(scales.dtype), groups, quantize_axis))
    y = (taken(numbers(data)).astype(scales.dtype) - zero) * taken(scale)
    return np.asarray(np.where(inside.reshape(inside.shape + (1,) * (rank - 1 - gather_axis)), y, y.dtype.type(0)))


_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_NF4 = np.array(
    (
        *(
            -1,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
        ),
        *(-0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1),
    )
)


@kernel("MatMulBnb4", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_bnb4(
    A: Array,
    B: Array,
    absmax: Array,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Array:
    """A·Wᵀ, or A·W; the numbers of all rows of W, in a row, are in blocks with a scale each"""
    if quant_type not in (0, 1):
        raise ValueError(f"quant_type is {quant_type}; there are 0 (FP4) and 1 (NF4)")
    _check_block_size(block_size)
    if N < 1 or K < 1:
        raise ValueError(f"N is {N} and K is {K}; both are 1 or more")
    _check_columns(A, K if transB else N)
    check_shape("B", B.shape, ((N * K + 1) // 2,))
    check_shape("absmax", absmax.shape, (-(-N * K // block_size),))
    table = (_NF4 if quant_type else np.concatenate([_FP4, -_FP4])).astype(absmax.dtype)

    def rows(some: slice) -> Array:
        places = np.arange(some.start * K, some.stop * K)
        codes = np.where(places % 2, B[places // 2] & 15, B[places // 2] >> 4)
        return np.asarray(table[codes] * absmax[places // block_size]).reshape(-1, K)

    if transB:
        return _product(A, rows, N, K)
    y = np.zeros((*A.shape[:-1], K), A.dtype)
    for some in _steps(N, K):
        y += A[..., some] @ rows(some)
    return y


@kernel("MatMulFpQ4", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_fpq4(A: Array, B: Array, B_shape: Array, *, blk_quant_type: int = 1) -> Array:
    """A·W; the bytes of a block of 32 numbers have a float, for type 1 a zero point, and the numbers k and k + 16 together"""
    if blk_quant_type not in (0, 1):
        raise ValueError(f"blk_quant_type is {blk_quant_type}; there are 0 and 1")
    if B_shape.shape != (2,) or (B_shape < 1).any():
        raise ValueError(f"B_shape is {B_shape.tolist()}; it has the two sizes of a matrix")
    K, N = map(int, B_shape)
    _check_columns(A, K)
    blocks = -(-K // 32)
    fields = [("scale", "<f4"), *([("zero", "u1")] if blk_quant_type else []), ("codes", "u1", 16)]
    kind = np.dtype(fields)
    check_shape("B", B.shape, (N * blocks * kind.itemsize,))
    whole = np.ascontiguousarray(B).view(kind).reshape(N, blocks)

    def rows(some: slice) -> Array:
        part = whole[some]
        codes = np.stack([part["codes"] & 15, part["codes"] >> 4], 2).reshape(*part.shape, 32).astype(A.dtype)
        codes -= part["zero"][..., None] if blk_quant_type else 8
        return np.asarray(codes * part["scale"][..., None]).reshape(len(part), -1)[:, :K]

    return _product(A, rows, N, K)


@kernel("MatMulBlockQuantizedFp4Weight", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_fp4_weight(
    A: Array,
    B: Array,
    weight_scale: Array,
    weight_scale_2: Array,
    input_scale: Array | None = None,
    bias: Array | None = None,
    *,
    block_size: int = 16,
) -> Array:
    """A·Wᵀ + bias with weights of 4 bits, scales of 8 bits, and a scale of them all"""
    if B.ndim != 2:
        raise ValueError(f"B has the shape {list(B.shape)}; it has two axes")
    _check_scalar("weight_scale_2", weight_scale_2)
    if input_scale is not None:
        _check_scalar("input_scale", input_scale)
    N, K = len(B), 2 * B.shape[1]
    scales = weight_scale.view(ml_dtypes.float8_e4m3fn).astype(A.dtype) * weight_scale_2.reshape(())

    def rows(some: slice) -> Array:
        codes = np.stack([B[some] & 15, B[some] >> 4], -1).reshape(-1, K)
        return np.asarray(codes.view(ml_dtypes.float4_e2m1fn).astype(A.dtype))

    return _scaled(A, rows, scales, "weight_scale", bias, (N, K), block_size)


@kernel("MatMulBlockQuantizedFp8Weight", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_fp8_weight(
    A: Array,
    B: Array,
    b_scale: Array,
    a_scale: Array | None = None,
    bias: Array | None = None,
    *,
    block_size: int = 128,
) -> Array:
    """A·Wᵀ + bias with weights of 8 bits; with a_scale A is rounded to 8 bits too"""
    if B.ndim != 2:
        raise ValueError(f"B has the shape {list(B.shape)}; it has two axes")
    if a_scale is not None:
        _check_scalar("a_scale", a_scale)
        step = a_scale.reshape(())
        most = A.dtype.type(448)
        A = ((A / step).clip(-most, most).astype(B.dtype).astype(A.dtype) * step).astype(A.dtype)
    return _scaled(A, lambda some: B[some].astype(A.dtype), b_scale, "b_scale", bias, B.shape, block_size)


def _scaled(
    A: Array,
    rows: Callable[[slice], Array],
    scales: Array,
    name: str,
    bias: Array | None,
    shape: tuple[int, ...],
    block_size: int,
) -> Array:
    """A·Wᵀ + bias for `rows` of W and their scales"""
    N, K = shape
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it is 1 or more")
    _check_columns(A, K)
    check_shape(name, scales.shape, (N, -(-K // block_size)))
    if bias is not None:
        check_shape("bias", bias.shape, (N,))
    groups = np.arange(K) // block_size
    y = _product(A, lambda some: (rows(some) * scales[some][:, groups]).astype(A.dtype), N, K)
    return y if bias is None else y + bias


def _check_scalar(name: str, value: Array) -> None:
    if value.size != 1:
        raise ValueError(f"{name} has the shape {list(value.shape)}; it is one number")


@kernel("GemmFloat8", domain=MICROSOFT, fresh=True)
def gemm_float8(
    A: Array,
    B: Array,
    C: Array | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: int = 1,
    transA: int = 0,
    transB: int = 0,
    _wide: bool,
) -> Array:
    """activation(α·A'·B' + β·C) in another type"""
    if dtype not in (1, 10, 11, 16):  # 11, double, is what float becomes in that precision
        raise ValueError(f"dtype is {dtype}; there are 1 (float), 10 (float16) and 16 (bfloat16)")
    named = (activation or "NONE").upper()
    if named not in ("NONE", "RELU", "GELU"):
        raise ValueError(f"activation is {activation!r}; there are RELU, GELU and NONE")
    if not (A.ndim == B.ndim == 2 and {A.dtype, B.dtype} <= _GEMM):
        raise ValueError(f"A is {A.dtype}{list(A.shape)} and B {B.dtype}{list(B.shape)}; both are matrices of floats")

    def floats(x: Array) -> Array:
        return np.asarray(x, np.float64 if x.dtype == np.float64 else np.float32)

    a, b = floats(A), floats(B)
    y = np.einsum(
        "ki,kj->ij" if transA and not transB else "ik,jk->ij" if transB and not transA else "ik,kj->ij",
        b if transA and transB else a,
        a if transA and transB else b,
    )
    y = alpha * (y.T if transA and transB else y)
    if C is not None and beta:
        y = y + beta * C.astype(y.dtype)
    if named == "RELU":
        y = np.maximum(y, 0)
    if named == "GELU":
        y = gelu(y, approximate="tanh")
    return np.asarray(y if _wide else y.astype(helper.tensor_dtype_to_np_dtype(dtype)))


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
    if g_idx.size and not (g_idx.min() >= 0 and g_idx.max() < blocks):
        raise ValueError(f"g_idx has numbers from {g_idx.min()} to {g_idx.max()}; there are {blocks} blocks")
    return g_idx[:K]


def _unpacked(packed: Array, bits: int) -> Array:
    """The numbers of each row of bytes; a byte holds the first one in its lowest bits."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return (packed[..., None] >> places & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _product(A: Array, rows: Callable[[slice], Array], N: int, K: int) -> Array:
    """A·Wᵀ for `rows`, which makes some rows of W."""
    y = np.empty((*A.shape[:-1], N), A.dtype)
    for some in _steps(N, K):
        y[..., some] = A @ rows(some).T
    return y


def _steps(N: int, K: int) -> Iterator[slice]:
    """Some of N rows after the others."""
    step = max(_TOGETHER // max(K, 1), 1)
    for first in range(0, N, step):
        yield slice(first, min(first + step, N))
