"""ONNX Runtime's quantizations: what its optimizer writes, and what training needs."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto, numpy_helper

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form, rounds, rule
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.activation import plus
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import like
from refgrad.rules.quantization import INTEGERS, ZERO_POINT, dequantize_linear, quantize_linear
from refgrad.tables.definitions import Shapes

rounds("QuantizeLinear", "QuantizeWithOrder", domain=MICROSOFT, to=INTEGERS)
rounds("QuantizeBFP", domain=MICROSOFT, to=[TensorProto.UINT8])

BYTES = ("tensor(int8)", "tensor(uint8)")
_SMALL = (*BYTES, "tensor(int16)", "tensor(uint16)", "tensor(int4)", "tensor(uint4)")
_SHORT_FLOATS = ("tensor(float16)", "tensor(float)")
_RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(2**15), 2**15 - 1),
    TensorProto.UINT16: (0, 2**16 - 1),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15),
}


@body(
    "QuantizeLinear",
    "y",
    types={"x": _SHORT_FLOATS, "y_scale": "x", "y_zero_point": _SMALL, "y": "y_zero_point"},
    domain=MICROSOFT,
)
def quantize_linear_body(
    op: FunctionEmitter, x: str, y_scale: str, y_zero_point: str | None = None, *, axis: int | None = None
) -> str:
    """saturate(round(x/y_scale) + y_zero_point), a scale and a zero point for all or for each index along an axis"""
    kind = TensorProto.UINT8 if y_zero_point is None else op.type(y_zero_point)
    if kind not in _RANGES:
        raise UnsupportedFormError("the type of its input y_zero_point is unknown; add it to value_info")
    low, high = (op.const(np.float32(end)) for end in _RANGES[kind])
    scale, zero_point = (v and _along(op, as_float(op, v), x, axis) for v in (y_scale, y_zero_point))
    q = op.Round(op.Div(as_float(op, x), scale))
    return op.Cast(op.Min(op.Max(plus(op, q, zero_point), low), high), to=kind)


@body(
    "DequantizeLinear",
    "y",
    types={
        "x": (*_SMALL, "tensor(int32)"),
        "x_scale": _SHORT_FLOATS,
        "x_zero_point": "x",
        "y": "x_scale",
    },
    domain=MICROSOFT,
)
def dequantize_linear_body(
    op: FunctionEmitter, x: str, x_scale: str, x_zero_point: str | None = None, *, axis: int | None = None
) -> str:
    """(x − x_zero_point)·x_scale, a scale and a zero point for all or for each index along an axis"""
    scale, zero_point = _along(op, x_scale, x, axis), x_zero_point and _along(op, x_zero_point, x, axis)
    return op.CastLike(dequantized(op, x, scale, zero_point), x_scale)


@rule("QuantizeLinear", domain=MICROSOFT, wrt=["x", "y_scale"], quantized=True, refused={"y_zero_point": ZERO_POINT})
def quantize_linear_of_microsoft(
    op: Emitter, d_y: str, x: str, y_scale: str, y_zero_point: str | None, y: str, axis: int | None
) -> tuple[str, str]:
    """as QuantizeLinear of ai.onnx"""
    return quantize_linear(op, d_y, x, y_scale, y_zero_point, y, 1 if axis is None else axis, 0)


@rule("DequantizeLinear", domain=MICROSOFT, wrt=["x", "x_scale"], quantized=True, refused={"x_zero_point": ZERO_POINT})
def dequantize_linear_of_microsoft(
    op: Emitter, d_y: str, x: str, x_scale: str, x_zero_point: str | None, axis: int | None
) -> tuple[str, str]:
    """as DequantizeLinear of ai.onnx"""
    return dequantize_linear(op, d_y, x, x_scale, x_zero_point, 1 if axis is None else axis, 0)


def dequantized(op: FunctionEmitter, q: str, scale: str, zero_point: str | None) -> str:
    """(q − zero_point)·scale in float, a scale and a zero point for all or for each index of the last axis

    It uses Cast: a DequantizeLinear may not have a scale for all and a zero point for each, nor every type.
    """
    return str(op.Mul(centred(op, q, zero_point), as_float(op, scale)))


def centred(op: FunctionEmitter, q: str, zero_point: str | None) -> str:
    """q − zero_point in float"""
    x = as_float(op, q)
    return x if zero_point is None else str(op.Sub(x, as_float(op, zero_point)))


def as_float(op: FunctionEmitter, x: str) -> str:
    """`x` in float."""
    return x if op.type(x) == TensorProto.FLOAT else str(op.Cast(x, to=TensorProto.FLOAT))


def _along(op: FunctionEmitter, parameter: str, x: str, axis: int | None) -> str:
    """A scale or a zero point in a shape that broadcasts to x: one for all, or one for each index along the axis."""
    if op.rank(parameter) == 0:
        return parameter
    axis, rank = 1 if axis is None else axis, op.rank(x)
    if rank is not None:
        return str(op.Reshape(parameter, [-1, *[1] * (-axis - 1 if axis < 0 else rank - axis - 1)][:rank]))
    count = op.Shape(op.Shape(x))
    after = op.const([-axis - 1]) if axis < 0 else op.Max(op.Sub(count, [axis + 1]), [0])
    ones = op.ConstantOfShape(after, value=numpy_helper.from_array(np.ones(1, np.int64)))
    return str(op.Reshape(parameter, op.Slice(op.Concat([-1], ones, axis=0), [0], count, [0])))


def single(op: FunctionEmitter, parameter: str) -> str:
    """A scale or a zero point for all, which may have an axis of 1."""
    return parameter if op.rank(parameter) == 0 else str(op.Reshape(parameter, op.const(np.zeros(0, np.int64))))


@body(
    "QuantizeWithOrder",
    "output",
    types={"input": _SHORT_FLOATS, "scale_input": ("tensor(float)",), "output": ("tensor(int8)",)},
    domain=MICROSOFT,
)
def quantize_with_order(
    op: FunctionEmitter, input: str, scale_input: str, *, order_input: int, order_output: int
) -> str:
    """saturate(round(x/scale_input)) in another order of cublasLt"""
    q = op.QuantizeLinear(as_float(op, input), single(op, scale_input), op.const(np.int8(0)))
    return reordered(op, q, order_input, order_output)


def _check_to(shapes: Shapes, args: Arguments) -> None:
    if args.to not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE):  # which a model in double has
        raise UnsupportedFormError(f"its attribute to is {args.to}; it is 1 (float) or 10 (float16)")


@body(
    "DequantizeWithOrder",
    "output",
    types={"input": ("tensor(int8)",), "scale_input": ("tensor(float)",), "output": _SHORT_FLOATS},
    check=_check_to,
    domain=MICROSOFT,
)
def dequantize_with_order(
    op: FunctionEmitter, input: str, scale_input: str, *, order_input: int, order_output: int, to: int
) -> str:
    """x·scale_input in another order of cublasLt"""
    x = reordered(op, dequantized(op, input, single(op, scale_input), None), order_input, order_output)
    return op.Cast(x, to=to)


# How cublasLt lays a matrix out, by its numbers of the orders. Rows and columns are split into tiles, from the coarse to the
# fine; the permutation says in which order (batch, rows, tiles of them, columns, tiles of them) lie.
ORDERS: dict[int, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    0: ("ORDER_COL", (), (), (0, 2, 1)),
    1: ("ORDER_ROW", (), (), (0, 1, 2)),
    2: ("ORDER_COL32", (), (32,), (0, 2, 1, 3)),
    3: ("ORDER_COL4_4R2_8C", (4, 2), (4, 2, 4), (0, 4, 1, 3, 5, 6, 2, 7)),
    4: ("ORDER_COL32_2R_4R4", (4, 4, 2), (32,), (0, 5, 1, 3, 2, 4, 6)),
}


def reordered(op: FunctionEmitter, x: str, order: int, target: int) -> str:
    """Matrices that lie in one order, the shape unchanged, in another one."""
    for number in (order, target):
        if number not in ORDERS:
            known = ", ".join(f"{name} ({k})" for k, (name, *_) in ORDERS.items())
            raise UnsupportedFormError(f"the order {number} is not known; there are {known}")
    if order == target:
        return x
    shape = op.Shape(x)
    _, rows, columns, perm = ORDERS[order]
    tiled = op.Reshape(x, op.Gather(_tiled(op, shape, rows, columns), list(perm)), allowzero=1)
    matrices = op.Transpose(tiled, perm=np.argsort(perm).tolist())
    _, rows, columns, perm = ORDERS[target]
    tiled = op.Reshape(matrices, _tiled(op, shape, rows, columns), allowzero=1)
    return str(op.Reshape(op.Transpose(tiled, perm=perm), shape, allowzero=1))


def _tiled(op: FunctionEmitter, shape: str, rows: tuple[int, ...], columns: tuple[int, ...]) -> str:
    """The sizes of batch, rows, their tiles, columns and their tiles; what has fewer than two axes is one row."""
    sizes = op.Concat([1, 1], shape, axis=0)
    batch = op.ReduceProd(op.Slice(sizes, [0], [-2], [0]), keepdims=1)
    row, column = op.Slice(sizes, [-2], [-1], [0]), op.Slice(sizes, [-1], [END], [0])
    parts = [batch]
    for size, tiles in ((row, rows), (column, columns)):
        parts += [op.Div(size, [math.prod(tiles)]), *([op.const(list(tiles))] if tiles else [])]
    return str(op.Concat(*parts, axis=0))


@body("FakeQuant", "fake_quantized_tensor", optional=["mask"], others=("mask",), domain=MICROSOFT)
def fake_quant_body(
    op: FunctionEmitter, input_tensor: str, scale: str, zero_point: str, *, quant_min: int = 0, quant_max: int = 255
) -> tuple[str, str]:
    """(clip(round(x/scale) + zero_point, quant_min, quant_max) − zero_point)·scale"""
    q = op.Add(op.Round(op.Div(input_tensor, scale)), zero_point)
    low, high = (op.const(bound, like=input_tensor) for bound in (quant_min, quant_max))
    inside = op.And(op.GreaterOrEqual(q, low), op.LessOrEqual(q, high))
    return op.Mul(op.Sub(op.Min(op.Max(q, low), high), zero_point), scale), inside


@rule("FakeQuant", domain=MICROSOFT)
def fake_quant(
    op: Emitter,
    d_fake_quantized_tensor: str,
    input_tensor: str,
    scale: str,
    zero_point: str,
    fake_quantized_tensor: str,
    mask: str,
) -> tuple[str, str, str]:
    """dx = 0, dscale = Σ dy·(q − zero_point), dzero_point = −Σ dy·scale where q was clipped

    With quantization="straight-through" dx = dy and dzero_point = 0, with "clipped" dx = dy where q was not clipped; in both
    dscale is less by dx·x/scale.
    """
    d_y = d_fake_quantized_tensor
    d_zero_point = op.Neg(op.Where(mask, 0.0, op.Mul(d_y, scale)))
    d_scale = op.Div(op.Mul(d_y, fake_quantized_tensor), scale)
    d_x = op.zeros_like(input_tensor)
    if op.quantization != "zero":
        d_x = d_y if op.quantization == "straight-through" else op.grad.FakeQuantGrad(d_y, mask)
        d_scale = op.Sub(d_scale, op.Div(op.Mul(d_x, input_tensor), scale))
    if op.quantization == "straight-through":
        d_zero_point = op.zeros_like(input_tensor)
    d_scale = op.grad.BroadcastGradient(d_scale, scale, (scale, input_tensor))
    return d_x, d_scale, op.grad.BroadcastGradient(d_zero_point, zero_point, (zero_point, input_tensor))


@form("FakeQuantGrad", results=[like("dY")])
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str:
    return op.grad.FakeQuantGrad(dY, mask)
