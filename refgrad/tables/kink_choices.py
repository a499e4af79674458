"""The choices of order 1 to 3 that the table of kinks has no numbers for, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KinkChoice:
    """Points where an operator has no derivative of some orders, and the numbers that refgrad gives there.

    `choices` are "zero", "one side" (the derivative of one side), "mean" (of both), "finite" (another number), "asymmetric"
    (it depends on the order in which the inputs are taken). For a point in KINKS every order above the first is 0, unless a row
    here says otherwise.
    """

    operator: str
    where: tuple[str, ...]
    orders: tuple[int, ...]
    choices: tuple[str, ...]
    reason: str


_BELOW = "the derivatives of the side x < 0, as for order 1"
_PRODUCT = "sign 0 = 0 in a product of the slopes of both sides"
_LINEAR = "the derivatives of the piece whose slope was chosen"

KINK_CHOICES: tuple[KinkChoice, ...] = (
    KinkChoice("Elu", ("x = 0",), (2, 3), ("one side",), _BELOW),
    KinkChoice("Selu", ("x = 0", "x = 0, γ·α = γ"), (2, 3), ("one side",), _BELOW),
    KinkChoice("Celu", ("x = 0",), (2, 3), ("one side",), _BELOW),
    KinkChoice(
        "Softsign",
        ("x = 0",),
        (2, 3),
        ("zero",),
        "sign 0 = 0 in −2·sign x/(1 + |x|)³; the third is 0, as for a constant",
    ),
    KinkChoice(
        "HardSwish",
        ("|x| = 3",),
        (2,),
        ("mean",),
        "half of 1/3: HardSigmoid has the slope 0 there, and x/6 + 1/2 has not",
    ),
    KinkChoice(
        "Div", ("b = 0",), (2, 3), ("zero",), "a/b is linear in a, whatever b is; the first derivative is infinite"
    ),
    KinkChoice(
        "Pow",
        ("x = 0",),
        (2, 3),
        ("one side", "asymmetric"),
        "the derivative in y is 0 where x = 0, and does not change with x; the derivative in x changes with y",
    ),
    KinkChoice("PRelu", ("x = 0",), (2,), ("one side",), "the slope of x < 0, which is the slope itself"),
    KinkChoice("LpNormalization", ("p = 1, an element is 0",), (2, 3), ("finite",), _PRODUCT),
    KinkChoice("GlobalLpPool", ("p = 1, an element is 0",), (1, 2, 3), ("mean", "zero"), "sign 0 = 0"),
    KinkChoice(
        "GlobalLpPool", ("p = 3, an element is 0",), (3,), ("mean",), "sign 0 = 0 in the third derivative of |x|³"
    ),
    KinkChoice("LpPool", ("p = 3, an element is 0",), (3,), ("mean",), "sign 0 = 0 in the third derivative of |x|³"),
    KinkChoice("GridSample", ("a point lies on a pixel",), (2, 3), ("one side",), _LINEAR),
    KinkChoice(
        "GridSample",
        ("a point lies on the border",),
        (2,),
        ("asymmetric",),
        "the derivative by the grid is 0, as outside; the weights of the pixels change as inside",
    ),
    KinkChoice("GridSample", ("cubic, a point lies on a pixel",), (3,), ("one side",), _LINEAR),
    KinkChoice("GridSample", ("reflected at the border",), (1, 2, 3), ("mean", "zero"), "both slopes add up to 0"),
    KinkChoice("Resize", ("the crop ends at the border",), (2,), ("one side",), _LINEAR),
    KinkChoice(
        "RoiAlign", ("a roi of no size",), (1, 2, 3), ("zero",), "its width counts as 1, as for every smaller roi"
    ),
    KinkChoice(
        "RoiAlign", ("a point lies on a pixel",), (1, 2, 3), ("one side", "zero"), "the slope towards the next pixel"
    ),
    KinkChoice(
        "DeformConv",
        ("the offset is 0",),
        (1, 2, 3),
        ("one side", "finite", "zero"),
        "the slope towards the next pixel, along each axis",
    ),
)
