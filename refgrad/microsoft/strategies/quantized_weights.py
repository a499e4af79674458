"""Strategies of ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(d: Drawing) -> Case:
    """Any number of axes, full and filled blocks, zero points as bytes, as floats and by default, groups, a bias."""
    bits, block_size = d.pick(4, 2, 8), d.pick(16, 32)
    N, K = d.integer(1, 3), d.integer(1, 40)
    blocks = -(-K // block_size)
    B = d.integers((N, blocks, block_size * bits // 8), 0, 255, np.uint8)
    scales = d.floats((N, blocks)) / d.dtype.type(4)
    zeros = d.pick("none", "packed", "floats")
    zero_points = None
    if zeros == "packed":
        zero_points = d.integers((N, -(-blocks * bits // 8)), 0, 255, np.uint8)
    elif zeros == "floats":
        zero_points = d.floats((N, blocks))
    g_idx = d.optional(lambda: d.integers((K,), 0, blocks - 1, np.int32))
    bias = d.optional(lambda: d.floats((N,)))
    a = d.floats((*d.shape(0, 2, size=2), K))
    return d.case(a, B, scales, zero_points, g_idx, bias, K=K, N=N, bits=bits, block_size=block_size)


@strategy("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(d: Drawing) -> Case:
    """Two or three axes, any indices, some of which are out of range."""
    bits, block_size = d.pick(4, 2, 8), d.pick(16, 32)
    width = d.integer(1, 10) * 4
    leading = (d.integer(1, 3), *(() if d.flag() else (d.integer(1, 2),)))
    blocks = -(-width // block_size)
    data = d.integers((*leading, width * bits // 8), 0, 255, np.uint8)
    packed = (*leading, -(-blocks * bits // 8))
    zero_points = d.optional(lambda: d.integers(packed, 0, 255, np.uint8))
    indices = d.integers(d.shape(0, 2, size=3), -leading[0] - 1, leading[0], d.pick(np.int64, np.int32))
    sizes: dict[str, Any] = {"bits": bits, "block_size": block_size, "quantize_axis": d.pick(-1, len(leading))}
    return d.case(data, indices, d.floats((*leading, blocks)), zero_points, **sizes)


@strategy("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(d: Drawing) -> Case:
    """Both types, blocks that go on in the next row, the matrix transposed or not."""
    block_size, N, K = d.pick(16, 32), d.integer(1, 4), d.integer(1, 40)
    trans = d.pick(1, 0, None)
    B = d.integers(((N * K + 1) // 2,), 0, 255, np.uint8)
    absmax = d.floats((-(-N * K // block_size),))
    a = d.floats((*d.shape(0, 2, size=2), N if trans == 0 else K))
    return d.case(a, B, absmax, K=K, N=N, block_size=block_size, quant_type=d.integer(0, 1), transB=trans)


def _weights(d: Drawing, N: int, K: int, bits: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales."""
    blocks = -(-K // block_size)
    B = d.integers((N, blocks, block_size * bits // 8), 0, 255, np.uint8)
    return B, d.floats((N, blocks)) / d.dtype.type(2**bits)


@strategy("MatMulNBitsMlp", domain=MICROSOFT)
def matmul_nbits_mlp(d: Drawing) -> Case:
    """With and without a normalization, a skip and biases."""
    N, K, bits, block_size = d.integer(1, 3), d.integer(1, 20), d.pick(4, 2, 8), d.pick(16, 32)
    a = (d.integer(1, 2), d.integer(1, 2), K)
    norm = d.optional(lambda: d.floats((K,)))
    skip = None if norm is None else d.optional(lambda: d.normal(a))
    gate, up = ((*_weights(d, N, K, bits, block_size), d.optional(lambda: d.normal((N,)))) for _ in range(2))
    outputs = 1 if skip is None else d.integer(1, 2)
    sizes: dict[str, Any] = {"K": K, "N": N, "bits": bits, "block_size": block_size, "epsilon": d.pick(0.1, 0.5)}
    return d.case(d.normal(a), skip, norm, *gate, *up, activation="silu", outputs=outputs, **sizes)


@strategy("MatMulNBitsQkv", domain=MICROSOFT)
def matmul_nbits_qkv(d: Drawing) -> Case:
    """With and without a skip and biases."""
    K, bits, block_size = d.integer(1, 20), d.pick(4, 2, 8), d.pick(16, 32)
    Nq, Nkv = d.integer(1, 3), d.integer(1, 2)
    a = (d.integer(1, 2), d.integer(1, 2), K)
    skip = d.optional(lambda: d.normal(a))
    parts: list[np.ndarray | None] = []
    for N in (Nq, Nkv, Nkv):
        parts += [*_weights(d, N, K, bits, block_size), d.floats((N,)) if d.flag() else None]
    outputs = 3 if skip is None else d.integer(3, 4)
    sizes: dict[str, Any] = {
        "K": K,
        "Nq": Nq,
        "Nkv": Nkv,
        "bits": bits,
        "block_size": block_size,
        "epsilon": d.pick(0.1, 0.5),
    }
    return d.case(d.normal(a), skip, d.floats((K,)), *parts, outputs=outputs, **sizes)


@strategy("MatMulNBitsQLoRA", domain=MICROSOFT)
def matmul_nbits_qlora(d: Drawing) -> Case:
    """Adapters of any rank, in any number of bits."""
    N, K, rank = d.integer(1, 3), d.integer(1, 20), d.integer(1, 18)
    bits, block_size = d.pick(4, 2, 8), d.pick(32, 16)
    lora_bits, lora_block_size = d.pick(8, 4, 2), d.pick(32, 16)
    adapters = (
        *_weights(d, rank, K, lora_bits, lora_block_size),
        *_weights(d, N, rank, lora_bits, lora_block_size),
    )
    x = d.floats((*d.shape(0, 2, size=2), K))
    lora: dict[str, Any] = {"lora_bits": lora_bits, "lora_block_size": lora_block_size}
    return d.case(
        x, *_weights(d, N, K, bits, block_size), *adapters, K=K, N=N, bits=bits, block_size=block_size, **lora
    )


@strategy("MatMulFpQ4", domain=MICROSOFT)
def matmul_fpq4(d: Drawing) -> Case:
    """Both types, full and filled blocks."""
    blk_quant_type, N, K = d.pick(1, 0, None), d.integer(1, 3), d.integer(1, 40)
    fields = [("scale", "<f4"), *([("zero", "u1")] if blk_quant_type != 0 else []), ("codes", "u1", 16)]
    blocks = np.zeros(N * -(-K // 32), fields)
    blocks["scale"] = d.floats(blocks.shape).astype(np.float32)
    blocks["codes"] = d.integers((*blocks.shape, 16), 0, 255, np.uint8)
    if blk_quant_type != 0:
        blocks["zero"] = d.integers(blocks.shape, 0, 15, np.uint8)
    a = d.floats((*d.shape(0, 2, size=2), K))
    if d.shapes == "unknown":  # the shape of B would be fed by the name of B_shape
        d.shapes = "symbolic"
    B = np.frombuffer(blocks.tobytes(), np.uint8)
    return d.case(a, B, np.array([K, N]), blk_quant_type=blk_quant_type)


@strategy("MatMulBlockQuantizedFp4Weight", domain=MICROSOFT)
def matmul_fp4_weight(d: Drawing) -> Case:
    """Any size of the blocks, the scales of all as a scalar or in a row."""
    N, half, block_size = d.integer(1, 3), d.integer(1, 10), d.pick(None, 1, 5, 8)
    blocks = -(-2 * half // (block_size or 16))
    B, scale = d.integers((N, half), 0, 255, np.uint8), d.integers((N, blocks), 30, 80, np.uint8)
    one = np.full(d.pick((), (1,)), d.pick(0.5, 2.0), np.float32)
    bias = d.optional(lambda: d.floats((N,)))
    input_scale = d.optional(lambda: np.array(2, np.float32))
    a = d.floats((*d.shape(0, 2, size=2), 2 * half))
    return d.case(a, B, scale, one, input_scale, bias, block_size=block_size)


@strategy("MatMulBlockQuantizedFp8Weight", domain=MICROSOFT)
def matmul_fp8_weight(d: Drawing) -> Case:
    """Any size of the blocks, weights of few bits."""
    N, K, block_size = d.integer(1, 3), d.integer(1, 20), d.pick(None, 1, 5, 8)
    B = d.floats((N, K)).astype(ml_dtypes.float8_e4m3fn)
    scale = d.floats((N, -(-K // (block_size or 128)))).astype(np.float32)
    bias = d.optional(lambda: d.floats((N,)))
    return d.case(d.floats((*d.shape(0, 2, size=2), K)), B, scale, None, bias, block_size=block_size)


@strategy("GemmFloat8", domain=MICROSOFT)
def gemm_float8(d: Drawing) -> Case:
    """Either matrix transposed or not, with and without C, which counts where β is not 0."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.pick(0, 1), d.pick(0, 1)
    a, b = ((inner, rows) if trans_a else (rows, inner)), ((columns, inner) if trans_b else (inner, columns))
    c = d.optional(lambda: d.normal((rows, columns)))
    kind = helper.np_dtype_to_tensor_dtype(d.dtype)
    factors: dict[str, Any] = {"alpha": d.optional(d.factor), "beta": d.optional(d.factor), "dtype": kind}
    return d.case(
        d.normal(a), d.normal(b), c, activation=d.pick(None, "GELU", "NONE"), transA=trans_a, transB=trans_b, **factors
    )
