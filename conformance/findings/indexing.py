"""Findings about gather, scatter, slice and what picks elements."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, gradient, half, model

_EMPTY = np.zeros((0, 3), np.float32)
_SLICE = "(X, starts, ends, axes, steps)"

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "is not implemented",
        "Y = Scatter (data, indices, updates)",
        {"data": f32([1, 2]), "indices": np.array([1]), "updates": f32([3])},
        {"Y": f32([1, 3])},
        "output[indices[i]] = updates[i]",
        9,
    ),
    about(
        REFERENCE,
        "takes nothing where a backward slice starts before the first element",
        "Y = Slice (X, starts, ends, axes, steps)",
        {
            "X": f32([1, 2]),
            "starts": np.array([-3]),
            "ends": np.array([-9]),
            "axes": np.array([0]),
            "steps": np.array([-1]),
        },
        {"Y": f32([1])},
        "a start is clamped to [0, 1] for negative stepping: the slice is from 0 to −1, exclusive",
    ),
    about(
        REFERENCE,
        "fails on a depth with one axis",
        "Y = OneHot (indices, depth, values)",
        {"indices": np.array([1]), "depth": np.array([2]), "values": f32([0, 1])},
        {"Y": f32([[0, 1]])},
        "depth is a scalar or a tensor of rank 1 with one element",
    ),
    about(
        REFERENCE,
        "fails on more than one axis as the elements occur",
        "Y = Unique <sorted = 0> (X)",
        {"X": f32([[2], [1]])},
        {"Y": f32([2, 1])},
        "without an axis the input is flattened",
    ),
    about(
        REFERENCE,
        "returns the input as the slices occur",
        "Y = Unique <axis = 1, sorted = 0> (X)",
        {"X": f32([[2, 1, 2]])},
        {"Y": f32([[2, 1]])},
        "Y holds each slice once",
    ),
    about(
        REFERENCE,
        "fails on scalars, which its inputs are",
        "Y = NonMaxSuppression (boxes, scores, most)",
        {"boxes": f32([[[0, 0, 1, 1]]]), "scores": f32([[[1]]]), "most": np.array(1)},
        {"Y": np.array([[0, 0, 0]])},
        "max_output_boxes_per_class is a scalar; there is one box",
    ),
    about(
        REFERENCE,
        "fails without max_output_boxes_per_class",
        "Y = NonMaxSuppression (boxes, scores)",
        {"boxes": f32([[[0, 0, 1, 1]]]), "scores": f32([[[1]]])},
        {"Y": np.zeros((0, 3), np.int64)},
        "it is optional and 0 by default, which means no output",
    ),
    about(
        ORT,
        "removes a box whose score is the threshold",
        "Y = NonMaxSuppression (boxes, scores, most, iou, score)",
        {
            "boxes": f32([[[0, 0, 1, 1]]]),
            "scores": f32([[[0.5]]]),
            "most": np.array([1]),
            "iou": f32([0.5]),
            "score": f32([0.5]),
        },
        {"Y": np.array([[0, 0, 0]])},
        "boxes with a score less than score_threshold are removed",
    ),
    about(
        ORT,
        "gives a scalar an axis",
        "Y = NonZero (X)",
        {"X": f32(1)},
        {"Y": np.zeros((0, 1), np.int64)},
        "for scalar input the shape is (0, N)",
    ),
    Finding(
        REFERENCE,
        "GatherElements",
        "fails where the index is smaller than the data along an axis that is not gathered",
        model("""
            <ir_version: 10, opset_import: ["" : 21]>
            gather (float[2, 3] data, int64[1, 2] indices) => (float[1, 2] output) {
                output = GatherElements <axis = 1> (data, indices)
            }
        """),
        {"data": np.arange(6, dtype=np.float32).reshape(2, 3), "indices": np.array([[2, 0]])},
        {"output": np.array([[2, 0]], np.float32)},
        proof="out[i][j] = input[i][index[i][j]] for the i and j of the index",
    ),
    Finding(
        ORT,
        "Unique",
        "loses elements beside a NaN",
        model("""
            <ir_version: 10, opset_import: ["" : 21]>
            distinct (float[4] x) => (float[N] y) { y = Unique(x) }
        """),
        {"x": f32([np.nan, 1, 2, 3])},
        {"y": f32([1, 2, 3, np.nan])},
        proof="1, 2 and 3 are elements of the input, each once",
    ),
    gradient(
        "fails on a negative step along the last axis",
        f"Y = Slice {_SLICE}",
        "size = Shape (X) X_grad = com.microsoft.SliceGrad (Y_grad, size, starts, ends, axes, steps)",
        {
            "X": f32([1, 2, 3]),
            "starts": np.array([-1]),
            "ends": np.array([-10]),
            "axes": np.array([0]),
            "steps": np.array([-1]),
            "Y_grad": f32([1, 2, 3]),
        },
        {"X_grad": f32([3, 2, 1])},
    ),
    gradient(
        "has no kernel for float16, which its schema allows",
        "Y = Slice (X, starts, ends)",
        "size = Shape (X) X_grad = com.microsoft.SliceGrad (Y_grad, size, starts, ends)",
        half({"X": f32([1, 2, 3]), "starts": np.array([1]), "ends": np.array([3]), "Y_grad": f32([4, 5])}),
        half({"X_grad": f32([0, 4, 5])}),
    ),
    gradient(
        "ends the process on an empty batch",
        "Y = GatherND <batch_dims = 1> (X, i)",
        "size = Shape (X) X_grad = com.microsoft.GatherNDGrad <batch_dims = 1> (size, i, Y_grad)",
        {"X": _EMPTY, "i": np.zeros((0, 1), np.int64), "Y_grad": f32([])},
        {"X_grad": _EMPTY},
        crashes=True,
    ),
)
