"""The gradient where an input is NaN, for every operator that compares numbers and so may stop a NaN.

An operator that computes with its input has the gradient NaN there, and needs no row.
"""

from __future__ import annotations

from math import nan

from refgrad.tables.kinks import KinkRow

NOT_ATTAINED = "no element is equal to NaN, so none has a share: 0/0"
NOT_INSIDE = "NaN is not between the bounds"
FIRST_NAN = "the element whose index is returned: NaN counts as the largest"

# `ours`, `torch` and `ort` are the gradient of each input for a cotangent of 1, as in the table of kinks. Dialect "ort" has
# what ONNX Runtime's builder has.
MISSING: tuple[KinkRow, ...] = (
    KinkRow("Relu", "x = NaN", (nan,), (1.0,), (1.0,), None, "NaN is not 0; the kernel ReluGrad of ONNX Runtime has 0"),
    KinkRow("LeakyRelu", "x = NaN", (nan,), (0.25,), (0.25,), None, "NaN is not above 0", {"alpha": 0.25}),
    KinkRow("HardSigmoid", "x = NaN", (nan,), (0.0,), (0.0,), None, NOT_INSIDE),
    KinkRow("ThresholdedRelu", "x = NaN", (nan,), (0.0,), None, None, "NaN is not above α, and the result is 0"),
    KinkRow("Shrink", "x = NaN", (nan,), (0.0,), None, None, "NaN is not beyond λ, and the result is 0"),
    KinkRow(
        "Clip", "x = NaN", ((nan, 0.5), 0.0, 1.0), ((0.0, 1.0), 0.0, 0.0), ((0.0, 1.0), 0.0, 0.0), None, NOT_INSIDE
    ),
    KinkRow(
        "Max",
        "one is NaN",
        ((nan, 1.0), (1.0, nan)),
        ((nan, nan), (nan, nan)),
        ((1.0, 1.0), (1.0, 1.0)),
        ((0.0, 0.0), (0.0, 0.0)),
        NOT_ATTAINED,
    ),
    KinkRow(
        "Min",
        "one is NaN",
        ((nan, 1.0), (1.0, nan)),
        ((nan, nan), (nan, nan)),
        ((1.0, 1.0), (1.0, 1.0)),
        ((0.0, 0.0), (0.0, 0.0)),
        NOT_ATTAINED,
    ),
    KinkRow("ReduceMax", "one is NaN", ((nan, 1.0, 2.0),), ((nan, nan, nan),), ((nan, nan, nan),), None, NOT_ATTAINED),
    KinkRow("ReduceMin", "one is NaN", ((nan, 1.0, 2.0),), ((nan, nan, nan),), ((nan, nan, nan),), None, NOT_ATTAINED),
    KinkRow(
        "ScatterElements",
        "data or updates are NaN",
        ((nan, 1.0, 2.0), (0, 1), (3.0, nan)),
        ((nan, nan, 1.0), None, (nan, nan)),
        ((nan, nan, 1.0), None, (nan, nan)),
        None,
        NOT_ATTAINED,
        {"reduction": "max"},
    ),
    KinkRow(
        "MaxPool",
        "one is NaN",
        ((((nan, 1.0, 2.0),),),),
        ((((1.0, 0.0, 0.0),),),),
        ((((1.0, 0.0, 0.0),),),),
        None,
        FIRST_NAN,
        {"kernel_shape": [3]},
    ),
    KinkRow(
        "TopK", "one is NaN", ((nan, 1.0, 2.0), (1,)), ((1.0, 0.0, 0.0), None), ((1.0, 0.0, 0.0), None), None, FIRST_NAN
    ),
)
