"""Strategies of the elementwise operators."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import FLOATS, Drawing, strategy

DOMAINS = {  # where each is defined, finite and not too steep
    **dict.fromkeys(("Neg", "Exp", "Sin", "Cos", "Atan", "Sinh", "Cosh", "Asinh", "Erf", "Identity"), (-3.0, 3.0)),
    "Tan": (-1.25, 1.25),
    **dict.fromkeys(("Asin", "Acos", "Atanh"), (-0.875, 0.875)),
    **dict.fromkeys(("Sqrt", "Log"), (0.125, 4.0)),
    "Acosh": (1.25, 4.0),
}
KINKS = {
    "Abs": (0.0,),
    "Sign": (0.0,),
    "Floor": tuple(range(-3, 4)),
    "Ceil": tuple(range(-3, 4)),
    "Round": tuple(k + 0.5 for k in range(-3, 3)),
}


@strategy(*DOMAINS)
def smooth(d: Drawing) -> Case:
    """One input of any shape, inside the domain."""
    return d.case(d.floats(d.shape(), *DOMAINS[d.op_type]))


@strategy(*KINKS, kinks=True)
def with_kinks(d: Drawing) -> Case:
    """One input of any shape, between the kinks."""
    return d.case(d.floats(d.shape(), -3, 3, avoid=KINKS[d.op_type]))


@strategy("Reciprocal")
def reciprocal(d: Drawing) -> Case:
    """Both signs, away from 0."""
    return d.case(d.floats(d.shape(), avoid=_near_zero()))


@strategy("Add", "Sub", "Mul")
def binary(d: Drawing) -> Case:
    """Every broadcast; either operand may be constant."""
    a, b = d.broadcasting()
    return d.case(d.floats(a), d.floats(b), fixed=[d.pick("A", "B")])


@strategy("Div")
def div(d: Drawing) -> Case:
    """A divisor of either sign, away from 0."""
    a, b = d.broadcasting()
    return d.case(d.floats(a), d.floats(b, avoid=_near_zero()), fixed=[d.pick("A", "B")])


@strategy("Sum", "Mean")
def sums(d: Drawing) -> Case:
    """One operand to four."""
    return d.case(*(d.floats(shape) for shape in d.broadcasting(d.integer(1, 4))))


@strategy("Max", "Min", kinks=True)
def extremes(d: Drawing) -> Case:
    """One operand to four, no two of which tie."""
    count = d.integer(2 if d.values == "kink" else 1, 4)
    return d.case(*d.disjoint(*d.broadcasting(count)))


@strategy("Mod", kinks=True)
def mod(d: Drawing) -> Case:
    """Fractions by whole numbers of either sign: every division leaves a remainder."""
    left, right = d.broadcasting()
    divisor = d.integers(right, 1, 1 if d.values == "kink" else 3) * np.where(d.bools(right), -1, 1)
    divided = d.floats(left, -7, 7, avoid=range(-7, 8))
    fmod = 1 if d.opset < 28 else d.pick(1, 0)  # before opset 28, floats require 1
    return d.case(divided, divisor.astype(d.dtype), fmod=fmod)


@strategy("Where")
def where(d: Drawing) -> Case:
    """A condition that broadcasts with what it chooses from, fed or constant."""
    condition, x, y = d.broadcasting(3)
    return d.case(d.bools(condition), d.floats(x), d.floats(y), fixed=["condition"])


@strategy("Pow")
def pow_(d: Drawing) -> Case:
    """A positive base to any power, or a base of either sign to a whole power, which gets no gradient."""
    base, power = d.broadcasting()
    if d.flag():
        kinds: list[np.dtype[Any]] = [np.dtype(np.int64), np.dtype(np.int32), d.dtype]
        whole = d.integers(power, -2, 3).astype(d.pick(*kinds))
        return d.case(d.floats(base, avoid=_near_zero()), whole, fixed=["Y"], wrt=["X"])
    return d.case(d.floats(base, 0.25, 2), d.floats(power), fixed=[d.pick("Y", "X")])


@strategy("Clip", kinks=True)
def clip(d: Drawing) -> Case:
    """Either bound absent, constant or fed; the lower one may be above the upper one, which then wins."""
    low = d.pick(None, -1.0, 0.5, 2.0)
    high = d.pick(None, 1.0, 0.0, -1.5)
    x = d.floats(d.shape(), -3, 3, avoid=[bound for bound in (low, high) if bound is not None])
    bounds = [None if bound is None else d.scalar(bound) for bound in (low, high)]
    return d.case(x, *bounds, fixed=["min", "max"])


@strategy("Cast")
def cast(d: Drawing) -> Case:
    """To every type that has a derivative."""
    to = d.pick(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return d.case(d.floats(d.shape()), to=to)


@strategy("CastLike")
def cast_like(d: Drawing) -> Case:
    """To the type of another input, which may have any shape and gets no gradient."""
    like = d.floats(d.shape()).astype(d.pick(*FLOATS[::-1]))
    return d.case(d.floats(d.shape()), like, fixed=["target_type"], wrt=["input"])


@strategy("CumSum", "CumProd")
def cumulative(d: Drawing) -> Case:
    """Either direction, with or without the element itself; factors may be 0."""
    shape = d.shape(1)
    axis = np.array(d.axis(len(shape)), d.pick(np.int64, np.int32))
    flags: dict[str, Any] = {name: d.pick(None, 0, 1) for name in ("exclusive", "reverse")}
    return d.case(d.floats(shape), axis, fixed=["axis"], **flags)


@strategy("Dropout")
def dropout(d: Drawing) -> Case:
    """In training or not, with a seed. The ratio and the mode may be absent, constant or fed."""
    ratio = d.optional(lambda: d.scalar(d.pick(0.5, 0.25)))
    training = d.optional(lambda: d.scalar(d.flag(), np.bool_))
    outputs = d.integer(1, 2)
    return d.case(
        d.floats(d.shape()), ratio, training, seed=d.integer(0, 3), outputs=outputs, fixed=["ratio", "training_mode"]
    )


def _near_zero() -> tuple[float, ...]:
    """The numbers to avoid, so that those drawn are at least 1/4 away from 0."""
    return (-0.125, 0.0, 0.125)
