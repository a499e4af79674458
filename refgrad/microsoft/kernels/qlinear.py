"""ONNX Runtime's operators of quantized tensors: read, computed in double, and rounded once.

A tensor q stands for (q − zero point)·scale. A result y becomes round(y/scale) + zero point, held within its type.
QLinearAdd, QLinearMul and QLinearAveragePool give round(y/scale + zero point): another number where y/scale is halfway
and the zero point odd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels import quantization as onnx_kernels
from refgrad.backends.numpy.kernels.activation import leaky_relu, sigmoid, softmax, softmax_1
from refgrad.backends.numpy.kernels.operands import check_axis, check_shape
from refgrad.backends.numpy.kernels.pooling import average_pool
from refgrad.backends.numpy.kernels.quantization import dynamic_quantize_linear, saturated
from refgrad.backends.numpy.registry import broadcasts
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.attention import attention
from refgrad.microsoft.kernels.normalization import embed_layer_normalization
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Maybe = np.ndarray | None


def read(q: Array, scale: Array, zero_point: Maybe = None) -> Array:
    return np.asarray((q.astype(np.float64) - _single("zero point", zero_point)) * _single("scale", scale))


def _single(what: str, parameter: Maybe) -> float:
    """A scale or a zero point for all, which may have an axis of 1; 0 where there is none."""
    if parameter is None:
        return 0.0
    if parameter.size != 1 or parameter.ndim > 1:
        raise ValueError(f"a {what} has the shape {list(parameter.shape)}; it is a scalar, one for the whole tensor")
    return float(parameter.reshape(())[()])


def for_columns(what: str, parameter: Maybe, columns: int) -> Array:
    """A scale or a zero point for all or for each column, in double; 0 where there is none."""
    if parameter is None:
        return np.zeros(())
    if parameter.ndim > 1 or parameter.size not in (1, columns):
        raise ValueError(
            f"{what} has the shape {list(parameter.shape)}; it is a scalar, or has one number for each of {columns} columns"
        )
    return parameter.astype(np.float64)


def written(y: Array, scale: Array, zero_point: Maybe, like: Array, together: bool = False) -> Array:
    """`y` in the type of the zero point, or of `like` where there is none; with `together` the sum is rounded"""
    zero = _single("zero point", zero_point)
    ratio, kind = y / _single("scale", scale), like.dtype if zero_point is None else zero_point.dtype
    return saturated(ratio + zero, 0.0, kind) if together else saturated(ratio, zero, kind)


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Arguments], Array]:
    def call(args: Arguments) -> Array:
        a, b = read(args.A, args.A_scale, args.A_zero_point), read(args.B, args.B_scale, args.B_zero_point)
        return written(function(a, b), args.C_scale, args.C_zero_point, args.A, together=True)

    return call


kernel_of_body("QLinearAdd", domain=MICROSOFT, fresh=True)(_binary(np.add))
kernel_of_body("QLinearMul", domain=MICROSOFT, fresh=True)(_binary(np.multiply))


@kernel_of_body("QLinearSigmoid", domain=MICROSOFT, fresh=True)
def qlinear_sigmoid(args: Arguments) -> Array:
    return written(sigmoid(read(args.X, args.X_scale, args.X_zero_point)), args.Y_scale, args.Y_zero_point, args.X)


@kernel_of_body("QLinearLeakyRelu", domain=MICROSOFT, fresh=True)
def qlinear_leaky_relu(args: Arguments) -> Array:
    return written(
        leaky_relu(read(args.X, args.X_scale, args.X_zero_point), alpha=args.alpha),
        args.Y_scale,
        args.Y_zero_point,
        args.X,
    )


@kernel_of_body("QLinearSoftmax", domain=MICROSOFT, fresh=True)
def qlinear_softmax(args: Arguments) -> Array:
    """Along `axis`, or before opset 13 over all axes from there on as one"""
    function = softmax if args.opset >= 13 else softmax_1
    return written(
        function(read(args.X, args.X_scale, args.x_zero_point), axis=args.axis), args.y_scale, args.y_zero_point, args.X
    )


@kernel_of_body("QLinearWhere", domain=MICROSOFT, fresh=True)
def qlinear_where(args: Arguments) -> Array:
    return written(
        np.where(
            args.condition, read(args.X, args.x_scale, args.x_zero_point), read(args.Y, args.y_scale, args.y_zero_point)
        ),
        args.z_scale,
        args.z_zero_point,
        args.X,
    )


@kernel_of_body("QLinearConcat", domain=MICROSOFT, fresh=True)
def qlinear_concat(args: Arguments) -> Array:
    """The tensors side by side; the inputs are in threes: a tensor, its scale and its zero point"""
    parts = [read(*args.inputs[k : k + 3]) for k in range(0, len(args.inputs), 3)]
    return written(np.concatenate(parts, args.axis), args.Y_scale, args.Y_zero_point, args.inputs[0])


@kernel_of_body("QLinearReduceMean", domain=MICROSOFT, fresh=True)
def qlinear_reduce_mean(args: Arguments) -> Array:
    """The mean over `axes`"""
    over = tuple(check_axis(axis, args.data.ndim) for axis in args.axes)
    mean = read(args.data, args.data_scale, args.data_zero_point).mean(over or None, keepdims=bool(args.keepdims))
    return written(mean, args.reduced_scale, args.reduced_zero_point, args.data)


@kernel_of_body("QLinearGlobalAveragePool", domain=MICROSOFT, fresh=True)
def qlinear_global_average_pool(args: Arguments) -> Array:
    over = tuple(range(1, args.X.ndim - 1)) if args.channels_last else tuple(range(2, args.X.ndim))
    return written(
        read(args.X, args.x_scale, args.x_zero_point).mean(over, keepdims=True), args.y_scale, args.y_zero_point, args.X
    )


@kernel_of_body("QLinearAveragePool", domain=MICROSOFT, fresh=True)
def qlinear_average_pool(args: Arguments) -> Array:
    real = read(args.X, args.x_scale, args.x_zero_point)
    pooled = average_pool(
        np.moveaxis(real, -1, 1) if args.channels_last else real,
        auto_pad=args.auto_pad,
        ceil_mode=args.ceil_mode,
        count_include_pad=args.count_include_pad,
        kernel_shape=args.kernel_shape,
        pads=args.pads,
        strides=args.strides,
    )
    return written(
        np.moveaxis(pooled, 1, -1) if args.channels_last else pooled,
        args.y_scale,
        args.y_zero_point,
        args.X,
        together=True,
    )


@kernel_of_body("QLinearConv", domain=MICROSOFT, fresh=True)
def qlinear_conv(args: Arguments) -> Array:
    """As QLinearConv of ai.onnx; with channels_last the channels of x and y are in the last axis"""
    y = onnx_kernels.qlinear_conv(
        np.moveaxis(args.x, -1, 1) if args.channels_last else args.x,
        *(
            args.x_scale,
            args.x_zero_point,
            args.w,
            args.w_scale,
            args.w_zero_point,
            args.y_scale,
            args.y_zero_point,
            args.B,
        ),
        auto_pad=args.auto_pad,
        dilations=args.dilations,
        group=args.group,
        kernel_shape=args.kernel_shape,
        pads=args.pads,
        strides=args.strides,
    )
    return np.ascontiguousarray(np.moveaxis(y, 1, -1)) if args.channels_last else y


@kernel_of_body("DynamicQuantizeMatMul", domain=MICROSOFT, fresh=True)
def dynamic_quantize_matmul(args: Arguments) -> Array:
    """A is quantized by its range, with one scale for all of its elements"""
    return _product(args.A.dtype, *dynamic_quantize_linear(args.A), args.B, args.b_scale, args.b_zero_point, args.bias)


@kernel_of_body("MatMulIntegerToFloat", domain=MICROSOFT, fresh=True)
def matmul_integer_to_float(args: Arguments) -> Array:
    """The scales and zero points of A and of B may be one for each of their columns"""
    return _product(
        args.a_scale.dtype, args.A, args.a_scale, args.a_zero_point, args.B, args.b_scale, args.b_zero_point, args.bias
    )


def _product(
    kind: np.dtype[Any],
    A: Array,
    a_scale: Array,
    a_zero_point: Maybe,
    B: Array,
    b_scale: Array,
    b_zero_point: Maybe,
    bias: Maybe,
) -> Array:
    if min(A.ndim, B.ndim) < 1:
        raise ValueError(f"A has rank {A.ndim} and B {B.ndim}; a product of matrices has no scalars")
    inner, columns = A.shape[-1], B.shape[-1] if B.ndim > 1 else 1
    a = (A - for_columns("a_zero_point", a_zero_point, inner)) * for_columns("a_scale", a_scale, inner)
    b = (B - for_columns("b_zero_point", b_zero_point, columns)) * for_columns("b_scale", b_scale, columns)
    y = a @ b
    if bias is not None:
        check_shape("bias", bias.shape, (columns,))
        y = y + bias
    return np.asarray(y.astype(kind))


@kernel_of_body("QAttention", domain=MICROSOFT, fresh=True)
def qattention(args: Arguments, *, _wanted: tuple[bool, ...]) -> tuple[Array, ...]:
    """Attention of numbers in double that input and weight stand for"""
    columns = args.weight.shape[-1]
    zero, factor = (
        for_columns(f"weight_{n}", v, columns)
        for n, v in (("zero_point", args.weight_zero_point), ("scale", args.weight_scale))
    )
    set_ = {} if args.mask_filter_value is None else {"mask_filter_value": args.mask_filter_value}
    results = attention(
        read(args.input, args.input_scale, args.input_zero_point),
        (args.weight - zero) * factor,
        args.bias.astype(np.float64),
        args.mask_index,
        None if args.past is None else args.past.astype(np.float64),
        num_heads=args.num_heads,
        scale=args.scale,
        unidirectional=args.unidirectional,
        _wanted=_wanted,
        **set_,
    )
    return tuple(value.astype(args.bias.dtype) for value in results)


@kernel_of_body("QGemm", domain=MICROSOFT, fresh=True)
def qgemm(args: Arguments) -> Array:
    """alpha·a·b·((A − zero)·(B − zero) + C); float without y. The scale and zero point of B may be one per column"""
    right = args.B.T if args.transB else args.B
    zero, factor = (
        for_columns(f"b_{n}", v, right.shape[1])
        for n, v in (("zero_point", args.b_zero_point), ("scale", args.b_scale))
    )
    left = args.A - _single("zero point", args.a_zero_point)
    sums = (left.T if args.transA else left) @ (right - zero)
    if args.C is not None and not broadcasts(args.C.shape, sums.shape):
        raise ValueError(f"C has the shape {list(args.C.shape)}, which does not broadcast to {list(sums.shape)}")
    real = (sums if args.C is None else sums + args.C) * (args.alpha * _single("scale", args.a_scale) * factor)
    return (
        real.astype(args.a_scale.dtype)
        if args.y_scale is None
        else written(real, args.y_scale, args.y_zero_point, args.A)
    )


@kernel_of_body("QEmbedLayerNormalization", domain=MICROSOFT, fresh=True)
def qembed_layer_normalization(args: Arguments) -> tuple[Array, Array]:
    """EmbedLayerNormalization in double"""
    y, counted, _ = embed_layer_normalization(
        args.input_ids,
        args.segment_ids,
        read(args.word_embedding_quant, args.word_embedding_scale, args.word_embedding_zero_point),
        read(args.position_embedding_quant, args.position_embedding_scale, args.position_embedding_zero_point),
        None
        if args.segment_embedding is None or args.segment_embedding_scale is None
        else read(args.segment_embedding, args.segment_embedding_scale, args.segment_embedding_zero_point),
        read(args.gamma_quant, args.gamma_scale, args.gamma_zero_point),
        read(args.beta_quant, args.beta_scale, args.beta_zero_point),
        args.mask,
        epsilon=args.epsilon,
    )
    return y.astype(args.word_embedding_scale.dtype), counted


@kernel_of_body("MatMulInteger16", domain=MICROSOFT, fresh=True)
def matmul_integer16(args: Arguments) -> Array:
    """A·B; of a sum that needs more, the last 32 bits are kept"""
    if min(args.A.ndim, args.B.ndim) < 1:
        raise ValueError(f"A has rank {args.A.ndim} and B {args.B.ndim}; a product of matrices has no scalars")
    return np.asarray((args.A.astype(np.int64) @ args.B.astype(np.int64)).astype(np.int32))


@kernel_of_body("MulInteger", domain=MICROSOFT, fresh=True)
def mul_integer(args: Arguments) -> Array:
    a, b = args.A - _single("zero point", args.A_zero_point), args.B - _single("zero point", args.B_zero_point)
    return np.asarray((a * b).astype(np.int32))


@kernel_of_body("ReduceSumInteger", domain=MICROSOFT, fresh=True)
def reduce_sum_integer(args: Arguments) -> Array:
    """Σ over the axes; the sum has a sign where the data have one"""
    for axis in args.axes:
        check_axis(axis, args.data.ndim)
    kind = np.int32 if args.data.dtype.kind == "i" else np.uint32
    return np.asarray(args.data.sum(tuple(args.axes), kind, keepdims=bool(args.keepdims)))
