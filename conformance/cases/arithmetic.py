"""Cases of the elementwise operators, away from their kinks."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.shape import NEWEST, ints, numbers
from refgrad.conformance.cases.special import TINY, Special

FORMS = ((2, 3), (), (0, 3))  # a matrix, a scalar, an empty tensor
PAIRS = (  # no broadcast, on the right, on the left, both ways, from a scalar, of an empty tensor, over a new axis
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((1, 3), (2, 3)),
    ((1, 3), (2, 1)),
    ((), (2, 3)),
    ((0, 3), (1, 3)),
    ((3,), (4, 2, 1)),
    ((2, 3), ()),
)
ANYWHERE = ("Neg", "Abs", "Exp", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Erf", "Identity")
BETWEEN_0_AND_1 = ("Sqrt", "Log", "Reciprocal", "Asin", "Acos", "Atanh")


SPECIAL = (
    # Functions that are flat or straight far out: the exponentials in their derivatives overflow.
    Special("Erf", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 6,)),
    Special("Atan", "far-out", ((-inf, -1e30, -1e15, 1e15, 1e30, inf),), ((0.0, 0.0, 1e-30, 1e-30, 0.0, 0.0),)),
    Special("Asinh", "far-out", ((-inf, -1e30, -0.0, 1e30, inf),), ((0.0, 1e-30, 1.0, 1e-30, 0.0),)),
    Special("Acosh", "far-out", ((1e30, inf),), ((1e-30, 0.0),)),
    # Exponentials, logarithms and powers: the derivative is infinite where the function overflows or begins.
    Special("Sin", "next-to-zero", ((-TINY, -0.0, TINY, 1e-30),), ((1.0,) * 4,)),
    Special("Cos", "next-to-zero", ((-1e-30, -0.0, 1e-30),), ((1e-30, 0.0, -1e-30),)),
    Special("Tan", "next-to-zero", ((-TINY, -0.0, TINY, 1e-30),), ((1.0,) * 4,)),
    Special("Asin", "next-to-zero", ((-TINY, -0.0, TINY, 1e-30),), ((1.0,) * 4,)),
    Special("Acos", "next-to-zero", ((-TINY, -0.0, TINY, 1e-30),), ((-1.0,) * 4,)),
    Special("Atanh", "next-to-zero", ((-TINY, -0.0, TINY, 1e-30),), ((1.0,) * 4,)),
    Special("Exp", "overflow", ((-inf, -800.0, -0.0, 80.0, 800.0, inf),), ((0.0, 0.0, 1.0, 5.540622e34, inf, inf),)),
    Special("Sinh", "overflow", ((-800.0, -0.0, 80.0, 800.0),), ((inf, 1.0, 2.770311e34, inf),)),
    Special("Cosh", "overflow", ((-800.0, -80.0, 80.0, 800.0),), ((-inf, -2.770311e34, 2.770311e34, inf),)),
    Special("Log", "next-to-zero", ((1e-30, 1e30, inf),), ((1e30, 1e-30, 0.0),)),
    Special("Sqrt", "next-to-zero", ((0.0, TINY, 1e-30, 1e30, inf),), ((inf, 2.0**66, 5e14, 5e-16, 0.0),)),
    Special("Reciprocal", "far-out", ((-inf, -1e15, 1e-15, 1e15, inf),), ((0.0, -1e-30, -1e30, -1e-30, 0.0),)),
    Special("Pow", "far-out", ((1e30, 1e-30), (0.5, 0.5)), ((5e-16, 5e14), (6.907755e16, -6.907755e-14))),
    # Arithmetic: the derivative with respect to one operand is the other, whatever its value.
    Special("Add", "infinite", ((inf, -inf, nan), (1.0, inf, 0.0)), ((1.0,) * 3, (1.0,) * 3)),
    Special("Sub", "infinite", ((inf, inf, 1.0), (1.0, inf, nan)), ((1.0,) * 3, (-1.0,) * 3)),
    Special("Mul", "infinite", ((inf, 1e30, 0.0, -0.0), (2.0, 1e30, inf, 3.0)), ((2.0, 1e30, inf, 3.0), (inf, 1e30, 0.0, 0.0))),
    Special("Div", "overflow", ((1e30, 1.0, 1.0), (1e30, 1e15, inf)), ((1e-30, 1e-15, 0.0), (-1e-30, -1e-30, 0.0))),
    Special("Div", "underflow", ((1e-30, 1.0), (1e-30, 1e-15)), ((1e30, 1e15), (-1e30, -1e30))),
    Special("Dropout", "missing", ((nan, inf, -inf),), ((1.0,) * 3,)),
    Special("Neg", "missing", ((nan, inf, -inf),), ((-1.0,) * 3,)),
    Special("Identity", "missing", ((nan, inf, -inf),), ((1.0,) * 3,)),
    Special("Abs", "far-out", ((-inf, -TINY, TINY, inf),), ((-1.0, -1.0, 1.0, 1.0),)),
    Special("Max", "infinite", ((inf, -inf, 1e30), (1.0, 1.0, -1e30)), ((1.0, 0.0, 1.0), (0.0, 1.0, 0.0))),
    Special("Min", "infinite", ((inf, -inf, 1e30), (1.0, 1.0, -1e30)), ((0.0, 1.0, 0.0), (1.0, 0.0, 1.0))),
    Special("Sum", "infinite", ((inf, nan), (1.0, inf)), ((1.0, 1.0), (1.0, 1.0))),
    Special("Mean", "overflow", ((3e38, inf), (3e38, 1.0)), ((0.5, 0.5), (0.5, 0.5))),
    Special("Clip", "infinite", ((-inf, 0.5, inf), -1.0, 1.0), ((0.0, 1.0, 0.0), 1.0, 1.0)),
    Special("Where", "missing", ((True, False), (inf, nan), (nan, inf)), (None, (1.0, 0.0), (0.0, 1.0))),
    Special("CumProd", "zero", ((2.0, 0.0, 3.0), 0), ((1.0, 8.0, 0.0), None), opset=26),
    Special("CumProd", "overflow", ((1.0, 0.0, 1e30, 1e30, 1e30), 0), ((1.0, inf, 0.0, 0.0, 0.0), None), opset=26),
    Special("Cosh", "overflow", ((-800.0, 800.0),), ((-inf, inf),)),
    Special("CumSum", "infinite", ((1.0, inf, nan), 0), ((3.0, 2.0, 1.0), None)),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every operator on every form and pair of shapes that broadcast, static, symbolic and unknown."""
    for shapes in SHAPES:
        yield from _unary(shapes)
        yield from _binary(shapes)
        yield from _powers(shapes)
        yield from _clips(shapes)
        yield from _conversions(shapes)
        yield from _others(shapes)


def positive(*shape: int, low: float = 0.2, high: float = 0.8) -> np.ndarray:
    """Float32 numbers between two bounds, the same in every run."""
    return np.random.default_rng(1).uniform(low, high, shape).astype(np.float32)


def scalar(value: float | bool, dtype: type = np.float32) -> np.ndarray:
    """A tensor without axes."""
    return np.array(value, dtype)


def _case(op_type: str, *inputs: np.ndarray | None, opset: int = NEWEST, **arguments: Any) -> Case:
    return node_case(op_type, *inputs, opset=opset, **arguments)


def _unary(shapes: str) -> Iterator[Case]:
    for form in FORMS:
        for op_type in ANYWHERE:
            yield _case(op_type, numbers(*form), shapes=shapes)
        for op_type in BETWEEN_0_AND_1:
            yield _case(op_type, positive(*form), shapes=shapes)
        yield _case("Acosh", positive(*form, low=1.2, high=3.0), shapes=shapes)


def _binary(shapes: str) -> Iterator[Case]:
    for left, right in PAIRS:
        a, b = numbers(*left), positive(*right)
        for op_type in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"):
            yield _case(op_type, a, b, shapes=shapes)
        # Far from the multiples of the divisor, where Mod jumps.
        yield _case(
            "Mod", positive(*left, low=5.2, high=5.8), positive(*right, low=0.99, high=1.01), fmod=1, shapes=shapes
        )
        signs = np.where(numbers(*right) > 0, 1, -1).astype(np.float32)
        yield _case(
            "Mod", positive(*left, low=5.2, high=5.8), signs * positive(*right, low=0.99, high=1.01), shapes=shapes
        )
        yield _case("Where", numbers(*right) > 0, a, b, shapes=shapes)
    for op_type in ("Max", "Min", "Sum", "Mean"):
        yield _case(op_type, numbers(2, 3), shapes=shapes)
        yield _case(op_type, numbers(2, 3), positive(3), numbers(4, 1, 1) * 3, shapes=shapes)  # no two are equal


def _powers(shapes: str) -> Iterator[Case]:
    for left, right in PAIRS:
        yield _case("Pow", positive(*left), numbers(*right), shapes=shapes)
    for exponent in (-1, 0, 0.5, 1, 2, 3):
        x = positive(2, 3) if exponent in (-1, 0.5) else numbers(2, 3)
        for y in (scalar(exponent), np.full((1, 1), exponent, np.float32)):
            yield _case("Pow", x, y, constant=["Y"], wrt=["X"], shapes=shapes, name=f"Pow-{exponent}-{y.ndim}-{shapes}")
    whole = np.array([-2, -1, 0, 1, 2, 3])
    for kind in (np.int32, np.int64, np.float32):
        yield _case(
            "Pow", numbers(2, 6), whole.astype(kind), wrt=["X"], shapes=shapes, name=f"Pow-{kind.__name__}-{shapes}"
        )
    zeros = np.array([0, 0, 0], np.float32)
    yield _case("Pow", zeros, ints(0, 1, 2), wrt=["X"], shapes=shapes, name=f"Pow-zeros-{shapes}")
    yield _case("Pow", zeros, scalar(2), constant=["Y"], wrt=["X"], shapes=shapes, name=f"Pow-zeros-squared-{shapes}")


def _clips(shapes: str) -> Iterator[Case]:
    x, low, high = np.array([-2, -0.5, 0.25, 3], np.float32), scalar(-1), scalar(1)
    for constant in ((), ("min", "max"), ("max",)):
        for bounds in ((None, None), (low, None), (None, high), (low, high), (high, low)):
            title = f"Clip-{[None if b is None else float(b) for b in bounds]}-{constant}-{shapes}"
            given = [name for name, bound in zip(("min", "max"), bounds, strict=True) if bound is not None]
            fixed = [name for name in constant if name in given]
            wrt = ["input", *(name for name in given if name not in fixed)]
            yield _case("Clip", x, *bounds, constant=fixed, wrt=wrt, shapes=shapes, name=title)
    yield _case("Clip", scalar(0.5), low, high, shapes=shapes)
    yield _case("Clip", numbers(0, 3), low, high, shapes=shapes)


def _conversions(shapes: str) -> Iterator[Case]:
    for to in (TensorProto.DOUBLE, TensorProto.FLOAT):
        yield _case("Cast", numbers(2, 3), to=to, shapes=shapes)
    yield _case("CastLike", numbers(2, 3), scalar(1, np.float64), wrt=["input"], shapes=shapes)


def _others(shapes: str) -> Iterator[Case]:
    constant: tuple[str, ...]
    for exclusive in (0, 1):
        for reverse in (0, 1):
            for axis, constant in ((1, ()), (-2, ("axis",))):
                at = np.array(axis, np.int64)
                settings: dict[str, Any] = {"exclusive": exclusive, "reverse": reverse, "constant": constant}
                yield _case("CumSum", numbers(2, 3), at, shapes=shapes, **settings)
                yield _case("CumProd", numbers(2, 5), at, opset=26, shapes=shapes, **settings)
                zeros = np.array([[2, 0, -1, 0, 3], [0, 0, 0, 1, 2], [0, 3, 2, -1, 0]], np.float32)
                title = f"CumProd-zeros-{exclusive}-{reverse}-{axis}-{shapes}"
                yield _case("CumProd", zeros, at, opset=26, shapes=shapes, name=title, **settings)
    for x in (numbers(1), numbers(0), numbers(2, 0), numbers(3, 9)):
        yield _case("CumProd", x, np.array(-1, np.int32), opset=26, shapes=shapes, constant=["axis"])
    x = numbers(4, 5)
    for constant in ((), ("training_mode",), ("ratio", "training_mode")):
        for training in (False, True):
            for ratio in (None, 0.0, 0.3):
                title = f"Dropout-{training}-{ratio}-{constant}-{shapes}"
                rate = None if ratio is None else scalar(ratio)
                fixed = [name for name in constant if name != "ratio" or ratio is not None]
                inputs = (x, rate, scalar(training, np.bool_))
                yield _case("Dropout", *inputs, constant=fixed, seed=3, shapes=shapes, name=title)
    yield _case("Dropout", x, shapes=shapes)
    yield _case("Dropout", x, scalar(0.3), wrt=["data"], shapes=shapes)
