"""Reductions."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.formulas.norms import over_norm_power
from refgrad.tables.registry import lowering


@lowering("Averaged")
def averaged(op: Emitter, dY: str, means: str, X: str, count: int | None) -> str:
    return op.Mul(dY, op.share(X, means, like=X) if count is None else 1 / max(count, 1))


@lowering("OverNorm")
def over_norm(op: Emitter, dY: str, Y: str) -> str:
    return over_norm_power(op, dY, Y, 1)
