"""Reductions."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import lowering


@lowering("Averaged")
def averaged(op: Emitter, dY: str, means: str, X: str, count: int | None) -> str:
    return str(op.Mul(dY, op.share(X, means, like=X) if count is None else 1 / max(count, 1)))
