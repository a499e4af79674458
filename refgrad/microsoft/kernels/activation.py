"""ONNX Runtime's activations, dropouts and softmaxes, and the activation of a fused operator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from refgrad.backends.numpy.kernels.activation import (
    celu,
    elu,
    gelu,
    hard_sigmoid,
    hard_swish,
    leaky_relu,
    quick_gelu,
    relu,
    selu,
    sigmoid,
    softmax_1,
    softmax_grad_1,
    softplus,
    softsign,
    tanh,
    thresholded_relu,
)
from refgrad.backends.numpy.kernels.normalization import (
    dropout,
    dropout_grad,
    packed_mask,
)
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.extend import Arguments, kernel, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Numbers = Sequence[float | None]


@kernel_of_body("BiasSoftmax", domain=MICROSOFT, in_float32=True, fresh=True)
def bias_softmax(args: Arguments) -> Array:
    """Softmax of data + bias over all axes from `axis` on, as one"""
    return softmax_1(args.data + args.bias, axis=args.axis)


@kernel_of_body("BiasDropout", domain=MICROSOFT, fresh=True)
def bias_dropout(args: Arguments) -> tuple[Array, Array]:
    """Dropout of data + bias, plus the residual"""
    y, mask = dropout(widened(args.data) + widened(args.bias), args.ratio, args.training_mode, seed=args.seed)
    return (y if args.residual is None else y + widened(args.residual)).astype(args.data.dtype, copy=False), mask


@kernel_of_body("BitmaskBiasDropout", domain=MICROSOFT, fresh=True)
def bitmask_bias_dropout(args: Arguments) -> tuple[Array, Array]:
    """BiasDropout with the mask packed, see `packed_mask`"""
    y, mask = bias_dropout(args.data, args.bias, args.residual, args.ratio, args.training_mode, seed=args.seed)
    return y, packed_mask(mask)


@kernel("BiasSoftmaxDropout", domain=MICROSOFT)
def bias_softmax_dropout(
    data: Array, bias: Array, ratio: Array | None = None, *, axis: int = 1, is_inner_broadcast: int, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Dropout of BiasSoftmax, always in training; its mask, and what it dropped from"""
    shares = bias_softmax(widened(data), widened(bias), axis=axis, is_inner_broadcast=is_inner_broadcast)
    y, mask = dropout(shares, ratio, np.array(True), seed=seed)
    return y.astype(data.dtype, copy=False), mask, shares.astype(data.dtype, copy=False)


@kernel("SoftmaxDropoutGrad", domain=MICROSOFT, fresh=True)
def softmax_dropout_grad(
    dY: Array, mask: Array, softmax_y: Array, ratio: Array | None = None, *, axis: int, seed: int = 0
) -> Array:
    """The gradient of BiasSoftmaxDropout: DropoutGrad in training, then SoftmaxGrad"""
    d = dropout_grad(widened(dY), mask, ratio, np.array(True))
    return softmax_grad_1(d, widened(softmax_y), axis=axis).astype(dY.dtype, copy=False)


@kernel_of_body("BiasSplitGelu", domain=MICROSOFT, in_float32=True, fresh=True)
def bias_split_gelu(args: Arguments) -> Array:
    """The left half of X + bias times Gelu of the right one"""
    if args.X.ndim != 3 or args.X.shape[-1] % 2:
        raise ValueError(f"X has the shape {list(args.X.shape)}; (N, S, D) is needed, D even")
    check_shape("bias", args.bias.shape, args.X.shape[-1:])
    left, right = np.split(args.X + args.bias, 2, -1)
    return np.asarray(left * gelu(np.ascontiguousarray(right), approximate="none"))


@kernel_of_body("ScaledSiLU", domain=MICROSOFT, fresh=True)
def scaled_silu(args: Arguments) -> Array:
    """z·σ(z), z = scale·X; each step is rounded"""
    if args.scale is not None and args.scale.size != 1:
        raise ValueError(f"scale has the shape {list(args.scale.shape)}; one number is needed")
    factor = args.alpha if args.scale is None else args.scale.reshape(()).astype(widened(args.X).dtype)
    z = widened(np.asarray(widened(args.X) * factor, args.X.dtype))
    gate = widened(np.asarray(sigmoid(z), args.X.dtype))
    return np.asarray(z * gate, args.X.dtype)


def plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else np.asarray(x + bias)


def activated(x: Array, name: str | None, given: Numbers) -> Array:
    """The activation of a fused operator; `given` are its parameters in order, as far as it has them.

    A default is a number of 32 bits, as an attribute that says it is.
    """

    def parameter(position: int, default: float) -> float:
        value = given[position] if position < len(given) else None
        return float(np.float32(default)) if value is None else value

    match name or "":
        case "":
            return x
        case "Relu":
            return relu(x)
        case "Tanh":
            return tanh(x)
        case "Sigmoid":
            return sigmoid(x)
        case "Softplus":
            return softplus(x)
        case "Softsign":
            return softsign(x)
        case "Gelu":
            return gelu(x, approximate="none")
        case "QuickGelu":
            return quick_gelu(x, alpha=parameter(0, 1.702))
        case "LeakyRelu":
            return leaky_relu(x, alpha=parameter(0, 0.01))
        case "ThresholdedRelu":
            return thresholded_relu(x, alpha=parameter(0, 1.0))
        case "Elu":
            return elu(x, alpha=parameter(0, 1.0))
        case "Celu":
            return celu(x, alpha=parameter(0, 1.0))
        case "Selu":
            return selu(x, alpha=parameter(0, 1.6732631921768188), gamma=parameter(2, 1.0507010221481323))
        case "HardSigmoid":
            return hard_sigmoid(x, alpha=parameter(0, 0.2), beta=parameter(1, 0.5))
        case "HardSwish":
            return hard_swish(x)
        case "Clip":
            return np.asarray(np.clip(x, parameter(0, -math.inf), parameter(1, math.inf)))
    raise ValueError(f"activation {name!r} is not supported")
