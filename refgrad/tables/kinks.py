"""The choices made where a derivative does not exist, as one table.

Rules implement it, the documentation prints it, and a difference between backends that it explains is a convention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

Point = tuple[Any, ...]  # per input a number or nested tuples of numbers; None for one that gets no gradient
CONVENTIONS = ("refgrad", "torch", "onnxruntime")  # whose choice `gradient(..., kinks=)` takes
SHARED = "equal shares: symmetric in the inputs, and the shares add up to dy"
ONE_SIDED = "the one-sided derivative, or its limit"


@dataclass(frozen=True)
class KinkRow:
    """A point without a derivative, and the gradient of each input there for a cotangent of 1 everywhere.

    `inputs` are given in the order of the schema. `torch` and `ort` (ONNX Runtime's builder) are None where they have no
    such operator or no gradient for it.
    """

    operator: str
    where: str
    inputs: Point
    ours: Point
    torch: Point | None
    ort: Point | None
    reason: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def choice(self, convention: str) -> Point:
        """The gradients that `gradient(..., kinks=convention)` gives: ours where that one has none."""
        theirs = {"refgrad": self.ours, "torch": self.torch, "onnxruntime": self.ort}[convention]
        if theirs is None:
            return self.ours
        return tuple(a if b is None else b for a, b in zip(self.ours, theirs, strict=True))

    @property
    def agreed(self) -> bool:
        """True if everyone who has a gradient chooses the same."""
        others = [zip(other, self.ours, strict=True) for other in (self.torch, self.ort) if other is not None]
        return all(repr(theirs) == repr(ours) for pairs in others for theirs, ours in pairs if theirs is not None)


KINKS: tuple[KinkRow, ...] = (
    KinkRow("Relu", "x = 0", (0.0,), (0.0,), (0.0,), (0.0,), "the result is as flat as for x < 0"),
    KinkRow("LeakyRelu", "x = 0", (0.0,), (0.25,), (0.25,), (0.25,), "the slope of x < 0", {"alpha": 0.25}),
    KinkRow("PRelu", "x = 0", (0.0, 0.25), (0.25, 0.0), (0.25, 0.0), None, "the slope of x < 0"),
    KinkRow("Elu", "x = 0", (0.0,), (0.5,), (0.5,), None, "the slope of x < 0", {"alpha": 0.5}),
    KinkRow("Selu", "x = 0", (0.0,), (1.7580993408473766,), (1.7580993408473766,), None, "the slope of x < 0, γ·α"),
    KinkRow("ThresholdedRelu", "x = α", (1.0,), (0.0,), (0.0,), None, "as for x < α", {"alpha": 1.0}),
    KinkRow(
        "Shrink",
        "|x| = λ",
        ((-0.5, 0.5),),
        ((0.0, 0.0),),
        ((0.0, 0.0),),
        None,
        "as for |x| < λ",
        {"lambd": 0.5, "bias": 0.5},
    ),
    KinkRow(
        "HardSigmoid",
        "the ends of the slope",
        ((-2.0, 2.0),),
        ((0.0, 0.0),),
        ((0.0, 0.0),),
        None,
        "as for the flat parts",
        {"alpha": 0.25},
    ),
    KinkRow("HardSwish", "|x| = 3", ((-3.0, 3.0),), ((0.0, 1.0),), ((0.0, 1.0),), None, "as for |x| > 3"),
    KinkRow("Abs", "x = 0", (0.0,), (0.0,), (0.0,), (0.0,), "sign 0 = 0"),
    KinkRow("Sqrt", "x = 0", (0.0,), (inf,), (inf,), (inf,), ONE_SIDED),
    KinkRow("Log", "x = 0", (0.0,), (inf,), (inf,), (inf,), ONE_SIDED),
    KinkRow("Reciprocal", "x = 0", (0.0,), (-inf,), (-inf,), (-inf,), ONE_SIDED),
    KinkRow("Asin", "|x| = 1", ((-1.0, 1.0),), ((inf, inf),), ((inf, inf),), None, ONE_SIDED),
    KinkRow("Acos", "|x| = 1", ((-1.0, 1.0),), ((-inf, -inf),), ((-inf, -inf),), None, ONE_SIDED),
    KinkRow("Atanh", "|x| = 1", ((-1.0, 1.0),), ((inf, inf),), ((inf, inf),), None, ONE_SIDED),
    KinkRow("Acosh", "x = 1", (1.0,), (inf,), (inf,), None, ONE_SIDED),
    KinkRow(
        "Pow",
        "x = 0",
        ((0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 2.0, 0.5)),
        ((0.0, 1.0, 0.0, inf), (0.0, 0.0, 0.0, 0.0)),
        ((0.0, 1.0, 0.0, inf), (0.0, 0.0, 0.0, 0.0)),
        ((nan, 1.0, 0.0, inf), None),
        "x⁰ is constant, so its derivative is 0; in y the limit of xʸ·log x; ONNX Runtime computes 0·0⁻¹",
    ),
    KinkRow(
        "Pow",
        "x < 0, y whole",
        ((-2.0,), (2.0,)),
        ((-4.0,), (nan,)),
        ((-4.0,), (nan,)),
        ((-4.0,), None),
        "xʸ is not real for y nearby",
    ),
    KinkRow(
        "Mod", "x = 2·y", (2.0, 1.0), (1.0, -2.0), (1.0, -2.0), None, "the quotient that was subtracted", {"fmod": 1}
    ),
    KinkRow("Max", "x = y", (1.0, 1.0), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5), SHARED),
    KinkRow("Min", "x = y", (1.0, 1.0), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5), SHARED),
    KinkRow(
        "ReduceMax",
        "two elements are the largest",
        ((1.0, 1.0, 0.0),),
        ((0.5, 0.5, 0.0),),
        ((0.5, 0.5, 0.0),),
        None,
        SHARED,
    ),
    KinkRow(
        "ReduceMin",
        "two elements are the smallest",
        ((1.0, 1.0, 2.0),),
        ((0.5, 0.5, 0.0),),
        ((0.5, 0.5, 0.0),),
        None,
        SHARED,
    ),
    KinkRow(
        "Clip",
        "x = min, x = max",
        ((-1.0, 1.0, -2.0, 2.0), -1.0, 1.0),
        ((1.0, 1.0, 0.0, 0.0), 1.0, 1.0),
        ((1.0, 1.0, 0.0, 0.0), 1.0, 1.0),
        ((1.0, 1.0, 0.0, 0.0), None, None),
        "x was not changed",
    ),
    KinkRow(
        "Clip",
        "min > max",
        ((0.0, -3.0, 3.0), 1.0, -1.0),
        ((0.0, 0.0, 0.0), 0.0, 3.0),
        ((0.0, 0.0, 0.0), 0.0, 3.0),
        ((0.0, 0.0, 0.0), None, None),
        "every result is max",
    ),
    KinkRow("ReduceLogSum", "the sum is 0", ((0.0, 0.0),), ((inf, inf),), ((inf, inf),), None, ONE_SIDED),
    KinkRow("ReduceL1", "an element is 0", ((0.0, 1.0),), ((0.0, 1.0),), ((0.0, 1.0),), None, "sign 0 = 0"),
    KinkRow(
        "ReduceL2", "the norm is 0", ((0.0, 0.0),), ((0.0, 0.0),), ((0.0, 0.0),), ((0.0, 0.0),), "the least subgradient"
    ),
    KinkRow(
        "ReduceLogSumExp",
        "every element is −∞",
        ((-inf, -inf),),
        ((0.0, 0.0),),
        ((nan, nan),),
        ((nan, nan),),
        "no finite change of x changes the result",
    ),
    KinkRow("Floor", "x is whole", (1.0,), (0.0,), (0.0,), None, "piecewise constant"),
    KinkRow("Ceil", "x is whole", (1.0,), (0.0,), (0.0,), None, "piecewise constant"),
    KinkRow("Round", "x is halfway", (0.5,), (0.0,), (0.0,), None, "piecewise constant"),
    KinkRow("Sign", "x = 0", (0.0,), (0.0,), (0.0,), None, "piecewise constant"),
    KinkRow(
        "MaxPool",
        "two elements of a window are the largest",
        (((((1.0, 1.0, 0.0),),)),),
        (((((1.0, 0.0, 0.0),),)),),
        (((((1.0, 0.0, 0.0),),)),),
        (((((1.0, 0.0, 0.0),),)),),
        "the element whose index MaxPool returns: the first",
        {"kernel_shape": [3]},
    ),
    KinkRow(
        "GlobalMaxPool",
        "two elements of a channel are the largest",
        ((((1.0, 0.0, 1.0),),),),
        ((((1.0, 0.0, 0.0),),),),
        ((((1.0, 0.0, 0.0),),),),
        None,
        "the first, as in MaxPool",
    ),
    KinkRow(
        "MaxRoiPool",
        "two pixels of a bin are the largest",
        (((((1.0, 0.0, 1.0),),),), ((0.0, 0.0, 0.0, 2.0, 0.0),)),
        (((((1.0, 0.0, 0.0),),),), ((0.0, 0.0, 0.0, 0.0, 0.0),)),
        None,
        None,
        "the first, as in MaxPool",
        {"pooled_shape": [1, 1]},
    ),
    KinkRow(
        "GridSample",
        "a point lies on a pixel",
        (((((1.0, 2.0, 4.0),),),), ((((0.0, 0.0),),),)),
        (((((0.0, 1.0, 0.0),),),), ((((3.0, -1.0),),),)),
        (((((0.0, 1.0, 0.0),),),), ((((3.0, -1.0),),),)),
        None,
        "the slope towards the next pixel",
    ),
    KinkRow(
        "GridSample",
        "a point lies on the border",
        (((((1.0, 2.0, 4.0),),),), ((((-1.0, 0.0), (1.0, 0.0)),),)),
        (((((1.0, 0.0, 1.0),),),), ((((0.0, 0.0), (0.0, 0.0)),),)),
        (((((1.0, 0.0, 1.0),),),), ((((0.0, 0.0), (0.0, 0.0)),),)),
        None,
        "the slope outside, where the padding repeats the border",
        {"padding_mode": "border", "align_corners": 1},
    ),
    KinkRow(
        "Resize",
        "a point lies on an element",
        (((1.0, 2.0, 4.0),), (0.0, 0.0, 1.0, 1.0), (1.0, 1.0)),
        (((1.0, 1.0, 1.0),), (0.0, 0.0, 0.0, 0.0), (0.0, -6.5)),
        None,
        None,
        "the derivative for a larger scale: a smaller one takes an element off the result where the size is whole",
        {"mode": "linear"},
    ),
    KinkRow(
        "Resize",
        "the crop ends at the border",
        (((1.0, 2.0, 4.0),), (0.0, 0.0, 1.0, 1.0), (1.0, 1.0)),
        (((1.0, 1.0, 1.0),), (0.0, 4.0, 0.0, 6.0), (0.0, 0.0)),
        None,
        None,
        "the slope within X for the last point, elsewhere the slope towards the next element",
        {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
    ),
    KinkRow(
        "LpPool",
        "a window is 0",
        ((((0.0, 0.0, 0.0),),),),
        ((((0.0, 0.0, 0.0),),),),
        ((((0.0, 0.0, 0.0),),),),
        None,
        "the least subgradient",
        {"kernel_shape": [3]},
    ),
    KinkRow(
        "LpPool",
        "p = 1, an element is 0",
        ((((0.0, 1.0, -2.0),),),),
        ((((0.0, 1.0, -1.0),),),),
        None,
        None,
        "sign 0 = 0",
        {"kernel_shape": [3], "p": 1},
    ),
    KinkRow(
        "GlobalLpPool",
        "x = 0",
        ((((0.0, 0.0),),),),
        ((((0.0, 0.0),),),),
        ((((0.0, 0.0),),),),
        None,
        "the least subgradient",
    ),
    KinkRow(
        "LpNormalization", "x = 0", ((0.0, 0.0),), ((0.0, 0.0),), None, None, "the result is 0 there, by definition"
    ),
    KinkRow(
        "LpNormalization",
        "p = 1, an element is 0",
        ((0.0, 1.0),),
        ((1.0, 0.0),),
        ((1.0, 0.0),),
        None,
        "sign 0 = 0",
        {"p": 1},
    ),
    KinkRow(
        "TopK",
        "two elements are the largest",
        ((1.0, 1.0, 0.0), (1,)),
        ((1.0, 0.0, 0.0), None),
        ((1.0, 0.0, 0.0), None),
        None,
        "the element whose index TopK returns: the first",
    ),
    KinkRow(
        "Unique",
        "an element occurs twice",
        ((1.0, 2.0, 2.0),),
        ((1.0, 1.0, 0.0),),
        None,
        None,
        "the element whose index Unique returns: the first",
    ),
    KinkRow(
        "ScatterElements",
        "updates and data are the largest",
        ((1.0, 5.0), (0, 0), (1.0, 1.0)),
        ((1 / 3, 1.0), None, (1 / 3, 1 / 3)),
        ((1 / 3, 1.0), None, (1 / 3, 1 / 3)),
        None,
        SHARED,
        {"reduction": "max"},
    ),
    KinkRow(
        "ScatterND",
        "updates and data are the smallest",
        ((1.0, 5.0), ((0,), (0,)), (1.0, 1.0)),
        ((1 / 3, 1.0), None, (1 / 3, 1 / 3)),
        None,
        None,
        SHARED,
        {"reduction": "min"},
    ),
)
