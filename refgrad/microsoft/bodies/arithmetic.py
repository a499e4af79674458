"""ONNX Runtime's arithmetic, and the axes along which operands were broadcast."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Emitter, UnsupportedFormError, body, form
from refgrad.formulas.types import as_scalar
from refgrad.microsoft.declared import divided, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import elements, like
from refgrad.tables.definitions import FLOATS


@body("ScaledSum", "output", domain=MICROSOFT)
def scaled_sum(
    op: FunctionEmitter,
    input_0: str,
    input_1: str,
    input_2: str | None = None,
    *,
    scale_0: float,
    scale_1: float,
    scale_2: float | None = None,
) -> str:
    """Σ scaleₖ·inputₖ"""
    total = op.Add(op.Mul(input_0, scale_0), op.Mul(input_1, scale_1))
    return str(total if input_2 is None else op.Add(total, op.Mul(input_2, 1.0 if scale_2 is None else scale_2)))


@body("BiasAdd", "Y", domain=MICROSOFT)
def bias_add(op: FunctionEmitter, X: str, bias: str, skip: str) -> str:
    """X + bias + skip"""
    return op.Add(op.Add(X, bias), skip)


@body("GatedAdd", "output", domain=MICROSOFT)
def gated_add(op: FunctionEmitter, X: str, Y: str, gate: str, gate_weight: str | None = None) -> str:
    """X + Y·gate; with gate_weight, the gate is σ(gate·gate_weight)"""
    factor = gate if gate_weight is None else op.Sigmoid(op.MatMul(gate, gate_weight))
    return op.Add(X, op.Mul(Y, factor))


@body("HyperConnectionPreMix", "output", types={"pre_mix": FLOATS}, domain=MICROSOFT)
def hyper_connection_pre_mix(
    op: FunctionEmitter, streams: str, pre_mix: str, *, num_branches: int = 0, reduction_scale: float = 1.0
) -> str:
    """reduction_scale·Σ streams[c]·pre_mix[c] over the branches c"""
    x, lead = _branches(op, streams, num_branches)
    gates = op.wide(pre_mix)
    if _rank(op, pre_mix, "pre_mix") == lead + 1:  # (..., C) or, of flattened streams, (..., C·H)
        gates = by_branch(op, gates, [num_branches] if num_branches else op.Shape(x, start=-2, end=-1))
    y = op.Squeeze(op.reduce("ReduceSum", op.Mul(x, op.CastLike(gates, x)), [-2]), [-2])
    return op.CastLike(y if reduction_scale == 1 else op.Mul(y, reduction_scale), streams)


@body("HyperConnectionPostMix", "output", types={"post_mix": FLOATS, "stream_mix": "post_mix"}, domain=MICROSOFT)
def hyper_connection_post_mix(
    op: FunctionEmitter,
    streams: str,
    block_output: str,
    post_mix: str,
    stream_mix: str | None = None,
    *,
    num_branches: int = 0,
) -> str:
    """Σ stream_mix[c, k]·streams[c] + post_mix[k]·block_output for every branch k"""
    x, lead = _branches(op, streams, num_branches)
    block, gates = (op.CastLike(op.wide(value), x) for value in (block_output, post_mix))
    if _rank(op, post_mix, "post_mix") == lead + 1:
        gates = op.Unsqueeze(gates, [-1])
    if stream_mix is not None:
        matrix = op.wide(stream_mix)
        x = op.MatMul(op.Transpose(op.CastLike(matrix, x), perm=[*range(lead), lead + 1, lead]), x)
    y = op.Add(x, op.Mul(gates, op.Unsqueeze(block, [-2])))
    return op.CastLike(op.Reshape(y, op.Shape(streams), allowzero=1) if num_branches else y, streams)


def _branches(op: FunctionEmitter, streams: str, num_branches: int) -> tuple[str, int]:
    """The streams (..., C, H), 16-bit streams as float, and how many axes are before C."""
    if num_branches < 0:
        raise UnsupportedFormError(f"num_branches={num_branches}: it is 0 for grouped streams, else how many there are")
    lead = _rank(op, streams, "streams") - (1 if num_branches else 2)
    if lead < 0:
        raise UnsupportedFormError(
            f"its input streams is of rank {op.rank(streams)}; with num_branches={num_branches} it has more axes"
        )
    if num_branches:
        divided("streams", sizes(op, streams, lead + 1)[-1], num_branches, "num_branches")
    x = op.wide(streams)
    return (by_branch(op, x, [num_branches]) if num_branches else x), lead


def by_branch(op: FunctionEmitter, x: str, count: str | list[int]) -> str:
    """(..., C·H) to (..., C, H)"""
    each = op.Div(op.Shape(x, start=-1), count)
    return op.Reshape(x, op.Concat(op.Shape(x, end=-1), count, each, axis=0), allowzero=1)


def _rank(op: FunctionEmitter, value: str, name: str) -> int:
    rank = op.rank(value)
    if rank is None:
        raise UnsupportedFormError(f"the rank of its input {name} is unknown; add it to value_info")
    return rank


@form("BroadcastGradientArgs", results=[elements(TensorProto.INT64), elements(TensorProto.INT64)])
def broadcast_gradient_args(op: Emitter, a_shape: str, b_shape: str) -> tuple[str, str]:
    """The axes along which each of two operands was broadcast, the last first"""
    a, b = op.dims(a_shape), op.dims(b_shape)
    if a is not None and b is not None and all(isinstance(dim, int) for dim in (*a, *b)):
        rank = max(len(a), len(b))
        padded = [(1,) * (rank - len(shape)) + shape for shape in (a, b)]
        first, second = (
            [k for k in range(rank) if k < rank - len(shape) or (own[k] == 1 and other[k] != 1)]
            for shape, own, other in ((a, *padded), (b, *reversed(padded)))
        )
        return op.const(np.array(first[::-1], np.int64)), op.const(np.array(second[::-1], np.int64))
    sizes = [op.Shape(shape) for shape in (a_shape, b_shape)]
    larger = op.Max(*sizes)
    missing = [op.Sub(larger, size) for size in sizes]
    own, other = (
        op.Concat(op.full(count, 1, like=shape), shape, axis=0)
        for count, shape in zip(missing, (a_shape, b_shape), strict=True)
    )
    last = op.Sub(op.Squeeze(larger, [0]), 1)
    places = op.Range(last, op.const(np.array(-1)), op.const(np.array(-1)))

    def axes(count: str, mine: str, facing: str) -> str:
        stretched = op.And(op.Equal(mine, 1), op.Not(op.Equal(facing, 1)))
        broadcast = op.Or(op.Less(places, count), op.Gather(stretched, places))
        return op.Compress(places, broadcast, axis=0)

    return axes(missing[0], own, other), axes(missing[1], other, own)


@form("DivGrad", results=[like("A"), like("B")])
def div_grad(op: Emitter, dY: str, A: str, B: str) -> tuple[str, str]:
    return op.grad.DivGrad(dY, A, B, None)


@form("Scale", results=[like("X")])
def scale(op: Emitter, X: str, scale: str, *, scale_down: int = 0) -> str:
    """X·scale, or X/scale with scale_down; the scale is one number of any type"""
    number = as_scalar(op, scale, op.type(X))
    return op.Div(X, number) if scale_down else op.Mul(X, number)


@form("BatchScale", results=[like("X"), like("X"), like("X")])
def batch_scale(
    op: Emitter, X: str, *, scale_0: float, scale_1: float, scale_2: float | None = None
) -> tuple[str, ...]:
    """X·scale for each scale"""
    return tuple(op.Mul(X, factor) for factor in (scale_0, scale_1, scale_2) if factor is not None)


@form("ZeroGradient", results=[like("X")])
def zero_gradient(op: Emitter, X: str, like: str | None = None) -> str:
    return op.zeros_like(X)
