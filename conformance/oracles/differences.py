"""Central differences in float64 on the interpreter: they know nothing of any rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from refgrad.backends import get_backend
from refgrad.conformance.differences import Difference, directional
from refgrad.conformance.oracles.evidence import Directional, Evidence, Oracle, Silent
from refgrad.conformance.point import ShapeMovedError, rms, with_defaults
from refgrad.conformance.question import Question
from refgrad.errors import BackendError

NAME = "differences"
DIRECTIONS = 2
_STEPS = (1e-3, 1e-5, 1e-7)  # tried in this order until the differences are settled
_SETTLED = 1e-6  # the error of a difference, relative to its value, that needs no smaller step

Forward = Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]]


def forward(question: Question) -> Forward:
    """The outputs of the question in float64, on the interpreter.

    :raises ShapeMovedError: an output has another shape there.
    :raises BackendError: the interpreter does not run it.
    """
    prepared = get_backend("numpy").prepare(with_defaults(question.model, question.wrt), precision="float64")
    outputs = tuple(question.cotangents)

    def run(at: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        results = prepared.run(at, outputs)
        for name, cotangent in question.cotangents.items():
            if results[name].shape != cotangent.shape:
                raise ShapeMovedError(f"the shape of {name!r} changes along this direction")
        return results

    return run


def along(question: Question, function: Forward, oracle: str, stream: int) -> list[Evidence]:
    """Differences of `function` along random directions, moving one input at a time."""
    rng = np.random.default_rng([question.seed, stream])
    at, weights = question.at, question.weights
    found: list[Evidence] = []
    for name in question.wrt:
        for _ in range(DIRECTIONS):
            direction = rng.standard_normal(at[name].shape) * (rms(at[name]) or 1.0)
            found.append(_settled(function, at, name, direction, weights, oracle))
    return found


def _settled(
    function: Forward,
    at: Mapping[str, Any],
    name: str,
    direction: np.ndarray,
    weights: Mapping[str, np.ndarray],
    oracle: str,
) -> Evidence:
    """The difference by the first step that settles it, or that with the smallest error.

    Where none does, because kinks are crossed, the nearest of the other estimates says how far off it may be.
    """
    found: list[tuple[Difference, float]] = []
    why = "the model is not finite near this point"
    for step in _STEPS:
        try:
            difference = directional(function, at, {name: direction}, weights, step)
        except (ShapeMovedError, BackendError) as error:
            why = str(error)
            break
        if np.isfinite(difference.value):
            found.append((difference, step))
            if difference.error <= _SETTLED * abs(difference.value):
                break
    if not found:
        return Silent(oracle, why, name)
    best, step = min(found, key=lambda pair: pair[0].error)
    error = best.error
    if error > _SETTLED * abs(best.value):
        error = max(error, min((abs(other.value - best.value) for other, _ in found if other is not best), default=0.0))
    return Directional(oracle, name, direction, best.value, error, best.scale, step)


def _testify(question: Question) -> Sequence[Evidence]:
    return along(question, forward(question), NAME, 1)


ORACLE = Oracle(
    NAME,
    "central differences in float64 on the interpreter, along random directions, with Richardson's extrapolation; trusted up "
    "to the error that the extrapolation and rounding leave",
    testify=_testify,
)
