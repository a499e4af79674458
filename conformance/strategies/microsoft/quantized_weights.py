"""Strategies of ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named


@strategy(*named("MatMulNBits"))
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
