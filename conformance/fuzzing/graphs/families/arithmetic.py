"""Elementwise operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    BOOL,
    DOUBLE,
    FLOAT,
    GraphScope,
    GraphValue,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template(3)
def _smooth(s: GraphScope) -> None:
    s.add(
        s.rng.choice(("Tanh", "Sigmoid", "Sin", "Cos", "Erf", "Softplus", "Neg", "Atan", "Asinh", "Identity")), s.pick()
    )


@template(1.5)
def _growing(s: GraphScope) -> None:
    s.add(s.rng.choice(("Exp", "Sinh", "Cosh")), s.calm(s.pick(), 2.5))


@template(1.5)
def _of_positive(s: GraphScope) -> None:
    s.add(s.rng.choice(("Log", "Sqrt", "Reciprocal")), s.positive(s.pick()))


@template()
def _bounded(s: GraphScope) -> None:
    x = s.pick()
    if x.array.size and np.max(np.abs(x.real)) > 0.9:
        x = s.add("Mul", s.add(s.rng.choice(("Tanh", "Sin")), x), s.number(0.75))
    op = s.rng.choice(("Acos", "Asin", "Atanh", "Tan"))
    s.add(op, x)


@template(0.4)
def _hyperbolic(s: GraphScope) -> None:
    s.add("Acosh", s.add("Add", s.positive(s.pick()), s.number(1.0)))


@template(3)
def _kinked(s: GraphScope) -> None:
    op = s.rng.choice(
        (
            "Relu",
            "Abs",
            "LeakyRelu",
            "Elu",
            "Selu",
            "Celu",
            "HardSigmoid",
            "Softsign",
            "ThresholdedRelu",
            "Shrink",
            "HardSwish",
        )
    )
    if op == "HardSwish" and s.opset < 14:
        raise MisfitError(op)
    alphas: dict[str, dict[str, Any]] = {
        "LeakyRelu": {"alpha": 0.2},
        "Elu": {"alpha": 1.5},
        "Celu": {"alpha": 0.7},
        "Selu": {"alpha": 1.2, "gamma": 0.9},
        "HardSigmoid": {"alpha": 0.4, "beta": 0.3},
        "ThresholdedRelu": {"alpha": 0.3},
        "Shrink": {"bias": 0.2, "lambd": 0.4},
    }
    x = s.pick()
    if op in ("Elu", "Selu", "Celu"):
        x = s.calm(x, 20.0)
    s.add(op, x, **(alphas.get(op, {}) if s.chance(0.5) else {}))


@template(1, 18)
def _mish(s: GraphScope) -> None:
    s.add("Mish", s.pick())


@template(1.2, 20)
def _gelu(s: GraphScope) -> None:
    s.add("Gelu", s.pick(), approximate=s.rng.choice((None, "none", "tanh")))


@template(0.7, 24)
def _swish(s: GraphScope) -> None:
    s.add("Swish", s.pick(), alpha=s.rng.choice((None, 0.7)))


@template(0.8)
def _prelu(s: GraphScope) -> None:
    x = s.pick(1)
    slope = s.uniform(tuple(d if s.chance(0.6) else 1 for d in x.shape)[s.rng.randint(0, x.rank - 1) :], -0.8, 0.8)
    s.add("PRelu", x, slope)


@template()
def _clip(s: GraphScope) -> None:
    x = s.pick()
    low = s.number(-0.7) if s.chance(0.7) else None
    high = s.uniform((), 0.4, 1.0) if s.chance(0.4) else s.number(0.9) if s.chance(0.7) else None
    s.add("Clip", x, low, high)


@template(5)
def _binary(s: GraphScope) -> None:
    x = s.pick()
    y = s.broadcasting(x.shape)
    if s.chance(0.5):
        x, y = y, x
    op = s.rng.choice(("Add", "Sub", "Mul", "Mul", "Div"))
    s.add(op, x, s.positive(y) if op == "Div" else y)


@template(1.5)
def _variadic(s: GraphScope) -> None:
    x = s.pick()
    others = [s.broadcasting(x.shape) for _ in range(s.rng.randint(0, 2))]
    s.add(s.rng.choice(("Max", "Min", "Sum", "Mean")), x, *others)


@template(1.5)
def _power(s: GraphScope) -> None:
    x = s.calm(s.pick())
    match s.rng.randrange(4):
        case 0:
            s.add("Pow", x, s.number(s.rng.choice((2.0, 3.0, 1.0, 0.0))))
        case 1:
            s.add("Pow", s.positive(x), s.calm(s.broadcasting(x.shape), 2.0))
        case 2:
            s.add("Pow", s.positive(x), s.number(s.rng.choice((0.5, -1.0, 1.5))))
        case 3:
            s.add("Pow", x, s.leaf(np.array(s.rng.choice((2, 3)))), kind=s.world.kind)


@template(0.6)
def _modulo(s: GraphScope) -> None:
    s.add("Mod", s.pick(), s.uniform((), 0.6, 1.5, moves=False), fmod=1)


@template(0.5)
def _rounding(s: GraphScope) -> None:
    x = s.pick()
    s.add("Mul", s.add(s.rng.choice(("Floor", "Ceil", "Round", "Sign")), x), x)


@template(2)
def _where(s: GraphScope) -> None:
    x = s.pick()
    y = s.broadcasting(x.shape)
    s.add("Where", condition(s, x), x, y)


def condition(s: GraphScope, x: GraphValue) -> GraphValue:
    """A truth value that broadcasts with `x`."""
    match s.rng.randrange(4):
        case 0:
            return s.leaf(s.world.numbers.random(x.shape) < 0.5)
        case 1:
            return s.add(s.rng.choice(("Greater", "Less")), x, s.number(0.05), kind=BOOL)
        case 2:
            return s.add(
                s.rng.choice(("GreaterOrEqual", "LessOrEqual")), s.broadcasting(x.shape), s.number(0.05), kind=BOOL
            )
    return s.leaf(np.array(s.chance(0.5)))


@template(0.8)
def _cast(s: GraphScope) -> None:
    other = s.rng.choice([kind for kind in (FLOAT, DOUBLE) if kind != s.world.kind])
    x = s.pick()
    wide = s.add("Cast", x, kind=other, to=other)
    moved = s.add(s.rng.choice(("Tanh", "Neg")), wide, kind=other)
    if s.chance(0.3) and s.opset >= 15:
        s.add("CastLike", moved, x, kind=s.world.kind)
    else:
        s.add("Cast", moved, kind=s.world.kind, to=s.world.kind)


@template(0.5)
def _dropout(s: GraphScope) -> None:
    s.add("Dropout", s.pick())
