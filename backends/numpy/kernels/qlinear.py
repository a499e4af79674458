"""The quantized operators that ONNX Runtime's optimizer writes (com.microsoft): read, computed in double, and rounded once.

A tensor q stands for (q − zero point)·scale. A result y becomes round(y/scale) + zero point, held within its type.
QLinearAdd, QLinearMul and QLinearAveragePool give round(y/scale + zero point): another number where y/scale is halfway
and the zero point odd.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refgrad.backends.numpy.kernels.activation import leaky_relu, sigmoid, softmax, softmax_1
from refgrad.backends.numpy.kernels.pooling import average_pool
from refgrad.backends.numpy.kernels.quantization import centred, saturated
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Maybe = np.ndarray | None


def _read(q: Array, scale: Array, zero_point: Maybe) -> Array:
    return np.asarray(centred(q, zero_point) * scale.astype(np.float64))


def _written(y: Array, scale: Array, zero_point: Maybe, like: Array, together: bool = False) -> Array:
    """`y` in the type of the zero point, or of `like` where there is none; with `together` the sum is rounded"""
    zero = 0.0 if zero_point is None else zero_point.astype(np.float64)
    ratio, kind = y / scale.astype(np.float64), like.dtype if zero_point is None else zero_point.dtype
    return saturated(ratio + zero, 0.0, kind) if together else saturated(ratio, zero, kind)


def _binary(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def call(
        A: Array, a: Array, a_zero: Maybe, B: Array, b: Array, b_zero: Maybe, c: Array, c_zero: Maybe = None
    ) -> Array:
        return _written(function(_read(A, a, a_zero), _read(B, b, b_zero)), c, c_zero, A, together=True)

    return call


kernel("QLinearAdd", domain=MICROSOFT, fresh=True)(_binary(np.add))
kernel("QLinearMul", domain=MICROSOFT, fresh=True)(_binary(np.multiply))


@kernel("QLinearSigmoid", domain=MICROSOFT, fresh=True)
def qlinear_sigmoid(X: Array, x: Array, x_zero: Maybe, y: Array, y_zero: Maybe = None) -> Array:
    return _written(sigmoid(_read(X, x, x_zero)), y, y_zero, X)


@kernel("QLinearLeakyRelu", domain=MICROSOFT, fresh=True)
def qlinear_leaky_relu(
    X: Array, x: Array, x_zero: Maybe, y: Array, y_zero: Maybe = None, *, alpha: float = 0.01
) -> Array:
    return _written(leaky_relu(_read(X, x, x_zero), alpha=alpha), y, y_zero, X)


@kernel("QLinearSoftmax", domain=MICROSOFT, fresh=True)
def qlinear_softmax(X: Array, x: Array, x_zero: Maybe, y: Array, y_zero: Maybe, *, axis: int = -1, opset: int) -> Array:
    """Along `axis`, or before opset 13 over all axes from there on as one"""
    function = softmax if opset >= 13 else softmax_1
    return _written(function(_read(X, x, x_zero), axis=axis), y, y_zero, X)


@kernel("QLinearWhere", domain=MICROSOFT, fresh=True)
def qlinear_where(
    condition: Array, X: Array, x: Array, x_zero: Array, Y: Array, y: Array, y_zero: Array, z: Array, z_zero: Array
) -> Array:
    return _written(np.where(condition, _read(X, x, x_zero), _read(Y, y, y_zero)), z, z_zero, X)


@kernel("QLinearConcat", domain=MICROSOFT, fresh=True)
def qlinear_concat(y: Array, y_zero: Array, *inputs: Array, axis: int) -> Array:
    """The tensors side by side; the inputs are in threes: a tensor, its scale and its zero point"""
    if len(inputs) % 3:
        raise ValueError(f"{len(inputs)} inputs follow the zero point; each tensor has a scale and a zero point")
    parts = [_read(*inputs[k : k + 3]) for k in range(0, len(inputs), 3)]
    return _written(np.concatenate(parts, axis), y, y_zero, inputs[0])


@kernel("QLinearReduceMean", domain=MICROSOFT, fresh=True)
def qlinear_reduce_mean(
    X: Array,
    x: Array,
    x_zero: Maybe,
    y: Array,
    y_zero: Maybe = None,
    *,
    axes: list[int] | None = None,
    keepdims: int = 1,
) -> Array:
    over = tuple(axes) if axes else None
    return _written(_read(X, x, x_zero).mean(over, keepdims=bool(keepdims)), y, y_zero, X)


@kernel("QLinearGlobalAveragePool", domain=MICROSOFT, fresh=True)
def qlinear_global_average_pool(
    X: Array, x: Array, x_zero: Array, y: Array, y_zero: Array, *, channels_last: int = 0
) -> Array:
    over = tuple(range(1, X.ndim - 1)) if channels_last else tuple(range(2, X.ndim))
    return _written(_read(X, x, x_zero).mean(over, keepdims=True), y, y_zero, X)


@kernel("QLinearAveragePool", domain=MICROSOFT, fresh=True)
def qlinear_average_pool(
    X: Array,
    x: Array,
    x_zero: Maybe,
    y: Array,
    y_zero: Maybe = None,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    real = _read(X, x, x_zero)
    pooled = average_pool(
        np.moveaxis(real, -1, 1) if channels_last else real,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _written(np.moveaxis(pooled, 1, -1) if channels_last else pooled, y, y_zero, X, together=True)


@kernel("QGemm", domain=MICROSOFT, fresh=True)
def qgemm(
    A: Array,
    a: Array,
    a_zero: Array,
    B: Array,
    b: Array,
    b_zero: Array,
    C: Maybe = None,
    y: Maybe = None,
    y_zero: Maybe = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """alpha·a·b·((A − zero)·(B − zero) + C); float without y. The scale and zero point of B may be one per column"""
    left, right = centred(A, a_zero), centred(B.T if transB else B, b_zero)
    sums = (left.T if transA else left) @ right
    real = (sums if C is None else sums + C) * (alpha * a.astype(np.float64) * b.astype(np.float64))
    return real.astype(a.dtype) if y is None else _written(real, y, y_zero, A)
