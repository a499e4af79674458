"""ONNX Runtime's operators of matrices of int8 that lie in the orders of cublasLt. Their zero points are 0.

A body reads its tensors, computes in float and quantizes the result, as the bodies of `refgrad.microsoft.bodies.qlinear` do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body, rounds
from refgrad.microsoft.bodies.activation import plus
from refgrad.microsoft.bodies.attention import check_window, parts, windowed
from refgrad.microsoft.bodies.position import known_rank
from refgrad.microsoft.bodies.qlinear import read
from refgrad.microsoft.bodies.quantization import as_float, centred, dequantized, reordered, single
from refgrad.microsoft.declared import check_pairs, check_shape, divided, product, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.rules.quantization import INTEGERS
from refgrad.tables.definitions import Ints, Shapes

rounds(
    *("QOrderedMatMul", "QOrderedGelu", "QOrderedLayerNormalization", "QOrderedAttention"),
    "QOrderedLongformerAttention",
    domain=MICROSOFT,
    to=INTEGERS,
)

_FLOAT = ("tensor(float)",)
_SHORT_FLOATS = ("tensor(float)", "tensor(float16)")
_INT32 = ("tensor(int32)",)
_INT8 = ("tensor(int8)",)
_ROW, _COL = 1, 0


def _check_orders(args: Arguments, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse matrices that do not lie in rows, or in columns."""
    if any(getattr(args, name) != _ROW for name in rows) or any(getattr(args, name) != _COL for name in columns):
        given = ", ".join(f"{name}={getattr(args, name)}" for name in (*rows, *columns))
        raise UnsupportedFormError(
            f"{given}: these orders are not read; use ORDER_ROW (1) for {' and '.join(rows)}, and ORDER_COL (0) for "
            f"{' and '.join(columns)}"
        )


def _check_order(shapes: Shapes, args: Arguments) -> None:
    if None not in (args.order_X, args.order_Y) and args.order_X != args.order_Y:
        raise UnsupportedFormError(f"order_X is {args.order_X} and order_Y {args.order_Y}; they are the same")


def _check_matmul(shapes: Shapes, args: Arguments) -> None:
    _check_orders(args, ("order_A", "order_Y"), ("order_B",))
    check_pairs(args, "C", "scale_C")
    if rank := shapes.rank(args.B):
        check_shape(shapes, "bias", args.bias, sizes(shapes, args.B, rank)[-1:])


def _check_attention(shapes: Shapes, args: Arguments) -> None:
    _check_orders(args, ("order_input", "order_output"), ("order_weight",))
    for name in ("past", "attention_bias", "qkv_hidden_sizes"):
        if getattr(args, name) is not None:
            raise UnsupportedFormError(f"it has {name}, which ONNX Runtime does not compute with; leave it out")
    check_shape(shapes, "input", args.input, (None, None, None))
    B, S, hidden = sizes(shapes, args.input, 3)
    for part in "QKV":
        weight = getattr(args, f"{part}_weight")
        check_shape(shapes, f"{part}_weight", weight, (hidden, None))
        columns = sizes(shapes, weight, 2)[1]
        divided(f"{part}_weight", columns, args.num_heads, "num_heads")
        check_shape(shapes, f"{part}_bias", getattr(args, f"{part}_bias"), (columns,))
    check_shape(shapes, "mask_index", args.mask_index, (B, S), (B, S, S))


def _check_longformer(shapes: Shapes, args: Arguments) -> None:
    _check_orders(args, ("order_input", "order_output"), ("order_weight", "order_global_weight"))
    check_shape(shapes, "input", args.input, (None, None, None))
    B, S, width = sizes(shapes, args.input, 3)
    check_window(shapes, args, B, S)
    divided("input", width, args.num_heads, "num_heads")
    for name in ("weight", "global_weight"):
        check_shape(shapes, name, getattr(args, name), (width, product(3, width)))
    for name in ("bias", "global_bias"):
        check_shape(shapes, name, getattr(args, name), (product(3, width),))


def _int8(op: FunctionEmitter, y: str, scale: str) -> str:
    q = str(op.QuantizeLinear(y, single(op, scale), op.const(np.int8(0))))
    op.types[q] = TensorProto.INT8, op.rank(y)
    return q


@body(
    "QOrderedMatMul",
    "Y",
    types={
        "A": _INT8,
        "scale_A": _FLOAT,
        "B": "A",
        "scale_B": "scale_A",
        "scale_Y": "scale_A",
        "bias": "scale_A",
        "C": "A",
        "scale_C": "scale_A",
        "Y": "A",
    },
    check=_check_matmul,
    domain=MICROSOFT,
)
def qordered_matmul(
    op: FunctionEmitter,
    A: str,
    scale_A: str,
    B: str,
    scale_B: str,
    scale_Y: str,
    bias: str | None = None,
    C: str | None = None,
    scale_C: str | None = None,
    *,
    order_A: int,
    order_B: int,
    order_Y: int,
) -> str:
    """Y stands for A·B + bias + C; B lies in columns, the others in rows"""
    y = op.MatMul(centred(op, A, None), reordered(op, centred(op, B, None), _COL, _ROW))
    y = plus(op, op.Mul(y, op.Mul(single(op, scale_A), scale_B)), bias)
    if C is not None and scale_C is not None:
        y = op.Add(y, dequantized(op, C, single(op, scale_C), None))
    return _int8(op, y, scale_Y)


@body(
    "QOrderedGelu",
    "Y",
    types={"X": _INT8, "scale_X": _FLOAT, "scale_Y": "scale_X", "Y": "X"},
    check=_check_order,
    domain=MICROSOFT,
)
def qordered_gelu(
    op: FunctionEmitter, X: str, scale_X: str, scale_Y: str, *, order_X: int | None = None, order_Y: int | None = None
) -> str:
    """Y stands for x·Φ(x) of what X stands for, in the same order"""
    return _int8(op, op.com_microsoft("Gelu", read(op, X, scale_X, None)), scale_Y)


@body(
    "QOrderedLayerNormalization",
    "Y",
    types={
        "X": _INT8,
        "scale_X": _FLOAT,
        "scale": _SHORT_FLOATS,
        "B": "scale",
        "scale_Y": "scale_X",
        "Y": "X",
    },
    check=_check_order,
    domain=MICROSOFT,
)
def qordered_layer_normalization(
    op: FunctionEmitter,
    X: str,
    scale_X: str,
    scale: str,
    B: str | None,
    scale_Y: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    order_X: int = 1,
    order_Y: int = 1,
) -> str:
    """Y stands for LayerNormalization of what X stands for, in the same order"""
    x = reordered(op, read(op, X, scale_X, None), order_X, _ROW)
    y = op.LayerNormalization(x, as_float(op, scale), B and as_float(op, B), axis=axis, epsilon=epsilon)
    return reordered(op, _int8(op, y, scale_Y), _ROW, order_Y)


def _rounded(op: FunctionEmitter, y: str, scale: str | None) -> str:
    """`y`, quantized and dequantized; `y` itself where there is no scale."""
    return y if scale is None else dequantized(op, _int8(op, y, scale), single(op, scale), None)


@body(
    "QOrderedAttention",
    "output",
    types={
        "input": _INT8,
        "scale_input": _FLOAT,
        **dict.fromkeys(("Q_weight", "K_weight", "V_weight", "past", "output"), "input"),
        **dict.fromkeys((f"scale_{part}_{of}" for part in "QKV" for of in ("gemm", "weight")), "scale_input"),
        **dict.fromkeys(("Q_bias", "K_bias", "V_bias", "scale_QKT_gemm", "scale_QKT_softmax"), "scale_input"),
        **dict.fromkeys(("scale_values_gemm", "attention_bias"), "scale_input"),
        "mask_index": _INT32,
    },
    check=_check_attention,
    domain=MICROSOFT,
)
def qordered_attention(
    op: FunctionEmitter,
    input: str,
    scale_input: str,
    scale_Q_gemm: str,
    scale_K_gemm: str,
    scale_V_gemm: str,
    Q_weight: str,
    K_weight: str,
    V_weight: str,
    scale_Q_weight: str,
    scale_K_weight: str,
    scale_V_weight: str,
    Q_bias: str,
    K_bias: str,
    V_bias: str,
    scale_QKT_gemm: str | None,
    scale_QKT_softmax: str | None,
    scale_values_gemm: str,
    mask_index: str | None = None,
    past: str | None = None,
    attention_bias: str | None = None,
    *,
    num_heads: int,
    order_input: int,
    order_output: int,
    order_weight: int,
    qkv_hidden_sizes: Ints | None = None,
    unidirectional: int = 0,
) -> str:
    """Attention of input·weight + bias of Q, K and V, each quantized, as are Q·Kᵀ and its softmax if they have scales"""
    x, heads = centred(op, input, None), []
    for weight, scale, bias, gemm in (
        (Q_weight, scale_Q_weight, Q_bias, scale_Q_gemm),
        (K_weight, scale_K_weight, K_bias, scale_K_gemm),
        (V_weight, scale_V_weight, V_bias, scale_V_gemm),
    ):
        y = op.MatMul(x, reordered(op, centred(op, weight, None), _COL, _ROW))
        y = op.Add(op.Mul(y, op.Mul(single(op, scale_input), scale)), bias)
        y = _rounded(op, y, gemm)
        heads.append(op.Transpose(op.Reshape(y, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3]))
    q, k, v = heads
    scores = _rounded(op, op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), scale_QKT_gemm)
    scores = op.Div(scores, op.Sqrt(as_float(op, op.Shape(q, start=3, end=4))))
    if mask_index is not None:
        rank = known_rank(op, "mask_index", mask_index)
        hidden = op.Not(op.Greater(op.Unsqueeze(mask_index, [1, 2] if rank == 2 else [1]), 0))
        scores = op.Add(scores, op.Mul(as_float(op, hidden), -10000.0))
    if unidirectional:
        positions = op.up_to(op.Shape(q, start=2, end=3))
        later = op.Greater(positions, op.Unsqueeze(positions, [1]))
        scores = op.Where(later, op.const(np.float32(-np.inf)), scores)
    shares = _rounded(op, op.Softmax(scores, axis=-1), scale_QKT_softmax)
    y = op.Transpose(op.MatMul(shares, v), perm=[0, 2, 1, 3])
    return _int8(op, op.Reshape(y, [0, 0, -1]), scale_values_gemm)


@body(
    "QOrderedLongformerAttention",
    "output",
    types={
        "input": _INT8,
        "scale_input": _FLOAT,
        **dict.fromkeys(("weight", "global_weight", "output"), "input"),
        **dict.fromkeys(("scale_weight", "bias", "scale_bias", "scale_qkv_gemm", "scale_global_weight"), "scale_input"),
        **dict.fromkeys(("global_bias", "scale_global_gemm", "scale_output"), "scale_input"),
        "mask": ("tensor(float16)",),
        "global": _INT32,
    },
    check=_check_longformer,
    domain=MICROSOFT,
)
def qordered_longformer_attention(
    op: FunctionEmitter,
    input: str,
    scale_input: str,
    weight: str,
    scale_weight: str,
    bias: str,
    scale_bias: str,
    scale_qkv_gemm: str,
    mask: str,
    global_weight: str,
    scale_global_weight: str,
    global_bias: str,
    scale_global_gemm: str,
    global_: str,
    scale_output: str,
    *,
    num_heads: int,
    order_global_weight: int,
    order_input: int,
    order_output: int,
    order_weight: int,
    window: int,
) -> str:
    """LongformerAttention of input·weight + bias and of input·global_weight + global_bias, each quantized"""
    x, projections = centred(op, input, None), []
    for matrix, scale, added, gemm in (
        (weight, scale_weight, bias, scale_qkv_gemm),
        (global_weight, scale_global_weight, global_bias, scale_global_gemm),
    ):
        y = op.MatMul(x, reordered(op, centred(op, matrix, None), _COL, _ROW))
        y = _rounded(op, op.Add(op.Mul(y, op.Mul(single(op, scale_input), scale)), added), gemm)
        projections.append(parts(op, y, op.Div(op.Shape(y, start=-1), [3]), -1))
    y = windowed(op, projections[0], projections[1], as_float(op, mask), global_, num_heads, window)
    return _int8(op, y, scale_output)
