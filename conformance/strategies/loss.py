"""Strategies of the losses over class scores."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy


@strategy("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def losses(d: Drawing) -> Case:
    """Every reduction, with and without weights. Some labels may be ignored; their value is a class or outside the classes."""
    examples, classes = d.integer(1, 4), d.integer(1, 4)
    further = d.shape(0, 2, size=3, empty=False)
    labels = d.integers((examples, *further), 0, classes - 1, d.pick(np.int64, np.int32))
    ignored = d.pick(None, -100, -1, *range(classes))
    if ignored is not None:
        left_out = d.bools(labels.shape)
        left_out.flat[0] = False
        labels = np.where(left_out, ignored, labels).astype(labels.dtype)
        if labels.flat[0] == ignored:  # the mean of no labels is NaN
            ignored = None
    weights = d.optional(lambda: d.floats((classes,), 0.25, 2))
    softmax = d.op_type == "SoftmaxCrossEntropyLoss"
    return d.case(
        d.floats((examples, classes, *further)),
        labels,
        weights,
        fixed=["labels" if softmax else "target", "weights" if softmax else "weight"],
        outputs=d.integer(1, 2) if softmax else 1,
        reduction=d.pick(None, "none", "sum", "mean"),
        ignore_index=ignored,
    )
