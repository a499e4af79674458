"""Strategies of the activations."""

from __future__ import annotations

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy


@strategy("Softmax", "LogSoftmax", "Hardmax")
def softmax(d: Drawing) -> Case:
    """Any axis of any rank; the default axis too."""
    shape = d.shape(1)
    return d.case(d.apart(shape), axis=d.optional(lambda: d.axis(len(shape))))
