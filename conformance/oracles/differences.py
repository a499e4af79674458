"""Central differences in float64 on the interpreter: they do not know any rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.oracles.central import FiniteDifference, directional
from refgrad.conformance.problems.observation import Directional, NotApplicable, Observation, Oracle
from refgrad.conformance.problems.point import ShapeMovedError, in_float64, rms, without
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import BackendError

NAME = "differences"
DIRECTIONS = 2
STEPS = (1e-3, 1e-5, 1e-7)  # tried in this order until the differences are settled
_SETTLED = 1e-6  # the error of a difference, relative to its value, that needs no smaller step
_SMALL = 1e-11  # the error, relative to the terms, that a smaller step only makes larger by rounding
_SPREAD = 1e6  # between the largest and the smallest element: more, and each moves by its own size

STILL = "no element is finite, so none can move"
KINKED = "every element that can move is at a kink"

Forward = Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]]


def forward(problem: Problem) -> Forward:
    """The outputs of the problem in float64, on the interpreter.

    :raises ShapeMovedError: an output has another shape there.
    :raises BackendError: the interpreter does not run it.
    """
    prepared = in_float64(problem.model, problem.wrt)
    outputs = tuple(problem.cotangents)

    def run(at: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        results = prepared.run(at, outputs)
        for name, cotangent in problem.cotangents.items():
            if results[name].shape != cotangent.shape:
                raise ShapeMovedError(f"the shape of {name!r} changes along this direction")
        return results

    return run


def along(problem: Problem, function: Forward, oracle: str, stream: int) -> list[Observation]:
    """Differences of `function` along random directions, moving one input at a time."""
    rng = np.random.default_rng([problem.seed, stream])
    still = problem.kinked
    return estimates(function, problem.at, problem.wrt, problem.wide_cotangents, rng, oracle, still=still)


def estimates(
    function: Forward,
    at: Mapping[str, Any],
    names: Iterable[str],
    cotangents: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    oracle: str = NAME,
    directions: int = DIRECTIONS,
    still: Mapping[str, np.ndarray] | None = None,
) -> list[Observation]:
    """Differences of <cotangents, function> at a point, along random directions, moving one of `names` at a time.

    :param still: the elements of an input that do not move, those at a kink.
    """
    observations: list[Observation] = []
    for name in names:
        if not at[name].size:
            observations.append(Directional(oracle, name, np.zeros(at[name].shape), 0.0, 0.0, 0.0))
            continue
        for _ in range(directions):
            kinked = (still or {}).get(name)
            direction = without(direction_at(at[name], rng), kinked)
            if not np.any(direction):
                observations.append(NotApplicable(oracle, STILL if kinked is None else KINKED, name))
                break
            observation = settled(function, at, name, direction, cotangents, oracle)
            if isinstance(observation, NotApplicable):
                # where the shape depends on which elements are equal, they stay so
                tied_direction = without(tied(at[name], direction), kinked)
                if not np.array_equal(tied_direction, direction, equal_nan=True):
                    observation = settled(function, at, name, tied_direction, cotangents, oracle)
            observations.append(observation)
    return observations


def direction_at(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random direction at `x`: of the size of `x`, or of each element where these differ very much.

    Infinite and missing elements do not move.
    """
    sizes = np.abs(x[np.isfinite(x) & (x != 0)])
    drawn: np.ndarray = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)
    if not sizes.size:
        return drawn
    most = float(sizes.max())
    own: np.ndarray = np.array(most * rms(x / most))
    if most > _SPREAD * float(sizes.min()):
        own = np.where(x == 0, float(np.median(sizes)), np.where(np.isfinite(x), np.abs(x), 0.0))
    moved: np.ndarray = np.multiply(drawn, own)
    return moved


def tied(x: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The direction in which equal elements of `x` move by the same amount."""
    _, first, of = np.unique(x, return_index=True, return_inverse=True)
    direction_of_values: np.ndarray = direction.reshape(-1)[first[of.reshape(x.shape)]]
    return direction_of_values


def settled(
    function: Forward,
    at: Mapping[str, Any],
    name: str,
    direction: np.ndarray,
    cotangents: Mapping[str, np.ndarray],
    oracle: str,
) -> Observation:
    """The difference by the first step that settles it, or that with the smallest error.

    Where none does, because kinks are crossed, the nearest of the other estimates says how far off it may be.
    """
    estimates_by_step: list[tuple[FiniteDifference, float]] = []
    why = "the model is not finite near this point"
    for step in STEPS:
        try:
            difference = directional(function, at, {name: direction}, cotangents, step)
        except (ShapeMovedError, BackendError) as error:
            why = str(error)  # a smaller step may stay where it runs
            continue
        if np.isfinite(difference.value):
            estimates_by_step.append((difference, step))
            if difference.error <= max(_SETTLED * abs(difference.value), _SMALL * difference.scale):
                break
    if not estimates_by_step:
        return NotApplicable(oracle, why, name)
    best, step = min(estimates_by_step, key=lambda pair: pair[0].error)
    uncertainty = best.error
    if uncertainty > _SETTLED * abs(best.value):
        uncertainty = max(
            uncertainty,
            min((abs(other.value - best.value) for other, _ in estimates_by_step if other is not best), default=0.0),
        )
    return Directional(oracle, name, direction, best.value, uncertainty, best.scale, step)


def _observe(problem: Problem) -> Sequence[Observation]:
    return along(problem, forward(problem), NAME, 1)


ORACLE = Oracle(
    NAME,
    "central differences in float64 on the interpreter, along random directions, with Richardson's extrapolation; trusted up "
    "to the error that the extrapolation and rounding leave",
    observe=_observe,
)
