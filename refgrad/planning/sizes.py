"""Sizes that are formulas of symbols, as exporters write them: `floor(H/4 - 1/4) + 1`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from refgrad.ranges import RANGES

_LONGEST = 2000  # characters of a formula
_OPERATIONS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "ceiling": math.ceil,
    "max": max,
    "Max": max,
    "min": min,
    "Min": min,
    "int": math.trunc,
    "abs": abs,
}


def axis_name(name: str, axis: int) -> str:
    """Return the name by which sizes are given for an axis of an input, with or without a symbol: `x[0]`."""
    return f"{name}[{axis}]"


def size_of(symbol: int | str | None, known: Mapping[str, int]) -> int | None:
    """The size of a dimension: a number, the number of a symbol, or the value of a formula. None if it is not known."""
    if not isinstance(symbol, str):
        return symbol
    if symbol in known:
        return known[symbol]
    if len(symbol) > _LONGEST or symbol.isidentifier() or not known:
        return None
    try:
        value = _value(ast.parse(symbol.strip(), mode="eval").body, known)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, KeyError, RecursionError, MemoryError):
        return None  # a name that is no formula, or one of other symbols
    return int(value) if value.denominator == 1 and not RANGES["dim"].why_not(int(value)) else None


def _value(node: ast.expr, known: Mapping[str, int]) -> Fraction:
    """The value of a formula.

    :raises KeyError: a symbol, an operator or a function that is not known.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(number)
        case ast.Name(id=name):
            return Fraction(known[name])
        case ast.BinOp(left=left, op=op, right=right):
            return Fraction(_OPERATIONS[type(op)](_value(left, known), _value(right, known)))
        case ast.UnaryOp(op=op, operand=operand):
            return Fraction(_OPERATIONS[type(op)](_value(operand, known)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return Fraction(_FUNCTIONS[name](*(_value(argument, known) for argument in args)))
    raise ValueError("This is no formula of sizes.")
