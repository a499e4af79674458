"""Softmax and losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
)
from refgrad.conformance.fuzzing.graphs.templates import axis_of, template


@template(2)
def _softmax(s: GraphScope) -> None:
    x = s.pick(1, filled=True)
    s.add(s.rng.choice(("Softmax", "LogSoftmax")), x, axis=axis_of(s, x.rank))


@template()
def _loss(s: GraphScope) -> None:
    x = s.pick(2, 4, filled=True)
    labels = s.world.numbers.integers(0, x.shape[1], (x.shape[0], *x.shape[2:]))
    given: dict[str, Any] = {"reduction": s.rng.choice((None, "sum", "none", "mean"))}
    if s.chance(0.3):
        given["ignore_index"] = int(s.rng.choice((0, -1, x.shape[1] - 1)))
    if given.get("ignore_index") == -1 and labels.size:
        labels[tuple(0 for _ in labels.shape)] = -1
    weight = s.positive(s.like((x.shape[1],))) if s.chance(0.4) else None
    given_labels = s.leaf(labels.astype(s.rng.choice((np.int64, np.int32))))
    if s.chance(0.5):
        s.add_all("SoftmaxCrossEntropyLoss", x, given_labels, weight, outputs=s.rng.choice((1, 2)), **given)
    else:
        s.add("NegativeLogLikelihoodLoss", s.add("LogSoftmax", x, axis=1), given_labels, weight, **given)
