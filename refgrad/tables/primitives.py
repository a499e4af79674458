"""The gradient primitives: what rules emit as `op.grad.X`, and every lowering and kernel implements.

A primitive exists where a gradient is more than a few operators, or where a runtime has a kernel for it. dY is the cotangent
of the forward operator's output Y, dX the cotangent of its input X. An attribute that is None takes the forward
operator's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Primitive:
    """A gradient primitive: the names of its inputs, outputs and attributes, and its meaning in a line."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    meaning: str

    def named(self, given: Sequence[Any]) -> dict[str, Any]:
        """The inputs by their names."""
        return dict(zip(self.inputs, given, strict=True))


def _primitive(signature: str, meaning: str) -> Primitive:
    """Read `dY, X; axis -> dX`."""
    before, _, after = signature.partition("->")
    inputs, _, attributes = before.partition(";")

    def names(text: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in text.split(",") if name.strip())

    return Primitive(names(inputs), names(after), names(attributes), meaning)


_RECURRENT = "hidden_size, direction, activations, activation_alpha, activation_beta, clip"
_NBITS = "A, B, scales, zero_points, g_idx; K, N, bits, block_size"
_BNB4 = "A, B, absmax; K, N, block_size, quant_type, transB"
_POOL = "auto_pad, ceil_mode, dilations, kernel_shape, pads, strides"

PRIMITIVES: dict[str, Primitive] = {
    # tensors and their shapes
    "Alias": _primitive(
        "X -> Y", "X where a tensor of another name has to stand, if the dialect names every cotangent"
    ),
    "ShapeOf": _primitive("X -> shape", "the sizes of X, a constant where they are known"),
    "Length": _primitive("X; axis -> length", "the size of X along an axis, on one axis; a constant where it is known"),
    "ReshapeLike": _primitive("dY, X -> dX", "the elements of dY in the shape of X"),
    "ReshapeGrad": _primitive("dY, X -> dX", "the same for the Reshape that made dY's primal of X"),
    "TileGrad": _primitive("dY, X, repeats -> dX", "dY summed over the copies of X"),
    "PadGrad": _primitive("dY, pads, axes -> dX", "dY without the padding"),
    "TriluGrad": _primitive("dY, k; upper -> dX", "the triangle of dY, 0 elsewhere"),
    "SplitTraining": _primitive("dY, lengths; axis, count -> dX", "the parts of dY, as many as count"),
    # broadcasting
    "BroadcastGradient": _primitive(
        "dY, X, operands -> dX", "dY summed over the axes along which X was broadcast among the operator's operands"
    ),
    # arithmetic
    "DivGrad": _primitive(
        "dC, A, B, C -> dA, dB", "dC/B and −dC·C/B, each summed over the axes along which its input was broadcast"
    ),
    # reductions
    "Averaged": _primitive(
        "dY, means, X; count -> dX",
        "dY divided by how many elements of X each of the means is of: count, if it is known",
    ),
    "OverNorm": _primitive("dY, Y -> dS", "dY/Y, 0 where the norm Y is 0"),
    # quantization
    "FakeQuantGrad": _primitive("dY, mask -> dX", "dY where mask, else 0"),
    "MatMulNBitsGrad": _primitive(
        f"dY, {_NBITS} -> dA", "dY·W, where W are the weights of MatMulNBits; they are made floats some rows at a time"
    ),
    "MatMulNBitsScaleGrad": _primitive(
        f"dY, {_NBITS} -> dScales, dZeroPoints", "the cotangents of the scales and of the zero points that are floats"
    ),
    "MatMulBnb4Grad": _primitive(
        f"dY, {_BNB4} -> dA", "dY times the weights of MatMulBnb4, transposed where the operator does not"
    ),
    "MatMulBnb4ScaleGrad": _primitive(f"dY, {_BNB4} -> dAbsmax", "the cotangent of the scales of MatMulBnb4"),
    # activations
    "ReluGrad": _primitive("dY, Y -> dX", "dY where Y > 0, else 0"),
    "LeakyReluGrad": _primitive("dY, X; alpha -> dX", "dY where X > 0, else alpha·dY"),
    "SigmoidGrad": _primitive("dY, Y -> dX", "dY·Y·(1 − Y)"),
    "TanhGrad": _primitive("dY, Y -> dX", "dY·(1 − Y²)"),
    "GeluGrad": _primitive(
        "dY, X, B; approximate -> dX", "dY·(Φ(x) + x·φ(x)) at x = X + B, or the derivative of the tanh form"
    ),
    "QuickGeluGrad": _primitive("dY, X; alpha -> dX", "dY·s·(1 + alpha·X·(1 − s)) with s = sigmoid(alpha·X)"),
    "SoftmaxGrad": _primitive("dY, Y; axis -> dX", "Y·(dY − Σ_axis dY·Y)"),
    "LogSoftmaxGrad": _primitive("dY, Y; axis -> dX", "dY − exp(Y)·Σ_axis dY"),
    "DropoutGrad": _primitive(
        "dY, mask, ratio, training_mode; seed -> dX", "dY/(1 − ratio) where mask, else 0; dY in inference"
    ),
    # indexing
    "SliceGrad": _primitive("dY, shape, starts, ends, axes, steps -> dX", "dY where Slice took it from, 0 elsewhere"),
    "GatherGrad": _primitive("shape, indices, dY; axis -> dX", "the slices of dY added at their indices along axis"),
    "GatherElementsGrad": _primitive("dY, shape, indices; axis -> dX", "the elements of dY added at their indices"),
    "GatherNDGrad": _primitive("shape, indices, dY; batch_dims -> dX", "the slices of dY added at their index tuples"),
    # linear
    "FusedMatMul": _primitive("A, B; transA, transB -> Y", "MatMul with the last two axes of A or B exchanged"),
    "MatrixGrad": _primitive("dY, A, B -> dA, dB", "the two gradients of MatMul, whose second operand is a matrix"),
    "Rows": _primitive("X -> Y", "X as a matrix: its last axis, and all others as one"),
    "BatchGradient": _primitive(
        "dY, X, operands -> dX", "BroadcastGradient of a stack of matrices, broadcast along the axes of the stack alone"
    ),
    "ConvGrad": _primitive(
        "dY, X, W; auto_pad, dilations, group, kernel_shape, pads, strides -> dX, dW, dB",
        "the three gradients of Conv",
    ),
    # pooling
    "MaxPoolGrad": _primitive(
        f"dY, X, Indices; {_POOL}, storage_order -> dX", "each element of dY added at the element that won its window"
    ),
    "AveragePoolGrad": _primitive(
        f"dY, X; {_POOL}, count_include_pad -> dX", "each element of dY divided among the elements of its window"
    ),
    "GlobalAveragePoolGrad": _primitive("dY, X, Y -> dX", "dY divided among the spatial elements"),
    # sampling
    "GridSampleGrad": _primitive(
        "dY, X, grid; align_corners, mode, padding_mode -> dX, dGrid", "the two gradients of GridSample"
    ),
    "DeformConvGrad": _primitive(
        "dY, X, W, offset, mask; dilations, group, kernel_shape, offset_group, pads, strides "
        "-> dX, dW, dOffset, dB, dMask",
        "the five gradients of DeformConv",
    ),
    "RoiAlignGrad": _primitive(
        "dY, X, rois, batch_indices; coordinate_transformation_mode, mode, output_height, output_width, sampling_ratio, "
        "spatial_scale -> dX, dRois",
        "the gradients of RoiAlign by the image and by the regions",
    ),
    "MaxRoiPoolGrad": _primitive(
        "dY, X, rois; pooled_shape, spatial_scale -> dX", "each element of dY added at the pixel that won its bin"
    ),
    # normalization
    "BatchStatistics": _primitive(
        "X, Scale, input_mean; epsilon -> Mean, InvStdDev",
        "the mean of each channel of BatchNormalization's X and 1/√(var + ε), as BatchNormalizationGrad reads them",
    ),
    "BatchNormalizationGrad": _primitive(
        "dY, X, Scale, B, Mean, InvStdDev; epsilon -> dX, dScale, dB",
        "the three gradients of BatchNormalization in training",
    ),
    "LayerNormalizationGrad": _primitive(
        "dY, X, Scale, B, Mean, InvStdDev; axis, epsilon -> dX, dScale, dB", "the three gradients of LayerNormalization"
    ),
    # recurrent; the arrays are of layout 0, and *All and the gates have the axes time, direction, batch, hidden unit
    "RNNGrad": _primitive(
        f"X, W, R, B, sequence_lens, initial_h, Y, dY, dY_h; {_RECURRENT} -> dX, dW, dR, dB, dH0",
        "the gradients of RNN",
    ),
    "GRUGates": _primitive(
        f"X, W, R, B, sequence_lens, initial_h, Y; {_RECURRENT}, linear_before_reset, layout -> zrh, arguments",
        "the gates of every step, and their arguments unless the gates tell the slopes alone",
    ),
    "GRUGrad": _primitive(
        "X, W, R, B, sequence_lens, initial_h, HAll, zrh, dHAll, dHt, arguments; "
        f"{_RECURRENT}, linear_before_reset -> dX, dW, dR, dB, dH0",
        "the gradients of GRU, by its gates",
    ),
    "LSTMGates": _primitive(
        "X, W, R, B, sequence_lens, initial_h, initial_c, P, Y; "
        f"{_RECURRENT}, input_forget, layout -> CAll, iofc, arguments",
        "the cells and the gates of every step, and the arguments unless the gates tell the slopes alone",
    ),
    "LSTMGrad": _primitive(
        "X, W, R, sequence_lens, initial_h, initial_c, HAll, CAll, iofc, dHAll, dHt, dCt, P, arguments; "
        f"{_RECURRENT}, input_forget -> dX, dW, dR, dB, dH0, dC0, dP",
        "the gradients of LSTM, by its cells and gates",
    ),
    # loss
    "SoftmaxCrossEntropyLossGrad": _primitive(
        "d_output, log_prob, labels, weights; reduction, ignore_index -> d_scores",
        "the cotangent of the scores, by the log-probabilities that the forward operator returned",
    ),
}
