"""Cotangents that pass where a condition holds."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.builder.op import Emitter

_FAST = (TensorProto.FLOAT, TensorProto.DOUBLE)


def mask_cotangent(op: Emitter, condition: str, d_y: str, *, unless: bool = False, other: float | str = 0.0) -> str:
    """A cotangent of the forward node where the condition holds (with `unless`: where it does not), 0 elsewhere.

    `other` may stand in for that 0: it is NaN where d_y is not finite, else 0.

    An element that does not pass may be infinite or NaN, as the cotangent behind √y is at y = 0: a Where discards it. If no
    operator behind the node can make it so, the result is a product with 0 or 1. It takes ONNX Runtime's CPU a tenth of
    the time of a Where whose condition changes from element to element. A dialect that follows ONNX Runtime's builder
    writes the Where.
    """
    if op.type(d_y) in _FAST and op.preserves_finite and not op.dialect.follows_onnxruntime:
        return op.Mul(d_y, op.Cast(op.Not(condition) if unless else condition, to=op.type(d_y)))
    return op.Where(condition, other, d_y) if unless else op.Where(condition, d_y, other)
