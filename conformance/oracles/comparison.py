"""Is one gradient what one oracle says along a direction, up to what explains an error? Or is there a kink?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto

from refgrad.conformance.oracles.central import STEP, directional, one_sided
from refgrad.conformance.oracles.differences import STEPS, direction_at, estimates
from refgrad.conformance.problems.kinked import OPERATORS
from refgrad.conformance.problems.observation import Directional
from refgrad.conformance.problems.point import (
    Point,
    ShapeMovedError,
    Truth,
    by_name,
    in_float64,
    largest,
    rms,
    without,
)
from refgrad.conformance.verdicts import CONVENTION, RIGHT, UNDECIDED, WRONG
from refgrad.errors import BackendError, counted

NOT_FINITE = "elements are not finite"
EXACT = 1e-6  # what float64 explains of a gradient

_SETTLED = 1e-6  # the error of a difference, relative to its terms, below which it is not noise
TELLING = 1e-2  # with a larger error the answer is not known
SENSITIVE = 10  # how many times the change under rounded intermediate results is explained
FLOAT64_BITS = 50  # of 53: a rounding that can be told from the float64 gradient
_JUMP = 0.1  # of the distance between the derivatives of both sides: a larger error means a jump
_ELEMENTS = 64  # that are looked at one by one
_NEIGHBOURS = 4  # points beside a kink that are asked at most


@dataclass(frozen=True)
class Judged:
    """The result of a comparison.

    `absolute` and `relative` are the largest error over the elements (or the directions) and that error relative to the
    largest element (or the norm); `allowed` is the largest relative error that rounding and the oracle explain. They are None
    where nothing was compared.
    """

    verdict: str
    absolute: float | None = None
    relative: float | None = None
    allowed: float | None = None
    note: str = ""

    @property
    def gravity(self) -> tuple[int, float]:
        """A key that orders comparisons: by the verdict, then by the error as a part of the allowed one."""
        order = (RIGHT, UNDECIDED, CONVENTION, WRONG)
        return order.index(self.verdict), (self.relative or 0.0) / (self.allowed or 1.0)


def gravest(judgements: Iterable[Judged]) -> Judged:
    """The gravest of several comparisons."""
    return max(judgements, key=lambda judged: judged.gravity)


def element_text(got: np.ndarray, place: tuple[int, ...]) -> str:
    """The value of an element, in words."""
    return f"element {place} is {float(got[place]):.6g}" if place else f"it is {float(got[place]):.6g}"


def against_directions(
    truth: Truth,
    name: str,
    got: np.ndarray,
    directions: Sequence[Directional],
    tolerance: float,
    exact: bool = False,
    compare_sides: bool = True,
) -> Judged:
    """A gradient against derivatives along directions: the worst of them.

    :param exact: the gradient was computed in float64.
    :param compare_sides: if they differ, compute the derivatives from both sides on the interpreter: it may be a kink.
    """
    expected = truth.point.wide[name].shape
    if got.shape != expected:
        return Judged(WRONG, note=f"shape {got.shape}, {name!r} has {expected}")
    if not np.all(np.isfinite(got)):
        return Judged(WRONG, note=f"{np.count_nonzero(~np.isfinite(got))} {NOT_FINITE}")
    judged = [_along(truth, name, got, direction, tolerance, exact, compare_sides) for direction in directions]
    return gravest(judged or [Judged(RIGHT, 0.0, 0.0, tolerance, "this gradient and the expected one are zero")])


def _along(
    truth: Truth,
    name: str,
    got: np.ndarray,
    observation: Directional,
    tolerance: float,
    exact: bool,
    compare_sides: bool,
) -> Judged:
    value, method = observation.value, observation.error
    if abs(value) <= method and method > _SETTLED * observation.scale:
        return Judged(UNDECIDED, note="the derivatives are no more than their error")
    derivative = float(np.sum(got * observation.direction))
    if not np.any(got) and abs(value) <= method:
        return Judged(RIGHT, 0.0, 0.0, tolerance, "this gradient and the expected one are zero")
    error = abs(derivative - value)
    size = max(float(np.linalg.norm(got)) * rms(observation.direction), abs(value))
    slack = tolerance * size + method
    if error > slack and name in truth.gradients:
        moved = np.linalg.norm(truth.moved(name, FLOAT64_BITS if exact else truth.bits)) * rms(observation.direction)
        slack += SENSITIVE * float(moved)
    if error > slack and observation.step:
        slack += SENSITIVE * truth.noise / observation.step
    numbers = (error, error / size, slack / size) if size else (0.0, 0.0, tolerance)
    if not error <= slack < np.inf:
        nearer = _crossed(truth, observation, derivative, tolerance * size, error) if compare_sides else None
        if nearer is not None:
            numbers = nearer, nearer / size, tolerance
            return Judged(RIGHT, *numbers, "by smaller steps: larger ones cross the edges of a kink or of stairs")
        note = f"{derivative:.6g} along a direction, {observation.oracle} gives {value:.6g} ± {method:.1g}"
        wrong = Judged(WRONG, *numbers, note)
        return _at_a_kink(truth, observation, derivative, tolerance * size, wrong) if compare_sides else wrong
    if slack > size and abs(value) <= method:
        return Judged(RIGHT, *numbers, "this gradient and the expected one are zero up to rounding")
    if slack - tolerance * size > TELLING * size:
        return Judged(UNDECIDED, *numbers, "rounding or a kink hides more than 1% of it")
    return Judged(RIGHT, *numbers)


def _crossed(truth: Truth, observation: Directional, derivative: float, slack: float, error: float) -> float | None:
    """The error by a smaller step whose difference is exact enough to tell and agrees with the gradient; None without one.

    Differences of stairs, and of what repeats itself, may settle on the slope of the whole where the steps fit it.
    """
    point = truth.point
    for step in (s / 2 for s in STEPS[1:] if s < observation.step):
        try:
            near = directional(
                point.evaluate, point.wide, {observation.name: observation.direction}, point.cotangent_of, step
            )
        except (ShapeMovedError, BackendError):
            continue
        off = abs(derivative - near.value)
        if TELLING * error > slack + near.error >= off:
            return off
    return None


def _at_a_kink(truth: Truth, observation: Directional, derivative: float, slack: float, wrong: Judged) -> Judged:
    """CONVENTION if the one-sided derivatives differ there and bracket the answer; UNDECIDED if they fail; else `wrong`."""
    point = truth.point
    try:
        left, right = one_sided(
            point.evaluate, point.wide, {observation.name: observation.direction}, point.cotangent_of, observation.step
        )
    except (ShapeMovedError, BackendError) as error:
        return replace(wrong, verdict=UNDECIDED, note=str(error))
    low, high = sorted((left.value, right.value))
    slack += left.error + right.error
    if high - low > 2 * slack and low - slack <= derivative <= high + slack:
        both = f"the derivative is {left.value:.4g} from the left, {right.value:.4g} from the right"
        return replace(wrong, verdict=CONVENTION, note=both)
    return wrong


def told_by_the_neighbour(truth: Truth, names: Collection[str], seed: int, tolerance: float) -> set[str]:
    """The `names` at a kink: the gradient, off from differences here, agrees with them at a point right beside this one.

    A sum of kinks need not lie between its one-sided derivatives, and Relu(x) − Relu(−x) has none at 0, where each convention
    of its parts is kept. One operator alone is at a kink only where the derivatives of both sides differ.
    """
    operators = [node for node in truth.point.model.graph.node if node.op_type in OPERATORS]
    if not operators:
        return set()
    draws, rng = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 3])
    agree: set[str] = set()
    for _ in range(_NEIGHBOURS):  # right beside one that is clipped the derivative may be 0, which tells nothing
        if left := sorted(set(names) - agree):
            agree |= _agreeing(truth.model, truth.point.beside(left, draws), left, rng, tolerance)
    return agree if len(operators) > 1 else {name for name in agree if bent(truth.point, name, rng)}


def _agreeing(
    model: ModelProto, point: Point, names: Sequence[str], rng: np.random.Generator, tolerance: float
) -> set[str]:
    """The `names` by which the gradient `model` agrees with differences at a point, and is not 0."""
    try:
        there = Truth(point, model, by_name(in_float64(model).run(point.wide | point.seeds), point.names))
    except BackendError:
        return set()
    observations = estimates(point.evaluate, point.wide, names, point.cotangent_of, rng, directions=1)
    differences = {estimate.name: estimate for estimate in observations if isinstance(estimate, Directional)}
    judged = {
        name: against_directions(there, name, there.gradients[name], [estimate], tolerance, exact=True)
        for name, estimate in differences.items()
    }
    return {name for name, estimate in judged.items() if estimate.verdict == RIGHT and not estimate.note}


def bent(
    point: Point, name: str, rng: np.random.Generator, step: float = STEP, still: np.ndarray | None = None
) -> bool:
    """True if the derivatives of both sides differ along a random direction, in which the elements in `still` do not move."""
    direction = direction_at(point.wide[name], rng)
    if still is not None:
        direction = without(direction, still)
    try:
        left, right = one_sided(point.evaluate, point.wide, {name: direction}, point.cotangent_of, step)
    except (ShapeMovedError, BackendError):
        return True
    return abs(right.value - left.value) > 2 * (left.error + right.error)


def outside_of_both(
    truth: Truth,
    name: str,
    got: np.ndarray,
    tolerance: float,
    rng: np.random.Generator,
    kinked: np.ndarray | None = None,
) -> str:
    """A text about an element that is not between the derivatives of both sides when it alone moves; empty if all are.

    :param kinked: the elements to look at. By default those that are not as in the float64 gradient, and of these no more than
        `_ELEMENTS`, drawn by chance.
    """
    point, wide = truth.point, got.astype(np.float64)
    expected = truth.gradients.get(name, np.zeros(wide.shape))
    places = np.flatnonzero(np.ones(wide.shape, bool) if kinked is None else kinked)
    if bad := np.count_nonzero(~np.isfinite(wide.flat[places])):
        return counted(int(bad), "element is not finite", "elements are not finite")
    slack = tolerance * max(largest(expected[np.isfinite(expected)]), largest(wide.flat[places]))
    if kinked is None:
        differ = np.flatnonzero(np.abs(wide - expected) > slack)
        places = rng.permutation(differ)[:_ELEMENTS]
    for index in places:
        direction = np.zeros(wide.shape)
        direction.flat[index] = length = rms(point.wide[name]) or 1.0
        try:
            left, right = one_sided(point.evaluate, point.wide, {name: direction}, point.cotangent_of, STEPS[1])
        except (ShapeMovedError, BackendError) as error:
            return str(error)
        low, high = sorted((left.value / length, right.value / length))
        off = slack + (left.error + right.error) / length
        place = tuple(map(int, np.unravel_index(index, wide.shape)))
        if not off - slack <= _JUMP * (high - low) + slack:
            return f"the output jumps at {element_text(wide, place)}"
        if not low - off <= wide.flat[index] <= high + off:
            return f"{element_text(wide, place)}, the derivatives of both sides are {low:.4g} and {high:.4g}"
    return ""
