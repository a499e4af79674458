"""Departures of normalizations."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "LayerNormalization SimplifiedLayerNormalization",
        "refused",
        "It wants a node with all its outputs, and LayerNormalization with a bias; torch writes neither. refgrad adds the "
        "outputs, and needs no bias.",
    ),
    Departure(
        "LayerNormalization",
        "wrong",
        "It leaves out what comes by Mean and InvStdDev. refgrad adds it to what the kernel gives.",
    ),
    Departure(
        "LayerNormalization",
        "form",
        "Its kernel fails on rows of one element. Where only the run tells how long they are, refgrad writes the formula in "
        "ai.onnx operators. Where Mean or InvStdDev is read too, they add nothing to the adjoints of Scale and B.",
    ),
    Departure(
        "LayerNormalization",
        "fails",
        "Its model runs the forward node too, whose kernel refuses a Scale or B that is smaller than a row of X. refgrad "
        "leaves out what no gradient needs.",
        cases="4x3x1|2x3x4x1|,3x1|,1-axis",
    ),
    Departure(
        "LayerNormalization",
        "kernel",
        "The forward kernel refuses a Scale or B that is smaller than a row of X.",
        cases=",3x1|,1-axis",
    ),
    Departure(
        "BatchNormalization BatchNormInternal",
        "refused",
        "It has no gradient by the running mean and variance, and wants BatchNormInternal with all five outputs. refgrad has "
        "one, and wants none.",
    ),
    Departure(
        "BatchNormalization",
        "wrong",
        "In inference too its module builder makes every BatchNormalization a BatchNormInternal in training, which normalizes "
        "by the batch instead of the running mean and variance. refgrad does so in training alone.",
    ),
    Departure(
        "BatchNormalization",
        "form",
        "In inference too its module builder makes every BatchNormalization a BatchNormInternal in training: of an empty "
        "batch, and for the adjoint of B, that is no difference. Where there are no elements, refgrad takes no kernel.",
    ),
    Departure(
        "BatchNormInternal",
        "wrong",
        "It leaves out what comes by running_mean, running_var and the statistics of the batch. refgrad differentiates the "
        "formula.",
    ),
    Departure(
        "SimplifiedLayerNormalization",
        "wrong",
        "It leaves out what comes by inv_std_var. refgrad differentiates the formula, which it writes in ai.onnx operators.",
    ),
    Departure(
        "SimplifiedLayerNormalization",
        "fails",
        "It takes inv_std_var for as long as the batch when axis is not the last, and has no kernel for the types. refgrad "
        "differentiates the formula, which it writes in ai.onnx operators.",
    ),
    Departure(
        "SimplifiedLayerNormalization",
        "form",
        "refgrad differentiates the formula, which it writes in ai.onnx operators: the operator is in no release of ONNX "
        "Runtime under the name that its schema has.",
    ),
    Departure(
        "SimplifiedLayerNormalization",
        "kernel",
        "Where X is empty, BroadcastGradientArgs takes its axes for broadcast (see Mul).",
        cases="x0x|0x",
    ),
)
