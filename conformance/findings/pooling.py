"""Findings about poolings."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, gradient, half, model

F32 = np.float32

_X3 = f32([1, 3, 2]).reshape(1, 1, 3)

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "is not implemented",
        "Y = GlobalLpPool (X)",
        {"X": f32([[[3, 4]]])},
        {"Y": f32([[[5]]])},
        "√(9 + 16)",
    ),
    about(
        REFERENCE,
        "takes the first image axis for none of it",
        "Y = GlobalMaxPool (X)",
        {"X": f32([[[1, 2]]])},
        {"Y": f32([[[2]]])},
        "the result has the rank of X, and 1 for each image axis",
    ),
    about(
        REFERENCE,
        "fails on an empty batch",
        "Y = GlobalAveragePool (X)",
        {"X": np.zeros((0, 1, 2), F32)},
        {"Y": np.zeros((0, 1, 1), F32)},
        "the result has as many images as X",
    ),
    about(
        REFERENCE,
        "gives other indices",
        "Y, I = MaxPool <kernel_shape = [1, 2]> (X)",
        {"X": f32([1, 2, 3, 4]).reshape(1, 1, 2, 2)},
        {"Y": f32([2, 4]).reshape(1, 1, 2, 1), "I": np.array([1, 3]).reshape(1, 1, 2, 1)},
        "the indices of the maxima in X flattened",
    ),
    about(
        REFERENCE,
        "fails on one image axis with auto_pad",
        'Y = MaxPool <kernel_shape = [2], auto_pad = "SAME_UPPER"> (X)',
        {"X": f32([[[2, 1]]])},
        {"Y": f32([[[2, 1]]])},
        "output_shape = ⌈2/1⌉; the pad is at the end",
    ),
    about(
        REFERENCE,
        "fails on one image axis with pads",
        "Y = MaxPool <kernel_shape = [2], pads = [1, 0]> (X)",
        {"X": f32([[[1, 2]]])},
        {"Y": f32([[[1, 2]]])},
        "the windows are (pad, 1) and (1, 2)",
    ),
    about(
        REFERENCE,
        "drops the last row with SAME_LOWER and a stride",
        'Y = MaxPool <kernel_shape = [3, 1], strides = [2, 1], auto_pad = "SAME_LOWER"> (X)',
        {"X": f32([1, 2, 3]).reshape(1, 1, 3, 1)},
        {"Y": f32([2, 3]).reshape(1, 1, 2, 1)},
        "output_shape = ⌈3/2⌉; the windows are (pad, 1, 2) and (2, 3, pad)",
    ),
    about(
        REFERENCE,
        "reads the window that ceil_mode adds as if it were whole",
        "Y = AveragePool <kernel_shape = [3], strides = [3], ceil_mode = 1> (X)",
        {"X": f32([[[1, 2, 3, 4]]])},
        {"Y": f32([[[2, 4]]])},
        "the windows are (1, 2, 3) and (4)",
    ),
    about(
        REFERENCE,
        "reads the window that ceil_mode adds as if it were whole",
        "Y = LpPool <kernel_shape = [2], strides = [2], ceil_mode = 1> (X)",
        {"X": f32([[[3, 4, 1]]])},
        {"Y": f32([[[5, 1]]])},
        "the windows are (3, 4) and (1)",
        22,
    ),
    about(
        REFERENCE,
        "fails on ceil_mode with auto_pad",
        'Y = AveragePool <kernel_shape = [2], strides = [2], ceil_mode = 1, auto_pad = "VALID"> (X)',
        {"X": f32([[[1, 3, 4]]])},
        {"Y": f32([[[2, 4]]])},
        "the windows are (1, 3) and (4)",
        22,
    ),
    *(
        about(
            REFERENCE,
            "pads for the kernel without its dilations",
            f'Y = {op} <kernel_shape = [2], dilations = [2], auto_pad = "SAME_UPPER"> (X)',
            {"X": f32([[[1, 1]]])},
            {"Y": f32([[[1, 1]]])},
            "the windows are (pad, 1) and (1, pad)",
            22,
        )
        for op in ("AveragePool", "LpPool")
    ),
    *(
        about(
            ORT,
            "pads for the kernel without its dilations, so that SAME is smaller",
            f'Y = {op} <kernel_shape = [2], dilations = [2], auto_pad = "SAME_UPPER"> (X)',
            {"X": f32([[[1, 1]]])},
            {"Y": f32([[[1, 1]]])},
            "output_shape = ⌈2/1⌉; the windows are (pad, 1) and (1, pad)",
            22,
        )
        for op in ("MaxPool", "AveragePool", "LpPool")
    ),
    about(
        ORT,
        "counts the indices in the larger shape",
        "Y = MaxUnpool <kernel_shape = [1, 1]> (X, I, shape)",
        {
            "X": f32([1, 2]).reshape(1, 1, 2, 1),
            "I": np.array([0, 1]).reshape(1, 1, 2, 1),
            "shape": np.array([1, 1, 2, 2]),
        },
        {"Y": f32([[1, 0], [2, 0]]).reshape(1, 1, 2, 2)},
        "the indices are into the tensor that was pooled, as in the node test with output_shape",
    ),
    *(
        Finding(
            ORT,
            op_type,
            "gives the lowest finite number for a window of −∞",
            model(f"""
            <ir_version: 10, opset_import: ["" : 21]>
            pool (float[1, 1, 2] x) => (float[1, 1, 1] y) {{ y = {op_type} {attributes} (x) }}
        """),
            {"x": np.full((1, 1, 2), -np.inf, np.float32)},
            {"y": np.full((1, 1, 1), -np.inf, np.float32)},
            proof="the maximum of a window is one of its elements, and all are −∞",
        )
        for op_type, attributes in (("MaxPool", "<kernel_shape = [2]>"), ("GlobalMaxPool", ""))
    ),
    gradient(
        "takes auto_pad SAME for no pads",
        'Y = AveragePool <auto_pad = "SAME_LOWER", kernel_shape = [2]> (X)',
        'X_grad = AveragePoolGrad <auto_pad = "SAME_LOWER", kernel_shape = [2]> (Y_grad)',
        {"X": _X3, "Y_grad": np.ones((1, 1, 3), F32)},
        {"X_grad": f32([1.5, 1, 0.5]).reshape(1, 1, 3)},
        19,
    ),
    gradient(
        "does not read dilations",
        "Y = AveragePool <dilations = [2], kernel_shape = [2]> (X)",
        "X_grad = AveragePoolGrad <dilations = [2], kernel_shape = [2]> (Y_grad)",
        {"X": _X3, "Y_grad": np.ones((1, 1, 1), F32)},
        {"X_grad": f32([0.5, 0, 0.5]).reshape(1, 1, 3)},
        19,
    ),
    gradient(
        "counts what is beyond the pads, where ceil_mode lets a window reach, with count_include_pad",
        "Y = AveragePool <ceil_mode = 1, count_include_pad = 1, kernel_shape = [2], strides = [2]> (X)",
        "X_grad = AveragePoolGrad <ceil_mode = 1, count_include_pad = 1, kernel_shape = [2], strides = [2]> (Y_grad)",
        {"X": _X3, "Y_grad": np.ones((1, 1, 2), F32)},
        {"X_grad": f32([0.5, 0.5, 1]).reshape(1, 1, 3)},
        19,
    ),
    gradient(
        "is wrong for three spatial axes",
        "Y = AveragePool <kernel_shape = [1, 2, 3]> (X)",
        "X_grad = AveragePoolGrad <kernel_shape = [1, 2, 3]> (Y_grad)",
        {"X": np.arange(24, dtype=F32).reshape(1, 1, 2, 3, 4), "Y_grad": np.ones((1, 1, 2, 2, 2), F32)},
        {"X_grad": np.ones((1, 1, 2, 1, 1), F32) * f32([[1], [2], [1]]) * f32([1, 2, 2, 1]) / F32(6)},
        19,
    ),
    gradient(
        "ends the process in float16",
        "Y = AveragePool <kernel_shape = [2]> (X)",
        "X_grad = AveragePoolGrad <kernel_shape = [2]> (Y_grad)",
        half({"X": _X3, "Y_grad": np.ones((1, 1, 2), F32)}),
        half({"X_grad": f32([0.5, 1, 0.5]).reshape(1, 1, 3)}),
        19,
        crashes=True,
    ),
    gradient(
        "takes the indices for row major with storage_order = 1",
        "Y, I = MaxPool <kernel_shape = [1, 1], storage_order = 1> (X)",
        "X_grad = MaxPoolGrad <kernel_shape = [1, 1], storage_order = 1> (Y_grad, I)",
        {
            "X": np.arange(6, dtype=F32).reshape(1, 1, 2, 3),
            "Y_grad": np.arange(6, dtype=F32).reshape(1, 1, 2, 3),
        },
        {"X_grad": np.arange(6, dtype=F32).reshape(1, 1, 2, 3)},
    ),
    gradient(
        "ends the process in float16",
        "Y = MaxPool <kernel_shape = [2]> (X)",
        "X_grad = MaxPoolGrad <kernel_shape = [2]> (Y_grad, I)",
        half({"X": _X3, "I": np.array([[[1, 1]]]), "Y_grad": np.ones((1, 1, 2), F32)}),
        half({"X_grad": f32([0, 2, 0]).reshape(1, 1, 3)}),
        crashes=True,
    ),
)
