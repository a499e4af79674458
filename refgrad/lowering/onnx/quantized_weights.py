"""The adjoints of products with quantised weights. The weights are made floats some rows at a time, and never stored."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.formulas.quantized_weights import Layout, Take, Weights, from_planes, over_rows, to_planes, wide
from refgrad.reverse.emit import Emitter
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
    layout = Layout(N, K, bits, block_size)
    weights = Weights(layout, dY, B, scales, zero_points, g_idx)
    d = wide(op, op.grad.Rows(dY), dY)
    start = op.full(op.Concat(op.Shape(d, end=1), [layout.columns], axis=0), 0.0, like=d)
    dA = over_rows(op, N, layout.columns, d, start, lambda take, _: op.MatMul(take(d, 1), weights.rows(op, take)))
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
    layout = Layout(N, K, bits, block_size)
    weights = Weights(layout, dY, B, scales, zero_points, g_idx)
    d = wide(op, op.grad.Rows(dY), dY)
    a = to_planes(op, wide(op, op.grad.Rows(A), dY), layout)

    def d_weights(take: Take) -> str:
        sizes = [0, layout.planes, *layout.shape[1:]] if g_idx is None else [0, layout.planes, -1]
        return op.Reshape(op.MatMul(op.Transpose(take(d, 1), perm=[1, 0]), a), sizes)

    def per_block(terms: str, first: str) -> str:
        """The sums of the numbers of each block, between zeros for the rows of other steps."""
        if g_idx is None:
            summed = op.ReduceSum(terms, [1, 3], keepdims=0)
        else:
            rows = op.Shape(terms, end=1)
            groups = op.Reshape(weights.groups(op), [layout.columns])
            shape = op.Concat(rows, [layout.blocks], axis=0)
            summed = op.grad.GatherGrad(shape, groups, op.Reshape(terms, [0, layout.columns]), axis=1)
        behind = op.Sub(op.Sub(op.const([N]), first), op.Shape(summed, end=1))
        return op.Pad(summed, op.Concat(first, [0], behind, [0], axis=0))

    start = op.full([N, layout.blocks], 0.0, like=d)

    d_scales = over_rows(
        op, N, layout.columns, d, start, lambda take, n: per_block(op.Mul(d_weights(take), weights.centred(op, take)), n)
    )
    d_scales = op.as_type(op.reshape_like(d_scales, scales), op.type(scales))
    if zero_points is None or op.type(zero_points) == TensorProto.UINT8:
        return d_scales, None
    d_zeros = over_rows(
        op,
        N,
        layout.columns,
        d,
        start,
        lambda take, n: per_block(op.Neg(op.Mul(d_weights(take), weights.laid(op, weights.scale(op, take)))), n),
    )
    return d_scales, op.as_type(op.reshape_like(d_zeros, zero_points), op.type(zero_points))
