"""The gradients of products with quantised weights. The weights are made floats some rows at a time, and never stored."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.quantized_weights import (
    BlockLayout,
    BlockWeights,
    Coded,
    Take,
    among,
    from_planes,
    over_rows,
    to_planes,
    wide,
)
from refgrad.tables.registry import lowering


@lowering("MatMulNBitsGrad")
def matmul_nbits_grad(
    op: Emitter,
    dY: str,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None,
    g_idx: str | None,
    K: int,
    N: int,
    bits: int,
    block_size: int,
) -> str:
    """dA = dY·W, the sum over some rows of W, and as many columns of dY, after the others"""
    layout = BlockLayout(N, K, bits, block_size)
    weights = BlockWeights(layout, dY, B, scales, zero_points, g_idx)
    d = wide(op, op.grad.Rows(dY), dY)
    start = _zeros(op, d, layout.columns)
    dA = over_rows(op, N, layout.columns, d, start, lambda take, *_: op.MatMul(take(d, 1), weights.rows(op, take)))
    return op.as_type(op.reshape_like(from_planes(op, dA, layout), A), op.type(A))


@lowering("MatMulNBitsScaleGrad")
def matmul_nbits_scale_grad(
    op: Emitter,
    dY: str,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None,
    g_idx: str | None,
    K: int,
    N: int,
    bits: int,
    block_size: int,
) -> tuple[str, str | None]:
    """With dW = dYᵀ·A: dscales = Σ dW·(q − z), dzero_points = −Σ dW·s, over the numbers of each block"""
    layout = BlockLayout(N, K, bits, block_size)
    weights = BlockWeights(layout, dY, B, scales, zero_points, g_idx)
    d = wide(op, op.grad.Rows(dY), dY)
    a = to_planes(op, wide(op, op.grad.Rows(A), dY), layout)

    def d_weights(take: Take) -> str:
        sizes = [0, layout.planes, *layout.shape[1:]] if g_idx is None else [0, layout.planes, -1]
        return op.Reshape(op.MatMul(op.Transpose(take(d, 1), perm=[1, 0]), a), sizes)

    def per_block(terms: str, begin: str) -> str:
        """The sums of the numbers of each block, between zeros for the rows of other steps."""
        if g_idx is None:
            summed = op.ReduceSum(terms, [1, 3], keepdims=0)
        else:
            groups = op.Reshape(weights.groups(op), [layout.columns])
            shape = op.Concat(op.Shape(terms, end=1), [layout.blocks], axis=0)
            summed = op.grad.GatherGrad(shape, groups, op.Reshape(terms, [0, layout.columns]), axis=1)
        return among(op, summed, 0, 2, begin, N)

    def by_scales(take: Take, begin: str, _: str) -> str:
        return per_block(op.Mul(d_weights(take), weights.centred(op, take)), begin)

    def by_zero_points(take: Take, begin: str, _: str) -> str:
        return per_block(op.Neg(op.Mul(d_weights(take), weights.laid(op, weights.scale(op, take)))), begin)

    start = op.full([N, layout.blocks], 0.0, like=d)
    op.assume(start, (N, layout.blocks))
    d_scales = over_rows(op, N, layout.columns, d, start, by_scales)
    d_scales = op.as_type(op.reshape_like(d_scales, scales), op.type(scales))
    if zero_points is None or op.type(zero_points) == TensorProto.UINT8:
        return d_scales, None
    d_zeros = over_rows(op, N, layout.columns, d, start, by_zero_points)
    return d_scales, op.as_type(op.reshape_like(d_zeros, zero_points), op.type(zero_points))


@lowering("MatMulBnb4Grad")
def matmul_bnb4_grad(
    op: Emitter, dY: str, A: str, B: str, absmax: str, K: int, N: int, block_size: int, quant_type: int, transB: int
) -> str:
    """dA = dY·W, or for transB = 0 dY·Wᵀ"""
    weights = Coded(N, K, block_size, quant_type, dY, B, absmax)
    d = wide(op, op.grad.Rows(dY), dY)

    def term(take: Take, begin: str, end: str) -> str:
        rows = weights.rows(op, begin, end)
        if transB:
            return op.MatMul(take(d, 1), rows)
        return among(op, op.MatMul(d, op.Transpose(rows, perm=[1, 0])), 1, 2, begin, N)

    start = _zeros(op, d, K if transB else N)
    dA = over_rows(op, N, K, d, start, term, weights.multiple)
    return op.as_type(op.reshape_like(dA, A), op.type(A))


@lowering("MatMulBnb4ScaleGrad")
def matmul_bnb4_scale_grad(
    op: Emitter, dY: str, A: str, B: str, absmax: str, K: int, N: int, block_size: int, quant_type: int, transB: int
) -> str:
    """dabsmax = Σ dW·W/absmax over the numbers of each block, with dW = dYᵀ·A, or for transB = 0 Aᵀ·dY"""
    weights = Coded(N, K, block_size, quant_type, dY, B, absmax)
    d, a = (wide(op, op.grad.Rows(x), dY) for x in (dY, A))
    left, right = (d, a) if transB else (a, d)

    def term(take: Take, begin: str, end: str) -> str:
        codes = weights.coded(op, begin, end)
        d_rows = op.Reshape(op.MatMul(op.Transpose(take(left, 1), perm=[1, 0]), right), [-1])
        missing = op.Sub(op.Size(codes), op.Shape(d_rows))
        d_blocks = op.Reshape(op.Pad(d_rows, op.Concat([0], missing, axis=0)), op.Shape(codes))
        summed = op.ReduceSum(op.Mul(d_blocks, codes), [1], keepdims=0)
        return among(op, summed, 0, 1, weights.block_of(op, begin), weights.blocks)

    start = op.full([weights.blocks], 0.0, like=d)
    op.assume(start, (weights.blocks,))
    d_absmax = over_rows(op, N, K, d, start, term, weights.multiple)
    return op.as_type(op.reshape_like(d_absmax, absmax), op.type(absmax))


def _zeros(op: Emitter, d: str, columns: int) -> str:
    """As many rows as `d` has."""
    zeros = op.full(op.Concat(op.Shape(d, end=1), [columns], axis=0), 0.0, like=d)
    op.assume(zeros, (None, columns))
    return zeros
