"""Quantization. Rounding is piecewise constant: it has a derivative only by `gradient(quantization=)`.

"straight-through" differentiates y = x/scale + zero_point (Bengio et al. 2013). "clipped" differentiates the same held
within the range of the type; then the gradient of the scale through QuantizeLinear and DequantizeLinear is LSQ's (Esser
et al. 2020). The cotangent of a quantised value is a float tensor of its shape. Everything is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from refgrad import traits
from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import WRITTEN_OUT
from refgrad.protos.types import FLOATS
from refgrad.rules.linear import matmul
from refgrad.tables.registry import QUANTIZED, QUANTIZERS, rule

FLOAT = TensorProto.FLOAT
INTEGERS = frozenset(getattr(TensorProto, sign + bits) for sign in ("INT", "UINT") for bits in ("2", "4", "8", "16"))
SMALL_FLOATS = frozenset(
    getattr(TensorProto, name)
    for name in (
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
        *("FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2"),
    )
    if hasattr(TensorProto, name)
)
ZERO_POINT = "a zero point is a number of the quantised type, which is not trained"

for _name in ("QuantizeLinear", "QLinearConv", "QLinearMatMul"):
    QUANTIZERS["", _name] = INTEGERS | SMALL_FLOATS
QUANTIZERS["", "Resize"] = INTEGERS  # it rounds what it reads between elements
for _name in sorted(traits.CASTS):
    QUANTIZERS["", _name] = SMALL_FLOATS

# Their rules need only the cotangent, which is a float, and shapes, places and comparisons of the inputs.
QUANTIZED.update(
    ("", _name)
    for _name in (
        *("QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"),
        *("Cast", "CastLike", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"),
        *("Concat", "Split", "Slice", "Pad", "CenterCropPad", "Trilu", "ReverseSequence", "Compress", "Where"),
        *("Gather", "GatherElements", "GatherND", "DepthToSpace", "SpaceToDepth", "Resize"),
        *("MaxPool", "Relu", "Clip", "Max", "Min"),
        *("Add", "Sub", "Neg"),
    )
)

Laid = tuple[str, Callable[[str], str]]


@rule("QuantizeLinear", wrt=["x", "y_scale"], refused={"y_zero_point": ZERO_POINT})
def quantize_linear(
    op: Emitter,
    d_y: str,
    x: str,
    y_scale: str,
    y_zero_point: str | None,
    y: str,
    axis: int,
    block_size: int,
) -> tuple[str, str]:
    """dx = dy/scale, dscale = −Σ dy·x/scale², "clipped" where x/scale + zero_point is in the range of the type, else 0

    The sum is over what each scale is for: everything, the other axes, or the block. The cotangent dy exists only with
    quantization="straight-through" or "clipped"; by itself the derivative is zero. Here the range is checked before
    rounding. torch checks it afterwards, so that half a step beyond the range is still inside.
    """
    scale, summed = _lay(op, y_scale, x, axis, block_size)
    zero_point = None if y_zero_point is None else _lay(op, y_zero_point, x, axis, block_size)[0]
    d_x, d_scale = _quantized(op, d_y, x, scale, zero_point, y)
    return op.as_type(d_x, op.values.adjoint_type(x)), summed(d_scale)


@rule("DequantizeLinear", wrt=["x", "x_scale"], refused={"x_zero_point": ZERO_POINT})
def dequantize_linear(
    op: Emitter, d_y: str, x: str, x_scale: str, x_zero_point: str | None, axis: int, block_size: int
) -> tuple[str, str]:
    """dx = dy·scale, dscale = Σ dy·(x − zero_point) over what each scale is for"""
    scale, summed = _lay(op, x_scale, x, axis, block_size)
    zero_point = None if x_zero_point is None else _lay(op, x_zero_point, x, axis, block_size)[0]
    d_y = op.as_type(d_y, FLOAT)
    return op.Mul(d_y, scale), summed(op.Mul(d_y, _centred(op, x, zero_point)))


@rule(
    "QLinearConv",
    wrt=["x", "x_scale", "w", "w_scale", "y_scale", "B"],
    refused=dict.fromkeys(("x_zero_point", "w_zero_point", "y_zero_point"), ZERO_POINT),
)
def qlinear_conv(
    op: Emitter,
    d_y: str,
    x: str,
    x_scale: str,
    x_zero_point: str,
    w: str,
    w_scale: str,
    w_zero_point: str,
    y_scale: str,
    y_zero_point: str,
    B: str | None,
    y: str,
    **attributes: Any,
) -> tuple[str | None, ...]:
    """the gradients of QuantizeLinear(Conv(DequantizeLinear x, DequantizeLinear w, x_scale·w_scale·B))"""
    scales = [_lay(op, name, like, 0, 0) for name, like in ((x_scale, x), (w_scale, w), (y_scale, y))]
    (s_x, sum_x), (s_w, sum_w), (s_y, sum_y) = scales
    x_, w_ = (_centred(op, q, _lay(op, z, q, 0, 0)[0]) for q, z in ((x, x_zero_point), (w, w_zero_point)))
    X, W = _shaped(op, op.Mul(x_, s_x), x), _shaped(op, op.Mul(w_, s_w), w)
    bias = None
    if B is not None:
        (b_x, b_to_x), (b_w, b_to_w) = (_lay(op, scale, B, 0, 0) for scale in (x_scale, w_scale))
        b, s_b = op.as_type(B, FLOAT), op.Mul(b_x, b_w)
        bias = op.Mul(b, s_b)
    Y = _shaped(op, op.Conv(X, W, bias, **attributes), y)
    d_Y, d_s_y = _quantized(op, d_y, Y, s_y, _lay(op, y_zero_point, y, 0, 0)[0], y)
    d_X, d_W, d_b = op.grad.ConvGrad(_shaped(op, d_Y, y), X, W, **attributes)
    d_x_scale, d_w_scale = sum_x(op.Mul(d_X, x_)), sum_w(op.Mul(d_W, w_))
    if B is not None:
        terms = op.Mul(d_b, b)
        d_x_scale = op.Add(d_x_scale, b_to_x(op.Mul(terms, b_w)))
        d_w_scale = op.Add(d_w_scale, b_to_w(op.Mul(terms, b_x)))
        d_b = op.Mul(d_b, s_b)
    return op.Mul(d_X, s_x), d_x_scale, op.Mul(d_W, s_w), d_w_scale, sum_y(d_s_y), d_b


@rule(
    "QLinearMatMul",
    wrt=["a", "a_scale", "b", "b_scale", "y_scale"],
    refused=dict.fromkeys(("a_zero_point", "b_zero_point", "y_zero_point"), ZERO_POINT),
)
def qlinear_matmul(
    op: Emitter,
    d_y: str,
    a: str,
    a_scale: str,
    a_zero_point: str,
    b: str,
    b_scale: str,
    b_zero_point: str,
    y_scale: str,
    y_zero_point: str,
    y: str,
) -> tuple[str, ...]:
    """the gradients of QuantizeLinear(MatMul(DequantizeLinear a, DequantizeLinear b)), scales per row of a and column of b"""
    (s_a, sum_a), (s_b, sum_b) = _lay_rows(op, a_scale, a), _lay_columns(op, b_scale, b)
    s_y, sum_y = _lay_columns(op, y_scale, y)
    a_ = _centred(op, a, _lay_rows(op, a_zero_point, a)[0])
    b_ = _centred(op, b, _lay_columns(op, b_zero_point, b)[0])
    A, B = _shaped(op, op.Mul(a_, s_a), a), _shaped(op, op.Mul(b_, s_b), b)
    Y = _shaped(op, op.MatMul(A, B), y)
    d_Y, d_s_y = _quantized(op, d_y, Y, s_y, _lay_columns(op, y_zero_point, y)[0], y)
    d_A, d_B = matmul(op, _shaped(op, d_Y, y), A, B)
    return op.Mul(d_A, s_a), sum_a(op.Mul(d_A, a_)), op.Mul(d_B, s_b), sum_b(op.Mul(d_B, b_)), sum_y(d_s_y)


@rule("MatMulInteger", wrt=["A", "B"], refused=dict.fromkeys(("a_zero_point", "b_zero_point"), ZERO_POINT))
def matmul_integer(
    op: Emitter, d_Y: str, A: str, B: str, a_zero_point: str | None, b_zero_point: str | None
) -> tuple[str, str]:
    """the gradients of MatMul(A − a_zero_point, B − b_zero_point)"""
    a = _centred(op, A, None if a_zero_point is None else _lay_rows(op, a_zero_point, A)[0])
    b = _centred(op, B, None if b_zero_point is None else _lay_columns(op, b_zero_point, B)[0])
    d_Y = _shaped(op, op.as_type(d_Y, FLOAT), d_Y)
    adjoints: tuple[str, str] = matmul(op, d_Y, a, b)
    return adjoints


@rule("ConvInteger", wrt=["x", "w"], refused=dict.fromkeys(("x_zero_point", "w_zero_point"), ZERO_POINT))
def conv_integer(
    op: Emitter, d_y: str, x: str, w: str, x_zero_point: str | None, w_zero_point: str | None, **attributes: Any
) -> tuple[str, str]:
    """the gradients of Conv(x − x_zero_point, w − w_zero_point)"""
    X = _centred(op, x, None if x_zero_point is None else _lay(op, x_zero_point, x, 0, 0)[0])
    W = _centred(op, w, None if w_zero_point is None else _lay(op, w_zero_point, w, 0, 0)[0])
    d_y = _shaped(op, op.as_type(d_y, FLOAT), d_y)
    d_X, d_W, _ = op.grad.ConvGrad(d_y, X, W, **attributes)
    return d_X, d_W


def within_range(op: Emitter, d_output: str, input: str, output: str) -> str:
    """The cotangent of a Cast: with "clipped" 0 where the float was outside the range of the small float that it became."""
    if op.quantization == "clipped" and op.type(output) in SMALL_FLOATS and op.type(input) in FLOATS:
        d_output = op.Where(_inside(op, op.as_type(input, FLOAT), op.type(output)), d_output, 0)
    return d_output


def _quantized(op: Emitter, d_y: str, x: str, scale: str, zero_point: str | None, y: str) -> tuple[str, str]:
    """The cotangents of x and of the scale, element by element, for the cotangent of y = x/scale + zero_point."""
    ratio, d_ratio = op.Div(op.as_type(x, FLOAT), scale), op.as_type(d_y, FLOAT)
    if op.quantization == "clipped":
        shifted = ratio if zero_point is None else op.Add(ratio, zero_point)
        inside = _inside(op, shifted, op.type(y))
        ratio, d_ratio = op.Where(inside, ratio, 0), op.Where(inside, d_ratio, 0)
    d_x = op.Div(d_ratio, scale)
    return d_x, op.Neg(op.Mul(d_x, ratio))


def _inside(op: Emitter, x: str, kind: int) -> str:
    """True if x is in the range of an element type."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    info: Any = ml_dtypes.iinfo if kind in INTEGERS else ml_dtypes.finfo
    limits = info(dtype)
    return op.And(op.GreaterOrEqual(x, float(limits.min)), op.LessOrEqual(x, float(limits.max)))


def _centred(op: Emitter, x: str, zero_point: str | None) -> str:
    """x − zero_point in float32.

    It uses Cast: a DequantizeLinear without an effect would meet the optimizers of runtimes, which merge it with the
    model's own.
    """
    x_ = op.as_type(x, FLOAT)
    return _shaped(op, x_ if zero_point is None else op.Sub(x_, zero_point), x)


def _shaped(op: Emitter, value: str, like: str) -> str:
    """`value`, known to have the shape of `like`."""
    shape = op.shape(like)
    if shape is not None and op.is_emitted(value):
        op.assume(value, shape)
    return value


# A scale or zero point in the shape of its tensor, in float32, and how the cotangent of that is summed to its own shape.


def _lay(op: Emitter, parameter: str, x: str, axis: int, block_size: int) -> Laid:
    """One for all, one per index along `axis`, or with `block_size` one per block along it."""
    value, shape = op.as_type(parameter, FLOAT), op.shape(parameter)
    if shape is not None and (shape == () or _is_single(op, parameter)):
        return _laid(op, op.Reshape(value, []) if shape else value, (), parameter, x)
    if block_size:
        dims = op.shape(x)
        size = dims[axis] if dims else None
        if isinstance(size, int) and size <= WRITTEN_OUT:
            blocks = op.const([k // block_size for k in range(size)])
        else:
            length = op.Squeeze(op.Shape(x, start=axis, end=axis + 1 or None), [0])
            blocks = op.Div(op.Range(0, length, 1), block_size)

        def summed(adjoint: str) -> str:
            total = op.grad.GatherGrad(op.shape_of(parameter), blocks, adjoint, axis=axis)
            return op.as_type(total, op.type(parameter))

        return _shaped(op, op.Gather(value, blocks, axis=axis), x), summed
    rank = op.rank(x)
    if rank is None:  # the axes after `axis` are 1; of a scalar there are none at all
        count = op.Shape(op.Shape(x))
        after = [-axis - 1] if axis < 0 else op.Max(op.Sub(count, [axis + 1]), [0])
        shape_at_run_time = op.Slice(op.Concat([-1], op.full(after, 1, like=count), axis=0), [0], count, [0])
        return _laid(op, op.Reshape(value, shape_at_run_time), None, parameter, x)
    sizes = [-1, *[1] * (-axis - 1 if axis < 0 else max(rank - axis - 1, 0))][:rank]
    known = (*shape, *sizes[1:]) if shape is not None and rank else None
    return _laid(op, op.Reshape(value, sizes), known, parameter, x)


def _lay_rows(op: Emitter, parameter: str, x: str) -> Laid:
    """One for all, a vector with one per row, or a tensor that broadcasts."""
    shape = op.shape(parameter)
    if shape is None:
        sizes = op.Shape(parameter)
        vector = op.Cast(op.Equal(op.Shape(sizes), [1]), to=TensorProto.INT64)
        sizes = op.Concat(sizes, op.full(vector, 1, like=sizes), axis=0)
        return _laid(op, op.Reshape(op.as_type(parameter, FLOAT), sizes), None, parameter, x)
    if len(shape) != 1 or _is_single(op, parameter):
        return _lay_columns(op, parameter, x)
    return _laid(op, op.Reshape(op.as_type(parameter, FLOAT), [-1, 1]), (*shape, 1), parameter, x)


def _lay_columns(op: Emitter, parameter: str, x: str) -> Laid:
    """One for all, a vector with one per column, or a tensor that broadcasts."""
    return _laid(op, op.as_type(parameter, FLOAT), op.shape(parameter), parameter, x)


def _laid(op: Emitter, value: str, shape: Any, parameter: str, x: str) -> Laid:
    if shape is not None and op.is_emitted(value):
        op.assume(value, shape)

    def summed(adjoint: str) -> str:
        total = op.grad.BroadcastGradient(_shaped(op, adjoint, x), value, (value, x))
        if op.shape(parameter) is None or op.shape(parameter) != shape:
            total = op.reshape_like(total, parameter)
        return op.as_type(total, op.type(parameter))

    return value, summed


def _is_single(op: Emitter, parameter: str) -> bool:
    """True if it is known to hold one element."""
    shape = op.static(parameter)
    return shape is not None and int(np.prod(shape)) == 1
