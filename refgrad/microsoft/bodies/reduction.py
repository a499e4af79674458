"""ONNX Runtime's reductions in training."""

from __future__ import annotations

from refgrad.extend import Emitter, form
from refgrad.rewrites.results import typed


@form("ReduceSumTraining", results=[typed("X")])
def reduce_sum_training(op: Emitter, X: str, axes: str, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> str:
    """ReduceSum"""
    return op.ReduceSum(X, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)
