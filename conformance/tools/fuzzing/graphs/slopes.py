"""The derivatives of gradients along a direction: by complex steps through the gradient, else by differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto

from refgrad.backends import get_backend
from refgrad.conformance.oracles.analytic import STEP
from refgrad.conformance.tools.fuzzing.graphs.evaluation import UNKNOWN, tangent

Arrays = Mapping[str, np.ndarray]


class SkippedError(Exception):
    """There is nothing to compare, for a reason."""


class Slope(NamedTuple):
    """The derivative of a gradient along a direction.

    `size` is the size of the numbers that it is compared with, `lost()` how far rounding moves it.
    """

    value: np.ndarray
    size: float
    tolerance: float
    lost: Callable[[], float]


def slopes(
    gradient: ModelProto,
    point: Mapping[str, Any],
    u: Arrays,
    names: Mapping[str, str],
    tolerance: float,
    lost: Callable[[Mapping[str, Any], str], float],
) -> dict[str, Slope]:
    """The derivatives of the outputs `names` of a gradient along `u`, by what they are gradients of.

    :param point: what the gradient is fed, and the initializers that move.
    :param tolerance: the relative error of complex steps, for the rounded constants of the models.
    :param lost: how far rounding moves an output of the gradient at a point.
    :raises SkippedError: neither complex steps nor differences say.
    """
    known = {v.name for v in gradient.graph.input} | {t.name for t in gradient.graph.initializer}
    point = {name: x for name, x in point.items() if name in known}
    try:
        values, moves, _ = tangent(gradient, point, {n: x for n, x in u.items() if n in known}, STEP)
    except UNKNOWN as error:
        return _by_differences(gradient, point, u, names, lost, error)
    found = {}
    for name, output in names.items():
        wanted = moves.get(output, np.zeros(np.shape(values[output])))
        size = _largest(wanted) + _largest(values[output])
        found[name] = Slope(wanted, max(size, 1.0), tolerance, partial(_steep, size))
    return found


def _by_differences(
    gradient: ModelProto,
    point: Mapping[str, Any],
    u: Arrays,
    names: Mapping[str, str],
    lost: Callable[[Mapping[str, Any], str], float],
    why: Exception,
) -> dict[str, Slope]:
    prepared = get_backend("numpy").prepare(gradient, precision="float64")
    known = {v.name for v in gradient.graph.input}
    if not {name for name in u if name in point} <= known:
        raise SkippedError(f"differences would need to move an initializer, and complex steps fail: {why}")
    fed = {name: x for name, x in point.items() if name in known}

    def at(h: float) -> dict[str, np.ndarray]:
        run = prepared.run({n: x + h * u[n] if n in u else x for n, x in fed.items()})
        return {name: np.asarray(run[names[name]]) for name in names}

    estimates = []
    base = at(0.0)
    for h in (1e-4, 3e-5):
        plus, minus, far, near = at(2 * h), at(-2 * h), at(h), at(-h)
        estimates.append({n: (8 * (far[n] - near[n]) - (plus[n] - minus[n])) / (12 * h) for n in names})
    whole = max(map(_largest, base.values()), default=0.0)
    found = {}
    for name in names:
        a, b = estimates[0][name], estimates[1][name]
        spread, size = _largest(a - b), max(_largest(b) + whole, 1.0)
        if not spread <= 1e-5 * size:
            raise SkippedError(f"differences do not settle, and complex steps fail: {why}")
        found[name] = Slope(b, size, 1e-5 + 10 * spread / size, partial(_blurred, lost, fed, names[name]))
    return found


def _largest(x: Any) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def _steep(size: float) -> float:
    return float(2.0**-44 * size)


def _blurred(lost: Callable[[Mapping[str, Any], str], float], fed: Mapping[str, Any], output: str) -> float:
    return lost(fed, output) / 3e-5
