"""A gradient at a kink, judged as a whole: is it a derivative along directions in which many elements move at once?

Each element of a gradient may lie between the derivatives of both sides and the vector be no generalized gradient: at a tie of
a maximum, a rule that gives every operand the whole cotangent is right element by element, and along (1, …, 1), where the
maximum is smooth, it has the sum of all. Beside a kink a function has derivatives, and a generalized gradient lies in their
convex hull (Clarke 1983, "Optimization and Nonsmooth Analysis", theorem 2.5.1). So along a direction its product must lie
among the derivatives at points nearby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from refgrad.conformance.oracles.central import Function
from refgrad.conformance.problems.point import ShapeMovedError, Truth, by_name, in_float64, rms
from refgrad.errors import RefgradError

_POINTS = 4  # nearby
_MORE = 32  # points that have to confirm that no kink is crossed: few may all lie on one side of it
_BESIDE, _STEP = 1e-5, 1e-7  # how far away they are, and the step of their differences, relative to the inputs
_SMOOTH = (
    1e-4  # of |gradient|·|direction|: derivatives that are closer together are of a direction that crosses no kink
)
_ROUNDINGS = 8.0  # of the sum of absolute terms: how far rounding moves a value of the function
_DRAWN = 3  # directions that are random in every element

Direction = Mapping[str, np.ndarray]


def contradiction(
    function: Function,
    at: Mapping[str, np.ndarray],
    cotangents: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    tolerance: float,
    rng: np.random.Generator,
    expected: Mapping[str, np.ndarray] | None = None,
    nearby: Callable[[Direction], Mapping[str, np.ndarray]] | None = None,
) -> tuple[str, float, float] | None:
    """Find a direction along which `got` is no derivative. Returns it in words, the derivative, and the one by `got`; or None.

    Directions are constant along some axes: so operands that tie move together. One that crosses kinks at the points nearby is
    judged only if it is random in each element, and with twice the room: the points do not show every derivative.

    :param function: the outputs, by name, at a point.
    :param at: the point, by the names of inputs. :param cotangents: by the names of outputs.
    :param got: the gradients, by the names of inputs. All are judged together.
    :param tolerance: the relative error of an element that rounding explains.
    :param expected: a gradient whose conventions are usual: what contradicts it too says nothing. Without it only directions
        that cross no kink are judged.
    :param nearby: the usual gradient at the point moved by so much. Along a direction that crosses no kink, what contradicts
        `expected` too is no derivative all the same if the derivatives nearby agree with this gradient. So is 0 for
        Relu(x) − Relu(−x) at 0.
    """
    names = [name for name in got if got[name].shape == at[name].shape and np.isfinite(got[name]).all()]
    if not names:
        return None
    scales = {name: rms(at[name]) or 1.0 for name in names}
    scale = min(scales.values())
    moving = [name for name, value in at.items() if np.asarray(value).dtype.kind == "f"]  # those not judged, too

    def drawn_nearby() -> Direction:
        return {name: _BESIDE * scale * rng.standard_normal(np.shape(at[name])) for name in moving}

    beside = [drawn_nearby() for _ in range(_POINTS)]

    def slope(direction: Direction, moved: Direction, side: int = 0) -> tuple[float, float]:
        """The derivative along a direction at a point nearby, with `side` from that side alone, and its error by rounding."""
        largest = 0.0

        def value(t: float) -> float:
            nonlocal largest
            there = {**at, **{name: at[name] + step for name, step in moved.items()}}
            results = function({**there, **{name: there[name] + t * step for name, step in direction.items()}})
            terms = [v * np.where(v == 0, 0.0, results[o]) for o, v in cotangents.items()]
            largest = max(largest, sum(float(np.sum(np.abs(term))) for term in terms))
            return float(sum(np.sum(term) for term in terms))

        step = _STEP * min(size for name, size in scales.items() if np.any(direction[name]))
        apart, length = (value(side * step) - value(0), side * step) if side else (value(step) - value(-step), 2 * step)
        return apart / length, float(_ROUNDINGS * np.finfo(np.float64).eps * largest / step)

    def sizes(gradients: Mapping[str, np.ndarray], direction: Direction) -> float:
        return sum(float(np.linalg.norm(gradients[name]) * np.linalg.norm(direction[name])) for name in names)

    def along(gradients: Mapping[str, np.ndarray], direction: Direction) -> float:
        return sum(float(np.vdot(gradients[name], direction[name])) for name in names)

    def is_smooth(direction: Direction, low: float, high: float, apart: float) -> bool:
        """True if at many more points nearby the derivatives are the same."""
        for _ in range(_MORE):
            there, _ = slope(direction, drawn_nearby())
            low, high = min(low, there), max(high, there)
            if not high - low <= apart:
                return False
        return True

    for direction, is_drawn, title in _directions({name: at[name].shape for name in names}, rng):
        if is_drawn and expected is None:
            continue
        try:
            told = [slope(direction, {}, side) for side in (1, -1)] + [slope(direction, moved) for moved in beside]
        except (ShapeMovedError, RefgradError, ValueError):
            continue
        slopes, roundings = zip(*told, strict=True)
        low, high = min(slopes), max(slopes)
        size = max(sizes(got, direction), 0.0 if expected is None else sizes(expected, direction), abs(low), abs(high))
        if not np.isfinite(high - low) or (not is_drawn and high - low > _SMOOTH * size):
            continue
        room = high - low + (tolerance + _BESIDE) * size + max(roundings)
        found = along(got, direction)
        if low - room <= found <= high + room:
            continue
        if expected is not None and not low - room <= along(expected, direction) <= high + room:
            if is_drawn or nearby is None:
                continue
            usual = [along(nearby(moved), direction) for moved in beside]
            if not all(low - room <= one <= high + room for one in usual):
                continue
        if not is_drawn and not is_smooth(direction, low, high, _SMOOTH * size):
            continue
        return title, low if found < low else high, found
    return None


def contradicted(usual: Truth, got: Mapping[str, np.ndarray], tolerance: float, rng: np.random.Generator) -> str:
    """A sentence about gradients that are no derivative all together at the point of the usual gradient; "" if they are one.

    :param usual: the gradient by refgrad's conventions, in float64.
    :param got: gradients by some of its inputs, in float64.
    :param tolerance: the relative error of an element that rounding explains.
    """
    point = usual.point
    prepared = in_float64(usual.model)

    def nearby(moved: Direction) -> dict[str, np.ndarray]:
        there = point.wide | {name: point.wide[name] + step for name, step in moved.items()}
        return by_name(prepared.run(there | point.seeds), point.names)

    expected = {name: usual.gradients[name] for name in got}
    found = contradiction(
        point.evaluate, point.wide, point.cotangent_of, got, tolerance, rng, expected=expected, nearby=nearby
    )
    if found is None:
        return ""
    direction, due, slope = found
    told = f"along {direction} the derivative is {due:.6g}, and the gradients together give {slope:.6g}"
    return f"conventions at a kink that are no derivative together: {told}"


def _directions(shapes: Mapping[str, Sequence[int]], rng: np.random.Generator) -> Iterator[tuple[Direction, bool, str]]:
    """Directions for inputs of these shapes, whether they are random in each element, and what to call them."""
    yield {name: np.ones(shape) for name, shape in shapes.items()}, False, "(1, …, 1)"
    if len(shapes) > 1:
        for name in shapes:
            others = {other: np.zeros(shape) for other, shape in shapes.items()}
            yield {**others, name: np.ones(shapes[name])}, False, f"(1, …, 1) of {name!r}"
    rank = max(map(len, shapes.values()), default=0)
    leading = [tuple(range(count)) for count in range(1, rank)]
    trailing = [tuple(range(count, rank)) for count in range(1, rank)]
    for axes in dict.fromkeys((*leading, *trailing)):
        seed = int(rng.integers(2**32))  # inputs of one shape move alike
        moved = {name: _varying(shape, axes, seed) for name, shape in shapes.items()}
        yield moved, False, f"a direction that varies along axes {list(axes)} alone"
    for _ in range(_DRAWN):
        yield {name: rng.standard_normal(shape) for name, shape in shapes.items()}, True, "a random direction"


def _varying(shape: Sequence[int], axes: Sequence[int], seed: int) -> np.ndarray:
    """Random numbers that vary along some axes alone."""
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    drawn = np.random.default_rng(seed).standard_normal(sizes)
    return np.broadcast_to(drawn, shape).copy()
