"""Findings about reading images between their pixels."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "is not implemented",
        "Y = MaxRoiPool <pooled_shape = [1, 1]> (X, rois)",
        {"X": f32([[1, 2], [4, 3]]).reshape(1, 1, 2, 2), "rois": f32([[0, 0, 0, 1, 1]])},
        {"Y": f32([4]).reshape(1, 1, 1, 1)},
        "the largest element of the region",
    ),
    about(
        REFERENCE,
        "does not know the names of opset 16",
        'Y = GridSample <mode = "bilinear", align_corners = 1> (X, grid)',
        {"X": f32([1, 3]).reshape(1, 1, 1, 2), "grid": f32([0, 0]).reshape(1, 1, 1, 2)},
        {"Y": f32([2]).reshape(1, 1, 1, 1)},
        "the middle of 1 and 3",
        16,
    ),
    about(
        REFERENCE,
        "clips the point, not the pixels around it, in cubic mode",
        'Y = GridSample <mode = "cubic", padding_mode = "border", align_corners = 1> (X, grid)',
        {"X": f32([0, 1]).reshape(1, 1, 2), "grid": f32([-1.5]).reshape(1, 1, 1)},
        {"Y": f32([-0.10546875]).reshape(1, 1, 1)},
        "x is −0.25; pixels −2 to 0 are 0, and pixel 1 has the weight −0.75·(1.25³ − 5·1.25² + 8·1.25 − 4)",
    ),
    about(
        REFERENCE,
        "fails where no point is asked for",
        "Y = GridSample (X, grid)",
        {"X": f32([1]).reshape(1, 1, 1, 1), "grid": np.zeros((1, 0, 1, 2), F32)},
        {"Y": np.zeros((1, 1, 0, 1), F32)},
        "(N, C, H_out, W_out)",
    ),
    about(
        ORT,
        "fails on one image axis",
        "Y = GridSample <align_corners = 1> (X, grid)",
        {"X": f32([[[1, 3]]]), "grid": f32([[[0]]])},
        {"Y": f32([[[2]]])},
        "X is (N, C, D1, ..., Dr) of any rank: the middle of 1 and 3",
        20,
    ),
    about(
        REFERENCE,
        "moves the points by half a pixel before opset 16",
        "Y = RoiAlign <sampling_ratio = 1> (X, rois, batch)",
        {"X": f32([[1, 2], [3, 4]]).reshape(1, 1, 2, 2), "rois": f32([[0, 0, 1, 1]]), "batch": np.array([0])},
        {"Y": f32([2.5]).reshape(1, 1, 1, 1)},
        "the point is (0.5, 0.5): the mean of all four",
        10,
    ),
)
