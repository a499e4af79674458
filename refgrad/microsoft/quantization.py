"""ONNX Runtime's quantizations: what its optimizer writes, and what training needs."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, numpy_helper

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import plus
from refgrad.microsoft.forms import form
from refgrad.microsoft.results import like
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import UnsupportedFormError, operator
from refgrad.tables.registry import rule

BYTES = ("tensor(int8)", "tensor(uint8)")
_SMALL = (*BYTES, "tensor(int16)", "tensor(uint16)", "tensor(int4)", "tensor(uint4)")
_SHORT_FLOATS = ("tensor(float16)", "tensor(float)")
_RANGES = {
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-(2**15), 2**15 - 1),
    TensorProto.UINT16: (0, 2**16 - 1),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15),
}


@operator(
    "QuantizeLinear",
    "y",
    types={"x": _SHORT_FLOATS, "y_scale": "x", "y_zero_point": _SMALL, "y": "y_zero_point"},
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


@operator(
    "DequantizeLinear",
    "y",
    types={
        "x": (*_SMALL, "tensor(int32)"),
        "x_scale": _SHORT_FLOATS,
        "x_zero_point": "x",
        "y": "x_scale",
    },
)
def dequantize_linear_body(
    op: FunctionEmitter, x: str, x_scale: str, x_zero_point: str | None = None, *, axis: int | None = None
) -> str:
    """(x − x_zero_point)·x_scale, a scale and a zero point for all or for each index along an axis"""
    scale, zero_point = (v and _along(op, v, x, axis) for v in (x_scale, x_zero_point))
    return op.CastLike(dequantized(op, x, scale, zero_point), x_scale)


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


@operator("FakeQuant", "fake_quantized_tensor", optional=["mask"], others=("mask",))
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
