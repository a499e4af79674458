"""ONNX Runtime's operators for shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.forward.graph import Node
from refgrad.microsoft.forms import form
from refgrad.microsoft.results import typed
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import UnsupportedFormError, operator
from refgrad.tables.registry import rule


@operator("ConcatTraining", "concat_result", optional=["per_input_length"], others=("per_input_length",))
def concat_training(op: FunctionEmitter, *inputs: str, axis: int) -> tuple[str, str]:
    """Concat; besides, the length of each input along the axis"""
    end = None if axis == -1 else axis + 1
    lengths = [op.Shape(x, start=axis, end=end) for x in inputs]
    return op.Concat(*inputs, axis=axis), op.Concat(*lengths, axis=0)


@rule("ConcatTraining", domain=MICROSOFT)
def concat_training_rule(op: Emitter, d_concat_result: str, inputs: list[str], per_input_length: str, axis: int) -> Any:
    """dxᵢ = the part of dy that xᵢ became"""
    return (op.grad.SplitTraining(d_concat_result, per_input_length, axis=axis, count=len(inputs)),)


@operator("Trilu", "Y", others=["k"])
def trilu_body(op: FunctionEmitter, X: str, k: str | None = None, *, upper: int = 1) -> str:
    """The triangle of X, 0 elsewhere"""
    return op.Trilu(X, k, upper=upper)


@rule("Trilu", domain=MICROSOFT, wrt=["X"])
def trilu(op: Emitter, d_Y: str, k: str | None, upper: int) -> str:
    """dX = the same triangle of dY, 0 elsewhere"""
    return op.grad.TriluGrad(d_Y, k, upper=upper)


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
