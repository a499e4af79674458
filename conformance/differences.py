"""Central differences in float64: an oracle that knows nothing of any rule.

Along a direction u, the derivative of t -> <v, f(x + t·u)> at 0 is <g, u>, where g is the gradient for the cotangent v. It is
estimated by D(h) = (φ(h) − φ(−h))/2h and one step of Richardson's extrapolation, (4·D(h/2) − D(h))/3, which cancels the
error of order h² (Richardson 1911).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

STEP = 1e-3
Function = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Difference:
    """A directional derivative: its value, and how far off the method itself may be."""

    value: float
    error: float


def directional(
    function: Function,
    point: Mapping[str, np.ndarray],
    direction: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    step: float = STEP,
) -> Difference:
    """The derivative of <cotangents, function> at `point` along `direction` (names missing from it do not move).

    `function` maps float64 arrays by name to float64 arrays by name. `error` is the larger of the last correction of the
    extrapolation and the rounding of the function values, 2⁻⁵²·Σ|v·f|/h.
    """
    size = 0.0

    def value(t: float) -> float:
        nonlocal size
        moved = {name: array + t * direction[name] if name in direction else array for name, array in point.items()}
        results = function(moved)
        terms = [np.sum(v * results[name], dtype=np.float64) for name, v in cotangents.items()]
        size = max(size, *(float(np.sum(np.abs(v * results[name]))) for name, v in cotangents.items()))
        return float(sum(terms))

    coarse = (value(step) - value(-step)) / (2 * step)
    fine = (value(step / 2) - value(-step / 2)) / step
    estimate = (4 * fine - coarse) / 3
    rounding = 8 * np.finfo(np.float64).eps * size / step
    return Difference(estimate, max(abs(estimate - fine), rounding))
