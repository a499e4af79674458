"""Findings about normalizations and dropout."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, double, f32, gradient

F32 = np.float32

_LAYER = {"X": f32([[0, 2]]), "S": f32([1, 1]), "B": f32([0, 0]), "Y_grad": f32([[1, 0]])}
_LAYER_GRAD = {"X_grad": f32([[0.1875, -0.1875]]), "S_grad": f32([-0.5, 0]), "B_grad": f32([1, 0])}
_LAYER_FORWARD = "Y, mean, r = LayerNormalization <axis = -1, epsilon = 3.0> (X, S, B)"
_LAYER_BACKWARD = (
    "X_grad, S_grad, B_grad = com.microsoft.LayerNormalizationGrad <axis = -1, epsilon = 3.0> (Y_grad, X, S, mean, r)"
)
_INVERTIBLE = (
    "X_grad, S_grad, B_grad = com.microsoft.InvertibleLayerNormalizationGrad <axis = -1, epsilon = 3.0>"
    " (Y_grad, Y, S, B, r)"
)
_SIMPLIFIED_FORWARD = "Y, r = SimplifiedLayerNormalization <axis = -1, epsilon = 5.0> (X, S)"
_SIMPLIFIED = (
    "X_grad, S_grad = com.microsoft.SimplifiedLayerNormalizationGrad <axis = -1, epsilon = 5.0> (Y_grad, X, S, r)"
)
_ONE = {"X": f32([[2]]), "S": f32([1]), "B": f32([0]), "Y_grad": f32([[1]])}
_ONE_GRAD = {"X_grad": f32([[0]]), "S_grad": f32([0]), "B_grad": f32([1])}

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "divides by the sum, not by the sum of magnitudes, where p is 1",
        "Y = LpNormalization <p = 1> (X)",
        {"X": f32([1, -3])},
        {"Y": f32([0.25, -0.75])},
        "the norm is |1| + |−3|",
    ),
    about(
        REFERENCE,
        "fails in opset 7",
        "Y = BatchNormalization <epsilon = 0.0> (X, s, b, m, v)",
        {"X": f32([[3]]), "s": f32([2]), "b": f32([1]), "m": f32([1]), "v": f32([4])},
        {"Y": f32([[3]])},
        "(3 − 1)/√4·2 + 1",
        7,
    ),
    about(
        REFERENCE,
        "mixes the mean of the batch into the given one in inference",
        "Y = BatchNormalization <epsilon = 0.0> (X, s, b, m, v)",
        {"X": f32([[3]]), "s": f32([2]), "b": f32([1]), "m": f32([1]), "v": f32([4])},
        {"Y": f32([[3]])},
        "one output is test mode, which takes the estimated mean and variance: (3 − 1)/√4·2 + 1",
        9,
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y = InstanceNormalization (X, s, b)",
        {"X": np.array([[[300, -300]]], np.float16), "s": np.array([1], np.float16), "b": np.array([0], np.float16)},
        {"Y": np.array([[[1, -1]]], np.float16)},
        "(x − 0)/√(300² + 1e-5)",
    ),
    about(
        REFERENCE,
        "fails in double",
        "Y = MeanVarianceNormalization (X)",
        {"X": np.array([[[[1, 3]]]], np.float64)},
        {"Y": np.array([[[[-1, 1]]]], np.float64)},
        "X may be double",
    ),
    about(
        ORT,
        "gives NaN where all elements are equal",
        "Y = MeanVarianceNormalization (X)",
        {"X": f32([[[[1, 1]]]])},
        {"Y": f32([[[[0, 0]]]])},
        "the function body adds 1e-9 to the standard deviation: 0/1e-9",
    ),
    about(
        REFERENCE,
        "fails on three axes",
        "Y = LRN <size = 1, alpha = 1.0, beta = 1.0> (X)",
        {"X": f32([[[1]]])},
        {"Y": f32([[[0.5]]])},
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
        {"Y": f32([1 / 3, 1 / 2]).reshape(1, 2, 1, 1)},
        "i goes from c − ⌊1/2⌋ to c + ⌈1/2⌉: 1/(1 + 2) and 1/(1 + 1)",
    ),
    about(
        ORT,
        "fails on an even size",
        "Y = LRN <size = 2, alpha = 2.0, beta = 1.0> (X)",
        {"X": np.ones((1, 2, 1, 1), F32)},
        {"Y": f32([1 / 3, 1 / 2]).reshape(1, 2, 1, 1)},
        "i goes from c − ⌊1/2⌋ to c + ⌈1/2⌉: 1/(1 + 2) and 1/(1 + 1)",
    ),
    about(
        ORT,
        "fails on three axes",
        "Y = LRN <size = 1, alpha = 1.0, beta = 1.0> (X)",
        {"X": f32([[[1]]])},
        {"Y": f32([[[0.5]]])},
        "X is (N × C × D1 × D2, ..., Dk): 1/(1 + 1)",
    ),
    about(
        REFERENCE,
        "fails on an empty batch",
        "Y = GroupNormalization <num_groups = 1> (X, s, b)",
        {"X": np.zeros((0, 1, 2), F32), "s": f32([1]), "b": f32([0])},
        {"Y": np.zeros((0, 1, 2), F32)},
        "nothing is normalized to nothing",
    ),
    about(
        REFERENCE,
        "gives the mask as bool before opset 10",
        "Y, mask = Dropout (X)",
        {"X": f32([1, 2])},
        {"Y": f32([1, 2]), "mask": f32([1, 1])},
        "the mask has the type T of X",
        7,
    ),
    about(
        REFERENCE,
        "is not implemented before opset 7",
        "Y = Dropout <is_test = 1> (X)",
        {"X": f32([1, 2])},
        {"Y": f32([1, 2])},
        "in test mode the output is Y = X",
        6,
    ),
    about(
        REFERENCE,
        "fails without a ratio",
        'Y = Dropout (X, "", training)',
        {"X": f32([]), "training": np.array(True)},
        {"Y": f32([])},
        "ratio is optional",
    ),
    about(
        REFERENCE,
        "has no stash_type but float",
        "Y, mean, r = LayerNormalization <stash_type = 11, epsilon = 0.0> (X, s)",
        {"X": f32([[1, 3]]), "s": f32([1, 1])},
        {"Y": f32([[-1, 1]]), "mean": np.array([[2]], np.float64), "r": np.array([[1]], np.float64)},
        "stash_type is the type of the mean and of 1/σ, here double",
    ),
    about(
        REFERENCE,
        "has no stash_type but float",
        "Y = RMSNormalization <stash_type = 11, epsilon = 0.0> (X, s)",
        {"X": f32([[1, -1]]), "s": f32([1, 1])},
        {"Y": f32([[1, -1]])},
        "x/√1",
        23,
    ),
    about(
        REFERENCE,
        "gives the mean in the type of X",
        "Y, mean, r = LayerNormalization <epsilon = 0.0> (X, s)",
        {"X": np.array([[1, 3]], np.float16), "s": np.array([1, 1], np.float16)},
        {"Y": np.array([[-1, 1]], np.float16), "mean": f32([[2]]), "r": f32([[1]])},
        "stash_type is float by default, and the type of the mean and of 1/σ",
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y = LRN <size = 1, alpha = 1.0, beta = 0.5> (X)",
        {"X": np.full((1, 1, 1, 1), 300, np.float16)},
        {"Y": np.ones((1, 1, 1, 1), np.float16)},
        "300/√(1 + 300²) is 1 to 6 digits",
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y = LpNormalization (X)",
        {"X": np.array([300, 400], np.float16)},
        {"Y": np.array([0.6, 0.8], np.float16)},
        "the norm is 500",
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y, m2, v2 = BatchNormalization <training_mode = 1> (X, s, b, m, v)",
        {
            "X": np.array([[300], [-300]], np.float16),
            "s": np.array([1], np.float16),
            "b": np.array([0], np.float16),
            "m": np.array([0], np.float16),
            "v": np.array([1], np.float16),
        },
        {"Y": np.array([[1], [-1]], np.float16), "m2": np.array([0], np.float16)},
        "(x − 0)/√(300² + 1e-5)",
    ),
    *(
        gradient(
            fault,
            f"Y, mask = Dropout (X, ratio{mode})",
            f"X_grad = com.microsoft.DropoutGrad (Y_grad, mask, ratio{mode})",
            {"X": f32([1, 2]), "ratio": np.array(0.5, F32), **training, "Y_grad": f32([3, 4])},
            {"X_grad": f32([3, 4])},
        )
        for fault, mode, training in (
            ("scales in inference", ", training", {"training": np.array(False)}),
            ("takes a training_mode that is left out for true", "", {}),
        )
    ),
    gradient(
        "fails where the mean is in double, which its schema allows",
        "Y = LayerNormalization <axis = -1, epsilon = 3.0> (X, S, B)",
        _LAYER_BACKWARD,
        double(_LAYER | {"mean": f32([[1]]), "r": f32([[0.5]])}),
        double(_LAYER_GRAD),
    ),
    gradient("fails on rows of one element", _LAYER_FORWARD, _LAYER_BACKWARD, _ONE, _ONE_GRAD),
    gradient(
        "reads beyond the end of a scale that is broadcast",
        _LAYER_FORWARD,
        _LAYER_BACKWARD,
        _LAYER | {"S": f32([1]), "B": f32([0])},
        _LAYER_GRAD | {"S_grad": f32([-0.5]), "B_grad": f32([1])},
    ),
    gradient("fails in double", _LAYER_FORWARD, _INVERTIBLE, double(_LAYER), double(_LAYER_GRAD)),
    gradient("fails on rows of one element", _LAYER_FORWARD, _INVERTIBLE, _ONE, _ONE_GRAD),
    *(
        gradient(
            fault,
            _SIMPLIFIED_FORWARD,
            _SIMPLIFIED,
            change({name: _ONE[name] for name in ("X", "S", "Y_grad")}),
            change({"X_grad": f32([[5 / 27]]), "S_grad": f32([2 / 3])}),
        )
        for fault, change in (("fails on rows of one element", dict), ("fails in double", double))
    ),
    gradient(
        "reads beyond the end of a scale that is broadcast",
        _SIMPLIFIED_FORWARD,
        _SIMPLIFIED,
        {"X": f32([[2, 2]]), "S": f32([1]), "Y_grad": f32([[1, 1]])},
        {"X_grad": f32([[5 / 27, 5 / 27]]), "S_grad": f32([4 / 3])},
    ),
)
