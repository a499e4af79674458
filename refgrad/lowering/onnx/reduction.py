"""Reductions."""

from __future__ import annotations

from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import lowering


@lowering("Averaged")
def averaged(op: Emitter, dY: str, means: str, X: str, count: int | None) -> str:
    return op.Mul(dY, op.share(X, means, like=X) if count is None else 1 / max(count, 1))


@lowering("OverNorm")
def over_norm(op: Emitter, dY: str, Y: str) -> str:
    """The division is never by 0, so that this has a derivative too."""
    return op.Div(dY, op.Where(op.Equal(Y, 0.0), 1.0, Y))
