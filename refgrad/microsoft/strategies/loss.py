"""Strategies of ONNX Runtime's losses."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT)
def softmax_cross_entropy_loss_internal(d: Drawing) -> Case:
    """Every reduction; weights, a label that is ignored, and the log probabilities as a further output."""
    batch, classes, rest = d.integer(1, 3), d.integer(1, 3), d.shape(0, 2, size=2, empty=False)
    ignored = d.optional(lambda: d.pick(-1, 0, 9))
    labels = d.integers((batch, *rest), 0, classes - 1)
    if ignored is not None and d.flag():
        labels.flat[d.integer(0, labels.size - 1)] = ignored
    weights = d.optional(lambda: d.floats((classes,), 0.25, 2))
    index = None if ignored is None else np.array(ignored, np.int64)
    fixed = [] if index is None else ["ignore_index"]
    reduction = d.pick(None, "mean", "sum", "none")
    outputs = d.integer(1, 2)
    return d.case(
        d.floats((batch, classes, *rest)), labels, weights, index, fixed=fixed, outputs=outputs, reduction=reduction
    )


@strategy("SoftmaxCrossEntropy", "SparseSoftmaxCrossEntropy", domain=MICROSOFT)
def softmax_cross_entropy(d: Drawing) -> Case:
    """Every reduction; the sparse operator with and without a weight for each label."""
    rows, classes = d.shape(1, 3, size=3, empty=False), d.integer(1, 4)
    scores, reduction = d.floats((*rows, classes)), d.pick(None, "mean", "sum", "none")
    if d.op_type == "SoftmaxCrossEntropy":
        return d.case(scores, d.floats((*rows, classes)), outputs=2, reduction=reduction)
    weights = d.optional(lambda: d.floats(rows, 0.25, 2))
    return d.case(scores, d.integers(rows, 0, classes - 1), weights, outputs=2, reduction=reduction)
