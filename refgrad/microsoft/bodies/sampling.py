"""ONNX Runtime's readings of an image between its pixels."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, body
from refgrad.microsoft.declared import check_flags, check_known, check_shape, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import Shapes

_NEWER = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}  # what ai.onnx calls them from opset 20 on


def _check_grid_sample(shapes: Shapes, args: Arguments) -> None:
    check_known(args, "mode", *_NEWER)
    check_known(args, "padding_mode", "zeros", "border", "reflection")
    check_flags(args, "align_corners")
    check_shape(shapes, "X", args.X, (None,) * 4)


@body("GridSample", "Y", check=_check_grid_sample, domain=MICROSOFT)
def grid_sample(
    op: FunctionEmitter,
    X: str,
    Grid: str,
    *,
    align_corners: int = 0,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
) -> str:
    """X at the points of Grid, whose last axis is (x, y) in −1..1 from border to border"""
    named = _NEWER[mode] if op.opset >= 20 else mode
    return op.GridSample(X, Grid, align_corners=align_corners, mode=named, padding_mode=padding_mode)


def _check_crop_and_resize(shapes: Shapes, args: Arguments) -> None:
    check_known(args, "mode", "bilinear", "nearest")
    check_shape(shapes, "X", args.X, (None,) * 4)
    check_shape(shapes, "rois", args.rois, (None, 4))
    check_shape(shapes, "batch_indices", args.batch_indices, (sizes(shapes, args.rois, 2)[0],))
    check_shape(shapes, "crop_size", args.crop_size, (2,))


@body("CropAndResize", "Y", others=("batch_indices", "crop_size"), check=_check_crop_and_resize, domain=MICROSOFT)
def crop_and_resize(
    op: FunctionEmitter,
    X: str,
    rois: str,
    batch_indices: str,
    crop_size: str,
    *,
    extrapolation_value: float = 0.0,
    mode: str = "bilinear",
) -> str:
    """The weights of the rows · X · the weights of the columns, at points spread over each box from corner to corner"""
    weights, inside = [], []
    for axis in (0, 1):
        pixels, count = (
            op.Shape(X, start=axis + 2, end=axis + 3),
            op.Cast(op.Slice(crop_size, [axis], [axis + 1], [0]), to=TensorProto.INT64),
        )
        first, last = (op.wide(op.Slice(rois, [at], [at + 1], [1])) for at in (axis, axis + 2))
        top = op.CastLike(op.Sub(pixels, [1]), first)
        share = op.Div(
            op.CastLike(op.up_to(count), first), op.CastLike(op.Max(op.Sub(count, [1]), op.const([1])), first)
        )
        share = op.Where(op.Equal(count, 1), 0.5, share)
        place = op.Mul(op.Add(first, op.Mul(op.Sub(last, first), share)), top)
        inside.append(op.And(op.GreaterOrEqual(place, 0.0), op.LessOrEqual(place, top)))
        pixel, place = op.CastLike(op.up_to(pixels), first), op.Unsqueeze(place, [2])
        if mode == "nearest":
            weights.append(op.CastLike(op.Equal(op.Floor(op.Add(place, 0.5)), pixel), first))
        else:
            weights.append(op.Relu(op.Sub(op.const(1.0, like=first), op.Abs(op.Sub(place, pixel)))))
    rows, columns = (op.Unsqueeze(x, [1]) for x in weights)
    image = op.wide(op.Gather(X, batch_indices, axis=0))
    y = op.MatMul(op.MatMul(rows, image), op.Transpose(columns, perm=[0, 1, 3, 2]))
    seen = op.And(op.Unsqueeze(inside[0], [1, 3]), op.Unsqueeze(inside[1], [1, 2]))
    return op.CastLike(op.Where(seen, y, op.const(extrapolation_value, like=y)), X)
