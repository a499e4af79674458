"""ONNX Runtime's training operators for normalizations, in ai.onnx operators."""

from __future__ import annotations

from refgrad.formulas.normalization import by_normalized
from refgrad.formulas.types import widest
from refgrad.lowering.microsoft.forms import form
from refgrad.reverse.emit import Emitter


@form("LayerNormalizationGrad", results="X scale scale")
def layer_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    mean: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str, str]:
    return op.grad.LayerNormalizationGrad(dY, X, scale, None, mean, inv_std_dev, axis=axis, epsilon=epsilon)


@form("InvertibleLayerNormalizationGrad", results="Y scale scale")
def invertible_layer_normalization_grad(
    op: Emitter,
    dY: str,
    Y: str,
    scale: str,
    bias: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str, str]:
    """LayerNormalizationGrad from the result: x̂ = (Y − bias)/scale"""
    normalized = op.Div(op.Sub(Y, bias), scale)
    return by_normalized(op, dY, normalized, Y, scale, inv_std_dev, axis, centred=True)


@form("SimplifiedLayerNormalizationGrad", results="X scale")
def simplified_layer_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str]:
    """x̂ = X·r and g = dY·scale: dX = r·(g − x̂·mean(g·x̂)), dscale = Σ dY·x̂"""
    wide = widest(op, X, inv_std_dev)
    normalized = op.Mul(op.as_type(X, wide), op.as_type(inv_std_dev, wide))
    return by_normalized(op, dY, normalized, X, scale, inv_std_dev, axis, centred=False)[:2]


@form("BatchNormalizationGrad", results="X scale scale")
def batch_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    mean: str,
    inv_std_dev: str,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> tuple[str, str, str]:
    """The statistics are those of the channels."""
    shape, wide = op.shape(X), widest(op, X, scale, mean)
    d, x, factor, centre, r = (op.as_type(value, wide) for value in (dY, X, scale, mean, inv_std_dev))
    if shape is not None:
        op.assume(x, shape)
        op.assume(d, shape)
    axes = [0, *range(2, 3 if shape is None else len(shape))]
    centre, r = (op.Unsqueeze(value, axes) for value in (centre, r))
    dX, dScale, dB = op.grad.BatchNormalizationGrad(d, x, factor, None, centre, r, epsilon=epsilon)
    return op.as_type(dX, op.type(X)), op.as_type(dScale, op.type(scale)), op.as_type(dB, op.type(scale))
