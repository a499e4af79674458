"""ONNX Runtime's operators that move elements, and those that make tensors of a shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form, rule
from refgrad.microsoft.bodies.position import known_rank
from refgrad.microsoft.declared import check_known, sizes
from refgrad.model.graph import Node
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import typed
from refgrad.tables.definitions import FLOATS, Shapes


@body("ConcatTraining", "concat_result", optional=["per_input_length"], others=("per_input_length",), domain=MICROSOFT)
def concat_training(op: FunctionEmitter, *inputs: str, axis: int) -> tuple[str, str]:
    """Concat; besides, the length of each input along the axis"""
    end = None if axis == -1 else axis + 1
    lengths = [op.Shape(x, start=axis, end=end) for x in inputs]
    return op.Concat(*inputs, axis=axis), op.Concat(*lengths, axis=0)


@rule("ConcatTraining", domain=MICROSOFT)
def concat_training_rule(op: Emitter, d_concat_result: str, inputs: list[str], per_input_length: str, axis: int) -> Any:
    """dxᵢ = the part of dy that xᵢ became"""
    return (op.grad.SplitTraining(d_concat_result, per_input_length, axis=axis, count=len(inputs)),)


@body("Trilu", "Y", others=["k"], domain=MICROSOFT)
def trilu_body(op: FunctionEmitter, X: str, k: str | None = None, *, upper: int = 1) -> str:
    """The triangle of X, 0 elsewhere"""
    return op.Trilu(X, k, upper=upper)


@rule("Trilu", domain=MICROSOFT, wrt=["X"])
def trilu(op: Emitter, d_Y: str, k: str | None, upper: int) -> str:
    """dX = the same triangle of dY, 0 elsewhere"""
    return op.grad.TriluGrad(d_Y, k, upper=upper)


_ANY = (*FLOATS, "tensor(int32)", "tensor(int64)")


@body("SampleOp", "Y", types={"X": _ANY, "Y": "X"}, domain=MICROSOFT)
def sample_op(op: FunctionEmitter, X: str) -> str:
    """X"""
    return op.Identity(X)


@body("ExpandDims", "Y", types={"X": _ANY, "axis": ["tensor(int32)"], "Y": "X"}, domain=MICROSOFT)
def expand_dims(op: FunctionEmitter, X: str, axis: str) -> str:
    """X with one more axis of one element"""
    return op.Unsqueeze(X, op.Reshape(op.Cast(axis, to=TensorProto.INT64), [-1]))


def _check_pad(shapes: Shapes, args: Arguments) -> None:
    check_known(args, "mode", "constant", "edge", "reflect", "wrap")


@body("Pad", "output", types={"pads": ["tensor(int64)"]}, check=_check_pad, domain=MICROSOFT)
def pad(op: FunctionEmitter, data: str, pads: str, value: str | None = None, *, mode: str = "constant") -> str:
    """data with pads before and behind each axis, cut where they are negative"""
    if mode == "wrap" and op.opset < 19:
        raise UnsupportedFormError("its mode 'wrap' needs opset 19: convert the model")
    given = None if value is None or mode != "constant" else op.Reshape(value, [])
    return op.Pad(data, op.Reshape(pads, [-1]), given, mode=mode)


@body("Range", "Y", types={"start": _ANY, "limit": "start", "delta": "start", "Y": "start"}, domain=MICROSOFT)
def range_(op: FunctionEmitter, start: str, limit: str, delta: str | None = None) -> str:
    """start, start + delta, ... before limit; delta is 1 where it is left out"""
    step = op.const(1, like=start) if delta is None else delta
    return op.Range(*(op.Reshape(number, []) for number in (start, limit, step)))


@form("SplitTraining", rest=typed("X"))
def split_training(op: Emitter, X: str, split: str, *, axis: int = 0, _node: Node) -> Any:
    """Split; where there are no lengths the parts are equal, the first of them longer by 1 where they do not fit"""
    count, static, length = len(_node.outputs), op.static(X), op.static(split)
    if length == (0,):
        size = op.const([static[axis]]) if static is not None else op.Gather(op.Shape(X), [axis])
        parts = op.const([count])
        least = op.Div(size, parts)
        longer = op.Less(op.const(np.arange(count)), op.Sub(size, op.Mul(least, parts)))
        split = op.Add(least, op.Cast(longer, to=TensorProto.INT64))
    elif length is not None and length != (count,):
        raise UnsupportedFormError(f"it has {count} outputs and {length[0] if length else 'no'} lengths")
    return op.Split(X, split, axis=axis, outputs=count)


@form("View", rest=typed("X"))
def view(op: Emitter, X: str, *shapes: str) -> tuple[str, ...]:
    """The elements of X in order, cut into tensors of the given shapes"""
    lengths = [op.ReduceProd(shape, keepdims=1) for shape in shapes]
    parts = op.Split(op.Reshape(X, [-1]), op.Concat(*lengths, axis=0), axis=0, outputs=len(shapes))
    parts = parts if isinstance(parts, tuple) else (parts,)
    return tuple(op.Reshape(part, shape, allowzero=1) for part, shape in zip(parts, shapes, strict=True))


def _check_unfold(shapes: Shapes, args: Arguments) -> None:
    dim, rank = args.dim, shapes.rank(args.input)
    if rank is not None and not -rank <= dim < rank:
        raise UnsupportedFormError(f"its dim is {dim}; a tensor of rank {rank} has the axes {-rank} to {rank - 1}")
    count = None if rank is None else sizes(shapes, args.input, rank)[dim]
    if args.step < 1:
        raise UnsupportedFormError(f"step={args.step} is not 1 or more")
    if args.size < 1 or (count is not None and args.size > count):
        most = "" if count is None else f" to {count}, the size of axis {dim}"
        raise UnsupportedFormError(f"size={args.size} is not from 1{most or ' on'}")


@body("UnfoldTensor", "output", check=_check_unfold, domain=MICROSOFT)
def unfold_tensor(op: FunctionEmitter, input: str, *, dim: int = -1, size: int, step: int = 1) -> str:
    """All slices of `size` elements along the axis dim, `step` apart, each along a new last axis"""
    rank = known_rank(op, "input", input)
    axis = dim % rank
    last = op.Sub(op.Shape(input, start=axis, end=axis + 1), [size - 1])
    starts = op.Range(op.const(np.array(0)), op.Squeeze(last, [0]), op.const(np.array(step)))
    slices = op.Gather(input, op.Add(op.Unsqueeze(starts, [1]), op.up_to(op.const([size]))), axis=axis)
    return op.Transpose(slices, perm=[k for k in range(rank + 1) if k != axis + 1] + [axis + 1])
