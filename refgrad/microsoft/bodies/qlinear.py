"""ONNX Runtime's operators of quantized tensors.

A tensor q stands for (q − zero_point)·scale. A body reads its tensors so, computes in float and quantizes the result:
where that is differentiable the option `quantization` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, rounds, rule
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.activation import plus
from refgrad.microsoft.bodies.attention import attention, check_attention
from refgrad.microsoft.bodies.normalization import embed_layer_normalization
from refgrad.microsoft.bodies.quantization import BYTES, as_float, centred, dequantized, single
from refgrad.microsoft.declared import check_pairs, check_shape, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.rules.linear import matmul
from refgrad.rules.quantization import INTEGERS, ZERO_POINT
from refgrad.tables.definitions import Ints, Shapes

rounds(
    *("QGemm", "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearConcat"),
    *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean", "QLinearWhere", "QLinearConv"),
    domain=MICROSOFT,
    to=INTEGERS,
)

_FLOAT = ("tensor(float)",)
_SHORT_FLOATS = ("tensor(float)", "tensor(float16)")
_INT32 = ("tensor(int32)",)


# Products with a result in float


@body(
    "DynamicQuantizeMatMul",
    "Y",
    types={"A": _FLOAT, "B": BYTES, "b_scale": "A", "b_zero_point": "B", "bias": "A", "Y": "A"},
    domain=MICROSOFT,
)
def dynamic_quantize_matmul(
    op: FunctionEmitter, A: str, B: str, b_scale: str, b_zero_point: str | None = None, bias: str | None = None
) -> str:
    """DynamicQuantizeLinear(A)·(B − b_zero_point)·b_scale + bias"""
    q, scale, zero_point = op.DynamicQuantizeLinear(A, outputs=3)
    op.types.update({q: (TensorProto.UINT8, op.rank(A)), zero_point: (TensorProto.UINT8, 0)})
    y = op.MatMul(centred(op, q, zero_point), centred(op, B, b_zero_point))
    return plus(op, op.Mul(op.Mul(y, scale), b_scale), bias)


@body(
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
    domain=MICROSOFT,
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


def _check_qgemm(shapes: Shapes, args: Arguments) -> None:
    for name in ("A", "B"):
        check_shape(shapes, name, getattr(args, name), (None, None))
    if (rank := shapes.rank(args.b_scale)) is not None:
        check_shape(shapes, "b_zero_point", args.b_zero_point, sizes(shapes, args.b_scale, rank))


@body(
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
    check=_check_qgemm,
    domain=MICROSOFT,
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


def _check_qattention(shapes: Shapes, args: Arguments) -> None:
    if args.do_rotary:
        raise UnsupportedFormError("do_rotary=1 has no effect in ONNX Runtime's kernel; leave it out")
    absent = dict.fromkeys(("attention_bias", "past_sequence_length", "qkv_hidden_sizes"))
    check_attention(shapes, Arguments(**vars(args), **absent, weights=args.weight, rotary_embedding_dim=0))


@body(
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
    check=_check_qattention,
    domain=MICROSOFT,
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


@body("QLinearAdd", "C", types=_BINARY, domain=MICROSOFT)
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


@body("QLinearMul", "C", types=_BINARY, domain=MICROSOFT)
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


@body("QLinearSigmoid", "Y", types=_UNARY, domain=MICROSOFT)
def qlinear_sigmoid(
    op: FunctionEmitter, X: str, X_scale: str, X_zero_point: str | None, Y_scale: str, Y_zero_point: str | None = None
) -> str:
    """Y stands for the sigmoid of what X stands for"""
    return _written(op, op.Sigmoid(read(op, X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X)


@body("QLinearLeakyRelu", "Y", types=_UNARY, domain=MICROSOFT)
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


@body(
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
    domain=MICROSOFT,
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


def _check_concat(shapes: Shapes, args: Arguments) -> None:
    if len(args.inputs) % 3:
        raise UnsupportedFormError(
            f"{len(args.inputs)} inputs follow Y_zero_point; give each tensor its scale and its zero point"
        )


@body(
    "QLinearConcat",
    "Y",
    types={
        "Y_scale": _FLOAT,
        "Y_zero_point": BYTES,
        "inputs": ("tensor(uint8)", "tensor(int8)", "tensor(float)"),
        "Y": "Y_zero_point",
    },
    check=_check_concat,
    domain=MICROSOFT,
)
def qlinear_concat(op: FunctionEmitter, Y_scale: str, Y_zero_point: str, *inputs: str, axis: int) -> str:
    """Y stands for what the tensors stand for, side by side; each is followed by its scale and its zero point"""
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


@body("QLinearAveragePool", "Y", types=_POOL, domain=MICROSOFT)
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


@body("QLinearGlobalAveragePool", "Y", types=_POOL, domain=MICROSOFT)
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


@body(
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
    domain=MICROSOFT,
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


@body(
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
    domain=MICROSOFT,
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


@body(
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
    domain=MICROSOFT,
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


def _check_embeddings(shapes: Shapes, args: Arguments) -> None:
    segment = "segment_embedding"
    check_pairs(args, "segment_ids", segment, f"{segment}_scale", f"{segment}_zero_point")


@body(
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
    check=_check_embeddings,
    domain=MICROSOFT,
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


@body(
    "MatMulInteger16",
    "Y",
    types={
        "A": ("tensor(int16)", "tensor(uint16)"),
        "B": ("tensor(int16)", "tensor(uint16)"),
        "Y": ("tensor(int32)", "tensor(uint32)"),
    },
    domain=MICROSOFT,
)
def matmul_integer16_body(op: FunctionEmitter, A: str, B: str) -> str:
    """A·B with 32 bits"""
    return op.MatMul(_int32(op, A), _int32(op, B))


@body(
    "MulInteger",
    "C",
    types={"A": BYTES, "A_zero_point": "A", "B": "A", "B_zero_point": "A", "C": _INT32},
    domain=MICROSOFT,
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


@body(
    "ReduceSumInteger",
    "reduced",
    types={"data": BYTES, "reduced": ("tensor(int32)", "tensor(uint32)")},
    domain=MICROSOFT,
)
def reduce_sum_integer_body(op: FunctionEmitter, data: str, *, axes: Ints, keepdims: int) -> str:
    """Σ data over the axes with 32 bits, which have a sign where data has one"""
    total = op.ReduceSum(_int32(op, data), list(axes), keepdims=keepdims)
    return op.Cast(total, to=TensorProto.UINT32) if op.type(data) == TensorProto.UINT8 else total


def _int32(op: FunctionEmitter, x: str) -> str:
    return str(op.Cast(x, to=TensorProto.INT32))


@rule("MatMulInteger16", domain=MICROSOFT, wrt=["A", "B"], quantized=True)
def matmul_integer16(op: Emitter, d_Y: str, A: str, B: str) -> tuple[str, str]:
    """the gradients of MatMul"""
    d, a, b = (op.as_type(value, TensorProto.FLOAT) for value in (d_Y, A, B))
    for made, of in ((a, A), (b, B)):
        shape = op.shape(of)
        if shape is not None:
            op.assume(made, shape)
    adjoints: tuple[str, str] = matmul(op, d, a, b)
    return adjoints


@rule(
    "MulInteger",
    domain=MICROSOFT,
    wrt=["A", "B"],
    broadcast=True,
    quantized=True,
    refused=dict.fromkeys(("A_zero_point", "B_zero_point"), ZERO_POINT),
)
def mul_integer(
    op: Emitter, d_C: str, A: str, A_zero_point: str | None, B: str, B_zero_point: str | None
) -> tuple[str, str]:
    """dA = dC·(B − B_zero_point), dB = dC·(A − A_zero_point)"""
    d = op.as_type(d_C, TensorProto.FLOAT)
    return op.Mul(d, _number_from(op, B, B_zero_point)), op.Mul(d, _number_from(op, A, A_zero_point))


def _number_from(op: Emitter, q: str, zero_point: str | None) -> str:
    """q − zero_point in float32."""
    x = op.as_type(q, TensorProto.FLOAT)
    return x if zero_point is None else op.Sub(x, op.Reshape(op.as_type(zero_point, TensorProto.FLOAT), []))


@rule("ReduceSumInteger", domain=MICROSOFT, wrt=["data"], quantized=True)
def reduce_sum_integer(op: Emitter, d_reduced: str, data: str, axes: Sequence[int], keepdims: int) -> str:
    """dx = dy along every reduced axis"""
    d = op.as_type(d_reduced, TensorProto.FLOAT)
    return op.Expand(d if keepdims else op.Unsqueeze(d, list(axes)), op.shape_of(data))
