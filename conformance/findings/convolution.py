"""Findings about convolutions."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, gradient

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "fails on groups",
        "Y = ConvTranspose <group = 2> (X, W)",
        {"X": f32([[[1], [2], [3], [4]]]), "W": f32([[[1]], [[1]], [[1]], [[1]]])},
        {"Y": f32([[[3], [7]]])},
        "1 + 2 and 3 + 4: each group sums its channels",
    ),
    about(
        REFERENCE,
        "fails on an output_shape that its pads do not give",
        "Y = ConvTranspose <strides = [2], output_shape = [2]> (X, W)",
        {"X": f32([[[1]]]), "W": f32([[[3, 4, 5]]])},
        {"Y": f32([[[4, 5]]])},
        "total_padding is 1; with NOTSET the larger part, here all, is in front",
    ),
    about(
        REFERENCE,
        "reads pads where there is an output_shape",
        "Y = ConvTranspose <pads = [0, 1], output_shape = [2]> (X, W)",
        {"X": f32([[[1, 2]]]), "W": f32([[[1, 3]]])},
        {"Y": f32([[[5, 6]]])},
        "if output_shape is specified pads values are ignored: total_padding is 1, with NOTSET in front, of (1, 5, 6)",
    ),
    about(
        REFERENCE,
        "fails on an empty batch",
        "Y = Col2Im (X, image, block)",
        {"X": np.zeros((0, 1, 1), F32), "image": np.array([1, 1]), "block": np.array([1, 1])},
        {"Y": np.zeros((0, 1, 1, 1), F32)},
        "the result has as many images as the input",
    ),
    about(
        ORT,
        "does not know the dilation of one axis",
        "Y = Col2Im <dilations = [2]> (X, image, block)",
        {"X": f32([[[1], [2], [3], [4]]]), "image": np.array([3]), "block": np.array([2])},
        {"Y": f32([[[1, 0, 2], [3, 0, 4]]])},
        "the elements of a block are two apart",
    ),
    about(
        ORT,
        "does not know the dilations of three axes",
        "Y = Col2Im <dilations = [1, 1, 2]> (X, image, block)",
        {"X": f32([[[1], [2], [3], [4]]]), "image": np.array([1, 2, 3]), "block": np.array([1, 2, 2])},
        {"Y": f32([[1, 0, 2], [3, 0, 4]]).reshape(1, 1, 1, 2, 3)},
        "the elements of a block are two apart",
    ),
    *(
        about(
            system,
            "fails on one image axis",
            "Y = DeformConv (X, W, offset)",
            {"X": f32([[[2]]]), "W": f32([[[3]]]), "offset": f32([[[0]]])},
            {"Y": f32([[[6]]])},
            "the input of n image axes is (N, C, D1, ..., Dn), n at least 1: 2·3",
            22,
        )
        for system in (REFERENCE, ORT)
    ),
    about(
        REFERENCE,
        "fails on an empty batch",
        "Y = ConvTranspose (X, W)",
        {"X": np.zeros((0, 1, 2), F32), "W": f32([[[1]]])},
        {"Y": np.zeros((0, 1, 2), F32)},
        "the result has as many images as X",
    ),
    gradient(
        "takes auto_pad SAME for no pads",
        'Y = Conv <auto_pad = "SAME_UPPER"> (X, W)',
        'X_grad, W_grad = com.microsoft.ConvGrad <auto_pad = "SAME_UPPER"> (Y_grad, X, W)',
        {
            "X": f32([1, 2, 3]).reshape(1, 1, 3),
            "W": f32([1, 10, 100]).reshape(1, 1, 3),
            "Y_grad": np.ones((1, 1, 3), F32),
        },
        {"X_grad": f32([11, 111, 110]).reshape(1, 1, 3), "W_grad": f32([3, 6, 5]).reshape(1, 1, 3)},
    ),
    gradient(
        "ends the process on an empty batch",
        "Y = Conv (X, W)",
        "X_grad, W_grad = com.microsoft.ConvGrad (Y_grad, X, W)",
        {"X": np.zeros((0, 1, 3), F32), "W": np.ones((1, 1, 3), F32), "Y_grad": np.zeros((0, 1, 1), F32)},
        {"X_grad": np.zeros((0, 1, 3), F32), "W_grad": np.zeros((1, 1, 3), F32)},
        crashes=True,
    ),
)
