"""ONNX Runtime's operators of quantized tensors.

A tensor q stands for (q − zero_point)·scale. A body reads its tensors so, computes in float and quantizes the result:
where that is differentiable the option `quantization` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import plus
from refgrad.microsoft.attention import attention
from refgrad.microsoft.normalization import embed_layer_normalization
from refgrad.microsoft.quantization import BYTES, as_float, centred, dequantized, single
from refgrad.microsoft.recurrent import BACKWARD, PARAMETERS
from refgrad.tables.definitions import Floats, Ints, Strings, UnsupportedFormError, operator

_FLOAT = ("tensor(float)",)
_SHORT_FLOATS = ("tensor(float)", "tensor(float16)")
_INT32 = ("tensor(int32)",)


# Products with a result in float


@operator(
    "DynamicQuantizeMatMul",
    "Y",
    types={"A": _FLOAT, "B": BYTES, "b_scale": "A", "b_zero_point": "B", "bias": "A", "Y": "A"},
)
def dynamic_quantize_matmul(
    op: FunctionEmitter, A: str, B: str, b_scale: str, b_zero_point: str | None = None, bias: str | None = None
) -> str:
    """DynamicQuantizeLinear(A)·(B − b_zero_point)·b_scale + bias"""
    q, scale, zero_point = op.DynamicQuantizeLinear(A, outputs=3)
    op.types.update({q: (TensorProto.UINT8, op.rank(A)), zero_point: (TensorProto.UINT8, 0)})
    y = op.MatMul(centred(op, q, zero_point), centred(op, B, b_zero_point))
    return plus(op, op.Mul(op.Mul(y, scale), b_scale), bias)


@operator(
    "MatMulIntegerToFloat",
    "Y",
    types={
        "A": BYTES,
        "B": BYTES,
        "a_scale": _SHORT_FLOATS,
        "b_scale": "a_scale",
        "a_zero_point": "A",
        "b_zero_point": "B",
        "bias": "a_scale",
        "Y": "a_scale",
    },
)
def matmul_integer_to_float(
    op: FunctionEmitter,
    A: str,
    B: str,
    a_scale: str,
    b_scale: str,
    a_zero_point: str | None = None,
    b_zero_point: str | None = None,
    bias: str | None = None,
) -> str:
    """(A − a_zero_point)·a_scale·(B − b_zero_point)·b_scale + bias, one for all or for each column"""
    y = op.MatMul(dequantized(op, A, a_scale, a_zero_point), centred(op, B, b_zero_point))
    y = op.Mul(y, as_float(op, b_scale))
    return op.CastLike(plus(op, y, bias and as_float(op, bias)), a_scale)


@operator(
    "QGemm",
    "Y",
    types={
        "A": BYTES,
        "a_scale": _FLOAT,
        "a_zero_point": "A",
        "B": BYTES,
        "b_scale": "a_scale",
        "b_zero_point": "B",
        "C": _INT32,
        "y_scale": "a_scale",
        "y_zero_point": BYTES,
        "Y": ("tensor(float)", *BYTES),
    },
)
def qgemm(
    op: FunctionEmitter,
    A: str,
    a_scale: str,
    a_zero_point: str,
    B: str,
    b_scale: str,
    b_zero_point: str,
    C: str | None = None,
    y_scale: str | None = None,
    y_zero_point: str | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> str:
    """α·a_scale·b_scale·((A − a_zero_point)·(B − b_zero_point) + C), in float, or quantized where there is a y_scale"""
    a = centred(op, A, single(op, a_zero_point))
    b = op.Transpose(B, perm=[1, 0]) if transB else B
    b = centred(op, b, b_zero_point)
    y = op.Gemm(a, b, C and as_float(op, C), transA=transA)
    scale = op.Mul(single(op, a_scale), b_scale)
    y = op.Mul(y, scale if alpha == 1 else op.Mul(scale, alpha))
    return y if y_scale is None else _written(op, y, y_scale, y_zero_point, A)


@operator(
    "QAttention",
    "output",
    optional=["present"],
    types={
        "input": BYTES,
        "weight": BYTES,
        "bias": _SHORT_FLOATS,
        "input_scale": "bias",
        "weight_scale": "bias",
        "mask_index": _INT32,
        "input_zero_point": "input",
        "weight_zero_point": "weight",
        "past": "bias",
        "output": "bias",
        "present": "bias",
    },
)
def qattention(
    op: FunctionEmitter,
    input: str,
    weight: str,
    bias: str,
    input_scale: str,
    weight_scale: str,
    mask_index: str | None = None,
    input_zero_point: str | None = None,
    weight_zero_point: str | None = None,
    past: str | None = None,
    *,
    do_rotary: int | None = None,
    mask_filter_value: float | None = None,
    num_heads: int,
    past_present_share_buffer: int | None = None,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[str, ...]:
    """Attention of (input − input_zero_point)·input_scale with the weights (weight − weight_zero_point)·weight_scale"""
    if do_rotary:
        raise UnsupportedFormError("do_rotary=1 has no effect in ONNX Runtime's kernel; leave it out")
    settings: dict[str, Any] = {} if mask_filter_value is None else {"mask_filter_value": mask_filter_value}
    x, w = (
        dequantized(op, input, input_scale, input_zero_point),
        dequantized(op, weight, weight_scale, weight_zero_point),
    )
    y, present = attention(
        op,
        x,
        w,
        as_float(op, bias),
        mask_index,
        past and as_float(op, past),
        num_heads=num_heads,
        past_present_share_buffer=past_present_share_buffer or 0,
        scale=scale,
        unidirectional=unidirectional,
        **settings,
    )
    return op.CastLike(y, bias), op.CastLike(present, bias)


@operator(
    "DynamicQuantizeLSTM",
    optional=["Y", "Y_h", "Y_c"],
    types={
        "X": _FLOAT,
        "W": BYTES,
        "R": "W",
        "sequence_lens": _INT32,
        **dict.fromkeys(("B", "initial_h", "initial_c", "P", "W_scale", "R_scale", "Y", "Y_h", "Y_c"), "X"),
        **dict.fromkeys(("W_zero_point", "R_zero_point"), "W"),
    },
)
def dynamic_quantize_lstm(
    op: FunctionEmitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    P: str | None,
    W_scale: str,
    W_zero_point: str,
    R_scale: str,
    R_zero_point: str,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[str, ...]:
    """LSTM with the weights that W and R stand for, of DynamicQuantizeLinear(X) and, in each step, DynamicQuantizeLinear(H)

    A step is an LSTM of one step: its initial_h is multiplied with R, and is nothing else. A step quantizes, by their
    range, the states of its sequences and of the sequences that the step before ended.
    """
    if direction not in BACKWARD:
        raise UnsupportedFormError(f"its direction {direction!r} is not known; there are {', '.join(BACKWARD)}")
    names = list(activations or ("Sigmoid", "Tanh", "Tanh") * len(BACKWARD[direction]))
    if len(names) != 3 * len(BACKWARD[direction]):
        raise UnsupportedFormError(f"it has {len(names)} activations; direction={direction} has three for each way")
    alphas, betas = iter(activation_alpha or ()), iter(activation_beta or ())
    length, batch = op.Shape(X, end=1), op.Shape(X, start=1, end=2)
    lengths = op.Expand(length, batch) if sequence_lens is None else op.Cast(sequence_lens, to=TensorProto.INT64)
    times = op.up_to(length)
    place = op.Unsqueeze(times, [1])
    active, read = (
        op.ranked(op.Unsqueeze(inside, [2]), 3)
        for inside in (op.Less(place, lengths), op.LessOrEqual(place, lengths))  # (time, batch, 1)
    )
    any_active = op.Less(times, op.ReduceMax(lengths, keepdims=0))
    x = op.Where(op.Unsqueeze(any_active, [1, 2]), X, 0.0) if sequence_lens else X
    x = _as_read_dynamically(op, x)
    w, r = (
        op.Transpose(_of_directions(op, q, scale, zero_point), perm=[0, 2, 1])
        for q, scale, zero_point in ((W, W_scale, W_zero_point), (R, R_scale, R_zero_point))
    )
    nothing = op.Expand(op.const(0.0, like=X), op.Concat(batch, op.Shape(R, start=1, end=2), axis=0))
    found = []
    for way, backward in enumerate(BACKWARD[direction]):
        functions = names[3 * way : 3 * way + 3]
        settings: dict[str, Any] = {
            "activations": functions,
            "activation_alpha": _taken(alphas, functions, 1),
            "activation_beta": _taken(betas, functions, 2),
            "clip": clip,
            "hidden_size": hidden_size,
            "input_forget": input_forget,
        }
        own_w, own_r, own_b, own_p = (v and op.Slice(v, [way], [way + 1], [0]) for v in (w, r, B, P))
        starts = [v and op.Squeeze(op.Slice(v, [way], [way + 1], [0]), [0]) for v in (initial_h, initial_c)]

        def step(
            op: FunctionEmitter,
            states: list[str],
            slices: list[str],
            settings: dict[str, Any] = settings,
            weights: tuple[str | None, ...] = (own_w, own_r, own_b, own_p),
        ) -> list[str]:
            (h, c), (x, active, read), (w, r, b, p) = states, slices, weights
            before = _as_read_dynamically(op, op.Where(read, h, 0.0))
            given = op.Unsqueeze(x, [0]), w, r, b, None, op.Unsqueeze(before, [0]), op.Unsqueeze(c, [0]), p
            _, new_h, new_c = op.LSTM(*given, outputs=3, **settings)
            new_h, new_c = op.Squeeze(new_h, [0]), op.Squeeze(new_c, [0])
            y = op.ranked(op.Where(active, new_h, 0.0), 2)
            return [op.Where(active, new_h, h), op.Where(active, new_c, c), y]

        rows = op.ReverseSequence(x, lengths, time_axis=0, batch_axis=1) if backward else x
        states = [op.ranked(start or op.Identity(nothing), 2) for start in starts]
        h, c, y = op.scan(step, states, [op.ranked(rows, 3), active, read])
        y = op.ReverseSequence(y, lengths, time_axis=0, batch_axis=1) if backward else y
        found.append((op.Unsqueeze(y, [1]), op.Unsqueeze(h, [0]), op.Unsqueeze(c, [0])))
    if len(found) == 1:
        return found[0]
    return tuple(op.Concat(*parts, axis=axis) for parts, axis in zip(zip(*found, strict=True), (1, 0, 0), strict=True))


def _of_directions(op: FunctionEmitter, q: str, scale: str, zero_point: str) -> str:
    """The floats that weights stand for, with a scale and a zero point for each direction, or for each of its columns."""
    laid = (op.Reshape(v, op.Concat(op.Shape(q, end=1), [1, -1], axis=0)) for v in (scale, zero_point))
    return dequantized(op, q, *laid)


def _as_read_dynamically(op: FunctionEmitter, x: str) -> str:
    """DequantizeLinear(DynamicQuantizeLinear(x)), which has a derivative where x is 0 everywhere too"""
    zero = op.const(0.0, like=x)
    every = op.Concat(op.Reshape(x, [-1]), op.Reshape(zero, [1]), axis=0)
    low, high = op.ReduceMin(every, keepdims=0), op.ReduceMax(every, keepdims=0)
    span = op.Sub(high, low)
    scale = op.Div(op.Where(op.Greater(span, zero), span, 255.0), 255.0)
    zero_point = op.Cast(op.Round(op.Div(op.Neg(low), scale)), to=TensorProto.UINT8)
    q = op.QuantizeLinear(x, scale, zero_point)
    op.types[q] = TensorProto.UINT8, op.rank(x)
    y = str(op.DequantizeLinear(q, scale, zero_point))
    op.types[y] = op.type(x), op.rank(x)
    return y


def _taken(given: Iterator[float], functions: list[str], parameters: int) -> list[float] | None:
    """The next numbers, one for each function that has so many parameters; None where there are none."""
    numbers = [next(given, None) for name in functions if len(PARAMETERS.get(name.lower(), ())) >= parameters]
    return [number for number in numbers if number is not None] or None


# Operators whose results are quantized


def read(op: FunctionEmitter, q: str, scale: str, zero_point: str | None) -> str:
    """The floats that a tensor with one scale and one zero point stands for."""
    return dequantized(op, q, single(op, scale), zero_point and single(op, zero_point))


def _written(op: FunctionEmitter, y: str, scale: str, zero_point: str | None, like: str) -> str:
    """`y` with that scale and zero point, or the zero point 0 of the type of `like`."""
    zero = op.const(0, like=like) if zero_point is None else single(op, zero_point)
    return str(op.QuantizeLinear(y, single(op, scale), zero))


_BINARY: dict[str, Any] = {
    "A": BYTES,
    "A_scale": _FLOAT,
    "A_zero_point": "A",
    "B": "A",
    "B_scale": "A_scale",
    "B_zero_point": "A",
    "C_scale": "A_scale",
    "C_zero_point": "A",
    "C": "A",
}


@operator("QLinearAdd", "C", types=_BINARY)
def qlinear_add(
    op: FunctionEmitter,
    A: str,
    A_scale: str,
    A_zero_point: str | None,
    B: str,
    B_scale: str,
    B_zero_point: str | None,
    C_scale: str,
    C_zero_point: str | None = None,
) -> str:
    """C stands for the sum of what A and B stand for"""
    y = op.Add(read(op, A, A_scale, A_zero_point), read(op, B, B_scale, B_zero_point))
    return _written(op, y, C_scale, C_zero_point, A)


@operator("QLinearMul", "C", types=_BINARY)
def qlinear_mul(
    op: FunctionEmitter,
    A: str,
    A_scale: str,
    A_zero_point: str | None,
    B: str,
    B_scale: str,
    B_zero_point: str | None,
    C_scale: str,
    C_zero_point: str | None = None,
) -> str:
    """C stands for the product of what A and B stand for"""
    y = op.Mul(read(op, A, A_scale, A_zero_point), read(op, B, B_scale, B_zero_point))
    return _written(op, y, C_scale, C_zero_point, A)


_UNARY: dict[str, Any] = {
    "X": BYTES,
    "X_scale": _FLOAT,
    "X_zero_point": "X",
    "Y_scale": "X_scale",
    "Y_zero_point": "X",
    "Y": "X",
}


@operator("QLinearSigmoid", "Y", types=_UNARY)
def qlinear_sigmoid(
    op: FunctionEmitter, X: str, X_scale: str, X_zero_point: str | None, Y_scale: str, Y_zero_point: str | None = None
) -> str:
    """Y stands for the sigmoid of what X stands for"""
    return _written(op, op.Sigmoid(read(op, X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X)


@operator("QLinearLeakyRelu", "Y", types=_UNARY)
def qlinear_leaky_relu(
    op: FunctionEmitter,
    X: str,
    X_scale: str,
    X_zero_point: str | None,
    Y_scale: str,
    Y_zero_point: str | None = None,
    *,
    alpha: float = 0.01,
) -> str:
    """LeakyRelu of the value that X stands for, quantized"""
    y = op.LeakyRelu(read(op, X, X_scale, X_zero_point), alpha=alpha)
    return _written(op, y, Y_scale, Y_zero_point, X)


@operator(
    "QLinearSoftmax",
    "Y",
    types={
        "X": BYTES,
        "X_scale": _FLOAT,
        "x_zero_point": "X",
        "y_scale": "X_scale",
        "y_zero_point": "X",
        "Y": "X",
    },
)
def qlinear_softmax(
    op: FunctionEmitter,
    X: str,
    X_scale: str,
    x_zero_point: str | None,
    y_scale: str,
    y_zero_point: str,
    *,
    axis: int = -1,
    opset: int,
) -> str:
    """Y stands for the softmax of what X stands for along `axis`, or before opset 13 over all axes from there on as one"""
    x = read(op, X, X_scale, x_zero_point)
    if opset >= 13:
        y = op.Softmax(x, axis=axis)
    else:
        y = op.Reshape(op.Softmax(op.Flatten(x, axis=axis), axis=1), op.Shape(X), allowzero=1)
    return _written(op, y, y_scale, y_zero_point, X)


@operator(
    "QLinearConcat",
    "Y",
    types={
        "Y_scale": _FLOAT,
        "Y_zero_point": BYTES,
        "inputs": ("tensor(uint8)", "tensor(int8)", "tensor(float)"),
        "Y": "Y_zero_point",
    },
)
def qlinear_concat(op: FunctionEmitter, Y_scale: str, Y_zero_point: str, *inputs: str, axis: int) -> str:
    """Y stands for what the tensors stand for, side by side; each is followed by its scale and its zero point"""
    if len(inputs) % 3:
        raise UnsupportedFormError(
            f"{len(inputs)} inputs follow Y_zero_point; give each tensor its scale and its zero point"
        )
    y = op.Concat(*(read(op, *inputs[k : k + 3]) for k in range(0, len(inputs), 3)), axis=axis)
    return _written(op, y, Y_scale, Y_zero_point, Y_zero_point)


_POOL: dict[str, Any] = {
    "X": BYTES,
    "x_scale": _FLOAT,
    "x_zero_point": "X",
    "y_scale": "x_scale",
    "y_zero_point": "X",
    "Y": "X",
}


@operator("QLinearAveragePool", "Y", types=_POOL)
def qlinear_average_pool(
    op: FunctionEmitter,
    X: str,
    x_scale: str,
    x_zero_point: str | None,
    y_scale: str,
    y_zero_point: str | None = None,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """Y stands for AveragePool of what X stands for, the channels in axis 1 or, with channels_last, in the last one"""
    last, first = _perms(len(kernel_shape) + 2)
    x = read(op, X, x_scale, x_zero_point)
    y = op.AveragePool(
        op.Transpose(x, perm=first) if channels_last else x,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _written(op, op.Transpose(y, perm=last) if channels_last else y, y_scale, y_zero_point, X)


def _perms(rank: int) -> tuple[list[int], list[int]]:
    """The permutations that move axis 1 to the end, and the last axis to place 1."""
    return [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]


@operator("QLinearGlobalAveragePool", "Y", types=_POOL)
def qlinear_global_average_pool(
    op: FunctionEmitter,
    X: str,
    x_scale: str,
    x_zero_point: str,
    y_scale: str,
    y_zero_point: str,
    *,
    channels_last: int = 0,
) -> str:
    """Y stands for the means over the pixels of what X stands for, the channels in axis 1 or, with channels_last, the last"""
    x = read(op, X, x_scale, x_zero_point)
    if channels_last:
        sizes = op.Shape(X)
        pixels = op.Slice(sizes, [1], [-1], [0])
        ends = op.Slice(sizes, [0], [1], [0]), op.Slice(sizes, [-1], [END], [0])
        rows = op.Reshape(x, op.Concat(ends[0], op.ReduceProd(pixels, keepdims=1), ends[1], axis=0), allowzero=1)
        shape = op.Concat(ends[0], op.Expand(op.const([1]), op.Shape(pixels)), ends[1], axis=0)
        y = op.Reshape(op.reduce("ReduceMean", rows, [1]), shape, allowzero=1)
    else:
        y = op.GlobalAveragePool(x)
    return _written(op, y, y_scale, y_zero_point, X)


@operator(
    "QLinearReduceMean",
    "reduced",
    types={
        "data": BYTES,
        "data_scale": _FLOAT,
        "data_zero_point": "data",
        "reduced_scale": "data_scale",
        "reduced_zero_point": "data",
        "reduced": "data",
    },
)
def qlinear_reduce_mean(
    op: FunctionEmitter,
    data: str,
    data_scale: str,
    data_zero_point: str | None,
    reduced_scale: str,
    reduced_zero_point: str | None = None,
    *,
    axes: Ints,
    keepdims: int,
) -> str:
    """reduced stands for the mean of what data stands for, over the axes"""
    y = op.reduce("ReduceMean", read(op, data, data_scale, data_zero_point), axes)
    return _written(op, y if keepdims else op.Squeeze(y, axes), reduced_scale, reduced_zero_point, data)


@operator(
    "QLinearWhere",
    "Z",
    types={
        "condition": ("tensor(bool)",),
        "X": BYTES,
        "x_scale": _FLOAT,
        "x_zero_point": "X",
        "Y": "X",
        "y_scale": "x_scale",
        "y_zero_point": "X",
        "z_scale": "x_scale",
        "z_zero_point": "X",
        "Z": "X",
    },
)
def qlinear_where(
    op: FunctionEmitter,
    condition: str,
    X: str,
    x_scale: str,
    x_zero_point: str,
    Y: str,
    y_scale: str,
    y_zero_point: str,
    z_scale: str,
    z_zero_point: str,
) -> str:
    """Z stands for what X stands for where the condition holds, elsewhere for what Y stands for"""
    z = op.Where(condition, read(op, X, x_scale, x_zero_point), read(op, Y, y_scale, y_zero_point))
    return _written(op, z, z_scale, z_zero_point, X)


@operator(
    "QLinearConv",
    "y",
    types={
        "x": BYTES,
        "x_scale": _FLOAT,
        "x_zero_point": "x",
        "w": BYTES,
        "w_scale": "x_scale",
        "w_zero_point": "w",
        "y_scale": "x_scale",
        "y_zero_point": BYTES,
        "B": _INT32,
        "y": "y_zero_point",
    },
)
def qlinear_conv(
    op: FunctionEmitter,
    x: str,
    x_scale: str,
    x_zero_point: str,
    w: str,
    w_scale: str,
    w_zero_point: str,
    y_scale: str,
    y_zero_point: str,
    B: str | None = None,
    *,
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """QLinearConv of ai.onnx, the channels of x and y in axis 1 or, with channels_last, in the last one"""
    axes = next((len(sizes) for sizes in (kernel_shape, strides, dilations) if sizes), None)
    rank = op.rank(x) or op.rank(w) or (axes and axes + 2)
    if channels_last and rank is None:
        raise UnsupportedFormError("with channels_last it needs the rank of its input x; add it to value_info")
    last, first = _perms(rank or 0)
    y = op.QLinearConv(
        op.Transpose(x, perm=first) if channels_last else x,
        *(x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return op.Transpose(y, perm=last) if channels_last else y


@operator(
    "QEmbedLayerNormalization",
    "layernorm_out",
    "mask_index_out",
    types={
        "input_ids": _INT32,
        "segment_ids": "input_ids",
        "word_embedding_quant": BYTES,
        "position_embedding_quant": "word_embedding_quant",
        "segment_embedding": "word_embedding_quant",
        "gamma_quant": "word_embedding_quant",
        "beta_quant": "word_embedding_quant",
        "mask": "input_ids",
        "word_embedding_scale": _FLOAT,
        "position_embedding_scale": "word_embedding_scale",
        "segment_embedding_scale": "word_embedding_scale",
        "gamma_scale": "word_embedding_scale",
        "beta_scale": "word_embedding_scale",
        "word_embedding_zero_point": "word_embedding_quant",
        "position_embedding_zero_point": "word_embedding_quant",
        "segment_embedding_zero_point": "word_embedding_quant",
        "gamma_zero_point": "word_embedding_quant",
        "beta_zero_point": "word_embedding_quant",
        "layernorm_out": "word_embedding_scale",
        "mask_index_out": "input_ids",
    },
)
def qembed_layer_normalization(
    op: FunctionEmitter,
    input_ids: str,
    segment_ids: str | None,
    word_embedding_quant: str,
    position_embedding_quant: str,
    segment_embedding: str | None,
    gamma_quant: str,
    beta_quant: str,
    mask: str | None,
    word_embedding_scale: str,
    position_embedding_scale: str,
    segment_embedding_scale: str | None,
    gamma_scale: str,
    beta_scale: str,
    word_embedding_zero_point: str,
    position_embedding_zero_point: str,
    segment_embedding_zero_point: str | None,
    gamma_zero_point: str,
    beta_zero_point: str,
    *,
    epsilon: float = 1e-12,
) -> tuple[str, ...]:
    """EmbedLayerNormalization of what the embeddings, gamma and beta stand for"""
    segments = (segment_ids, segment_embedding, segment_embedding_scale, segment_embedding_zero_point)
    if None in segments and any(segments):
        raise UnsupportedFormError(
            "it has some of segment_ids, segment_embedding, its scale and its zero point; give it all of them or none"
        )
    rows = None
    if segment_embedding is not None and segment_embedding_scale is not None:
        rows = read(op, segment_embedding, segment_embedding_scale, segment_embedding_zero_point)
    return embed_layer_normalization(
        op,
        input_ids,
        segment_ids,
        read(op, word_embedding_quant, word_embedding_scale, word_embedding_zero_point),
        read(op, position_embedding_quant, position_embedding_scale, position_embedding_zero_point),
        rows,
        read(op, gamma_quant, gamma_scale, gamma_zero_point),
        read(op, beta_quant, beta_scale, beta_zero_point),
        mask,
        epsilon=epsilon,
    )[:2]


# Sums of whole numbers


@operator(
    "MatMulInteger16",
    "Y",
    types={
        "A": ("tensor(int16)", "tensor(uint16)"),
        "B": ("tensor(int16)", "tensor(uint16)"),
        "Y": ("tensor(int32)", "tensor(uint32)"),
    },
)
def matmul_integer16_body(op: FunctionEmitter, A: str, B: str) -> str:
    """A·B with 32 bits"""
    return op.MatMul(_int32(op, A), _int32(op, B))


@operator(
    "MulInteger",
    "C",
    types={"A": BYTES, "A_zero_point": "A", "B": "A", "B_zero_point": "A", "C": _INT32},
)
def mul_integer_body(
    op: FunctionEmitter, A: str, A_zero_point: str | None, B: str, B_zero_point: str | None = None
) -> str:
    """(A − A_zero_point)·(B − B_zero_point) with 32 bits"""
    factors = (
        _int32(op, q) if zero is None else op.Sub(_int32(op, q), _int32(op, single(op, zero)))
        for q, zero in ((A, A_zero_point), (B, B_zero_point))
    )
    return op.Mul(*factors)


@operator(
    "ReduceSumInteger",
    "reduced",
    types={"data": BYTES, "reduced": ("tensor(int32)", "tensor(uint32)")},
)
def reduce_sum_integer_body(op: FunctionEmitter, data: str, *, axes: Ints, keepdims: int) -> str:
    """Σ data over the axes with 32 bits, which have a sign where data has one"""
    total = op.ReduceSum(_int32(op, data), list(axes), keepdims=keepdims)
    return op.Cast(total, to=TensorProto.UINT32) if op.type(data) == TensorProto.UINT8 else total


def _int32(op: FunctionEmitter, x: str) -> str:
    return str(op.Cast(x, to=TensorProto.INT32))
