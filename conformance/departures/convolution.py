"""Departures of convolutions."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "Conv",
        "wrong",
        "Its kernel pads nothing with auto_pad SAME. refgrad writes those pads, and where only the run tells them the formula "
        "in ai.onnx operators.",
        cases="SAME|same",
    ),
    Departure(
        "Conv",
        "form",
        "auto_pad SAME where only the run tells that it pads nothing: refgrad writes the formula in ai.onnx operators.",
        cases="SAME|same",
    ),
    Departure(
        "Conv",
        "fails",
        "Where the batch is empty its kernel ends the process. refgrad takes ai.onnx operators where it is declared to be.",
        cases="0x",
    ),
    Departure(
        "Conv",
        "kernel",
        "Where the batch is empty the training kernel ends the process, and for the adjoint of W the forward kernel refuses "
        "an image without channels.",
        cases="0x",
    ),
    Departure(
        "Conv",
        "kernel",
        "The forward kernel refuses auto_pad SAME with dilations, of the model itself.",
        cases="SAME.*dilations",
    ),
    Departure(
        "ConvTranspose",
        "fails",
        "There is no kernel for ConvTransposeGrad on the CPU. refgrad writes the formula in ai.onnx operators.",
    ),
    Departure(
        "ConvTranspose",
        "kernel",
        "There is no kernel for ConvTransposeGrad on the CPU, and where the batch is empty Conv, which refgrad takes for the "
        "adjoint of W, refuses an image without channels.",
        cases="0x",
    ),
)
