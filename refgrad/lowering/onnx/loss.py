"""Losses over class scores. Scores are (N, C, d...), labels (N, d...), weights (C,)."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.formulas.loss import read_labels
from refgrad.formulas.types import wide_type
from refgrad.tables.registry import lowering


@lowering("SoftmaxCrossEntropyLossGrad")
def softmax_cross_entropy_loss_grad(
    op: Emitter,
    d_output: str,
    log_prob: str,
    labels: str,
    weights: str | None,
    reduction: str,
    ignore_index: int | str | None,
) -> str:
    """share·(exp(log_prob) − onehot(label)): the share is subtracted where the label points, in float32 for 16-bit floats."""
    read = read_labels(op, d_output, labels, weights, ignore_index, reduction)
    kind, wide = op.type(d_output), wide_type(op, d_output)
    share = op.as_type(op.Unsqueeze(read.share, [1]), wide)
    soft = op.Mul(op.as_type(op.Exp(log_prob), wide), share)
    at = op.Unsqueeze(read.classes, [1])
    return op.as_type(op.ScatterElements(soft, at, op.Neg(share), axis=1, reduction="add"), kind)
