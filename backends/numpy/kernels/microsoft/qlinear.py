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
from refgrad.backends.numpy.kernels.microsoft.attention import attention
from refgrad.backends.numpy.kernels.microsoft.normalization import embed_layer_normalization
from refgrad.backends.numpy.kernels.operands import check_axis, check_shape
from refgrad.backends.numpy.kernels.pooling import average_pool
from refgrad.backends.numpy.kernels.quantization import dynamic_quantize_linear, saturated
from refgrad.backends.numpy.kernels.recurrent import directions_of
from refgrad.backends.numpy.registry import broadcasts, kernel
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


def _binary(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def call(
        A: Array, a: Array, a_zero: Maybe, B: Array, b: Array, b_zero: Maybe, c: Array, c_zero: Maybe = None
    ) -> Array:
        return written(function(read(A, a, a_zero), read(B, b, b_zero)), c, c_zero, A, together=True)

    return call


kernel("QLinearAdd", domain=MICROSOFT, fresh=True)(_binary(np.add))
kernel("QLinearMul", domain=MICROSOFT, fresh=True)(_binary(np.multiply))


@kernel("QLinearSigmoid", domain=MICROSOFT, fresh=True)
def qlinear_sigmoid(X: Array, x: Array, x_zero: Maybe, y: Array, y_zero: Maybe = None) -> Array:
    return written(sigmoid(read(X, x, x_zero)), y, y_zero, X)


@kernel("QLinearLeakyRelu", domain=MICROSOFT, fresh=True)
def qlinear_leaky_relu(
    X: Array, x: Array, x_zero: Maybe, y: Array, y_zero: Maybe = None, *, alpha: float = 0.01
) -> Array:
    return written(leaky_relu(read(X, x, x_zero), alpha=alpha), y, y_zero, X)


@kernel("QLinearSoftmax", domain=MICROSOFT, fresh=True)
def qlinear_softmax(X: Array, x: Array, x_zero: Maybe, y: Array, y_zero: Maybe, *, axis: int = -1, opset: int) -> Array:
    """Along `axis`, or before opset 13 over all axes from there on as one"""
    function = softmax if opset >= 13 else softmax_1
    return written(function(read(X, x, x_zero), axis=axis), y, y_zero, X)


@kernel("QLinearWhere", domain=MICROSOFT, fresh=True)
def qlinear_where(
    condition: Array, X: Array, x: Array, x_zero: Array, Y: Array, y: Array, y_zero: Array, z: Array, z_zero: Array
) -> Array:
    return written(np.where(condition, read(X, x, x_zero), read(Y, y, y_zero)), z, z_zero, X)


@kernel("QLinearConcat", domain=MICROSOFT, fresh=True)
def qlinear_concat(y: Array, y_zero: Array, *inputs: Array, axis: int) -> Array:
    """The tensors side by side; the inputs are in threes: a tensor, its scale and its zero point"""
    if len(inputs) % 3:
        raise ValueError(f"{len(inputs)} inputs follow the zero point; each tensor has a scale and a zero point")
    parts = [read(*inputs[k : k + 3]) for k in range(0, len(inputs), 3)]
    return written(np.concatenate(parts, axis), y, y_zero, inputs[0])


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
    for axis in axes or ():
        check_axis(axis, X.ndim)
    over = tuple(axes) if axes else None
    return written(read(X, x, x_zero).mean(over, keepdims=bool(keepdims)), y, y_zero, X)


@kernel("QLinearGlobalAveragePool", domain=MICROSOFT, fresh=True)
def qlinear_global_average_pool(
    X: Array, x: Array, x_zero: Array, y: Array, y_zero: Array, *, channels_last: int = 0
) -> Array:
    over = tuple(range(1, X.ndim - 1)) if channels_last else tuple(range(2, X.ndim))
    return written(read(X, x, x_zero).mean(over, keepdims=True), y, y_zero, X)


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
    real = read(X, x, x_zero)
    pooled = average_pool(
        np.moveaxis(real, -1, 1) if channels_last else real,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return written(np.moveaxis(pooled, 1, -1) if channels_last else pooled, y, y_zero, X, together=True)


@kernel("QLinearConv", domain=MICROSOFT, fresh=True)
def qlinear_conv(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    w: Array,
    w_scale: Array,
    w_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    B: Maybe = None,
    *,
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    """As QLinearConv of ai.onnx; with channels_last the channels of x and y are in the last axis"""
    y = onnx_kernels.qlinear_conv(
        np.moveaxis(x, -1, 1) if channels_last else x,
        *(x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return np.ascontiguousarray(np.moveaxis(y, 1, -1)) if channels_last else y


@kernel("DynamicQuantizeMatMul", domain=MICROSOFT, fresh=True)
def dynamic_quantize_matmul(
    A: Array, B: Array, b_scale: Array, b_zero_point: Maybe = None, bias: Maybe = None
) -> Array:
    """A is quantized by its range, with one scale for all of its elements"""
    return _product(A.dtype, *dynamic_quantize_linear(A), B, b_scale, b_zero_point, bias)


@kernel("MatMulIntegerToFloat", domain=MICROSOFT, fresh=True)
def matmul_integer_to_float(
    A: Array,
    B: Array,
    a_scale: Array,
    b_scale: Array,
    a_zero_point: Maybe = None,
    b_zero_point: Maybe = None,
    bias: Maybe = None,
) -> Array:
    """The scales and zero points of A and of B may be one for each of their columns"""
    return _product(a_scale.dtype, A, a_scale, a_zero_point, B, b_scale, b_zero_point, bias)


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


@kernel("QAttention", domain=MICROSOFT, fresh=True)
def qattention(
    input: Array,
    weight: Array,
    bias: Array,
    input_scale: Array,
    weight_scale: Array,
    mask_index: Maybe = None,
    input_zero_point: Maybe = None,
    weight_zero_point: Maybe = None,
    past: Maybe = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
    _wanted: tuple[bool, ...],
) -> tuple[Array, ...]:
    """Attention of numbers in double that input and weight stand for"""
    if do_rotary:
        raise ValueError("do_rotary=1 is not supported")
    columns = weight.shape[-1]
    if mask_index is not None and mask_index.ndim in (2, 3):
        keys = input.shape[1] + (0 if past is None else past.shape[3])
        check_shape("mask_index", mask_index.shape, (*input.shape[: mask_index.ndim - 1], keys))
    zero, factor = (
        for_columns(f"weight_{n}", v, columns) for n, v in (("zero_point", weight_zero_point), ("scale", weight_scale))
    )
    results = attention(
        read(input, input_scale, input_zero_point),
        (weight - zero) * factor,
        bias.astype(np.float64),
        mask_index,
        None if past is None else past.astype(np.float64),
        mask_filter_value=mask_filter_value,
        num_heads=num_heads,
        past_present_share_buffer=past_present_share_buffer,
        scale=scale,
        unidirectional=unidirectional,
        _wanted=_wanted,
    )
    return tuple(value.astype(bias.dtype) for value in results)


@kernel("DynamicQuantizeLSTM", domain=MICROSOFT, fresh=True)
def dynamic_quantize_lstm(
    X: Array,
    W: Array,
    R: Array,
    B: Maybe,
    sequence_lens: Maybe,
    initial_h: Maybe,
    initial_c: Maybe,
    P: Maybe,
    W_scale: Array,
    W_zero_point: Array,
    R_scale: Array,
    R_zero_point: Array,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Array, Array, Array]:
    """Step k is the k-th step of every sequence that has one, in the order of its direction; in double

    By their range, a step quantizes the states of its own sequences and of the sequences that the step before ended.
    """
    ways = directions_of(("Sigmoid", "Tanh", "Tanh"), direction, activations, activation_alpha, activation_beta, clip)
    for name, value in (("X", X), ("W", W), ("R", R)):
        if value.ndim != 3:
            raise ValueError(f"{name} has rank {value.ndim}; rank 3 is needed")
    (time, batch, inputs), (_, hidden, _), count = X.shape, R.shape, len(ways)
    if hidden_size is not None and hidden_size != hidden:
        raise ValueError(f"hidden_size is {hidden_size}, and R {list(R.shape)} has {hidden} hidden units")
    for name, given, needed in (
        ("W", W, (count, inputs, 4 * hidden)),
        ("R", R, (count, hidden, 4 * hidden)),
        ("B", B, (count, 8 * hidden)),
        ("sequence_lens", sequence_lens, (batch,)),
        ("initial_h", initial_h, (count, batch, hidden)),
        ("initial_c", initial_c, (count, batch, hidden)),
        ("P", P, (count, 3 * hidden)),
    ):
        if given is not None:
            check_shape(name, given.shape, needed)
    lengths = np.full(batch, time) if sequence_lens is None else sequence_lens
    if sequence_lens is not None and ((lengths < 1) | (lengths > time)).any():
        raise ValueError(f"sequence_lens is {lengths.tolist()}; its numbers are from 1 to {time}")
    weights = [
        (q - _by_direction(f"{name}_zero_point", zero, q)) * _by_direction(f"{name}_scale", scale, q)
        for name, q, scale, zero in (("W", W, W_scale, W_zero_point), ("R", R, R_scale, R_zero_point))
    ]
    Y = np.zeros((time, count, batch, hidden))
    Y_h, Y_c = (np.zeros((count, batch, hidden)) if v is None else v.astype(np.float64) for v in (initial_h, initial_c))
    x = _through_bytes(X[: lengths.max(initial=0)])
    for way, (backward, (f, g, h)) in enumerate(ways):
        w, r = weights[0][way], weights[1][way]
        bias = 0.0 if B is None else B[way].reshape(2, -1).sum(0, np.float64)
        peep_i, peep_o, peep_f = np.zeros((3, hidden)) if P is None else P[way].reshape(3, hidden)
        for k in range(len(x)):
            rows = np.flatnonzero(k < lengths)
            places = lengths[rows] - 1 - k if backward else np.full(len(rows), k)
            read = np.where((k <= lengths)[:, np.newaxis], Y_h[way], 0)
            before = _through_bytes(read.astype(X.dtype))[rows]
            C = Y_c[way, rows]
            i, o, forget, c = np.split(x[places, rows] @ w + before @ r + bias, 4, axis=1)
            i = f(i + peep_i * C)
            C = (1 - i if input_forget else f(forget + peep_f * C)) * C + i * g(c)
            Y_c[way, rows], Y_h[way, rows] = C, f(o + peep_o * C) * h(C)
            Y[places, way, rows] = Y_h[way, rows]
    return Y.astype(X.dtype), Y_h.astype(X.dtype), Y_c.astype(X.dtype)


def _by_direction(name: str, parameter: Array, q: Array) -> Array:
    """One for each direction or for each of its columns, in double."""
    count, _, columns = q.shape
    if parameter.shape not in ((count,), (count, columns)):
        raise ValueError(
            f"{name} has the shape {list(parameter.shape)}; it is [{count}], or [{count}, {columns}] with one for each column"
        )
    return parameter.astype(np.float64).reshape(count, 1, -1)


def _through_bytes(x: Array) -> Array:
    """`x` quantized by its range and dequantized, in double."""
    q, scale, zero = dynamic_quantize_linear(x)
    return np.asarray((q.astype(np.float64) - zero) * scale)


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
    for name, matrix in (("A", A), ("B", B)):
        if matrix.ndim != 2:
            raise ValueError(f"{name} has rank {matrix.ndim}; it is a matrix")
    right = B.T if transB else B
    if b.shape != b_zero.shape:
        raise ValueError(
            f"b_scale has the shape {list(b.shape)} and b_zero_point {list(b_zero.shape)}; they have the same"
        )
    zero, factor = (for_columns(f"b_{n}", v, right.shape[1]) for n, v in (("zero_point", b_zero), ("scale", b)))
    left = A - _single("zero point", a_zero)
    sums = (left.T if transA else left) @ (right - zero)
    if C is not None and not broadcasts(C.shape, sums.shape):
        raise ValueError(f"C has the shape {list(C.shape)}, which does not broadcast to {list(sums.shape)}")
    real = (sums if C is None else sums + C) * (alpha * _single("scale", a) * factor)
    return real.astype(a.dtype) if y is None else written(real, y, y_zero, A)


@kernel("QEmbedLayerNormalization", domain=MICROSOFT, fresh=True)
def qembed_layer_normalization(
    input_ids: Array,
    segment_ids: Maybe,
    words: Array,
    positions: Array,
    segments: Maybe,
    gamma: Array,
    beta: Array,
    mask: Maybe,
    of_words: Array,
    of_positions: Array,
    of_segments: Maybe,
    of_gamma: Array,
    of_beta: Array,
    words_zero: Array,
    positions_zero: Array,
    segments_zero: Maybe,
    gamma_zero: Array,
    beta_zero: Array,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, Array]:
    """EmbedLayerNormalization in double"""
    given = [value is not None for value in (segment_ids, segments, of_segments, segments_zero)]
    if any(given) and not all(given):
        raise ValueError(
            "segment_ids, segment_embedding, its scale and its zero point are given together, or none of them"
        )
    y, counted, _ = embed_layer_normalization(
        input_ids,
        segment_ids,
        read(words, of_words, words_zero),
        read(positions, of_positions, positions_zero),
        None if segments is None or of_segments is None else read(segments, of_segments, segments_zero),
        read(gamma, of_gamma, gamma_zero),
        read(beta, of_beta, beta_zero),
        mask,
        epsilon=epsilon,
    )
    return y.astype(of_words.dtype), counted


@kernel("MatMulInteger16", domain=MICROSOFT, fresh=True)
def matmul_integer16(A: Array, B: Array) -> Array:
    """A·B; of a sum that needs more, the last 32 bits are kept"""
    if min(A.ndim, B.ndim) < 1:
        raise ValueError(f"A has rank {A.ndim} and B {B.ndim}; a product of matrices has no scalars")
    return np.asarray((A.astype(np.int64) @ B.astype(np.int64)).astype(np.int32))


@kernel("MulInteger", domain=MICROSOFT, fresh=True)
def mul_integer(A: Array, A_zero_point: Maybe, B: Array, B_zero_point: Maybe = None) -> Array:
    a, b = A - _single("zero point", A_zero_point), B - _single("zero point", B_zero_point)
    return np.asarray((a * b).astype(np.int32))


@kernel("ReduceSumInteger", domain=MICROSOFT, fresh=True)
def reduce_sum_integer(data: Array, *, axes: list[int], keepdims: int) -> Array:
    """Σ over the axes; the sum has a sign where the data have one"""
    for axis in axes:
        check_axis(axis, data.ndim)
    kind = np.int32 if data.dtype.kind == "i" else np.uint32
    return np.asarray(data.sum(tuple(axes), kind, keepdims=bool(keepdims)))
