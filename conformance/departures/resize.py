"""Departures of Resize."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "Resize",
        "fails",
        "There is no kernel for ResizeGrad on the CPU. refgrad writes the formula in ai.onnx operators.",
    ),
    Departure(
        "Resize",
        "refused",
        "Before version 13 of the operator, and where it cannot read the model at all.",
    ),
)
