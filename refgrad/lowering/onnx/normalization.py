"""The gradients of normalizations. x̂ = (x − mean)·r is the normalized input, r = 1/√(var + ε)."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.formulas.normalization import by_normalized, by_rows, by_statistics, channel_axes, channels, statistics
from refgrad.formulas.types import widest
from refgrad.tables.registry import lowering


@lowering("BatchStatistics")
def batch_statistics(op: Emitter, X: str, Scale: str, input_mean: str, epsilon: float) -> tuple[str, str]:
    [x] = channels(op, X)
    return statistics(op, x, channel_axes(op, x), epsilon)


@lowering("BatchNormalizationGrad")
def batch_normalization_grad(
    op: Emitter, dY: str, X: str, Scale: str, B: str | None, Mean: str, InvStdDev: str, epsilon: float
) -> tuple[str, str, str]:
    """As in `by_statistics`, over the batch and space."""
    x, d_y = channels(op, X, dY)
    axes = channel_axes(op, x)
    dX, dScale, dB = by_statistics(op, d_y, x, Scale, Mean, InvStdDev, axes, axes)
    return dX if x == X else op.reshape_like(dX, X), dScale, dB


@lowering("LayerNormalizationGrad")
def layer_normalization_grad(
    op: Emitter, dY: str, X: str, Scale: str, B: str | None, Mean: str, InvStdDev: str, axis: int, epsilon: float
) -> tuple[str, str, str]:
    """x̂ = (X − Mean)·r; the rest is `by_rows`, or `by_normalized`."""
    x, mean, r = (op.as_type(value, widest(op, X, Mean)) for value in (X, Mean, InvStdDev))
    centred = op.Sub(x, mean)
    if axis == -1 or axis + 1 == op.rank(X):
        made = by_rows(op, dY, centred, X, Scale, r, has_mean=True)
        if made is not None:
            d_y, bias, shape = op.as_type(dY, op.type(x)), B or Scale, op.shape(X)
            if shape is not None:
                op.assume(d_y, shape)
            return *made, op.as_type(op.grad.BroadcastGradient(d_y, bias, (bias, d_y)), op.type(Scale))
    return by_normalized(op, dY, op.Mul(centred, r), X, Scale, r, axis, centred=True, B=B)
