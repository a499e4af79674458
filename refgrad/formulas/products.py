"""The product of the other factors, for operators that multiply elements of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

from refgrad.builder.op import Emitter
from refgrad.formulas.types import in_range, widened

Over = Callable[[str], str]  # a reduction over the group of each element, in a shape that broadcasts against x


def of_others(op: Emitter, d: str, x: str, total: Over, product: Over) -> str:
    """d·(the product of the other elements in the group of each element of `x`), in the type of `d`.

    It is d·(product of the other nonzero elements)·(product of the other zeros). The first product is the product of
    all nonzero elements, divided by x. Each element is split into m·2^e, so that the product of the m stays in the range
    of the type wherever the product of the others does. The second product is 1 if no other element is 0. If one or two
    are 0, its value is 0, and it has the derivatives of a product of one or two factors. If more than two are 0, its
    value and its derivatives are 0. (So fourth derivatives are lost where four elements are 0. A second derivative by
    the same element is 0 up to the rounding error of the first derivative, divided by the element.)

    :param d: the cotangent, in a shape that broadcasts against `x`.
    :param total: sums over the groups.
    :param product: multiplies over the groups.
    """
    kind = op.type(d)
    x, d = widened(op, x, d)

    def others(values: str) -> str:
        return op.Sub(total(values), values)

    zero = op.Equal(x, 0.0)
    nonzero, zeros = op.Where(zero, 1.0, x), op.Where(zero, x, 0.0)
    exponent = op.Round(op.Mul(op.Log(op.Abs(in_range(op, nonzero))), 1 / math.log(2)))
    own, every = _powers(op, op.Neg(exponent)), _powers(op, total(exponent))
    mantissa = op.Mul(op.Mul(nonzero, own[0]), own[1])
    rest = op.Div(op.Mul(d, product(mantissa)), mantissa)
    for down, up in zip(own, every, strict=True):
        rest = op.Mul(op.Mul(rest, down), up)
    count, one = others(op.Cast(zero, to=op.type(x))), others(zeros)
    two = op.Mul(op.Sub(op.Mul(one, one), others(op.Mul(zeros, zeros))), 0.5)
    vanishing = op.Where(op.Equal(count, 1.0), one, op.Where(op.Equal(count, 2.0), two, 0.0))
    made = op.Where(op.Equal(count, 0.0), rest, op.Mul(in_range(op, rest), vanishing))
    return op.as_type(made, kind)


def _powers(op: Emitter, exponent: str) -> tuple[str, str]:
    """Two numbers whose product is 2^exponent, each of about half of its exponent: that product may leave the range."""
    half, two = op.Round(op.Mul(exponent, 0.5)), op.const(2.0, like=exponent)
    return op.Pow(two, half), op.Pow(two, op.Sub(exponent, half))
