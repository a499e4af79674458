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
