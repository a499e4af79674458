"""Cases of ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, drawer


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        yield from _matmul_nbits(shapes)
        yield from _fused(shapes)
        if shapes != "unknown":  # the shape of B would be fed by the name of B_shape
            yield from _matmul_fpq4(shapes)
        yield from _small_floats(shapes)
        yield from _gemm_float8(shapes)
        yield from _gather_block_quantized(shapes)
        yield from _matmul_bnb4(shapes)


def nbits(
    a: tuple[int, ...],
    N: int,
    bits: int,
    block_size: int,
    zeros: str = "",
    grouped: bool = False,
    with_bias: bool = False,
    **options: Any,
) -> Case:
    """MatMulNBits with an A of the shape `a` and zero points that are packed, floats, or absent."""
    K, numbers, floats = a[-1], np.random.default_rng(N), drawer(N)
    blocks = -(-K // block_size)
    B = numbers.integers(0, 256, (N, blocks, block_size * bits // 8), dtype=np.uint8)
    scales = floats(N, blocks) * np.float32(2.0**-bits)
    zero_points: np.ndarray | None = None
    if zeros == "packed":
        zero_points = numbers.integers(0, 256, (N, -(-blocks * bits // 8)), dtype=np.uint8)
    elif zeros == "floats":
        zero_points = floats(N, blocks) + np.float32(2 ** (bits - 1))
    g_idx = (np.arange(K) * 7 % blocks).astype(np.int32) if grouped else None
    bias = floats(N) if with_bias else None
    inputs = [floats(*a), B, scales, zero_points, g_idx, bias]
    while inputs[-1] is None:
        inputs.pop()
    sizes = {"K": K, "N": N, "bits": bits, "block_size": block_size}
    return case("MatMulNBits", *inputs, **sizes, **options)


def _matmul_nbits(shapes: str) -> Iterator[Case]:
    options: dict[str, Any] = {"shapes": shapes}
    yield nbits((2, 32), 3, 4, 16, **options)
    yield nbits((2, 3, 37), 5, 4, 16, "packed", with_bias=True, **options)
    yield nbits((3, 20), 2, 2, 16, "packed", **options)
    yield nbits((1, 2, 1, 40), 3, 4, 32, "floats", with_bias=True, accuracy_level=1, **options)
    yield nbits((2, 48), 2, 4, 16, "floats", grouped=True, **options)
    if shapes == "static":
        yield nbits((33,), 2, 8, 16, "packed", with_bias=True, **options)
        yield nbits((2, 24), 3, 8, 32, **options)
        yield nbits((2, 18), 3, 2, 16, "floats", **options)
        yield nbits((2, 36), 3, 4, 16, grouped=True, **options)
        yield nbits((2, 32), 3, 4, 16, constant=("B", "scales"), wrt=("A", "scales"), **options)
        yield nbits((2, 33), 3, 4, 16, "floats", grouped=True, constant=("B", "g_idx"), **options)
        yield nbits((0, 32), 3, 4, 16, "packed", with_bias=True, **options)


def _weights(N: int, K: int, bits: int, block_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales."""
    blocks = -(-K // block_size)
    B = np.random.default_rng(seed).integers(0, 256, (N, blocks, block_size * bits // 8), dtype=np.uint8)
    return B, drawer(seed)(N, blocks) * np.float32(2.0**-bits)


def _fused(shapes: str) -> Iterator[Case]:
    floats, K, N = drawer(5), 20, 3
    a, skip, norm = floats(2, 2, K), floats(2, 2, K), floats(K)
    sizes: dict[str, Any] = {"K": K, "N": N, "block_size": 16, "shapes": shapes}
    gate, up = _weights(N, K, 4, 16, 1), _weights(N, K, 4, 16, 2)
    name = "MatMulNBitsMlp"
    yield case(name, a, None, None, *gate, None, *up, activation="silu", **sizes)
    if shapes == "static":
        constant = {"constant": ("gate_B", "up_B"), "activation": "silu"}
        yield case(name, a[0, 0], None, norm, *gate, None, *up, **constant, **sizes)
        yield case(name, a[:0], None, norm, *gate, None, *up, activation="silu", **sizes)
    yield case(name, a, None, norm, *gate, floats(N), *up, floats(N), activation="silu", accuracy_level=1, **sizes)
    options = {"activation": "relu", "epsilon": 0.01, "outputs": 2, "bits": 8}
    (B, scales), up = _weights(N, K, 8, 16, 3), _weights(N, K, 8, 16, 4)
    far = scales / 16, array([4, -4, 4])  # from the kink of Relu
    yield case(name, a, skip, norm, B, *far, *up, None, **options, **sizes)
    q, k, v = (_weights(n, K, 4, 16, n) for n in (4, 2, 2))
    del sizes["N"]
    sizes |= {"Nq": 4, "Nkv": 2}
    name = "MatMulNBitsQkv"
    yield case(name, a, None, norm, *q, None, *k, None, *v, outputs=3, **sizes)
    if shapes == "static":
        constant = {"constant": ("q_B", "k_B", "v_B")}
        yield case(name, a[0, 0], None, norm, *q, None, *k, None, *v, outputs=3, **constant, **sizes)
    biases = floats(4), floats(2), floats(2)
    each = (x for w, b in zip((q, k, v), biases, strict=True) for x in (*w, b))
    yield case(name, a, skip, norm, *each, outputs=4, epsilon=0.01, accuracy_level=1, **sizes)
    q, k, v = (_weights(n, K, 2, 16, n) for n in (4, 2, 2))
    yield case(name, a[:0], None, norm, *q, None, *k, None, *v, outputs=3, bits=2, **sizes)
    name, sizes = "MatMulNBitsQLoRA", {"K": K, "N": N, "shapes": shapes}
    adapters = *_weights(5, K, 8, 32, 6), *_weights(N, 5, 8, 32, 7)
    yield case(name, a, *_weights(N, K, 4, 32, 1), *adapters, **sizes)
    options = {"bits": 2, "block_size": 16, "lora_bits": 4, "lora_block_size": 16, "accuracy_level": 1}
    adapters = *_weights(18, K, 4, 16, 8), *_weights(N, 18, 4, 16, 9)
    yield case(name, a[0, 0], *_weights(N, K, 2, 16, 3), *adapters, **options, **sizes)
    if shapes == "static":
        A, A_scales, B, B_scales = adapters
        yield case(
            name, a, *_weights(N, K, 2, 16, 3), *adapters, constant=("W", "lora_A", "lora_B"), **options, **sizes
        )
        for empty in ((A[:0], A_scales, B, B_scales), (A, A_scales, B[:, :0], B_scales)):
            yield case(name, a, *_weights(N, K, 2, 16, 3), *empty, **options, **sizes)


def table(
    shape: tuple[int, ...], bits: int, block_size: int, indices: np.ndarray, zeros: bool = False, **options: Any
) -> Case:
    """GatherBlockQuantized of bytes whose last axis is in blocks."""
    numbers, floats = np.random.default_rng(shape[0]), drawer(shape[0])
    blocks = -(-shape[-1] // block_size)
    data = numbers.integers(0, 256, (*shape[:-1], shape[-1] * bits // 8), dtype=np.uint8)
    zero_points = numbers.integers(0, 256, (*shape[:-1], -(-blocks * bits // 8)), dtype=np.uint8)
    inputs = data, indices, floats(*shape[:-1], blocks), *([zero_points] if zeros else [])
    return case("GatherBlockQuantized", *inputs, bits=bits, block_size=block_size, **options)


def _gather_block_quantized(shapes: str) -> Iterator[Case]:
    few = np.array([[0, 4], [-1, 2]])
    yield table((5, 40), 4, 16, few, True, shapes=shapes)
    yield table((5, 40), 2, 32, few.astype(np.int32), quantize_axis=-1, shapes=shapes)
    yield table((3, 2, 24), 8, 16, np.array([0, 2, 2]), True, quantize_axis=2, shapes=shapes)
    if shapes == "static":
        yield table(
            (5, 40), 4, 16, np.array([4, 5, -6]), True, shapes=shapes, constant=("data", "indices", "zero_points")
        )
        yield table((5, 24), 8, 16, np.array([7, 1, -9]), shapes=shapes)
        yield table((5, 24), 8, 16, np.array(2), shapes=shapes)
        yield table((5, 24), 8, 16, np.zeros((2, 0), np.int64), shapes=shapes)


def bnb4(a: tuple[int, ...], N: int, K: int, block_size: int, quant_type: int, **options: Any) -> Case:
    """MatMulBnb4 with an A of the shape `a`."""
    numbers, floats = np.random.default_rng(N), drawer(N)
    B = numbers.integers(0, 256, (N * K + 1) // 2, dtype=np.uint8)
    sizes = {"K": K, "N": N, "block_size": block_size, "quant_type": quant_type}
    return case("MatMulBnb4", floats(*a), B, floats(-(-N * K // block_size)), **sizes, **options)


def _matmul_bnb4(shapes: str) -> Iterator[Case]:
    options: dict[str, Any] = {"shapes": shapes}
    yield bnb4((2, 20), 3, 20, 16, 0, **options)
    yield bnb4((2, 2, 21), 3, 21, 16, 1, **options)
    yield bnb4((2, 3), 3, 21, 16, 1, transB=0, training_mode=1, **options)
    if shapes == "static":
        yield bnb4((32,), 2, 32, 32, 1, constant=("B",), **options)
        yield bnb4((2, 0, 5), 4, 5, 64, 0, **options)


def fpq4(a: tuple[int, ...], N: int, blk_quant_type: int, **options: Any) -> Case:
    """MatMulFpQ4 with an A of the shape `a`."""
    numbers, floats = np.random.default_rng(N), drawer(N)
    fields = [("scale", "<f4"), *([("zero", "u1")] if blk_quant_type else []), ("codes", "u1", 16)]
    blocks = np.zeros(N * -(-a[-1] // 32), fields)
    blocks["scale"], blocks["codes"] = floats(len(blocks)), numbers.integers(0, 256, (len(blocks), 16))
    blocks["scale"][0] = 255 / 256  # the bits 0x3f7f0000: 127 is the largest byte that does not reach the exponent
    if blk_quant_type:
        blocks["zero"] = numbers.integers(0, 16, len(blocks))
    B = np.frombuffer(blocks.tobytes(), np.uint8)
    return case("MatMulFpQ4", floats(*a), B, np.array([a[-1], N]), blk_quant_type=blk_quant_type, **options)


def _matmul_fpq4(shapes: str) -> Iterator[Case]:
    yield fpq4((2, 40), 3, 1, shapes=shapes)
    yield fpq4((2, 1, 32), 2, 0, shapes=shapes)
    if shapes == "static":
        yield fpq4((33,), 2, 0, shapes=shapes, constant=("B", "B_shape"))
        yield fpq4((0, 8), 2, 1, shapes=shapes)


def _small_floats(shapes: str) -> Iterator[Case]:
    floats, numbers = drawer(8), np.random.default_rng(8)
    name = "MatMulBlockQuantizedFp4Weight"
    B, scale = numbers.integers(0, 256, (3, 9), dtype=np.uint8), numbers.integers(30, 80, (3, 2), dtype=np.uint8)
    B[0, 0] = 255
    one, all_ = np.array(0.25, np.float32), np.array([2.0], np.float32)
    yield case(name, floats(2, 2, 18), B, scale, one, shapes=shapes)
    fine = numbers.integers(30, 80, (3, 3), dtype=np.uint8)
    options: dict[str, Any] = {"block_size": 8, "shapes": shapes}
    yield case(name, floats(18), B, fine, one, all_[0], floats(3), constant=("B", "weight_scale"), **options)
    yield case(name, floats(0, 18), B, scale, all_, shapes=shapes)
    name = "MatMulBlockQuantizedFp8Weight"
    B = floats(3, 20).astype(ml_dtypes.float8_e4m3fn)
    yield case(name, floats(2, 2, 20), B, floats(3, 1), shapes=shapes)
    yield case(name, floats(20), B, floats(3, 3), None, floats(3), constant=("B",), **options)
    yield case(name, floats(2, 20), B, floats(3, 3), all_, wrt=("b_scale",), **options)
    yield case(name, floats(0, 20), B, floats(3, 3), all_, **options)


def _gemm_float8(shapes: str) -> Iterator[Case]:
    floats, name = drawer(9), "GemmFloat8"
    for trans_a, trans_b in ((0, 0), (0, 1), (1, 0), (1, 1)) if shapes == "static" else ((0, 1),):
        a, b = floats(*((4, 2) if trans_a else (2, 4))), floats(*((3, 4) if trans_b else (4, 3)))
        yield case(name, a, b, floats(2, 3), transA=trans_a, transB=trans_b, beta=0.5, alpha=-1.5, shapes=shapes)
    yield case(name, floats(2, 4), floats(4, 3), floats(2, 3), activation="GELU", shapes=shapes)
    half = [floats(*shape).astype(np.float16) for shape in ((2, 4), (4, 3))]
    yield case(name, *half, activation="NONE", dtype=10, shapes=shapes)
    yield case(name, floats(0, 4), floats(4, 3), activation="RELU", shapes=shapes)
    signs = np.abs(floats(4, 3)) * array([1, -1, 1])  # no sum is close to 0
    yield case(name, np.abs(floats(2, 4)), signs, activation="RELU", shapes=shapes)
