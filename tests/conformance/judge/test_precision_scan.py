"""The scan against mpmath: every error has a reason, every reason an error, and planted errors are found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpmath import mp, mpf

from refgrad.conformance.tools.precision import exact
from refgrad.conformance.tools.precision.explanations import ErrorExplanation, explanations, reason, unexplained
from refgrad.conformance.tools.precision.functions import FUNCTIONS, OutsideError
from refgrad.conformance.tools.precision.scan import BOUND, Measured, Miss, scan
from refgrad.errors import RecordsError
from refgrad.tables.registry import RULES

pytestmark = pytest.mark.interpreter

RESULTS = json.loads((Path(__file__).parents[3] / "reports" / "results" / "precision.json").read_text())
QUICK = (
    "Elu (alpha=2.5)",
    "Celu (alpha=0.1)",
    "Selu",
    "Softplus",
    "Exp",
    "Tanh",
    "Sigmoid",
    "Cosh",
    "ReduceProd (keepdims=0)",
)
NAMED = {function.name: function for function in FUNCTIONS}


def test_every_error_has_a_reason() -> None:
    assert {row["function"] for row in RESULTS} == set(NAMED)
    assert not [row for row in RESULTS if row["unexplained"] or (row["beyond"] and not row["reason"])]


@pytest.mark.parametrize("row", explanations(), ids=lambda row: "-".join(row.of))
def test_every_reason_has_an_error(row: ErrorExplanation) -> None:
    nowhere = Miss((), 0, 0.0, "0", 0.0, 0.0)
    made = (
        Measured(r["function"], r["type"], r["executor"], r["order"], 1, nowhere, ()) for r in RESULTS if r["beyond"]
    )
    assert any(map(row.matches, made))


@pytest.mark.parametrize("name", QUICK)
def test_the_interpreter_in_float32(name: str) -> None:
    for measured in scan([NAMED[name]], ["float32"], ["numpy"]):
        assert unexplained(measured) == []


def test_every_operator_of_numbers_is_scanned() -> None:
    """The operators with a rule in the families of scalar functions; others move, select or sum."""
    scanned = {(function.domain, function.operator) for function in FUNCTIONS}
    families = ("refgrad.rules.activation", "refgrad.rules.arithmetic")
    ruled = {key for key, rule in RULES.items() if rule.function.__module__ in families}
    of_several = {"Softmax", "LogSoftmax", "Where", "Cast", "CastLike", "CumSum", "CumProd", "Dropout"}
    assert ruled - scanned == {("", name) for name in of_several}


# What is wrong is found

EXP = NAMED["Exp"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: mp.exp(x) * (1 + mpf(2) ** -16),
        lambda x: mp.exp(x) + mpf(2) ** -10 * x,
        lambda x: mp.exp(min(x, mpf(60))),
    ],
    ids=["a factor", "a term", "the tail"],
)
def test_a_wrong_derivative_is_found(wrong: Any) -> None:
    first = next(scan([replace(EXP, forward=wrong)], ["float32"], ["numpy"]))
    assert first.worst.error > BOUND
    assert unexplained(first)


def test_a_reason_holds_within_its_limit_alone() -> None:
    miss = Miss((3.0,), 0, 1.0, "1.001", 100.0, 3.0)
    measured = Measured("F", "float32", "numpy", 1, 1, miss, (miss,))
    for limit, holds in (
        ({"absolute": 2.0}, False),
        ({"absolute": 4.0}, True),
        ({"units": 50.0}, False),
        ({"units": 200.0}, True),
        ({"near_largest": 0.5}, False),
        ({"subnormal": True}, False),
        ({"squares": True}, False),
    ):
        row = ErrorExplanation("why", ("F", "*", "*", "1"), **limit)  # type: ignore[arg-type]
        assert reason(measured, miss, [row]) == ("why" if holds else "")
        assert bool(unexplained(measured, [row])) != holds
        assert unexplained(measured, [replace(row, of=("G", "*", "*", "1"))]) == [miss]


def test_numbers_at_the_ends_have_their_own_limits() -> None:
    far = Miss((3e38,), 0, math.nan, "1", math.inf, math.inf)
    tiny = Miss((-1e30,), 0, 0.0, "1e-40", 1e4, 0.0)
    assert ErrorExplanation("", ("*",) * 4, near_largest=0.5).covers(far, "float32")
    assert ErrorExplanation("", ("*",) * 4, subnormal=True).covers(tiny, "float32")
    assert ErrorExplanation("", ("*",) * 4, squares=True).covers(tiny, "float32")


def test_derivatives_are_exact_and_kinks_are_seen() -> None:
    with mp.workprec(2000):
        x = mpf("0.7")
        assert abs(exact.slope(mp.sin, [x], 0) - mp.cos(x)) < mpf(2) ** -150
        second, third = exact.second(mp.sin, x)
        assert abs(second + mp.sin(x)) < mpf(2) ** -150
        assert abs(third + mp.cos(x)) < mpf(2) ** -150
        with pytest.raises(exact.OneSidedError):
            exact.slope(abs, [mpf(0)], 0)
        with pytest.raises(exact.OneSidedError):
            exact.second(lambda x: x * abs(x), mpf(0))
        with pytest.raises(OutsideError):
            exact.slope(NAMED["Log"].forward, [mpf(0)], 0)


def test_a_malformed_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refgrad.conformance.tools.precision import explanations as module

    file = tmp_path / "explanations.toml"
    monkeypatch.setattr(module, "_FILE", file)
    for text, said in (
        ('of = [["*", "*", "*", "*"]]', "it has no limit. Give it one of"),
        ('units = 2.0\nof = ["Exp"]', "of has 'Exp'. Write four patterns"),
    ):
        file.write_text(f'[[explanation]]\nreason = "why"\n{text}\n')
        with pytest.raises(RecordsError, match=said.replace("[", r"\[")):
            list(module._read())
