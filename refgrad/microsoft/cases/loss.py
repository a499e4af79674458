"""Cases of ONNX Runtime's losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, drawer


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        scores, labels = floats(4, 3, 2), np.array([[0, 2], [1, -1], [2, 0], [-1, 1]])
        ignored = np.array(-1)
        for reduction in ("mean", "sum", "none"):
            for weights in (None, array([0.5, 1.0, 2.0])):
                loss = "SoftmaxCrossEntropyLossInternal"
                yield case(loss, scores, labels, weights, ignored, shapes=shapes, outputs=2, reduction=reduction)
                yield case(loss, scores, np.abs(labels), weights, shapes=shapes, reduction=reduction)
            far = np.where(labels < 0, 9, labels), np.full_like(labels, 9)
            for each in far:  # ignored labels outside the classes, then no others
                yield case(loss, scores, each, None, np.array(9), shapes=shapes, outputs=2, reduction=reduction)
        """With log_prob as an output: ONNX Runtime's kernels write to it, and end the process where it is left out."""
        scores = floats(2, 3, 4)
        shares = np.abs(floats(2, 3, 4))
        labels, weights = np.array([[0, 3, 1], [2, 2, 0]]), np.abs(floats(2, 3))
        for reduction in ("mean", "sum", "none"):
            options: dict[str, Any] = {"shapes": shapes, "outputs": 2, "reduction": reduction}
            yield case("SoftmaxCrossEntropy", scores, shares, **options)
            yield case("SoftmaxCrossEntropy", scores[0], shares[0] / shares[0].sum(-1, keepdims=True), **options)
            for weight in (None, weights):
                yield case("SparseSoftmaxCrossEntropy", scores, labels, weight, **options)
