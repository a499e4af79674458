"""The adjoint identity <v, J·u> = <Jᵀ·v, u> (Griewank & Walther 2008): forward mode against the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import refgrad
from refgrad.conformance.oracles.analytic import KinkError, NotAnalyticError
from refgrad.conformance.oracles.central import one_sided
from refgrad.conformance.oracles.comparison import EXACT
from refgrad.conformance.oracles.complex_step import Tangent
from refgrad.conformance.oracles.differences import STEPS, Forward, direction_at, forward
from refgrad.conformance.oracles.field import ROUNDED, Field, product
from refgrad.conformance.problems.observation import Built, NotApplicable, Oracle, Property
from refgrad.conformance.problems.point import ShapeMovedError, in_float64, rms
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import BackendError, RefgradError
from refgrad.reverse.assembly import noted

NAME = "adjoint"
COTANGENTS = 3
_SENSITIVE = 10  # how many times the change under rounded intermediate results is explained
_ESTIMATED = 2  # how far the error that differences state may be off, as a factor
_ROUNDING = 1e-12  # of the forward mode in float64, relative to each element
_TELLING = 1e-2  # with a larger error the derivative is not known

Arrays = Mapping[str, np.ndarray]


def _examine(problem: Problem, built: Built) -> Sequence[Property | NotApplicable]:
    rng = np.random.default_rng([problem.seed, 4])
    at = problem.at
    direction = {name: direction_at(at[name], rng) for name in problem.wrt if at[name].size}
    if not any(np.any(u) for u in direction.values()):
        return [NotApplicable(NAME, "no input has an element that can move")]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # onnx.reference makes NumPy warn
        try:
            field = Field(problem, built)
            moved, errors, how = _moved(problem, at, direction)
            return [_identity(problem, built, field, at, direction, moved, errors, how, rng)]
        except _UnknownError as error:
            return [NotApplicable(NAME, str(error))]
        except (RefgradError, ShapeMovedError) as error:
            return [NotApplicable(NAME, f"the gradient does not run in float64: {error}")]


class _UnknownError(Exception):
    """J·u is not known."""


def _identity(
    problem: Problem,
    built: Built,
    field: Field,
    at: Mapping[str, Any],
    direction: Arrays,
    moved: Arrays,
    errors: Arrays,
    how: str,
    rng: np.random.Generator,
) -> Property:
    """The worst of the cotangents."""
    properties = []
    for _ in range(COTANGENTS):
        v = {name: rng.standard_normal(c.shape) for name, c in problem.cotangents.items()}
        gradient = field(at, v)
        forwards, backwards = product(moved, v), product(gradient, direction)
        size = max(abs(forwards), sum(float(np.linalg.norm(gradient[name])) * rms(u) for name, u in direction.items()))
        error, slack = abs(forwards - backwards), EXACT * size + product(errors, {n: np.abs(x) for n, x in v.items()})
        if slack < error < np.inf:  # is it rounding?
            rounded = Field(problem, built, ROUNDED)(at, v)
            slack += _SENSITIVE * abs(product(rounded, direction) - backwards)
        if not np.isfinite(error):
            error, size = np.inf, 1.0
        note = f"<v, J·u> = {forwards:.6g} by {how}, <Jᵀ·v, u> = {backwards:.6g}"
        properties.append(Property(NAME, error / size if size else 0.0, slack / size if size else EXACT, note))
    return max(properties, key=lambda tested: tested.error / tested.allowed)


def _moved(problem: Problem, at: Mapping[str, Any], direction: Arrays) -> tuple[Arrays, Arrays, str]:
    """J·u by output, how far off each element may be, and what found it."""
    moved: Arrays
    errors: Arrays
    try:
        tangent = Tangent(problem)
        moved = tangent.along(direction)
        errors = {name: tangent.rounding * np.abs(x) for name, x in moved.items()}
        how = "complex step"
    except KinkError as error:
        raise _UnknownError(str(error)) from error
    except (NotAnalyticError, BackendError):
        moved, errors = _by_differences(problem, at, direction)
        how = "differences"
        exact = _by_forward_mode(problem, at, direction)
        if exact is not None and all(_is_within(exact[name] - moved[name], errors[name]) for name in moved):
            moved, errors = exact, {name: _ROUNDING * np.abs(x) for name, x in exact.items()}
            how = "forward mode, which differences confirm"
    if not all(np.all(np.isfinite(x)) for x in moved.values()):
        raise _UnknownError("the derivative is not finite")
    return moved, errors, how


def _by_forward_mode(problem: Problem, at: Mapping[str, Any], direction: Arrays) -> Arrays | None:
    """J·u by refgrad's own rules, transposed: exact, and no oracle by itself. None where refgrad refuses."""
    try:
        tangent_model = refgrad.jvp(problem.model, problem.wrt, list(problem.cotangents))
        moves, moved = noted(tangent_model, "directions"), noted(tangent_model, "derivatives")
        still = {moves[name]: np.zeros(at[name].shape) for name in problem.wrt}
        results = in_float64(tangent_model).run({**at, **still, **{moves[name]: u for name, u in direction.items()}})
    except RefgradError:
        return None
    return {output: results[name] for output, name in moved.items()}


def _is_within(apart: np.ndarray, errors: np.ndarray) -> bool:
    """True if differences, whose errors are estimates, confirm a derivative that is so far apart from them."""
    return float(np.linalg.norm(apart)) <= _ESTIMATED * float(np.linalg.norm(errors))


def _by_differences(problem: Problem, at: Mapping[str, Any], direction: Arrays) -> tuple[Arrays, Arrays]:
    """J·u as a whole by central differences with Richardson's extrapolation, by the step that leaves the smallest error."""
    best: tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]] | None = None
    why = "the model does not run near this point"
    function = forward(problem)
    for step in STEPS:
        try:
            far, near = (_quotient(function, at, direction, h) for h in (step, step / 2))
            left, right = one_sided(function, at, direction, problem.wide_cotangents, step)
        except (ShapeMovedError, BackendError) as error:
            why = str(error)
            continue
        moved = {name: (4 * near[name][0] - far[name][0]) / 3 for name in near}
        errors = {name: np.maximum(np.abs(moved[name] - near[name][0]), near[name][1]) for name in near}
        worst = max(float(np.linalg.norm(e)) / (float(np.linalg.norm(moved[n])) or 1.0) for n, e in errors.items())
        slack = left.error + right.error
        if abs(left.value - right.value) > 2 * slack + EXACT * max(abs(left.value), abs(right.value)):
            worst, why = np.inf, "the point is a kink"
        if worst <= _TELLING and (best is None or worst < best[0]):
            best = worst, moved, errors
        if worst <= EXACT:
            break
    if best is None:
        raise _UnknownError(why)
    return best[1:]


def _quotient(
    function: Forward, at: Mapping[str, Any], direction: Arrays, step: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Central differences of the outputs, and what the rounding of these does to them."""
    ends = []
    for h in (step, -step):
        ends.append(function({**at, **{name: at[name] + h * u for name, u in direction.items()}}))
    ahead, behind = ends
    eps = float(np.finfo(np.float64).eps)
    return {name: ((ahead[name] - behind[name]) / (2 * step), 8 * eps * np.abs(ahead[name]) / step) for name in ahead}


ORACLE = Oracle(
    NAME,
    "the adjoint identity <v, J·u> = <Jᵀ·v, u>: the gradient, run in float64, for three fresh cotangents, against the "
    "derivative of the outputs along a random direction u, by complex step, by refgrad's forward mode where differences "
    "confirm it, or by differences; it sees what is not orthogonal to u",
    examine=_examine,
)
