"""A gradient that somebody built, in float64 on the interpreter, at any point and for any cotangents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from refgrad.backends import get_backend
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import ShapeMovedError
from refgrad.conformance.problems.problem import Problem

ROUNDED = 50  # of 53 bits: a rounding that can be told from float64


class Field:
    """The gradient as a function of the point and the cotangents.

    :param bits: round every intermediate result to that many bits, to see what rounding does.
    :raises BackendError: the interpreter does not run it.
    """

    def __init__(self, problem: Problem, built: Built, bits: int | None = None) -> None:
        self._built, self._wrt = built, problem.wrt
        self._prepared = get_backend("numpy").prepare(built.model, precision="float64", bits=bits)

    def __call__(self, at: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The gradient by every input of the problem, zeros where the builder has none.

        :raises ShapeMovedError: a gradient has another shape than its input.
        :raises BackendError: the interpreter fails.
        """
        built = self._built
        known = built.named(self._prepared.run(built.feeds(at, cotangents), list(built.gradients.values())))
        gradients = {}
        for name in self._wrt:
            gradient = known.get(name, np.zeros(at[name].shape))
            if gradient.shape != at[name].shape:
                raise ShapeMovedError(f"the gradient by {name!r} has the shape {gradient.shape}, not {at[name].shape}")
            gradients[name] = gradient
        return gradients


def product(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Σ <a, b> over the names in `b`. An element of `a` that is not finite has no part where `b` is 0."""
    return float(sum(np.sum(np.where(v == 0, 0.0, a[name] * v)) for name, v in b.items()))
