"""Activations and their gradients, in forms that neither overflow nor cancel."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.arithmetic import select
from refgrad.backends.numpy.kernels.erf import blockwise_memory, erf, erfc, single_gelu, single_gelu_slope
from refgrad.backends.numpy.kernels.operands import check_axis, check_expands, summed
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel, reuse, reuse_first
from refgrad.protos.domains import MICROSOFT

_SQRT_HALF = math.sqrt(0.5)
_EXPONENT = {2: 11, 4: 88, 8: 709}  # the exponential of this is finite, by the bytes of the type
_UNSHIFTED = 60  # where |x| is below, the exponentials and the sum of 2³⁶ of them are normal numbers in float32
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1/(1 + e^−x); where e^−x would be infinite it is eˣ"""
    y = np.asarray(np.negative(x))
    np.exp(y, out=y)
    y += 1
    np.divide(1, y, out=y)
    least = -_EXPONENT[x.dtype.itemsize]
    if x.size and not x.min() >= least:
        np.exp(x, out=y, where=x < least)
    return y


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    """Φ(x) = erfc(−x/√2)/2"""
    return np.asarray(0.5 * erfc(x * -_SQRT_HALF))


def _normal_pdf(x: np.ndarray) -> np.ndarray:
    """φ(x) = e^(−x²/2)/√(2π)"""
    return np.asarray(np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _tanh_cdf(x: np.ndarray) -> np.ndarray:
    """(1 + tanh u)/2 = sigmoid(2u), u = √(2/π)·(x + 0.044715·x³)"""
    u = np.asarray(np.square(x))
    u *= _TANH_CUBIC
    u += 1
    u *= x
    u *= 2 * _TANH_SCALE
    return sigmoid(u)


@kernel("Relu", fresh=True)
def relu(X: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    return np.asarray(np.maximum(X, X.dtype.type(0), out=reuse(_free, X.dtype, X)))


@kernel("ReluGrad", domain=MICROSOFT, fresh=True, abstract=reuse_first)
def relu_grad(dY: np.ndarray, X: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    """dX = dY where X > 0, else 0; the result Y gives the same as X"""
    return select(X > 0, dY, dY.dtype.type(0), reuse_first(dY, _free=_free))


@kernel("LeakyRelu", in_float32=True, fresh=True)
def leaky_relu(X: np.ndarray, *, alpha: float) -> np.ndarray:
    scaled = np.asarray(alpha * X)
    if 0 < alpha <= 1:
        return np.asarray(np.maximum(X, scaled, out=scaled if X.ndim else None))
    return select(X < 0, scaled, X)


@kernel("HardSwish", in_float32=True, fresh=True)
def hard_swish(X: np.ndarray) -> np.ndarray:
    """x·max(0, min(1, x/6 + 1/2)); the function body in onnx has the slope in float32"""
    slope = np.asarray(X / 6, X.dtype)
    slope += 0.5
    np.clip(slope, 0, 1, out=slope)
    slope *= X
    return slope


@kernel("LeakyReluGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def leaky_relu_grad(dY: np.ndarray, Y: np.ndarray, *, alpha: float = 0.01) -> np.ndarray:
    """dX = dY where Y > 0, else α·dY; Y has the sign of X where α > 0"""
    return select(Y > 0, dY, alpha * dY)


@kernel("Elu", in_float32=True, fresh=True)
def elu(X: np.ndarray, *, alpha: float) -> np.ndarray:
    """α·(eˣ − 1) where x < 0, else x"""
    below = np.asarray(np.minimum(X, X.dtype.type(0)))
    np.expm1(below, out=below)
    below *= alpha
    return select(X < 0, below, X)


@kernel("Selu", in_float32=True, fresh=True)
def selu(X: np.ndarray, *, alpha: float, gamma: float) -> np.ndarray:
    """γ·α·(eˣ − 1) where x ≤ 0, else γ·x"""
    y = elu(X, alpha=alpha)
    y *= gamma
    return y


@kernel("Celu", in_float32=True, fresh=True)
def celu(X: np.ndarray, *, alpha: float) -> np.ndarray:
    """max(0, x) + min(0, α·(e^(x/α) − 1))"""
    return np.asarray(np.maximum(X, 0) + np.minimum(alpha * np.expm1(X / alpha), 0))


@kernel("PRelu", since=7, in_float32=True, fresh=True)
def prelu(X: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """slope·x where x < 0, else x"""
    check_expands("slope", slope.shape, X.shape)
    return select(X < 0, np.asarray(slope * X), X)


@kernel("PRelu", in_float32=True, fresh=True)
def prelu_1(X: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Before opset 7 a slope for all, or one for each channel"""
    return prelu(X, slope.reshape(()) if slope.size == 1 else slope.reshape(-1, *[1] * (X.ndim - 2)))


@kernel("ThresholdedRelu", fresh=True)
def thresholded_relu(X: np.ndarray, *, alpha: float) -> np.ndarray:
    return select(X.dtype.type(alpha) < X, X, np.zeros((), X.dtype))


@kernel("Shrink", in_float32=True, fresh=True)
def shrink(X: np.ndarray, *, bias: float, lambd: float) -> np.ndarray:
    """x + bias where x < −λ, x − bias where x > λ, else 0; the bias in the type of x"""
    b, zero = X.dtype.type(bias), np.zeros((), X.dtype)
    return select(np.less(X, -lambd), np.asarray(X + b), select(np.greater(X, lambd), np.asarray(X - b), zero))


@kernel("HardSigmoid", in_float32=True, fresh=True)
def hard_sigmoid(X: np.ndarray, *, alpha: float, beta: float) -> np.ndarray:
    """max(0, min(1, α·x + β))"""
    return np.asarray(np.clip(alpha * X + beta, 0, 1))


@kernel("Swish", in_float32=True, fresh=True)
def swish(X: np.ndarray, *, alpha: float) -> np.ndarray:
    """x·sigmoid(α·x)"""
    y = sigmoid(X if alpha == 1 else np.asarray(alpha * X))
    y *= X
    return y


@kernel("SwiGLU", in_float32=True, fresh=True)
def swiglu(A: np.ndarray, B: np.ndarray, *, alpha: float) -> np.ndarray:
    """a·sigmoid(α·a)·b"""
    if A.shape != B.shape:
        raise ValueError(f"A has the shape {list(A.shape)} and B {list(B.shape)}; they must be the same")
    return np.asarray(swish(A, alpha=alpha) * B)


@kernel("Mish", in_float32=True, fresh=True)
def mish(X: np.ndarray) -> np.ndarray:
    """x·tanh(log(1 + eˣ))"""
    y = softplus(X)
    np.tanh(y, out=y)
    y *= X
    return y


@kernel("Sigmoid", in_float32=True, fresh=True)
def sigmoid_kernel(X: np.ndarray) -> np.ndarray:
    return sigmoid(X)


@kernel("SigmoidGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def sigmoid_grad(dY: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """dX = dY·Y·(1 − Y)"""
    d = np.asarray(1 - Y)
    d *= Y
    d *= dY
    return d


@kernel("Tanh", in_float32=True, fresh=True)
def tanh(X: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    return np.asarray(np.tanh(X, out=reuse(_free, X.dtype, X)))


@kernel("TanhGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def tanh_grad(dY: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """dX = dY·(1 − Y²)"""
    d = np.asarray(1 - Y)
    d *= dY
    d *= 1 + Y
    return d


def _erf_memory(X: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    return blockwise_memory(X, reuse(_free, X.dtype, X))


@kernel("Erf", in_float32=True, fresh=True, abstract=_erf_memory)
def erf_kernel(X: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    return erf(X, reuse(_free, X.dtype, X))


def _as_large(X: np.ndarray) -> None:
    """The function takes an array as large as its result."""
    need(X.nbytes)


@kernel("Softplus", in_float32=True, fresh=True, abstract=_as_large)
def softplus(X: np.ndarray) -> np.ndarray:
    """log(1 + eˣ) = max(x, 0) + log1p(e^−|x|)"""
    y = np.asarray(np.abs(X))
    np.negative(y, out=y)
    np.exp(y, out=y)
    np.log1p(y, out=y)
    y += np.maximum(X, 0)
    return y


@kernel("Softsign", in_float32=True, fresh=True)
def softsign(X: np.ndarray) -> np.ndarray:
    """x/(1 + |x|)"""
    return np.asarray(X / (1 + np.abs(X)))


def _gelu_memory(X: np.ndarray, *, approximate: str, _free: tuple[bool, ...] = ()) -> np.ndarray | None:
    if approximate == "tanh":
        _as_large(X)
        return None
    return _erf_memory(X, _free=_free)


@kernel("Gelu", in_float32=True, fresh=True, abstract=_gelu_memory)
def gelu(X: np.ndarray, *, approximate: str, _free: tuple[bool, ...] = ()) -> np.ndarray:
    """x·Φ(x), or its tanh approximation"""
    if approximate == "tanh":
        y = _tanh_cdf(X)
        y *= X
        return y
    if X.dtype == np.float32:
        return single_gelu(X, reuse(_free, X.dtype, X))
    return np.asarray(X * _normal_cdf(X))


@kernel("Gelu", "BiasGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def gelu_microsoft(X: np.ndarray, B: np.ndarray | None = None) -> np.ndarray:
    """x·Φ(x) at X + B"""
    return gelu(X if B is None else X + B, approximate="none")


@kernel("FastGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def fast_gelu(X: np.ndarray, B: np.ndarray | None = None) -> np.ndarray:
    if B is not None and B.shape != X.shape[-1:]:
        raise ValueError(
            f"bias has the shape {list(B.shape)}; it has one number for each of the last axis: {list(X.shape[-1:])}"
        )
    return gelu(X if B is None else X + B, approximate="tanh")


@kernel("QuickGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def quick_gelu(X: np.ndarray, *, alpha: float = 1.702) -> np.ndarray:
    """x·sigmoid(α·x)"""
    return np.asarray(X * sigmoid(alpha * X))


@kernel("GeluGrad", "BiasGeluGrad_dX", domain=MICROSOFT, in_float32=True, fresh=True)
def gelu_grad(dY: np.ndarray, X: np.ndarray, B: np.ndarray | None = None) -> np.ndarray:
    """dX = dY·(Φ(x) + x·φ(x)) at X + B"""
    x = X if B is None else X + B
    slope = single_gelu_slope(x) if x.dtype == np.float32 else _normal_cdf(x) + x * _normal_pdf(x)
    return np.asarray(dY * slope)


@kernel("FastGeluGrad", "BiasFastGeluGrad_dX", domain=MICROSOFT, in_float32=True, fresh=True)
def fast_gelu_grad(dY: np.ndarray, X: np.ndarray, B: np.ndarray | None = None) -> np.ndarray:
    """dX = dY·(s + x·s·(1 − s)·2u'), s = sigmoid(2u), u' = √(2/π)·(1 + 3·0.044715·x²) at X + B

    Beyond ±100, where x² and x³ may overflow, s is 0 or 1, and the slope is the one at ±100.
    """
    x = np.clip(X if B is None else X + B, -100, 100)
    s = _tanh_cdf(x)
    slope = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
    return np.asarray(dY * (s + x * slope * s * (1 - s)))


@kernel("QuickGeluGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def quick_gelu_grad(dY: np.ndarray, X: np.ndarray, *, alpha: float = 1.702) -> np.ndarray:
    """dX = dY·s·(1 + α·x·(1 − s)), s = sigmoid(α·x)"""
    s = sigmoid(alpha * X)
    return np.asarray(dY * s * (1 + alpha * X * (1 - s)))


def _softmax_memory(x: np.ndarray, *, axis: int, _free: tuple[bool, ...] = ()) -> np.ndarray | None:
    """The sums along the axis."""
    need(x.nbytes // max(x.shape[axis], 1))
    return reuse(_free, x.dtype, x)


@kernel("Softmax", since=13, in_float32=True, fresh=True, abstract=_softmax_memory)
def softmax(x: np.ndarray, *, axis: int, _free: tuple[bool, ...] = ()) -> np.ndarray:
    if not x.size:
        return x.copy()
    into = reuse(_free, x.dtype, x)
    if x.dtype.itemsize >= 4 and x.min() > -_UNSHIFTED and x.max() < _UNSHIFTED:
        e = np.asarray(np.exp(x, out=into))
    else:
        e = np.asarray(np.subtract(x, x.max(axis, keepdims=True), out=into))
        np.exp(e, out=e)
    e /= summed(e, (axis,), keepdims=True)
    return e


def _log_softmax_memory(x: np.ndarray, *, axis: int, _free: tuple[bool, ...] = ()) -> np.ndarray | None:
    """The exponentials and their sums along the axis."""
    need(x.nbytes + x.nbytes // max(x.shape[axis], 1))
    return reuse(_free, x.dtype, x)


@kernel("LogSoftmax", since=13, in_float32=True, fresh=True, abstract=_log_softmax_memory)
def log_softmax(x: np.ndarray, *, axis: int, _free: tuple[bool, ...] = ()) -> np.ndarray:
    if not x.size:
        return x.copy()
    shifted = np.asarray(np.subtract(x, x.max(axis, keepdims=True), out=reuse(_free, x.dtype, x)))
    shifted -= np.log(summed(np.exp(shifted), (axis,), keepdims=True))
    return shifted


@kernel("Hardmax", since=13, fresh=True)
def hardmax(x: np.ndarray, *, axis: int) -> np.ndarray:
    """1 at the first largest element, 0 elsewhere."""
    y = np.zeros_like(x)
    if x.size:
        np.put_along_axis(y, x.argmax(axis, keepdims=True), 1, axis)
    return y


@kernel("Hardmax", fresh=True)
def hardmax_1(x: np.ndarray, *, axis: int) -> np.ndarray:
    """Over all axes from `axis` on, as one."""
    return hardmax(_rows(x, axis), axis=1).reshape(x.shape)


@kernel("Softmax", in_float32=True, fresh=True)
def softmax_1(x: np.ndarray, *, axis: int) -> np.ndarray:
    """Over all axes from `axis` on, as one."""
    return softmax(_rows(x, axis), axis=1).reshape(x.shape)


@kernel("LogSoftmax", in_float32=True, fresh=True)
def log_softmax_1(x: np.ndarray, *, axis: int) -> np.ndarray:
    """Over all axes from `axis` on, as one."""
    return log_softmax(_rows(x, axis), axis=1).reshape(x.shape)


@kernel("SoftmaxGrad_13", domain=MICROSOFT, in_float32=True, fresh=True)
def softmax_grad(dY: np.ndarray, Y: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """dX = Y·(dY − Σ_axis dY·Y)"""
    d = np.asarray(dY * Y)
    np.subtract(dY, summed(d, (axis,), keepdims=True), out=d)
    d *= Y
    return d


@kernel("LogSoftmaxGrad_13", domain=MICROSOFT, in_float32=True, fresh=True)
def log_softmax_grad(dY: np.ndarray, Y: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """dX = dY − e^Y·Σ_axis dY"""
    d = np.asarray(np.exp(Y))
    d *= summed(dY, (axis,), keepdims=True)
    np.subtract(dY, d, out=d)
    return d


@kernel("SoftmaxGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def softmax_grad_1(dY: np.ndarray, Y: np.ndarray, *, axis: int = 1) -> np.ndarray:
    """The same over all axes from `axis` on, as one"""
    return softmax_grad(_rows(dY, axis), _rows(Y, axis), axis=1).reshape(dY.shape)


@kernel("LogSoftmaxGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def log_softmax_grad_1(dY: np.ndarray, Y: np.ndarray, *, axis: int = 1) -> np.ndarray:
    """The same over all axes from `axis` on, as one"""
    return log_softmax_grad(_rows(dY, axis), _rows(Y, axis), axis=1).reshape(dY.shape)


def _rows(x: np.ndarray, axis: int) -> np.ndarray:
    """(axes before `axis`) × (the others)"""
    split = check_axis(axis, x.ndim) if x.ndim else 0
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))
