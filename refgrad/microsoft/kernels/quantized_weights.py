"""ONNX Runtime's products with weights that are quantised in blocks: some rows of them are made floats at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.activation import gelu
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
_TOGETHER = 2**20  # weights that are floats at a time


@kernel_of_body("MatMulNBits", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_nbits(args: Arguments) -> Array:
    """A·Wᵀ + bias with W = (q − zero point)·scale"""
    scales, zero_points = args.scales, args.zero_points
    blocks = -(-args.K // args.block_size)
    due = (args.N, blocks, args.block_size * args.bits // 8)
    if 0 in args.B.shape:  # a projection that is left out
        y = np.zeros((*args.A.shape[:-1], args.N), args.A.dtype)
        return y if args.bias is None else y + args.bias
    scales = scales.reshape(args.N, blocks)
    if zero_points is not None and zero_points.dtype == np.uint8:
        zero_points = _unpacked(zero_points.reshape(args.N, -1), args.bits)[:, :blocks]
    elif zero_points is not None:
        zero_points = zero_points.reshape(args.N, blocks)
    groups = np.arange(args.K) // args.block_size if args.g_idx is None else _groups(args.g_idx, args.K, blocks)

    def rows(some: slice) -> Array:
        q = _unpacked(args.B[some].reshape(-1, due[1] * due[2]), args.bits)[:, : args.K].astype(scales.dtype)
        q -= 2 ** (args.bits - 1) if zero_points is None else zero_points[some][:, groups]
        q *= scales[some][:, groups]
        return q

    y = _product(args.A, rows, args.N, args.K)
    return y if args.bias is None else y + args.bias


@kernel_of_body("MatMulNBitsMlp", domain=MICROSOFT, in_float32=True)
def matmul_nbits_mlp(args: Arguments) -> tuple[Array, ...]:
    """activation(gate of A) times its projection; A is normalized first where norm_scale is given"""
    x, total = _normalized(args.A, args.skip, args.norm_scale, args.epsilon)
    sizes: dict[str, Any] = {"K": args.K, "N": args.N, "bits": args.bits, "block_size": args.block_size}
    gate, up = (
        matmul_nbits(x, *given, **sizes)
        for given in (
            (args.gate_B, args.gate_scales, None, None, args.gate_bias),
            (args.up_B, args.up_scales, None, None, args.up_bias),
        )
    )
    slope = gate > 0 if args.activation == "relu" else 0.5 + 0.5 * np.tanh(0.5 * gate)
    return gate * slope * up, total


@kernel_of_body("MatMulNBitsQkv", domain=MICROSOFT, in_float32=True)
def matmul_nbits_qkv(args: Arguments) -> tuple[Array, ...]:
    """The query, the key and the value that A, normalized, is projected to"""
    x, total = _normalized(args.A, args.skip, args.norm_scale, args.epsilon)
    each = (
        (args.q_B, args.q_scales, args.q_bias, args.Nq),
        (args.k_B, args.k_scales, args.k_bias, args.Nkv),
        (args.v_B, args.v_scales, args.v_bias, args.Nkv),
    )
    sizes: dict[str, Any] = {"K": args.K, "bits": args.bits, "block_size": args.block_size}
    return *(matmul_nbits(x, B, scales, None, None, bias, N=N, **sizes) for B, scales, bias, N in each), total


def _normalized(A: Array, skip: Array | None, scale: Array | None, epsilon: float) -> tuple[Array, Array]:
    """A + skip over its root mean square, and A + skip."""
    if scale is None:
        return A, A
    total = A if skip is None else A + skip
    squares = np.einsum("...k,...k->...", total, total)[..., None] / A.dtype.type(max(A.shape[-1], 1))
    return total / np.sqrt(squares + A.dtype.type(epsilon)) * scale, total


@kernel_of_body("MatMulNBitsQLoRA", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_nbits_qlora(args: Arguments) -> Array:
    """X·Wᵀ + (X·Aᵀ)·Bᵀ"""
    rank = len(args.lora_A_scales)
    base = matmul_nbits(args.X, args.W, args.scales, K=args.K, N=args.N, bits=args.bits, block_size=args.block_size)
    sizes: dict[str, Any] = {"bits": args.lora_bits, "block_size": args.lora_block_size}
    down = matmul_nbits(args.X, args.lora_A, args.lora_A_scales, K=args.K, N=rank, **sizes)
    return np.asarray(base + matmul_nbits(down, args.lora_B, args.lora_B_scales, K=rank, N=args.N, **sizes))


@kernel_of_body("GatherBlockQuantized", domain=MICROSOFT, in_float32=True, fresh=True)
def gather_block_quantized(args: Arguments) -> Array:
    """The chosen slices of (data − zero point)·scale; zeros where an index is out of range"""
    rank, packed = args.data.ndim, args.data.dtype == np.uint8
    gather_axis, quantize_axis = args.gather_axis % rank, args.quantize_axis % rank
    shape = (*args.data.shape[:-1], args.data.shape[-1] * 8 // args.bits) if packed else args.data.shape
    size = shape[quantize_axis]
    chosen = np.where(args.indices < 0, args.indices + shape[gather_axis], args.indices)
    inside = (chosen >= 0) & (chosen < shape[gather_axis])
    chosen = np.where(inside, chosen, 0)
    step = args.block_size or max(size, 1)

    def taken(table: Array) -> Array:
        """The slices of `table` at `chosen`. If all of them share one slice, that one is taken for each."""
        return np.take(table, chosen if table.shape[gather_axis] > 1 else np.zeros_like(chosen), gather_axis)

    def numbers(table: Array) -> Array:
        return (
            _unpacked(table.reshape(-1, table.shape[-1]), args.bits).reshape(*table.shape[:-1], -1) if packed else table
        )

    groups = np.arange(size) // step
    scale = np.take(args.scales, groups, quantize_axis)
    zero: Array | float = 2.0 ** (args.bits - 1) if packed else 0.0
    if args.zero_points is not None:
        zero = taken(np.take(numbers(args.zero_points).astype(args.scales.dtype), groups, quantize_axis))
    y = (taken(numbers(args.data)).astype(args.scales.dtype) - zero) * taken(scale)
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


@kernel_of_body("MatMulBnb4", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_bnb4(args: Arguments) -> Array:
    """A·Wᵀ, or A·W; the numbers of all rows of W, in a row, are in blocks with a scale each"""
    table = (_NF4 if args.quant_type else np.concatenate([_FP4, -_FP4])).astype(args.absmax.dtype)

    def rows(some: slice) -> Array:
        places = np.arange(some.start * args.K, some.stop * args.K)
        codes = np.where(places % 2, args.B[places // 2] & 15, args.B[places // 2] >> 4)
        return np.asarray(table[codes] * args.absmax[places // args.block_size]).reshape(-1, args.K)

    if args.transB:
        return _product(args.A, rows, args.N, args.K)
    y = np.zeros((*args.A.shape[:-1], args.K), args.A.dtype)
    for some in _steps(args.N, args.K):
        y += args.A[..., some] @ rows(some)
    return y


@kernel_of_body("MatMulFpQ4", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_fpq4(args: Arguments) -> Array:
    """A·W; the bytes of a block of 32 numbers have a float, for type 1 a zero point, and the numbers k and k + 16 together"""
    K, N = map(int, args.B_shape)
    blocks = -(-K // 32)
    fields = [("scale", "<f4"), *([("zero", "u1")] if args.blk_quant_type else []), ("codes", "u1", 16)]
    kind = np.dtype(fields)
    whole = np.ascontiguousarray(args.B).view(kind).reshape(N, blocks)

    def rows(some: slice) -> Array:
        part = whole[some]
        codes = np.stack([part["codes"] & 15, part["codes"] >> 4], 2).reshape(*part.shape, 32).astype(args.A.dtype)
        codes -= part["zero"][..., None] if args.blk_quant_type else 8
        return np.asarray(codes * part["scale"][..., None]).reshape(len(part), -1)[:, :K]

    return _product(args.A, rows, N, K)


@kernel_of_body("MatMulBlockQuantizedFp4Weight", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_fp4_weight(args: Arguments) -> Array:
    """A·Wᵀ + bias with weights of 4 bits, scales of 8 bits, and a scale of them all"""
    N, K = len(args.B), 2 * args.B.shape[1]
    scales = args.weight_scale.view(ml_dtypes.float8_e4m3fn).astype(args.A.dtype) * args.weight_scale_2.reshape(())

    def rows(some: slice) -> Array:
        codes = np.stack([args.B[some] & 15, args.B[some] >> 4], -1).reshape(-1, K)
        return np.asarray(codes.view(ml_dtypes.float4_e2m1fn).astype(args.A.dtype))

    return _scaled(args.A, rows, scales, args.bias, (N, K), args.block_size)


@kernel_of_body("MatMulBlockQuantizedFp8Weight", domain=MICROSOFT, in_float32=True, fresh=True)
def matmul_fp8_weight(args: Arguments) -> Array:
    """A·Wᵀ + bias with weights of 8 bits; with a_scale A is rounded to 8 bits too"""
    A = args.A
    if args.a_scale is not None:
        step = args.a_scale.reshape(())
        most = A.dtype.type(448)
        A = ((A / step).clip(-most, most).astype(args.B.dtype).astype(A.dtype) * step).astype(A.dtype)
    return _scaled(A, lambda some: args.B[some].astype(A.dtype), args.b_scale, args.bias, args.B.shape, args.block_size)


def _scaled(
    A: Array,
    rows: Callable[[slice], Array],
    scales: Array,
    bias: Array | None,
    shape: tuple[int, ...],
    block_size: int,
) -> Array:
    """A·Wᵀ + bias for `rows` of W and their scales"""
    N, K = shape
    groups = np.arange(K) // block_size
    y = _product(A, lambda some: (rows(some) * scales[some][:, groups]).astype(A.dtype), N, K)
    return y if bias is None else y + bias


@kernel_of_body("GemmFloat8", domain=MICROSOFT, fresh=True)
def gemm_float8(args: Arguments, *, _wide: bool) -> Array:
    """activation(α·A'·B' + β·C) in another type"""
    named, transA, transB = (args.activation or "NONE").upper(), args.transA, args.transB

    def floats(x: Array) -> Array:
        return np.asarray(x, np.float64 if x.dtype == np.float64 else np.float32)

    a, b = floats(args.A), floats(args.B)
    y = np.einsum(
        "ki,kj->ij" if transA and not transB else "ik,jk->ij" if transB and not transA else "ik,kj->ij",
        b if transA and transB else a,
        a if transA and transB else b,
    )
    y = args.alpha * (y.T if transA and transB else y)
    if args.C is not None and args.beta:
        y = y + args.beta * args.C.astype(y.dtype)
    if named == "RELU":
        y = np.maximum(y, 0)
    if named == "GELU":
        y = gelu(y, approximate="tanh")
    return np.asarray(y if _wide else y.astype(helper.tensor_dtype_to_np_dtype(args.dtype)))


def _groups(g_idx: Array, K: int, blocks: int) -> Array:
    """The block of each column, as g_idx says it."""
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
