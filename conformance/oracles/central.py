"""Central differences in float64: an oracle that does not know any rule.

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


def rounding_error(scale: float, step: float) -> float:
    """The error that rounding makes in a difference quotient of sums of terms whose absolute values add up to `scale`."""
    return float(8 * np.finfo(np.float64).eps * scale / step)


@dataclass(frozen=True)
class FiniteDifference:
    """A directional derivative: its value, how far off the method itself may be, and the size of what it adds up."""

    value: float
    error: float
    scale: float


class _Path:
    """φ(t) = <cotangents, function(point + t·direction)>, and the largest size of what it adds up."""

    def __init__(
        self,
        function: Function,
        point: Mapping[str, np.ndarray],
        direction: Mapping[str, np.ndarray],
        cotangents: Mapping[str, np.ndarray],
    ) -> None:
        self.function, self.point, self.direction, self.cotangents = function, point, direction, cotangents
        self.size = 0.0

    def __call__(self, t: float) -> float:
        moved = {n: array + t * self.direction[n] if n in self.direction else array for n, array in self.point.items()}
        results = self.function(moved)
        # A value that is not finite has no part in the sum where its cotangent is 0.
        terms = [v * np.where(v == 0, 0.0, results[name]) for name, v in self.cotangents.items()]
        self.size = max(self.size, *(float(np.sum(np.abs(term))) for term in terms))
        return float(sum(np.sum(term, dtype=np.float64) for term in terms))

    def rounding(self, step: float) -> float:
        """The error that the rounding of the function values makes in a difference quotient."""
        return rounding_error(self.size, step)


def directional(
    function: Function,
    point: Mapping[str, np.ndarray],
    direction: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    step: float = STEP,
) -> FiniteDifference:
    """The derivative of <cotangents, function> at `point` along `direction` (names missing from it do not move).

    `function` maps float64 arrays by name to float64 arrays by name. `error` is the larger of the last correction of the
    extrapolation and the rounding of the function values, 2⁻⁵²·Σ|v·f|/h.
    """
    value = _Path(function, point, direction, cotangents)
    coarse = (value(step) - value(-step)) / (2 * step)
    fine = (value(step / 2) - value(-step / 2)) / step
    estimate = (4 * fine - coarse) / 3
    return FiniteDifference(estimate, max(abs(estimate - fine), value.rounding(step)), value.size)


def one_sided(
    function: Function,
    point: Mapping[str, np.ndarray],
    direction: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    step: float = STEP,
) -> tuple[FiniteDifference, FiniteDifference]:
    """The derivatives from the left and from the right: they differ at a kink, and only there.

    The error of order h is extrapolated away: 2·D(h/2) − D(h).
    """
    value = _Path(function, point, direction, cotangents)
    here = value(0.0)
    sides = []
    for h in (-step, step):
        coarse, fine = (value(h) - here) / h, (value(h / 2) - here) / (h / 2)
        estimate = 2 * fine - coarse
        sides.append(FiniteDifference(estimate, max(abs(estimate - fine), 2 * value.rounding(step)), value.size))
    return sides[0], sides[1]
