"""Derivatives at special points by Taylor arithmetic: the numbers, the oracle, and twenty planted guards to catch."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

from refgrad.conformance.tools.jets.campaign import results
from refgrad.conformance.tools.jets.judging import judged
from refgrad.conformance.tools.jets.point import SpecialPoint, at
from refgrad.conformance.tools.jets.points import AT_ZERO, POINTS, REASONS
from refgrad.conformance.tools.jets.records import faults
from refgrad.conformance.tools.jets.series import CONTEXT, Series, UndefinedError, mpf
from refgrad.tables.kink_choices import KINK_CHOICES
from refgrad.tables.kinks import KINKS
from refgrad.tables.once import qualified
from refgrad.tables.registry import RULES, rule

pytestmark = pytest.mark.interpreter

T = Series({(1, 0): mpf(1.0)})

ANALYTIC: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "exp": (np.exp, mpmath.exp),
    "log": (np.log, mpmath.log),
    "sin": (np.sin, mpmath.sin),
    "cos": (np.cos, mpmath.cos),
    "tan": (np.tan, mpmath.tan),
    "sinh": (np.sinh, mpmath.sinh),
    "cosh": (np.cosh, mpmath.cosh),
    "tanh": (np.tanh, mpmath.tanh),
    "arctan": (np.arctan, mpmath.atan),
    "arcsin": (np.arcsin, mpmath.asin),
    "arccos": (np.arccos, mpmath.acos),
    "arcsinh": (np.arcsinh, mpmath.asinh),
    "arctanh": (np.arctanh, mpmath.atanh),
    "sqrt": (np.sqrt, mpmath.sqrt),
    "erf": (lambda x: x[()].erf(), mpmath.erf),
    "x^2.5": (lambda x: x**2.5, lambda x: x**2.5),
    "x^x": (lambda x: x**x, lambda x: x**x),
    "1/x": (lambda x: 1 / x, lambda x: 1 / x),
}


@pytest.mark.parametrize("name", ANALYTIC)
def test_a_series_has_the_taylor_coefficients(name):
    """mpmath finds them by its own differences, in 50 digits."""
    ours, theirs = ANALYTIC[name]
    found = np.asarray(ours(np.array(mpf(0.375) + T, object)), object)[()]
    with mpmath.workdps(50):
        expected = mpmath.taylor(theirs, mpmath.mpf(0.375), 4)
    for k, c in enumerate(expected):
        assert abs(float(found.coefficient(k)) - float(c)) <= 1e-14 * max(1, abs(float(c))), (name, k)


def test_roots_and_logarithms_of_a_series_that_vanishes():
    assert np.sqrt(np.array([T * T], object))[0].terms == {(1, 0): 1}
    assert (T**0.5).terms == {(Fraction(1, 2), 0): 1}
    assert T.log().terms == {(0, 1): 1}
    assert (T**T).coefficient(1, 1) == 1  # t^t = 1 + t·log t + …
    assert (T ** (2 + T)).lead == (2, 0)
    with pytest.raises(UndefinedError):
        (-T).log()
    with pytest.raises(UndefinedError):
        (-T).sqrt()


def test_a_removable_singularity_is_removed():
    quotient = T.sin() / T
    assert [float(quotient.coefficient(k)) for k in range(3)] == pytest.approx([1, 0, -1 / 6])


def test_series_compare_by_their_leading_terms():
    assert T > T * T > T**3 > 0 > -T
    assert T.log() < -1e30
    assert abs(-T) == T
    assert max(T, 2 * T, key=lambda x: x.sign) is T
    assert not (T - T)
    assert np.floor(np.array([1 - T, 1 + T], object)).tolist() == [0, 1]
    assert CONTEXT.dps == 50


def test_every_operator_with_a_rule_has_points_or_a_reason():
    own = ("", "ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft")  # other tests register more
    known = {qualified(domain, op_type) for domain, op_type in RULES if domain in own}
    pointed = {point.operator for point in POINTS}
    assert known <= pointed | set(AT_ZERO) | set(REASONS)
    assert not pointed & set(AT_ZERO)
    assert not pointed & set(REASONS)
    assert not set(AT_ZERO) & set(REASONS)


def test_points_have_names_of_their_own():
    names = [(point.operator, point.where) for point in POINTS]
    assert len(set(names)) == len(names)


def test_rows_of_kink_choices_are_of_points():
    rows = {(point.operator, point.row) for point in POINTS}
    assert not [kink for kink in KINK_CHOICES if not {(kink.operator, where) for where in kink.where} <= rows]


def test_every_kink_has_a_point():
    rows = {(point.operator, point.row) for point in POINTS}
    assert not [kink for kink in KINKS if (kink.operator, kink.where) not in rows and kink.operator not in REASONS]


# A part of the run that `nox -s jets` makes.
RESULTS = Path(__file__).parents[3] / "reports" / "results" / "special_points.json"
QUICK = ("Abs", "Div", "PRelu", "Pow", "ReduceL2", "ReduceProd", "Relu", "Shrink", "Softsign", "Sqrt")


@pytest.mark.parametrize("operator", QUICK)
def test_refgrad_is_right_where_a_derivative_exists(operator):
    verdicts = [verdict for point in POINTS if point.operator == operator for verdict in judged(point)]
    assert not [str(fault) for fault in faults(verdicts)]
    written = json.loads(RESULTS.read_text(encoding="utf-8"))
    made = results(verdicts)
    assert made["counts"][operator] == written["counts"][operator], (
        "run python -m refgrad.conformance.tools.jets --write " + RESULTS.name
    )
    assert made["choices"] == {k: v for k, v in written["choices"].items() if k.startswith(f"{operator} |")}


def test_the_checked_in_results_are_of_every_operator():
    written = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(written["counts"]) == {point.operator for point in POINTS} | set(AT_ZERO)


def test_clip_between_equal_bounds_is_constant():
    """The quick part of the 27 groups of Clip."""
    [point] = [point for point in POINTS if point.operator == "Clip" and point.where == "x = min = max"]
    assert not [str(fault) for fault in faults(judged(point))]


def one(op: Any, x: str, formula: str, there: float = 1.0) -> str:
    """`formula`, replaced by a constant where x is 0."""
    return op.Where(op.Equal(x, 0.0), there, formula)


def steady(op: Any, x: str) -> str:
    """x without its derivative: a staircase through it."""
    return op.Mul(op.Round(op.Mul(x, 1024.0)), 1 / 1024)


Planted = tuple[str, dict[str, Any], Callable[..., Any], SpecialPoint]
ROWS = {"wrt": ["data"]}
PLANTED: dict[str, Planted] = {
    "an exponent of 0 replaced by 1": (
        "Pow",
        {},
        lambda op, d_Z, X, Y, Z: (
            op.Mul(d_Z, op.Mul(Y, op.Pow(X, op.Sub(op.Add(Y, op.Cast(op.Equal(Y, 0.0), to=op.type(Y))), 1.0)))),
            op.Mul(d_Z, op.Mul(Z, op.Log(X))),
        ),
        at("Pow", "y = 0", 23.0, 0.0),
    ),
    "a base that is a constant for the exponent": (
        "Pow",
        {},
        lambda op, d_Z, X, Y, Z: (
            op.Mul(d_Z, op.Mul(Y, op.Pow(X, op.Sub(Y, 1.0)))),
            op.Mul(d_Z, op.Mul(Z, op.Log(steady(op, X)))),
        ),
        at("Pow", "y = 2", 3.0, 2.0),
    ),
    "a denominator of 0 replaced by 1, of a root": (
        "Sqrt",
        {},
        lambda op, d_Y, Y: op.Div(op.Mul(d_Y, 0.5), one(op, Y, Y)),
        at("Sqrt", "x = 0", 0.0),
    ),
    "a denominator of 0 replaced by 1, of a quotient": (
        "Div",
        {},
        lambda op, d_C, A, B, C: (op.Div(d_C, one(op, B, B)), op.Neg(op.Div(op.Mul(d_C, C), one(op, B, B)))),
        at("Div", "b = 0", 2.0, 0.0),
    ),
    "a denominator that is a constant": (
        "Div",
        {},
        lambda op, d_C, A, B: (
            op.Div(d_C, steady(op, B)),
            op.Neg(op.Div(op.Mul(d_C, A), op.Mul(B, B))),
        ),
        at("Div", "a = b", 2.0, 2.0),
    ),
    "a norm that is a constant": (
        "ReduceL2",
        {"wrt": ["data"]},
        lambda op, d_reduced, data, reduced: op.Mul(data, op.Div(d_reduced, steady(op, reduced))),
        at("ReduceL2", "an element is 0", (0.0, 1.0)),
    ),
    "an argument of 0 replaced by 1, of a logarithm": (
        "Log",
        {},
        lambda op, d_output, input: op.Div(d_output, one(op, input, input)),
        at("Log", "x = 0", 0.0),
    ),
    "a product divided by its elements, 0 replaced by 1": (
        "ReduceProd",
        {"wrt": ["data"]},
        lambda op, d_reduced, data, reduced: op.Div(op.Mul(d_reduced, reduced), one(op, data, data)),
        at("ReduceProd", "1 zeros", (0.0, 2.0, 3.0)),
    ),
    "a lost mixed term of a product": (
        "Mul",
        {},
        lambda op, d_C, A, B: (op.Mul(d_C, steady(op, B)), op.Mul(d_C, A)),
        at("Mul", "a = 0", 0.0, 2.0),
    ),
    "both mixed terms of a product lost": (
        "Mul",
        {},
        lambda op, d_C, A, B: (op.Mul(d_C, steady(op, B)), op.Mul(d_C, steady(op, A))),
        at("Mul", "a = b = 0", 0.0, 0.0),
    ),
    "a lost mixed term of a softmax": (
        "Softmax",
        {},
        lambda op, d_output, output: op.Mul(d_output, op.Mul(output, op.Sub(1.0, output))),
        at("Softmax", "equal elements", (2.0, 2.0, 2.0)),
    ),
    "a factor of 1.001": (
        "Softplus",
        {},
        lambda op, d_Y, X: op.Mul(d_Y, op.Mul(op.Sigmoid(X), 1.001)),
        at("Softplus", "x = 0", 0.0),
    ),
    "a slope that is a constant": (
        "Sigmoid",
        {},
        lambda op, d_Y, Y: op.Mul(d_Y, op.Mul(steady(op, Y), op.Sub(1.0, Y))),
        at("Sigmoid", "x = 0", 0.0),
    ),
    "a constant at 0 that loses the second derivative": (
        "Exp",
        {},
        lambda op, d_output, input, output: op.Mul(d_output, one(op, input, output)),
        at("Exp", "x = 0", 0.0),
    ),
    "a Where that blocks the second derivative": (
        "ReduceSumSquare",
        {"wrt": ["data"]},
        lambda op, d_reduced, data: op.Mul(d_reduced, one(op, data, op.Mul(data, 2.0), 0.0)),
        at("ReduceSumSquare", "every element is 0", (0.0, 0.0)),
    ),
    "a constant at 0 that loses the third derivative, of tanh": (
        "Tanh",
        {},
        lambda op, d_output, output: op.Mul(d_output, one(op, output, op.Sub(1.0, op.Mul(output, output)))),
        at("Tanh", "x = 0", 0.0),
    ),
    "a constant at 0 that loses the third derivative, of the sine": (
        "Sin",
        {},
        lambda op, d_output, input: op.Mul(d_output, one(op, input, op.Cos(input))),
        at("Sin", "x = 0", 0.0),
    ),
    "a constant at 0 that loses the third derivative, of the arctangent": (
        "Atan",
        {},
        lambda op, d_output, input: op.Mul(d_output, one(op, input, op.Reciprocal(op.Add(op.Mul(input, input), 1.0)))),
        at("Atan", "x = 0", 0.0),
    ),
    "half a second derivative": (
        "Cosh",
        {},
        lambda op, d_output, input: op.Mul(d_output, op.Mul(op.Add(op.Sinh(input), op.Sinh(steady(op, input))), 0.5)),
        at("Cosh", "x = 0", 0.0),
    ),
    "a higher choice that no row records": (
        "Abs",
        {},
        lambda op, d_Y, X: op.Mul(d_Y, op.Sin(X)),
        at("Abs", "x = 0", 0.0),
    ),
}


@pytest.mark.parametrize("guard", PLANTED)
def test_planted_guard_is_caught(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op_type, settings, function, point = PLANTED[guard]
    assert not faults(judged(point))
    monkeypatch.setitem(RULES, ("", op_type), RULES["", op_type])  # so that it is put back
    rule(op_type, replace=True, **({"broadcast": True} if op_type in ("Pow", "Div", "Mul") else {}), **settings)(
        function
    )
    assert faults(judged(point))
