"""Cases of ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        yield from _matmul_nbits(shapes)
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
    zero_points = None
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
    yield nbits((2, 48), 3, 4, 16, "floats", grouped=True, **options)
    if shapes == "static":
        yield nbits((33,), 2, 8, 16, "packed", with_bias=True, **options)
        yield nbits((2, 24), 3, 8, 32, **options)
        yield nbits((2, 18), 3, 2, 16, "floats", **options)
        yield nbits((2, 36), 3, 4, 16, grouped=True, **options)
        yield nbits((2, 32), 3, 4, 16, constant=("B", "scales"), wrt=("A", "scales"), **options)
        yield nbits((2, 33), 3, 4, 16, "floats", grouped=True, constant=("B", "g_idx"), **options)
        yield nbits((0, 32), 3, 4, 16, "packed", with_bias=True, **options)


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
