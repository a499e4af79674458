"""Strategies of ONNX Runtime's sums."""

from __future__ import annotations

from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named


@strategy(*named("ScaledSum"))
def scaled_sum(d: Drawing) -> Case:
    """Two or three terms; the factor of the third may be absent."""
    shape = d.shape()
    scales: dict[str, Any] = {"scale_0": d.factor(), "scale_1": d.factor()}
    count = d.integer(2, 3)
    third = d.optional(d.factor) if count == 3 else None
    return d.case(*(d.floats(shape) for _ in range(count)), scale_2=third, **scales)
