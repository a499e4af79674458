"""Second derivatives: a gradient is a gradient field only if its Jacobian is symmetric (Schwarz), <w, Dg·u> = <u, Dg·w>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import refgrad
from refgrad.conformance.oracles.central import FiniteDifference, directional
from refgrad.conformance.oracles.differences import STEPS, direction_at
from refgrad.conformance.oracles.field import Field, product
from refgrad.conformance.problems.observation import Built, NotApplicable, Oracle, Property
from refgrad.conformance.problems.point import ShapeMovedError, in_float64
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import BackendError, RefgradError
from refgrad.notices import quiet

NAME = "second-order"
_SETTLED = 1e-7  # the error of a difference, relative to its value, that needs no smaller step
_EXACT = 1e-6  # what float64 explains of a second derivative
_TELLING = 1e-2  # with a larger error of the differences the answer is not known

Arrays = Mapping[str, np.ndarray]


class _UnsettledError(Exception):
    """The gradient has no derivative that differences find."""


def _examine(problem: Problem, built: Built) -> Sequence[Property | NotApplicable]:
    rng = np.random.default_rng([problem.seed, 5])
    at, cotangents = problem.at, problem.wide_cotangents
    names = [name for name in problem.wrt if at[name].size]
    u, w = ({name: direction_at(at[name], rng) for name in names} for _ in range(2))
    if not any(np.any(direction) for direction in u.values()):
        return [NotApplicable(NAME, "no input has an element that can move")]
    with np.errstate(all="ignore"):
        try:
            field = Field(problem, built)
            across = _along(field, at, cotangents, u, w), _along(field, at, cotangents, w, u)
            properties = [_compared(*across, "<w, Dg·u>", "<u, Dg·w>")]
            again = _differentiated(problem, built, w)
        except _UnsettledError as error:
            return [NotApplicable(NAME, str(error))]
        except (RefgradError, ShapeMovedError) as error:
            return [NotApplicable(NAME, f"the gradient does not run in float64: {error}")]
        if again is not None:
            exact = FiniteDifference(product(again, u), 0.0, 0.0)
            properties.append(_compared(across[0], exact, "<w, Dg·u> by differences", "differentiated again"))
        return properties


def _along(field: Field, at: Mapping[str, Any], v: Arrays, u: Arrays, w: Arrays) -> FiniteDifference:
    """<w, Dg·u> by differences of the gradient g, by the step that leaves the smallest error."""
    best: FiniteDifference | None = None
    why = "the gradient is not finite near this point"
    for step in STEPS:
        try:
            difference = directional(lambda moved: field(moved, v), at, u, w, step)
        except (ShapeMovedError, BackendError) as error:
            why = str(error)
            continue
        if np.isfinite(difference.value) and (best is None or difference.error < best.error):
            best = difference
        if best is not None and best.error <= _SETTLED * abs(best.value):
            break
    if best is None:
        raise _UnsettledError(why)
    return best


def _compared(one_way: FiniteDifference, other: FiniteDifference, left: str, right: str) -> Property | NotApplicable:
    error, slack = abs(one_way.value - other.value), one_way.error + other.error
    size = max(abs(one_way.value), abs(other.value))
    note = f"{left} = {one_way.value:.6g}, {right} = {other.value:.6g}"
    if not np.isfinite(error):
        return NotApplicable(NAME, f"the second derivative is not finite: {note}")
    if slack > _TELLING * size and error <= slack:
        return (
            Property(NAME, 0.0, _EXACT, f"both second derivatives are zero up to {slack:.1e}")
            if size <= slack
            else _blurred(note)
        )
    if slack > _TELLING * size:
        return _blurred(note)
    return Property(NAME, error / size if size else 0.0, _EXACT + (slack / size if size else 0.0), note)


def _blurred(note: str) -> NotApplicable:
    return NotApplicable(NAME, f"the differences of the gradient do not settle: {note}")


def _differentiated(problem: Problem, built: Built, w: Arrays) -> Arrays | None:
    """D(<w, g>): refgrad's gradient of its own gradient; None where the gradient is not refgrad's, or where it refuses."""
    if not Built.of(built.model).gradients:
        return None
    known = {name: built.gradients[name] for name in w if name in built.gradients}
    if not known:
        return None
    try:
        with quiet():
            again = Built.of(refgrad.gradient(built.model, list(known), list(known.values())))
        seeds = {gradient: w[name] for name, gradient in known.items()}
        prepared = in_float64(again.model)
        second = again.named(prepared.run(again.feeds(built.feeds(problem.at, problem.wide_cotangents), seeds)))
    except RefgradError:
        return None
    return {name: second.get(name, np.zeros(x.shape)) for name, x in w.items()}


ORACLE = Oracle(
    NAME,
    "the Jacobian of a gradient is symmetric, by differences of the gradient in float64; and refgrad's gradient of its own "
    "gradient is what those differences are. It does not see a gradient that is wrong by one factor throughout",
    examine=_examine,
)
