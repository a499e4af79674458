"""Departures of poolings."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "AveragePool",
        "wrong",
        "Its kernel looks at neither dilations nor the pads of auto_pad SAME, adds up three spatial axes wrongly, divides by "
        "a whole window where ceil_mode lets that reach beyond the pads, and gives an empty tensor where a size of X is not "
        "declared. refgrad takes it for the rest, with SAME written as pads.",
    ),
    Departure(
        "AveragePool",
        "form",
        "auto_pad SAME where the kernel, which pads nothing then, happens to be right: no pads at the beginning. refgrad "
        "writes the pads.",
        cases="same_upper",
    ),
    Departure(
        "AveragePool",
        "fails",
        "Where not even the rank of X is known, the process ends. refgrad writes the formula in ai.onnx operators.",
        cases="unknown|0x",
    ),
    Departure(
        "MaxPool",
        "fails",
        "Its kernel reads all sizes of X but the first off the declaration of its output: where one is missing the process "
        "ends. refgrad writes the formula in ai.onnx operators.",
    ),
    Departure(
        "MaxPool",
        "wrong",
        "Its kernel takes the indices for those of storage_order 0. refgrad takes it for one spatial axis, which makes no "
        "difference. And an empty batch whose sizes are not declared may come back in another shape.",
        cases="storage_order=1|with_argmax_2d_precomputed_strides|0x.*symbolic",
    ),
    Departure(
        "MaxPool",
        "form",
        "The kernel with storage_order 1, where there are no elements.",
        cases="0x.*storage_order=1",
    ),
    Departure(
        "AveragePool MaxPool",
        "refused",
        "Before opset 22 onnx counts a window too that begins in the padding at the end, and so does ONNX Runtime 1.19.2 in "
        "any: it declares other sizes than the result has.",
        cases="ceil",
    ),
    Departure(
        "AveragePool MaxPool",
        "kernel",
        "Before opset 22 onnx counts a window too that begins in the padding at the end, and so does ONNX Runtime 1.19.2 in "
        "any: already the forward result has another size.",
        cases="ceil",
    ),
    Departure(
        "GlobalAveragePool",
        "fails",
        "It divides the size of X by that of Y: where Y is empty the process ends. refgrad takes 1 for 0.",
        cases="0x",
    ),
    Departure(
        "GlobalAveragePool",
        "form",
        "It divides the size of X by that of Y, which ends the process where Y is empty: refgrad takes the larger of it and "
        "1.",
        cases="symbolic|unknown",
    ),
)
