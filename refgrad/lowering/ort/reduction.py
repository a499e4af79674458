"""Reductions, as ONNX Runtime's builder writes their gradients."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.lowering.ort.kernels import SINGLE
from refgrad.tables.registry import lowering


@lowering("Averaged", dialect="ort")
def averaged(op: Emitter, dY: str, means: str, X: str, count: int | None) -> str | None:
    """The sizes are divided as integers, which fails where they are 0; in double the quotient would be rounded to float."""
    shape = op.static(X)
    if op.type(dY) not in SINGLE or shape is None or 0 in shape:
        return None
    scale = op.Div(op.Size(X), op.Size(means))
    return op.com_microsoft("Scale", dY, scale, scale_down=1)


@lowering("OverNorm", dialect="ort")
def over_norm(op: Emitter, dY: str, Y: str) -> str:
    return op.Where(op.Equal(Y, 0.0), 0.0, op.Div(dY, Y))
