"""Normalizations. x̂ = (x − mean)·r is the normalized input, r = 1/√(var + ε)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.normalization import (
    along_channels,
    by_rows,
    by_statistics,
    channel_axes,
    channels,
    finite,
    fraction,
    statistics,
)
from refgrad.formulas.types import of_shape, wide_type, widest
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.registry import rule


@rule("BatchNormalization")
def batch_normalization(
    op: Emitter,
    d_Y: str | None,
    d_running_mean: str | None,
    d_running_var: str | None,
    X: str,
    scale: str,
    B: str,
    input_mean: str,
    input_var: str,
    epsilon: float,
    momentum: float,
    training_mode: int,
) -> tuple[str | None, ...]:
    """dX = dY·scale·r, dscale = Σ dY·x̂, dB = Σ dY; in training mode dX also has terms for the batch's mean and variance"""
    wide = widest(op, X, scale, input_mean)
    if training_mode and wide in SIXTEEN_BIT:
        wide = TensorProto.FLOAT  # r² and the sums may exceed the range of a 16-bit type
    x, d_y = of_shape(op, X, wide, X, d_Y or op.zeros_like(X))
    factor, mean, var = (op.as_type(value, wide) for value in (scale, input_mean, input_var))
    if training_mode:
        centre, r = op.grad.BatchStatistics(x, factor, mean, epsilon=epsilon)
        d_x, d_scale, d_B = op.grad.BatchNormalizationGrad(d_y, x, factor, B, centre, r, epsilon=epsilon)
        d_mean, d_var, share = _through_running_statistics(op, x, scale, d_running_mean, d_running_var, momentum)
        adjoints = [d_x if share is None else op.Add(d_x, share), d_scale, d_B, d_mean, d_var]
    else:
        flat_y, flat = channels(op, d_y, x)
        adjoints = list(_in_inference(op, flat_y, flat, factor, mean, var, epsilon))
        if flat != x:
            adjoints[0] = op.reshape_like(str(adjoints[0]), X)
    primals = X, scale, B, input_mean, input_var
    return tuple(d and op.as_type(d, op.type(name)) for d, name in zip(adjoints, primals, strict=True))


def _in_inference(op: Emitter, d_y: str, x: str, scale: str, mean: str, var: str, epsilon: float) -> tuple[str, ...]:
    axes = channel_axes(op, x)
    r = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    factor = op.Mul(scale, r)
    d_B = op.ReduceSum(d_y, axes, keepdims=0)
    centred = op.Sub(x, along_channels(op, mean, axes))
    d_scale = op.Mul(op.ReduceSum(op.Mul(d_y, centred), axes, keepdims=0), r)
    d_mean = op.Neg(op.Mul(d_B, factor))
    d_var = op.Mul(op.Mul(d_scale, op.Mul(factor, r)), -0.5)
    return op.Mul(d_y, along_channels(op, factor, axes)), d_scale, d_B, d_mean, d_var


def _through_running_statistics(
    op: Emitter, x: str, scale: str, d_running_mean: str | None, d_running_var: str | None, momentum: float
) -> tuple[str | None, str | None, str | None]:
    """The cotangents of input_mean and input_var, and the contribution of the running statistics to the cotangent of `x`.

    running_mean = momentum·input_mean + (1 − momentum)·mean. running_var has the same form with the batch's variance,
    which is divided by n, not by n − 1.
    """
    d_mean = d_var = d_x = None
    [rows] = channels(op, x)
    axes = channel_axes(op, rows)
    if d_running_mean is not None:
        d_mean = op.Mul(d_running_mean, momentum)
        share = op.Mul(op.as_type(d_running_mean, op.type(x)), 1 - momentum)
        d_x = along_channels(op, op.Mul(share, op.share(rows, scale, like=x)), axes)
    if d_running_var is not None:
        d_var = op.Mul(d_running_var, momentum)
        share = op.Mul(op.as_type(d_running_var, op.type(x)), 2 * (1 - momentum))
        centred = op.Sub(rows, op.reduce("ReduceMean", rows, op.const(axes)))
        part = op.Mul(along_channels(op, op.Mul(share, op.share(rows, scale, like=x)), axes), centred)
        d_x = part if d_x is None else op.Add(d_x, part)
    if d_x is not None and op.rank(x) is None:
        d_x = op.reshape_like(op.Expand(d_x, op.Shape(rows)), x)
    return d_mean, d_var, d_x


@rule("InstanceNormalization")
def instance_normalization(op: Emitter, d_output: str, input: str, scale: str, epsilon: float) -> tuple[str, str, str]:
    """dx = r·(g − mean(g) − x̂·mean(g·x̂)) with g = dy·scale and means over space, dscale = Σ dy·x̂, dB = Σ dy"""
    wide = wide_type(op, input)  # r² and the sums may exceed the range of a 16-bit type
    x, d_y = channels(op, *of_shape(op, input, wide, input, d_output))
    shared = channel_axes(op, x)
    mean, r = statistics(op, x, shared[1:], epsilon)
    made = by_statistics(op, d_y, x, op.as_type(scale, wide), mean, r, shared[1:], shared)
    d_x, d_scale, d_B = (op.as_type(d, op.type(input)) for d in made)
    return d_x if op.rank(input) is not None else op.reshape_like(d_x, input), d_scale, d_B


@rule("LayerNormalization")
def layer_normalization(
    op: Emitter,
    d_Y: str | None,
    d_Mean: str | None,
    d_InvStdDev: str | None,
    X: str,
    Scale: str,
    B: str | None,
    Mean: str,
    InvStdDev: str,
    axis: int,
    epsilon: float,
) -> tuple[str, str, str | None]:
    """dX = r·(g − mean(g) − x̂·mean(g·x̂)) with g = dY·Scale, dScale = Σ dY·x̂, dB = Σ dY; plus (dMean − dr·r²·x̂)/n

    The schema does not allow Mean and InvStdDev in double. If X is in double, the rule computes both again from X.
    """
    d_Y = d_Y or op.zeros_like(X)
    if op.type(X) == TensorProto.DOUBLE:
        Mean, InvStdDev = _in_double(op, X, Mean, InvStdDev, axis, epsilon)
    d_X, d_Scale, d_B = op.grad.LayerNormalizationGrad(d_Y, X, Scale, B, Mean, InvStdDev, axis=axis, epsilon=epsilon)
    wide = widest(op, X, Mean)
    x, mean, r = (op.as_type(value, wide) for value in (X, Mean, InvStdDev))
    if d_Mean is not None:
        share = op.Mul(op.as_type(d_Mean, wide), op.share(x, mean, like=x))
        d_X = op.Add(d_X, op.as_type(share, op.type(X)))
    if d_InvStdDev is not None:
        normalized = op.Mul(op.Sub(x, mean), r)
        slope = op.Mul(op.Mul(op.as_type(d_InvStdDev, wide), op.Mul(r, r)), op.share(x, mean, like=x))
        d_X = op.Sub(d_X, op.as_type(op.Mul(normalized, slope), op.type(X)))
    return d_X, d_Scale, d_B


def _in_double(op: Emitter, X: str, Mean: str, InvStdDev: str, axis: int, epsilon: float) -> tuple[str, str]:
    rank = op.rank(X)
    if rank is not None:
        return statistics(op, X, list(range(axis % rank, rank)), epsilon)
    mean, r = statistics(op, op.Flatten(X, axis=axis), [1], epsilon)
    return op.reshape_like(mean, Mean), op.reshape_like(r, InvStdDev)


@rule("RMSNormalization")
def rms_normalization(
    op: Emitter, d_Y: str, X: str, scale: str, axis: int, epsilon: float, stash_type: int
) -> tuple[str, str]:
    """dX = r·(g − x̂·mean(g·x̂)) with g = dY·scale, x̂ = r·X and r = 1/√(mean X² + ε); dscale = Σ dY·x̂"""
    kind, rank, shape = op.type(X), op.rank(X), op.shape(X)
    wide = widest(op, X, scale)
    wide = stash_type if wide in SIXTEEN_BIT else wide
    x, d_y, factor = (op.as_type(value, wide) for value in (X, d_Y, scale))
    flat = x if rank is not None else op.Flatten(x, axis=axis)  # one row holds all axes from `axis` on
    along = op.const([1] if rank is None else list(range(axis % rank, rank)))
    mean = op.reduce("ReduceMean", op.Mul(flat, flat), along)
    r = op.Reciprocal(op.Sqrt(op.Add(mean, epsilon)))
    if axis == -1 or axis + 1 == rank:
        made = by_rows(op, d_y, x, X, scale, r, has_mean=False)
        if made is not None:
            return made
    g = op.Mul(d_y, factor)
    if rank is None:
        x, g, d_y = flat, op.Flatten(g, axis=axis), op.Flatten(d_y, axis=axis)
    normalized = op.Mul(x, r)
    slope = op.reduce("ReduceMean", op.Mul(g, normalized), along)
    d_X = op.as_type(op.Mul(op.Sub(g, op.Mul(normalized, slope)), r), kind)
    d_scale = op.Mul(d_y, normalized)
    if rank is None:
        d_X, d_scale = (op.reshape_like(value, X) for value in (d_X, d_scale))
    if shape is not None:
        op.assume(d_scale, shape)
    d_scale = op.grad.BroadcastGradient(d_scale, scale, (scale, d_scale))
    return d_X, op.as_type(d_scale, op.type(scale))


@rule("GroupNormalization")
def group_normalization(
    op: Emitter, d_Y: str, X: str, scale: str, epsilon: float, num_groups: int, stash_type: int
) -> tuple[str, str, str]:
    """dX = r·(g − mean(g) − x̂·mean(g·x̂)) with g = dY·scale and means over a group, dscale = Σ dY·x̂, dbias = Σ dY

    From opset 21 on, each channel has a scale and a bias. Before opset 21, each group has them.
    """
    kind, per_channel = op.type(X), op.opset >= 21
    wide = stash_type if kind in SIXTEEN_BIT and stash_type not in SIXTEEN_BIT else wide_type(op, X)
    x, d_y, factor = (op.as_type(value, wide) for value in (X, d_Y, scale))
    groups = _grouped(op, x, X, num_groups)
    mean, r = statistics(op, groups, [2, 3], epsilon)
    if not per_channel:
        d_x, d_scale, d_bias = by_statistics(
            op, _grouped(op, d_y, X, num_groups), groups, factor, mean, r, [2, 3], [0, 2, 3]
        )
    else:
        d_x, d_scale, d_bias = _by_groups(op, _grouped(op, d_y, X, num_groups), groups, factor, mean, r)
    d_scale, d_bias = (op.as_type(d, op.type(scale)) for d in (d_scale, d_bias))
    return op.as_type(op.reshape_like(d_x, X), kind), d_scale, d_bias


def _by_groups(op: Emitter, d_y: str, x: str, scale: str, mean: str, r: str) -> tuple[str, str, str]:
    """The cotangents as in `by_statistics`, for `x` of shape (N, groups, channels of a group, space), one scale a channel."""
    centred = op.Sub(x, mean)
    share = fraction(op, x, mean, [2, 3])
    r = finite(op, r, x, [2, 3])
    slopes, totals = op.ReduceSum(op.Mul(d_y, centred), [3]), op.ReduceSum(d_y, [3])
    d_scale, d_bias = (op.Reshape(op.ReduceSum(sums, [0, 3], keepdims=0), [-1]) for sums in (op.Mul(slopes, r), totals))
    factor = op.Reshape(scale, op.Concat(op.Shape(x, start=1, end=3), [1], axis=0))
    slope, total = (op.Mul(op.ReduceSum(op.Mul(sums, factor), [2]), share) for sums in (slopes, totals))
    rest = op.Add(op.Mul(centred, op.Mul(op.Mul(op.Mul(slope, r), r), r)), op.Mul(total, r))
    return op.Sub(op.Mul(d_y, op.Mul(factor, r)), rest), d_scale, d_bias


def _grouped(op: Emitter, value: str, X: str, groups: int) -> str:
    """`value`, which has the shape of `X`, reshaped to (N, groups, channels of a group, space)"""
    known = [dim for dim in (op.shape(X) or ())[1:] if isinstance(dim, int)]
    if known and 0 not in known and len(known) + 1 == op.rank(X):
        sizes = groups, known[0] // groups, math.prod(known[1:])
        made = op.Reshape(value, [-1, *sizes])
        op.assume(made, (None, *sizes))
        return made
    channels = op.Div(op.Shape(X, start=1, end=2), [groups])
    space = op.ReduceProd(op.Shape(X, start=2), keepdims=1)
    return op.Reshape(value, op.Concat(op.Shape(X, end=1), [groups], channels, space, axis=0), allowzero=1)


@rule("MeanVarianceNormalization")
def mean_variance_normalization(op: Emitter, d_Y: str, X: str, Y: str, axes: Sequence[int]) -> str:
    """dX = (dY − mean(dY) − u·mean(dY·Y))/(σ + 1e-9), u = (X − mean X)/σ; 0 for u where σ is 0"""
    along = op.const(list(axes))
    centred = op.Sub(X, op.reduce("ReduceMean", X, along))
    deviation = op.Sqrt(op.reduce("ReduceMean", op.Mul(centred, centred), along))
    u = op.Div(centred, op.Where(op.Equal(deviation, 0), 1, deviation))
    slope = op.reduce("ReduceMean", op.Mul(d_Y, Y), along)
    d_y = op.Sub(op.Sub(d_Y, op.reduce("ReduceMean", d_Y, along)), op.Mul(u, slope))
    return op.Div(d_y, op.Add(deviation, 1e-9))


@rule("LpNormalization")
def lp_normalization(op: Emitter, d_output: str, input: str, output: str, axis: int, p: int) -> str:
    """dx = (dy − u·Σ_axis dy·y)/‖x‖, u = y for p = 2 and sign(x) for p = 1; 0 where the norm is 0"""
    if p == 2:
        direction, norm = output, op.Sqrt(op.ReduceSum(op.Mul(input, input), [axis], keepdims=1))
    else:
        direction, norm = op.Sign(input), op.ReduceSum(op.Abs(input), [axis], keepdims=1)
    zero = op.Equal(norm, 0)
    slope = op.ReduceSum(op.Mul(d_output, output), [axis], keepdims=1)
    d_x = op.Div(op.Sub(d_output, op.Mul(direction, slope)), op.Where(zero, 1, norm))
    return op.Where(zero, 0, d_x)


@rule("LRN")
def lrn(op: Emitter, d_Y: str, X: str, alpha: float, beta: float, bias: float, size: int) -> str:
    """With s = bias + α·mean(x²) over neighbouring channels: dx = dy·s^−β − 2αβ·x·mean'(dy·x·s^(−β−1))

    mean' is the cotangent of the mean: the mean over the mirrored neighbourhood. AveragePool computes both means: the channels
    are reshaped to a spatial axis. AveragePool does not take bfloat16 before opset 22.
    """
    before, after = (size - 1) // 2, size // 2
    pooled = TensorProto.FLOAT if op.type(X) == TensorProto.BFLOAT16 and op.opset < 22 else op.type(X)
    x, d_y = (op.as_type(_as_image(op, value), pooled) for value in (X, d_Y))

    def mean_over(value: str, pads: list[int]) -> str:
        return op.AveragePool(value, pads=pads, kernel_shape=[size, 1], count_include_pad=1)

    mean = mean_over(op.Mul(x, x), [before, 0, after, 0])
    s = op.Add(op.Mul(mean, alpha), bias)
    power = op.Pow(s, -beta - 1)
    slope = mean_over(op.Mul(op.Mul(d_y, x), power), [after, 0, before, 0])
    d_x = op.Sub(op.Mul(d_y, op.Mul(power, s)), op.Mul(op.Mul(x, slope), 2 * alpha * beta))
    return op.as_type(op.reshape_like(d_x, X), op.type(X))


def _as_image(op: Emitter, X: str) -> str:
    """`X` of shape (N, C, D...), reshaped to (N, 1, C, ΠD)"""
    shape = op.shape(X)
    known = None if shape is None else [dim for dim in shape[1:] if isinstance(dim, int)]
    if shape is not None and known is not None and len(known) == len(shape) - 1 and 0 not in known:
        return op.Reshape(X, [-1, 1, known[0], math.prod(known[1:])])
    size = op.ReduceProd(op.Shape(X, start=2), keepdims=1)
    image = op.Concat(op.Shape(X, end=1), [1], op.Shape(X, start=1, end=2), size, axis=0)
    return op.Reshape(X, image, allowzero=1)
