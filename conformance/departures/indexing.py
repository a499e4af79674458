"""Departures of indexing."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "ScatterElements ScatterND",
        "wrong",
        "It does not look at reduction: the gradient of data is 0 at every index, that of updates is taken as "
        "if they replaced. refgrad has the derivative of each reduction.",
        cases=r"add|mul|max|min|duplicate",
    ),
    Departure(
        "ScatterElements ScatterND",
        "form",
        "It does not look at reduction, which makes no difference where there are no updates, or by what they "
        "are and which won. refgrad has the derivative of each reduction.",
        cases=r"add|mul|max|min|duplicate",
    ),
    Departure(
        "TopK",
        "kernel",
        "The kernel of TopK ends the process where there are no rows.",
        cases=r"0x3",
    ),
)
