"""Findings about normalizations and dropout."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "divides by the sum, not by the sum of magnitudes, where p is 1",
        "Y = LpNormalization <p = 1> (X)",
        {"X": F32([1, -3])},
        {"Y": F32([0.25, -0.75])},
        "the norm is |1| + |−3|",
    ),
    about(
        REFERENCE,
        "fails in opset 7",
        "Y = BatchNormalization <epsilon = 0.0> (X, s, b, m, v)",
        {"X": F32([[3]]), "s": F32([2]), "b": F32([1]), "m": F32([1]), "v": F32([4])},
        {"Y": F32([[3]])},
        "(3 − 1)/√4·2 + 1",
        7,
    ),
    about(
        REFERENCE,
        "mixes the mean of the batch into the given one in inference",
        "Y = BatchNormalization <epsilon = 0.0> (X, s, b, m, v)",
        {"X": F32([[3]]), "s": F32([2]), "b": F32([1]), "m": F32([1]), "v": F32([4])},
        {"Y": F32([[3]])},
        "one output is test mode, which takes the estimated mean and variance: (3 − 1)/√4·2 + 1",
        9,
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y = InstanceNormalization (X, s, b)",
        {"X": np.float16([[[300, -300]]]), "s": np.float16([1]), "b": np.float16([0])},
        {"Y": np.float16([[[1, -1]]])},
        "(x − 0)/√(300² + 1e-5)",
    ),
    about(
        REFERENCE,
        "squares before it subtracts, so that it is wrong where the mean is large",
        "Y = MeanVarianceNormalization (X)",
        {"X": F32([[[[4096, 4097]]]])},
        {"Y": F32([[[[-1, 1]]]])},
        "(X − EX)/√E(X − EX)² is ∓0.5/0.5; the function body computes E X² − (EX)²",
    ),
    about(
        REFERENCE,
        "fails in double",
        "Y = MeanVarianceNormalization (X)",
        {"X": np.float64([[[[1, 3]]]])},
        {"Y": np.float64([[[[-1, 1]]]])},
        "X may be double",
    ),
    about(
        ORT,
        "gives NaN where all elements are equal",
        "Y = MeanVarianceNormalization (X)",
        {"X": F32([[[[1, 1]]]])},
        {"Y": F32([[[[0, 0]]]])},
        "the function body adds 1e-9 to the standard deviation: 0/1e-9",
    ),
    about(
        REFERENCE,
        "fails on three axes",
        "Y = LRN <size = 1, alpha = 1.0, beta = 1.0> (X)",
        {"X": F32([[[1]]])},
        {"Y": F32([[[0.5]]])},
        "X is (N × C × D1 × D2, ..., Dk): 1/(1 + 1)",
    ),
    about(
        REFERENCE,
        "normalizes the first image of a batch only",
        "Y = LRN <size = 1, alpha = 1.0, beta = 1.0> (X)",
        {"X": np.ones((2, 1, 1, 1), F32)},
        {"Y": np.full((2, 1, 1, 1), 0.5, F32)},
        "1/(1 + 1)",
    ),
    about(
        REFERENCE,
        "leaves the channel behind out of an even size",
        "Y = LRN <size = 2, alpha = 2.0, beta = 1.0> (X)",
        {"X": np.ones((1, 2, 1, 1), F32)},
        {"Y": F32([1 / 3, 1 / 2]).reshape(1, 2, 1, 1)},
        "i goes from c − ⌊1/2⌋ to c + ⌈1/2⌉: 1/(1 + 2) and 1/(1 + 1)",
    ),
    about(
        ORT,
        "fails on an even size",
        "Y = LRN <size = 2, alpha = 2.0, beta = 1.0> (X)",
        {"X": np.ones((1, 2, 1, 1), F32)},
        {"Y": F32([1 / 3, 1 / 2]).reshape(1, 2, 1, 1)},
        "i goes from c − ⌊1/2⌋ to c + ⌈1/2⌉: 1/(1 + 2) and 1/(1 + 1)",
    ),
    about(
        ORT,
        "fails on three axes",
        "Y = LRN <size = 1, alpha = 1.0, beta = 1.0> (X)",
        {"X": F32([[[1]]])},
        {"Y": F32([[[0.5]]])},
        "X is (N × C × D1 × D2, ..., Dk): 1/(1 + 1)",
    ),
    about(
        REFERENCE,
        "fails on an empty batch",
        "Y = GroupNormalization <num_groups = 1> (X, s, b)",
        {"X": np.zeros((0, 1, 2), F32), "s": F32([1]), "b": F32([0])},
        {"Y": np.zeros((0, 1, 2), F32)},
        "nothing is normalized to nothing",
    ),
    about(
        REFERENCE,
        "gives the mask as bool before opset 10",
        "Y, mask = Dropout (X)",
        {"X": F32([1, 2])},
        {"Y": F32([1, 2]), "mask": F32([1, 1])},
        "the mask has the type T of X",
        7,
    ),
    about(
        REFERENCE,
        "is not implemented before opset 7",
        "Y = Dropout <is_test = 1> (X)",
        {"X": F32([1, 2])},
        {"Y": F32([1, 2])},
        "in test mode the output is Y = X",
        6,
    ),
    about(
        REFERENCE,
        "fails without a ratio",
        'Y = Dropout (X, "", training)',
        {"X": F32([]), "training": np.array(True)},
        {"Y": F32([])},
        "ratio is optional",
    ),
)
