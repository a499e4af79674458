"""Differences that move many inputs at once: they test the gradients of a large model in a few evaluations.

Along a direction u of several inputs the derivative is Σₓ <gₓ, uₓ>. If a difference agrees with this sum, each gradient of it
agrees, since errors along random directions do not cancel. So each gradient has an observation of its own: the difference
without the terms of the other gradients.

A small term would hide behind a large one. So a group has gradients with terms of similar size, and its directions are scaled
until all terms are as large as the smallest. A group that does not agree is halved: this finds what is wrong or at a kink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from refgrad.conformance.oracles.central import FiniteDifference, directional, rounding_error
from refgrad.conformance.oracles.differences import DIRECTIONS, NAME, STEPS, Forward, direction_at
from refgrad.conformance.problems.observation import Directional
from refgrad.conformance.problems.point import ShapeMovedError, rms
from refgrad.errors import BackendError

FEWEST = 4  # gradients in a group: fewer are observed one by one
_APART = 1e3  # between the largest and the smallest term of a group
_PRECISE = 1e-5  # the error of a difference, relative to each term, that is small enough
_SMALLEST = 1e-9  # step: with a smaller one, the rounding of the inputs counts
_ENOUGH = 2  # steps at which a difference does not agree
_NOISE = 1e-6  # the error of a difference, relative to its scale, that is small enough where all terms are 0


@dataclass
class _Observer:
    function: Forward
    at: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]
    cotangents: Mapping[str, np.ndarray]
    rng: np.random.Generator
    tolerance: float

    def group(self, names: Sequence[str], directions: int, fewest: int) -> Iterator[list[Directional]]:
        """The observations of a group, or of each of its parts that agree and have at least `fewest` gradients."""
        if len(names) < fewest:
            return
        try:
            found = [one for _ in range(directions) for one in self._along(names, self._direction(names))]
        except _HiddenError:
            return
        except _DisagreementError:
            half = len(names) // 2
            yield from self.group(names[:half], directions, fewest)
            yield from self.group(names[half:], directions, fewest)
        else:
            yield found

    def _direction(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """A random direction whose terms are of the same size."""
        drawn = {name: direction_at(self.at[name], self.rng) for name in names}
        sizes = {name: self.term(name, x) for name, x in drawn.items()}
        least = min(sizes.values())
        return {name: x * (least / sizes[name]) if least else x for name, x in drawn.items()}

    def term(self, name: str, direction: np.ndarray) -> float:
        """The size of a term: of the product of a gradient and a direction."""
        return float(np.linalg.norm(self.gradients[name])) * rms(direction)

    def _along(self, names: Sequence[str], direction: Mapping[str, np.ndarray]) -> list[Directional]:
        """An observation of each gradient, by a step at which the difference agrees with all together.

        :raises _DisagreementError: at no step does it agree.
        :raises _HiddenError: it cannot agree, because rounding hides the terms.
        """
        terms = {name: float(np.sum(self.gradients[name] * direction[name])) for name in names}
        total, least = math.fsum(terms.values()), min(self.term(name, direction[name]) for name in names)
        best: tuple[float, FiniteDifference] | None = None  # its step, too
        for number, step in enumerate(self._steps(least)):
            if number == _ENOUGH and best is None:
                break
            try:
                difference = directional(self.function, self.at, direction, self.cotangents, step)
            except (ShapeMovedError, BackendError):
                continue
            off, error = abs(difference.value - total), difference.error
            enough = _PRECISE * least if least else _NOISE * difference.scale
            if error <= enough and off <= self.tolerance * least + error and (best is None or error < best[1].error):
                best = step, difference
                if error <= self.tolerance * least:
                    break
        if best is None:
            raise _DisagreementError
        step, found = best
        return [
            Directional(NAME, name, direction[name], found.value - (total - term), found.error, found.scale, step)
            for name, term in terms.items()
        ]

    def _steps(self, least: float) -> list[float]:
        """The steps to try, the smallest first: with many inputs, a larger one crosses kinks.

        Rounding hides the terms, of which `least` is the smallest, at steps below the first one.

        :raises _HiddenError: it hides them at every step.
        """
        steps = sorted(STEPS)
        if not least:
            return steps
        smallest = rounding_error(self._scale, 1.0) / (_PRECISE * least)
        if smallest > steps[-1]:
            raise _HiddenError
        first = max(_SMALLEST, 2 * smallest)
        return [first, *(step for step in steps if step > first)]

    @cached_property
    def _scale(self) -> float:
        """The sum of the absolute terms that the function adds up."""
        results = self.function(self.at)
        return max(
            float(np.sum(np.abs(v * np.where(v == 0, 0.0, results[name])))) for name, v in self.cotangents.items()
        )


class _DisagreementError(Exception):
    """The difference along a direction is not the sum of the terms."""


class _HiddenError(Exception):
    """Rounding hides the terms of a group."""


def grouped_estimates(
    function: Forward,
    at: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    *,
    tolerance: float,
    directions: int = DIRECTIONS,
    fewest: int = FEWEST,
) -> Iterator[list[Directional]]:
    """Observations of those gradients that agree with differences which move many inputs at once; the others have none.

    They come group by group, since each takes long in a large model.

    :param function: the outputs in float64, by name, at a point. :param at: the point, by the names of inputs.
    :param gradients: the gradients in float64, by the names of inputs. :param cotangents: by the names of outputs.
    :param tolerance: how far off each gradient may be, relative to its size.
    :param directions: how many random directions each gradient is observed along.
    :param fewest: how many gradients a group has at least.
    """
    observer = _Observer(function, at, gradients, cotangents, rng, tolerance)
    sizes = {}
    for name, gradient in gradients.items():
        if gradient.size and gradient.shape == at[name].shape and np.all(np.isfinite(gradient)):
            direction = direction_at(at[name], rng)
            if np.any(direction):  # of an input without a finite element no element moves
                sizes[name] = observer.term(name, direction)
    for group in _of_similar_size(sizes):
        yield from observer.group(group, directions, fewest)


def _of_similar_size(sizes: Mapping[str, float]) -> Iterator[list[str]]:
    """Groups of names: a group has terms of size 0 alone, or terms whose sizes are not further apart than `_APART`."""
    group: list[str] = []
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if group and not sizes[name] <= _APART * sizes[group[0]]:
            yield group
            group = []
        group.append(name)
    if group:
        yield group
