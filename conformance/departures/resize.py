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
        "It takes a vector of sizes whose length is a symbol for an empty one, and refuses the model.",
        cases="symbolic",
    ),
    Departure(
        "Resize",
        "kernel",
        "ONNX Runtime 1.19.2 runs not even the forward node: cubic on three axes, linear on one, axes counted from the end.",
        cases="cubic|linear|axes=",
    ),
    Departure(
        "Resize",
        "kernel",
        "There is no kernel for ResizeGrad on the CPU, and MatMul, which refgrad takes instead, refuses an empty batch.",
        cases="0x2x3x4",
    ),
)
