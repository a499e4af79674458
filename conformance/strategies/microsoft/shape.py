"""Strategies of ONNX Runtime's operators that move elements."""

from __future__ import annotations

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named


@strategy(*named("ConcatTraining"))
def concat_training(d: Drawing) -> Case:
    """One to three tensors along any axis, with their lengths as a further output."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.axis(len(shape))
    place = axis % len(shape)
    parts = [(*shape[:place], d.integer(0, 2), *shape[place + 1 :]) for _ in range(d.integer(1, 3))]
    return d.case(*(d.floats(part) for part in parts), axis=axis, outputs=d.integer(1, 2))
