"""Departures of losses."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal",
        "refused",
        "It wants a node with log_prob, and has no gradient by the weights. refgrad adds the output, and has.",
    ),
    Departure(
        "SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal",
        "wrong",
        "It leaves out what comes by log_prob. refgrad adds it to what the kernel gives.",
    ),
    Departure(
        "SoftmaxCrossEntropyLoss",
        "kernel",
        "Where there are no labels the forward kernel ends the process.",
        cases="0x",
    ),
    Departure(
        "SoftmaxCrossEntropyLossInternal",
        "form",
        "refgrad differentiates the formula, which it writes in ai.onnx operators: only a build for training has the "
        "operator.",
    ),
)
