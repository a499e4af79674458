"""Losses over class scores. Scores are (N, C, d...), labels (N, d...), weights (C,)."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.formulas.loss import read_labels
from refgrad.tables.registry import rule


@rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    op: Emitter,
    d_output: str | None,
    d_log_prob: str | None,
    scores: str,
    labels: str,
    weights: str | None,
    output: str,
    log_prob: str,
    ignore_index: int | None,
    reduction: str,
) -> tuple[str | None, str | None]:
    """dscores = w·dy·(softmax − onehot(label)), divided by Σw for the mean; dweights as for NegativeLogLikelihoodLoss

    The cotangent of log_prob = LogSoftmax(scores) adds its own contribution.
    """
    d_scores = None
    if d_output is not None:
        d_scores = op.grad.SoftmaxCrossEntropyLossGrad(
            d_output, log_prob, labels, weights, reduction=reduction, ignore_index=ignore_index
        )
    if d_log_prob is not None:
        through_log_prob = op.grad.LogSoftmaxGrad(d_log_prob, log_prob, axis=1)
        d_scores = through_log_prob if d_scores is None else op.Add(d_scores, through_log_prob)
    return d_scores, _d_weights(op, d_output, log_prob, labels, weights, output, ignore_index, reduction)


@rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    op: Emitter,
    d_loss: str,
    input: str,
    target: str,
    weight: str | None,
    loss: str,
    ignore_index: int | None,
    reduction: str,
) -> tuple[str, str | None]:
    """dx = −w·dy at the label, divided by Σw for the mean; dw = dy·(−x[label]), for the mean dy·(−x[label] − y)/Σw"""
    read = read_labels(op, d_loss, target, weight, ignore_index, reduction)
    at, share = op.Unsqueeze(read.classes, [1]), op.Unsqueeze(read.share, [1])
    d_input = op.ScatterElements(op.zeros_like(input), at, op.Neg(share), axis=1)
    return d_input, _d_weights(op, d_loss, input, target, weight, loss, ignore_index, reduction)


def _d_weights(
    op: Emitter,
    d_loss: str | None,
    log_prob: str,
    labels: str,
    weights: str | None,
    loss: str,
    ignore_index: int | None,
    reduction: str,
) -> str | None:
    if weights is None or d_loss is None:
        return None
    read = read_labels(op, d_loss, labels, weights, ignore_index, reduction)
    taken = op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(read.classes, [1]), axis=1), [1])
    d_weight = op.Neg(op.Mul(read.unit, op.Add(taken, loss) if reduction == "mean" else taken))
    if read.ignored is not None:
        d_weight = op.Where(read.ignored, 0.0, d_weight)
    return op.grad.GatherGrad(op.shape_of(weights), read.classes, d_weight, axis=0)
