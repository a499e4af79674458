"""The labels of losses over class scores. Scores are (N, C, d...), labels (N, d...), weights (C,)."""

from __future__ import annotations

from dataclasses import dataclass

from refgrad.builder.op import Emitter


@dataclass(frozen=True)
class Labels:
    """The tensors that the cotangent of a loss needs for each label, all (N, d...) or a scalar.

    `classes` are the labels, 0 where they are ignored, `ignored` tells where (None: nowhere). `unit` is the cotangent of
    an unweighted loss, `share` the cotangent of a weighted loss: 0 where ignored.
    """

    classes: str
    ignored: str | None
    unit: str
    share: str


def read_labels(
    op: Emitter, d_loss: str, labels: str, weights: str | None, ignore_index: int | str | None, reduction: str
) -> Labels:
    """`share` = dL·w, divided by Σw for the mean; 0 where everything is ignored. `ignore_index` may be the name of a scalar."""
    if weights is None and ignore_index is None:
        unit = op.Mul(d_loss, op.share(labels, None, like=d_loss)) if reduction == "mean" else d_loss
        return Labels(labels, None, unit, unit if reduction == "none" else op.Expand(unit, op.shape_of(labels)))
    ignored = None if ignore_index is None else op.Equal(labels, ignore_index)
    classes = labels if ignored is None else op.Where(ignored, 0, labels)
    if weights is None:
        weight = op.Cast(op.Not(ignored), to=op.type(d_loss))
    else:
        weight = op.Gather(weights, classes)
        if ignored is not None:
            weight = op.Where(ignored, 0.0, weight)
    unit = d_loss
    if reduction == "mean":
        total = op.ReduceSum(weight, keepdims=0)
        unit = op.Div(d_loss, op.Where(op.Equal(total, 0.0), 1.0, total))
    return Labels(classes, ignored, unit, op.Mul(unit, weight))
