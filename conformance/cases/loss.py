"""Cases of the losses over class scores."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.arithmetic import positive
from refgrad.conformance.cases.shape import NEWEST, numbers
from refgrad.conformance.cases.special import Special

SPECIAL = (
    Special(
        "SoftmaxCrossEntropyLoss",
        "settled",
        (((1000.0, 0.0, -1000.0), (0.0, 0.0, -inf)), (1, 0)),
        (((1.0, -1.0, 0.0), (-0.5, 0.5, 0.0)), None),
        attributes={"reduction": "sum"},
    ),
    Special(
        "NegativeLogLikelihoodLoss",
        "infinite",
        (((-inf, 0.0), (0.0, -inf)), (0, 0)),
        (((-1.0, 0.0), (-1.0, 0.0)), None),
        attributes={"reduction": "sum"},
    ),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every reduction, with and without weights, ignored labels and further axes; log_prob as an output too."""
    for shapes in SHAPES:
        for further in ((), (4,), (2, 3)):
            scores = numbers(5, 3, *further)
            labels = np.random.default_rng(2).integers(0, 3, (5, *further))
            outside = labels.copy()
            outside[0] = -100
            for reduction in ("none", "sum", "mean"):
                for ignore_index, read in ((None, labels), (1, labels), (-100, outside)):
                    for weights in (None, positive(3)):
                        yield from _losses(scores, read, weights, reduction, ignore_index, shapes)


def _losses(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None,
    reduction: str,
    ignore_index: int | None,
    shapes: str,
) -> Iterator[Case]:
    weighted = "weighted" if weights is not None else "equal"
    title = f"{'x'.join(map(str, scores.shape))}-{reduction}-ignore={ignore_index}-{weighted}-{shapes}"
    attributes: dict[str, Any] = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "opset": NEWEST,
        "shapes": shapes,
    }
    if ignore_index is None:
        del attributes["ignore_index"]
    for kind in (np.int64, np.int32):
        for outputs in (1, 2):
            name = f"SoftmaxCrossEntropyLoss-{title}-{kind.__name__}-{outputs}"
            if (kind is np.int32) == (outputs == 2):
                read = labels.astype(kind)
                yield node_case(
                    "SoftmaxCrossEntropyLoss", scores, read, weights, outputs=outputs, name=name, **attributes
                )
    log_prob = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    yield node_case(
        "NegativeLogLikelihoodLoss", log_prob, labels, weights, name=f"NegativeLogLikelihoodLoss-{title}", **attributes
    )
