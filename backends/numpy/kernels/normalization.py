"""Normalizations and dropout, with their gradients.

x̂ = (x − mean)·r is the normalized input, r = 1/√(var + ε), n the number of elements that a mean is over.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from refgrad.backends.numpy.kernels.arithmetic import sum_to
from refgrad.backends.numpy.kernels.operands import (
    check_axis,
    check_expands,
    check_shape,
    mean_square,
    squares_summed,
    summed,
    wide_type,
    widened,
)
from refgrad.backends.numpy.kernels.operands import mean as mean_of
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import SIXTEEN_BIT, kernel, reuse, reuse_first
from refgrad.protos.domains import MICROSOFT


def _per_channel(v: np.ndarray, rank: int) -> np.ndarray:
    return v.reshape(-1, *[1] * (rank - 2))


def _all_but_channels(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _batch_normalization_memory(
    X: np.ndarray, *_: Any, training_mode: int = 0, _free: tuple[bool, ...] = (), **__: Any
) -> np.ndarray | None:
    return None if training_mode else reuse_first(X, _free=_free)


@kernel("BatchNormalization", since=7, fresh=True, abstract=_batch_normalization_memory)
def batch_normalization(
    X: np.ndarray,
    scale: np.ndarray,
    B: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int = 0,
    spatial: int = 1,
    _opset: int,
    _wanted: tuple[bool, ...],
    _free: tuple[bool, ...] = (),
) -> tuple[np.ndarray, ...]:
    """x̂·scale + B, by the given mean and variance, or in training by the batch's, and then their running averages.

    Before opset 14 five outputs meant training, and spatial=0 a mean and a variance for each element of an image.
    """
    rank, kinds = X.ndim, (X.dtype, mean.dtype, var.dtype)
    if rank < 2:
        raise ValueError(f"X has rank {rank}; expected a batch, the channels and any further axes")
    for what, v in (("scale", scale), ("B", B), ("mean", mean), ("var", var)):
        check_shape(what, v.shape, X.shape[1:2] if spatial else X.shape[1:])
    X, scale, B, mean, var = map(widened, (X, scale, B, mean, var))
    if _opset < 14 and any(_wanted[1:]):
        if not spatial:
            raise ValueError("spatial=0 is not supported in training")
        Y, running_mean, running_var, batch_mean, r = _train(X, scale, B, mean, var, epsilon, momentum)
        batch_var = 1 / np.square(r) - epsilon
        return tuple(v.astype(kinds[0], copy=False) for v in (Y, running_mean, running_var, batch_mean, batch_var))
    if not training_mode:
        factor = scale / np.sqrt(var + epsilon)
        shift = B - mean * factor
        if spatial:
            factor, shift = _per_channel(factor, rank), _per_channel(shift, rank)
        Y = np.multiply(X, factor, out=reuse(_free[:1], np.result_type(X, factor), X))
        return (np.add(Y, shift, out=Y).astype(kinds[0], copy=False),)
    results = _train(X, scale, B, mean, var, epsilon, momentum)
    return tuple(v.astype(kind, copy=False) for v, kind in zip(results, kinds, strict=False))


@kernel("BatchNormalization", fresh=True)
def batch_normalization_1(
    X: np.ndarray,
    scale: np.ndarray,
    B: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    *,
    epsilon: float,
    momentum: float,
    is_test: int,
    spatial: int = 1,
) -> tuple[np.ndarray, ...]:
    """Before opset 7 is_test=0 means training."""
    wanted = (True, not is_test)
    return batch_normalization(
        X, scale, B, mean, var, epsilon=epsilon, momentum=momentum, spatial=spatial, _opset=7, _wanted=wanted
    )


@kernel("BatchNormInternal", domain=MICROSOFT, fresh=True)
def batch_norm_internal(
    X: np.ndarray,
    scale: np.ndarray,
    B: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> tuple[np.ndarray, ...]:
    """BatchNormalization in training, and the batch's mean and r; else by the given mean and variance."""
    if not training_mode:
        return batch_normalization(
            X, scale, B, mean, var, epsilon=epsilon, momentum=momentum, _opset=14, _wanted=(True,)
        )
    kinds = X.dtype, *[mean.dtype] * 4
    X, scale, B, mean, var = map(widened, (X, scale, B, mean, var))
    results = _train(X, scale, B, mean, var, epsilon, momentum)
    return tuple(v.astype(kind, copy=False) for v, kind in zip(results, kinds, strict=True))


def _train(
    X: np.ndarray,
    scale: np.ndarray,
    B: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    epsilon: float,
    momentum: float,
) -> tuple[np.ndarray, ...]:
    axes, rank = _all_but_channels(X.ndim), X.ndim
    n = np.asarray(X.size // max(X.shape[1], 1), X.dtype)  # the mean of nothing is NaN, without a warning
    batch_mean = summed(X, axes) / n
    centred = X - _per_channel(batch_mean, rank)
    batch_var = squares_summed(centred, axes) / n
    r = 1 / np.sqrt(batch_var + epsilon)
    Y = np.multiply(centred, _per_channel(scale * r, rank), out=centred)
    Y += _per_channel(B, rank)
    running_mean = mean * momentum + batch_mean * (1 - momentum)
    running_var = var * momentum + batch_var * (1 - momentum)
    return Y, running_mean, running_var, batch_mean, r


@kernel("BatchNormalizationGrad", domain=MICROSOFT, fresh=True)
def batch_normalization_grad(
    dY: np.ndarray,
    X: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    r: np.ndarray,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> tuple[np.ndarray, ...]:
    """dX = scale·r·(dY − mean dY − x̂·mean(dY·x̂)), dscale = Σ dY·x̂, dB = Σ dY, over batch and space"""
    kinds = X.dtype, scale.dtype, scale.dtype
    dY, X, scale, mean, r = map(widened, (dY, X, scale, mean, r))
    axes, rank = _all_but_channels(X.ndim), X.ndim
    normalized = X - _per_channel(mean, rank)
    normalized *= _per_channel(r, rank)
    dX = dY * normalized
    d_scale, d_B = summed(dX, axes), summed(dY, axes)
    n = X.size // max(X.shape[1], 1)
    np.subtract(dY, _per_channel(d_B / n, rank), out=dX)
    normalized *= _per_channel(d_scale / n, rank)
    dX -= normalized
    dX *= _per_channel(scale * r, rank)
    results = dX, d_scale, d_B
    return tuple(d.astype(kind, copy=False) for d, kind in zip(results, kinds, strict=True))


def _mean_square_memory(
    X: np.ndarray, *_: Any, axis: int = -1, _free: tuple[bool, ...] = (), **__: Any
) -> np.ndarray | None:
    """BLAS sums the squares of float and double without writing them down; there are four numbers for each sum."""
    need(X.nbytes if X.itemsize < 4 else 4 * math.prod(X.shape[: axis if axis >= 0 else X.ndim + axis]) * X.itemsize)
    return reuse_first(X, _free=_free)


@kernel("LayerNormalization", fresh=True, abstract=_mean_square_memory)
def layer_normalization(
    X: np.ndarray,
    scale: np.ndarray,
    B: np.ndarray | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    _free: tuple[bool, ...] = (),
) -> tuple[np.ndarray, ...]:
    """x̂·scale + B over the axes from `axis` on, and mean and r in `stash_type`."""
    x, axes, stash = _stashed(X, axis, stash_type)
    check_expands("scale", scale.shape, X.shape)
    if B is not None:
        check_expands("B", B.shape, X.shape)
    mean = mean_of(x, axes, True)
    Y = np.subtract(x, mean, out=reuse(_free[:1], x.dtype, X))
    r = 1 / np.sqrt(mean_square(Y, axes, True) + epsilon)
    Y *= r
    Y *= scale
    if B is not None:
        Y += B
    return Y.astype(X.dtype, copy=False), mean.astype(stash, copy=False), r.astype(stash, copy=False)


@kernel("SimplifiedLayerNormalization", fresh=True)
@kernel("SimplifiedLayerNormalization", domain=MICROSOFT, fresh=True)
def simplified_layer_normalization(
    X: np.ndarray, scale: np.ndarray, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int | None = None
) -> tuple[np.ndarray, ...]:
    """x·r·scale with r = 1/√(mean x² + ε) over the axes from `axis` on, and r in `stash_type` (None: float or double)."""
    x, axes, stash = _stashed(X, axis, stash_type or float_or_double(X))
    check_expands("scale", scale.shape, X.shape)
    r = 1 / np.sqrt(mean_square(x, axes, True) + epsilon)
    Y = x * r
    Y *= scale
    return Y.astype(X.dtype, copy=False), r.astype(stash, copy=False)


@kernel("RMSNormalization", fresh=True, abstract=_mean_square_memory)
def rms_normalization(X: np.ndarray, scale: np.ndarray, *, axis: int, epsilon: float, stash_type: int) -> np.ndarray:
    """x·r·scale with r = 1/√(mean x² + ε) over the axes from `axis` on"""
    return simplified_layer_normalization(X, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)[0]


@kernel("InstanceNormalization", in_float32=True, fresh=True)
def instance_normalization(X: np.ndarray, scale: np.ndarray, B: np.ndarray, *, epsilon: float) -> np.ndarray:
    """x̂·scale + B, each channel of each instance by its own mean and variance"""
    axes, rank = tuple(range(2, X.ndim)), X.ndim
    check_shape("scale", scale.shape, X.shape[1:2])
    check_shape("B", B.shape, X.shape[1:2])
    Y = X - mean_of(X, axes, True)
    Y *= _per_channel(scale, rank) / np.sqrt(mean_square(Y, axes, True) + epsilon)
    Y += _per_channel(B, rank)
    return np.asarray(Y)


@kernel("MeanVarianceNormalization", in_float32=True, fresh=True)
def mean_variance_normalization(X: np.ndarray, *, axes: list[int]) -> np.ndarray:
    """(x − mean)/(√var + 1e-9) over `axes`. The body in onnx has mean x² − (mean x)² for the variance, which cancels."""
    centred = X - mean_of(X, tuple(axes), True)
    centred /= np.sqrt(mean_square(centred, tuple(axes), True)) + 1e-9
    return np.asarray(centred)


@kernel("GroupNormalization", in_float32=True, fresh=True)
def group_normalization(
    X: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> np.ndarray:
    """x̂·scale + bias, group by group of channels; the scale and the bias are the channels', before opset 21 the groups'"""
    x = X.reshape(X.shape[0], num_groups, X.shape[1] // num_groups, int(np.prod(X.shape[2:])))
    factor, shift = (v.reshape(num_groups, -1, 1) for v in (scale, bias))
    Y = x - mean_of(x, (2, 3), True)
    Y *= factor / np.sqrt(mean_square(Y, (2, 3), True) + epsilon)
    Y += shift
    return np.asarray(Y.reshape(X.shape))


@kernel("LayerNormalizationGrad", domain=MICROSOFT, fresh=True)
def layer_normalization_grad(
    dY: np.ndarray,
    X: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    r: np.ndarray,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[np.ndarray, ...]:
    """G = dY·scale; dX = r·(g − mean g − x̂·mean(g·x̂)), dscale = Σ dY·x̂, dB = Σ dY"""
    x, axes, _ = _stashed(X, axis, stash_type)
    return _centred_grad(dY, (x - mean) * r, X, scale, r, axes)


@kernel("InvertibleLayerNormalizationGrad", domain=MICROSOFT, fresh=True)
def invertible_layer_normalization_grad(
    dY: np.ndarray,
    Y: np.ndarray,
    scale: np.ndarray,
    B: np.ndarray,
    r: np.ndarray,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[np.ndarray, ...]:
    """The same from the result: x̂ = (Y − B)/scale"""
    y, axes, _ = _stashed(Y, axis, stash_type)
    return _centred_grad(dY, (y - B) / scale, Y, scale, r, axes)


def _centred_grad(
    dY: np.ndarray, normalized: np.ndarray, X: np.ndarray, scale: np.ndarray, r: np.ndarray, axes: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    d = widened(dY)
    g = d * scale
    dX = r * (g - mean_of(g, axes, True) - normalized * mean_of(g * normalized, axes, True))
    d_scale, d_B = sum_to(d * normalized, scale.shape), sum_to(d.astype(normalized.dtype, copy=False), scale.shape)
    return (
        dX.astype(X.dtype, copy=False),
        d_scale.astype(scale.dtype, copy=False),
        d_B.astype(scale.dtype),
    )


@kernel("SimplifiedLayerNormalizationGrad", domain=MICROSOFT, fresh=True)
def simplified_layer_normalization_grad(
    dY: np.ndarray,
    X: np.ndarray,
    scale: np.ndarray,
    r: np.ndarray,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[np.ndarray, ...]:
    """G = dY·scale; dX = r·(g − x·r·mean(g·x·r)), dscale = Σ dY·x·r"""
    x, axes, _ = _stashed(X, axis, stash_type)
    normalized, d = x * r, widened(dY)
    g = d * scale
    dX = r * (g - normalized * mean_of(g * normalized, axes, True))
    d_scale = sum_to(d * normalized, scale.shape)
    return dX.astype(X.dtype, copy=False), d_scale.astype(scale.dtype, copy=False)


def float_or_double(X: np.ndarray) -> int:
    """The element type of statistics where none is given: float, or double for a double."""
    return int(TensorProto.DOUBLE if X.dtype == np.float64 else TensorProto.FLOAT)


def _stashed(X: np.ndarray, axis: int, stash_type: int) -> tuple[np.ndarray, tuple[int, ...], np.dtype]:
    """X in the type to compute in, never narrower than float32 nor than X, the axes, and the type of the statistics."""
    stash = helper.tensor_dtype_to_np_dtype(stash_type)
    own = wide_type(X.dtype)
    wide = own if stash in SIXTEEN_BIT else np.promote_types(own, stash)
    return X.astype(wide, copy=False), tuple(range(check_axis(axis, X.ndim), X.ndim)), stash


@kernel("LRN", in_float32=True, fresh=True)
def lrn(X: np.ndarray, *, alpha: float, beta: float, bias: float, size: int) -> np.ndarray:
    """x/(bias + α/size·Σ x²)^β, the sum over `size` neighbouring channels"""
    if size < 1:
        raise ValueError(f"size={size} channels; one or more are needed")
    before, channels = (size - 1) // 2, X.shape[1]
    need((channels + size) * (X.size // max(channels, 1)) * X.itemsize)
    padded = np.zeros((X.shape[0], channels + size - 1, *X.shape[2:]), X.dtype)
    padded[:, before : before + channels] = np.square(X)
    total = padded[:, :channels].copy()
    for offset in range(1, size):
        total += padded[:, offset : offset + channels]
    return np.asarray(X / (bias + alpha / size * total) ** beta)


@kernel("LpNormalization", in_float32=True, fresh=True)
def lp_normalization(X: np.ndarray, *, axis: int, p: int) -> np.ndarray:
    """x/‖x‖_p along `axis`, and 0 where the norm is 0."""
    if p not in (1, 2):
        raise ValueError(f"p={p} is neither 1 nor 2")
    norm = np.sum(np.abs(X) ** p, axis=axis, keepdims=True) ** X.dtype.type(1 / p)
    return np.asarray(X / np.where(norm == 0, 1, norm))


def _dropped(ratio: np.ndarray | None, training_mode: np.ndarray | None) -> float:
    """The share of the elements that is dropped: 0 without training."""
    if training_mode is None or not training_mode.item():
        return 0.0
    return 0.5 if ratio is None else float(ratio.item())


def _dropout_memory(X: np.ndarray, ratio: Any = None, training_mode: Any = None, **_: Any) -> np.ndarray | None:
    """The input itself where nothing is dropped."""
    if training_mode is None or (isinstance(training_mode, np.ndarray) and not training_mode.item()):
        return X
    return None


@kernel("Dropout", since=12, abstract=_dropout_memory)
def dropout(
    X: np.ndarray, ratio: np.ndarray | None = None, training_mode: np.ndarray | None = None, *, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """x·mask/(1 − ratio) in training, else x. The mask depends on `seed` alone; a node without one has the seed 0."""
    p = _dropped(ratio, training_mode)
    if not p:
        return X, np.ones(X.shape, bool)
    mask = np.random.RandomState(seed or 0).uniform(0, 1, X.shape) >= p
    return (widened(X) * mask * (1 / (1 - p))).astype(X.dtype, copy=False), mask


@kernel("Dropout", since=7, abstract=_dropout_memory)
def dropout_7(X: np.ndarray, *, ratio: float, _opset: int) -> tuple[np.ndarray, np.ndarray]:
    """Identity: these versions are for inference."""
    return X, np.ones(X.shape, bool if _opset >= 10 else X.dtype)


@kernel("Dropout")
def dropout_1(X: np.ndarray, *, ratio: float, is_test: int) -> tuple[np.ndarray, np.ndarray]:
    """is_test=0 means training; the mask has the type of X."""
    Y, mask = dropout(X, np.array(ratio), np.array(not is_test))
    return Y, mask.astype(X.dtype)


@kernel("DropoutGrad", domain=MICROSOFT)
def dropout_grad(
    dY: np.ndarray,
    mask: np.ndarray,
    ratio: np.ndarray | None = None,
    training_mode: np.ndarray | None = None,
    *,
    seed: int | None = None,
) -> np.ndarray:
    """dX = dY/(1 − ratio) where the mask is true, else 0; without training, as by default, dX = dY"""
    p = _dropped(ratio, training_mode)
    if not p:
        return dY
    return np.where(mask, (widened(dY) * (1 / (1 - p))).astype(dY.dtype, copy=False), dY.dtype.type(0))


@kernel("BitmaskDropout", domain=MICROSOFT)
def bitmask_dropout(
    X: np.ndarray, ratio: np.ndarray | None = None, training_mode: np.ndarray | None = None, *, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Dropout with the mask packed, see `packed_mask`"""
    Y, mask = dropout(X, ratio, training_mode, seed=seed)
    return Y, packed_mask(mask)


@kernel("BitmaskDropoutGrad", domain=MICROSOFT)
def bitmask_dropout_grad(
    dY: np.ndarray,
    mask: np.ndarray,
    ratio: np.ndarray | None = None,
    training_mode: np.ndarray | None = None,
    *,
    seed: int | None = None,
) -> np.ndarray:
    """DropoutGrad with the mask packed, see `packed_mask`"""
    bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=dY.size, bitorder="little")
    return dropout_grad(dY, bits.reshape(dY.shape), ratio, training_mode)


def packed_mask(mask: np.ndarray) -> np.ndarray:
    """The elements of `mask` in order as the bits of uint32 numbers, the lowest bit first"""
    bits = np.packbits(mask.reshape(-1), bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view("<u4").astype(np.uint32, copy=False)
