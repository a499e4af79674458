"""ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

import math

from onnx import TensorProto

from refgrad.errors import RuleError
from refgrad.formulas.quantized_weights import Layout, Weights, every_row, from_planes, wide
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import plus
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import FLOATS, UnsupportedFormError, operator
from refgrad.tables.registry import rule

_BYTES = ("tensor(uint8)",)


@operator(
    "MatMulNBits",
    "Y",
    types={"B": _BYTES, "zero_points": (*_BYTES, *FLOATS), "g_idx": ("tensor(int32)",)},
)
def matmul_nbits_body(
    op: FunctionEmitter,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None = None,
    g_idx: str | None = None,
    bias: str | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> str:
    """A·Wᵀ + bias, W = (q − zero_points)·scales, block by block of the numbers q in the bytes of B"""
    layout = Layout(N, K, bits, block_size)
    if refusal := layout.refusal or _prepacked(weight_prepacked):
        raise UnsupportedFormError(refusal)
    weights = Weights(layout, A, B, scales, zero_points, g_idx)
    W = from_planes(op, weights.rows(op, every_row), layout)
    y = op.MatMul(wide(op, A, A), op.Transpose(W, perm=[1, 0]))
    return plus(op, op.CastLike(y, A), bias)


@rule("MatMulNBits", domain=MICROSOFT, wrt=["A", "scales", "zero_points", "bias"], settings=["scales", "zero_points"])
def matmul_nbits(
    op: Emitter,
    d_Y: str,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None,
    g_idx: str | None,
    bias: str | None,
    K: int,
    N: int,
    bits: int,
    block_size: int,
    weight_prepacked: int,
) -> tuple[str | None, ...]:
    """dA = dY·W, dbias = Σ dY; with dW = dYᵀ·A dscales = Σ dW·(q − z) and dzero_points = −Σ dW·scales over each block

    The weights stay quantised: W is made some rows at a time.
    """
    layout = Layout(N, K, bits, block_size)
    if refusal := layout.refusal or _prepacked(weight_prepacked) or _misshapen(op, layout, B, scales, zero_points):
        raise RuleError(f"Node {op.node!r}: {refusal}.")
    d_bias = None if bias is None else op.grad.BroadcastGradient(d_Y, bias, (bias, d_Y))
    if 0 in (op.shape(B) or ()):  # a projection that is omitted
        return None, None, None, d_bias
    given = d_Y, A, B, scales, zero_points, g_idx
    sizes = {"K": K, "N": N, "bits": bits, "block_size": block_size}
    d_scales, d_zero_points = op.grad.MatMulNBitsScaleGrad(*given, **sizes)
    return op.grad.MatMulNBitsGrad(*given, **sizes), d_scales, d_zero_points, d_bias


def _prepacked(weight_prepacked: int) -> str:
    if not weight_prepacked:
        return ""
    return f"weight_prepacked is {weight_prepacked}: only a CUDA kernel reads that layout; save the weights with 0"


def _misshapen(op: Emitter, layout: Layout, B: str, scales: str, zero_points: str | None) -> str:
    """What is wrong with the shapes that are known, or "". A parameter may be given in one row."""
    per_block = (layout.N, layout.blocks)
    packed = zero_points is not None and op.type(zero_points) == TensorProto.UINT8
    zeros = (layout.N, layout.zero_bytes) if packed else per_block
    due = [(B, layout.shape)]
    if 0 not in (op.shape(B) or ()):
        due += [(scales, per_block), *([(zero_points, zeros)] if zero_points is not None else [])]
    for value, expected in due:
        shape = op.static(value)
        rows = math.prod(expected)
        if shape is None or shape == expected or (len(expected) == 2 and shape == (rows,)):
            continue
        if value == B and all(is_ in (0, size) for is_, size in zip(shape, expected, strict=False)) and len(shape) == 3:
            continue
        return f"{value!r} has the shape {list(shape)}; with N={layout.N}, K={layout.K}, bits={layout.bits} and " \
               f"block_size={layout.block_size} it is {list(expected)}"
    return ""
