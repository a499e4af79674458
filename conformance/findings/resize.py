"""Findings about Resize and Upsample."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "fails on the attribute scales",
        "Y = Upsample <scales = [2.0]> (X)",
        {"X": f32([1])},
        {"Y": f32([1, 1])},
        "output_dimension = floor(input_dimension · scale)",
        7,
    ),
    about(
        REFERENCE,
        "fails on the attributes of opset 1",
        "Y = Upsample <height_scale = 1.0, width_scale = 2.0> (X)",
        {"X": f32([1]).reshape(1, 1, 1, 1)},
        {"Y": f32([1, 1]).reshape(1, 1, 1, 2)},
        "output_width = floor(input_width · width_scale)",
        1,
    ),
    about(
        REFERENCE,
        "fails on a scale that is not whole",
        "Y = Upsample (X, scales)",
        {"X": f32([1, 2]), "scales": f32([1.5])},
        {"Y": f32([1, 1, 2])},
        "elements 0, 1, 2 are read at 0, 2/3 and 4/3",
        9,
    ),
    about(
        REFERENCE,
        "fails on linear",
        'Y = Upsample <mode = "linear"> (X, scales)',
        {"X": f32([1, 2]), "scales": f32([2])},
        {"Y": f32([1, 1.5, 2, 2])},
        "elements are read at 0, 1/2, 1, and 3/2, where there is no further one",
        9,
    ),
    about(
        REFERENCE,
        "fails in opset 10",
        "Y = Resize (X, scales)",
        {"X": f32([1]), "scales": f32([2])},
        {"Y": f32([1, 1])},
        "output_dimension = floor(input_dimension · scale)",
        10,
    ),
    about(
        ORT,
        "copies what keeps its shape",
        'Y = Resize <mode = "linear"> (X, "", scales)',
        {"X": f32([[0, 4, 8]]), "scales": f32([1, 1.25])},
        {"Y": f32([[0, 2.8, 6]])},
        "the elements are read at (i + 0.5)/1.25 − 0.5: −0.1, 0.7 and 1.5",
    ),
    about(
        ORT,
        "fails on one axis where it is linear",
        'Y = Resize <mode = "linear"> (X, "", scales)',
        {"X": f32([0, 4]), "scales": f32([2])},
        {"Y": f32([0, 1, 3, 4])},
        "X is N-D; the elements are read at −1/4, 1/4, 3/4 and 5/4",
    ),
    about(
        ORT,
        "fails on three axes where it is cubic",
        'Y = Resize <mode = "cubic", coordinate_transformation_mode = "align_corners"> (X, "", "", sizes)',
        {"X": f32([[[1, 2]]]), "sizes": np.array([1, 1, 3])},
        {"Y": f32([[[1, 1.5, 2]]])},
        "X is N-D; the elements are read at 0, 1/2 and 1, where the four weights are symmetric",
    ),
    about(
        REFERENCE,
        "reads beside the element where the result has one",
        'Y = Resize <coordinate_transformation_mode = "pytorch_half_pixel"> (X, "", scales)',
        {"X": f32([1, 2, 3]), "scales": f32([0.34])},
        {"Y": f32([1])},
        "pytorch_half_pixel: x_original is 0 where length_resized is not above 1",
    ),
    about(
        REFERENCE,
        "spreads the region over a length that is not rounded",
        'Y = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize"> (X, roi, scales)',
        {"X": f32([0, 1, 2, 3]), "roi": f32([0, 1]), "scales": f32([1.3])},
        {"Y": f32([0, 0.75, 1.5, 2.25, 3])},
        "x_original is x_resized·(4 − 1)/(5 − 1)",
    ),
    about(
        REFERENCE,
        "spreads the corners over a length that is not rounded",
        'Y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners", '
        'keep_aspect_ratio_policy = "not_larger"> (X, "", "", sizes)',
        {"X": f32([[0] * 3, [1] * 3]), "sizes": np.array([9, 4])},
        {"Y": f32([[0] * 4, [0.5] * 4, [1] * 4])},
        "the lengths are round(2·4/3) and 4; x_original is x_resized·(2 − 1)/(3 − 1)",
        18,
    ),
)
