"""Is one gradient what one oracle says, up to what explains an error?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto

from refgrad.conformance.oracles.central import STEP, directional, one_sided
from refgrad.conformance.oracles.differences import STEPS, direction_at, estimates
from refgrad.conformance.questions.evidence import Directional, Elementwise
from refgrad.conformance.questions.kinked import OPERATORS, kinks_of
from refgrad.conformance.questions.point import (
    Point,
    ShapeMovedError,
    Truth,
    by_name,
    in_float64,
    largest,
    limits,
    rms,
    without,
)
from refgrad.conformance.questions.rounding import DRAWS, FEW_DRAWS, MANY_DRAWS
from refgrad.errors import BackendError

AGREED, DISAGREED, KINK, INCONCLUSIVE = "agreed", "disagreed", "kink", "inconclusive"
NOT_FINITE = "elements are not finite"
EXACT = 1e-6  # what float64 explains of a gradient

_SETTLED = 1e-6  # the error of a difference, relative to its terms, below which it is not noise
_TELLING = 1e-2  # with a larger error the answer is not known
SENSITIVE = 10  # how many times the change under rounded intermediate results is explained
FLOAT64_BITS = 50  # of 53: a rounding that can be told from the float64 gradient
_JUMP = 0.1  # of the distance between the derivatives of both sides: a larger error means a jump
_ELEMENTS = 64  # that are looked at one by one
_NEIGHBOURS = 4  # points beside a kink that are asked at most
_COARSER = 4  # bits less, when rounding alone does not explain an error: is there a kink near?


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
        order = (AGREED, INCONCLUSIVE, KINK, DISAGREED)
        return order.index(self.verdict), (self.relative or 0.0) / (self.allowed or 1.0)


def gravest(found: Iterable[Judged]) -> Judged:
    """The gravest of several comparisons."""
    return max(found, key=lambda judged: judged.gravity)


def against_directions(
    truth: Truth,
    name: str,
    got: np.ndarray,
    found: Sequence[Directional],
    tolerance: float,
    exact: bool = False,
    sided: bool = True,
) -> Judged:
    """A gradient against derivatives along directions: the worst of them.

    :param exact: the gradient was computed in float64.
    :param sided: an error may be a kink's: the derivatives from both sides are taken on the interpreter.
    """
    expected = truth.point.wide[name].shape
    if got.shape != expected:
        return Judged(DISAGREED, note=f"shape {got.shape}, {name!r} has {expected}")
    if not np.all(np.isfinite(got)):
        return Judged(DISAGREED, note=f"{np.count_nonzero(~np.isfinite(got))} {NOT_FINITE}")
    judged = [_along(truth, name, got, said, tolerance, exact, sided) for said in found]
    return gravest(judged or [Judged(AGREED, 0.0, 0.0, tolerance, "both are zero")])


def _along(
    truth: Truth, name: str, got: np.ndarray, said: Directional, tolerance: float, exact: bool, sided: bool
) -> Judged:
    value, method = said.value, said.error
    if abs(value) <= method and method > _SETTLED * said.scale:
        return Judged(INCONCLUSIVE, note="the derivatives are no more than their error")
    derivative = float(np.sum(got * said.direction))
    if not np.any(got) and abs(value) <= method:
        return Judged(AGREED, 0.0, 0.0, tolerance, "both are zero")
    error = abs(derivative - value)
    size = max(float(np.linalg.norm(got)) * rms(said.direction), abs(value))
    slack = tolerance * size + method
    if error > slack and name in truth.gradients:
        moved = np.linalg.norm(truth.moved(name, FLOAT64_BITS if exact else truth.bits)) * rms(said.direction)
        slack += SENSITIVE * float(moved)
    if error > slack and said.step:
        slack += SENSITIVE * truth.noise / said.step
    numbers = (error, error / size, slack / size) if size else (0.0, 0.0, tolerance)
    if not error <= slack < np.inf:
        nearer = _crossed(truth, said, derivative, tolerance * size, error) if sided else None
        if nearer is not None:
            numbers = nearer, nearer / size, tolerance
            return Judged(AGREED, *numbers, "by smaller steps: larger ones cross the edges of a kink or of stairs")
        note = f"{derivative:.6g} along a direction, {said.oracle} gives {value:.6g} ± {method:.1g}"
        wrong = Judged(DISAGREED, *numbers, note)
        return _at_a_kink(truth, said, derivative, tolerance * size, wrong) if sided else wrong
    if slack > size and abs(value) <= method:
        return Judged(AGREED, *numbers, "both are zero up to rounding")
    if slack - tolerance * size > _TELLING * size:
        return Judged(INCONCLUSIVE, *numbers, "rounding or a kink hides more than 1% of it")
    return Judged(AGREED, *numbers)


def _crossed(truth: Truth, said: Directional, derivative: float, slack: float, error: float) -> float | None:
    """The error by a smaller step whose difference is exact enough to tell and agrees with the gradient; None without one.

    Differences of stairs, and of what repeats itself, may settle on the slope of the whole where the steps fit it.
    """
    point = truth.point
    for step in (s / 2 for s in STEPS[1:] if s < said.step):
        try:
            near = directional(point.evaluate, point.wide, {said.name: said.direction}, point.cotangent_of, step)
        except (ShapeMovedError, BackendError):
            continue
        off = abs(derivative - near.value)
        if _TELLING * error > slack + near.error >= off:
            return off
    return None


def _at_a_kink(truth: Truth, said: Directional, derivative: float, slack: float, wrong: Judged) -> Judged:
    """KINK if the one-sided derivatives differ there and bracket the answer; INCONCLUSIVE if they fail; else `wrong`."""
    point = truth.point
    try:
        left, right = one_sided(point.evaluate, point.wide, {said.name: said.direction}, point.cotangent_of, said.step)
    except (ShapeMovedError, BackendError) as error:
        return replace(wrong, verdict=INCONCLUSIVE, note=str(error))
    low, high = sorted((left.value, right.value))
    slack += left.error + right.error
    if high - low > 2 * slack and low - slack <= derivative <= high + slack:
        both = f"the derivative is {left.value:.4g} from the left, {right.value:.4g} from the right"
        return replace(wrong, verdict=KINK, note=both)
    return wrong


def against_elements(truth: Truth, said: Elementwise, got: np.ndarray, tolerance: float, exact: bool = False) -> Judged:
    """A gradient against the gradient of another autodiff, element by element."""
    if got.shape != said.gradient.shape:
        return Judged(DISAGREED, note=f"shape {got.shape}, {said.oracle} has {said.gradient.shape}")
    if not np.all(np.isfinite(said.gradient)):
        return Judged(INCONCLUSIVE, note=f"the gradient of {said.oracle} is not finite")
    error, size = np.abs(got - said.gradient), largest(said.gradient)
    explained = np.full(error.shape, (tolerance + said.error) * max(size, largest(got)))
    if not _within(error, explained) and said.name in truth.gradients:
        bits = FLOAT64_BITS if exact else truth.bits
        explained += SENSITIVE * np.abs(truth.moved(said.name, bits))
        explained = _with_spread(truth, said.name, bits, error, explained)
    worst = _worst(error, explained)
    numbers = _numbers(error, explained, worst, size)
    if _within(error, explained):
        return Judged(AGREED, *numbers) if size else Judged(AGREED, 0.0, 0.0, tolerance, "both are zero")
    return Judged(DISAGREED, *numbers, f"{_element(got, worst)}, {said.oracle} has {said.gradient[worst]:.6g}")


def against_float64(truth: Truth, name: str, got: np.ndarray, tolerance: float, own_draws: bool = False) -> Judged:
    """A gradient in the model's types against the float64 one, element by element.

    An error is explained by the tolerance, relative to the largest element, and by how far rounding moves this element itself.

    :param own_draws: the executor draws random numbers of its own.
    """
    point, expected = truth.point, truth.gradients[name]
    if got.shape != expected.shape:
        return Judged(DISAGREED, note=f"shape {got.shape}, the float64 gradient has {expected.shape}")
    kind = point.dtype(name)
    if got.dtype not in (kind, np.dtype(np.float64)):
        return Judged(DISAGREED, note=f"dtype {got.dtype}, {name!r} has {kind}")
    if not np.all(np.isfinite(expected)):
        return Judged(INCONCLUSIVE, note="the float64 gradient is not finite")
    difference = got.astype(np.float64) - expected
    error, size = np.abs(difference), largest(expected)
    # Results below the smallest normal number of the type are not accurate.
    underflow = limits(kind)[1] * max(got.size, 1) ** 0.5
    if largest(error) <= max(tolerance * size, underflow):
        most = largest(error)
        return Judged(AGREED, most, most / size if size else 0.0, tolerance, "" if size else "both are zero")
    explained = np.full(error.shape, max(tolerance * size, underflow))
    explained += SENSITIVE * np.abs(truth.moved(name, truth.bits))
    near_a_kink = False
    explained = _with_spread(truth, name, truth.bits, error, explained)
    if not _within(error, explained):
        explained += truth.spread(name, truth.bits - _COARSER)
        near_a_kink = True
    if not _within(error, explained):  # terms that cancel each other exactly do so no more where each is rounded
        explained += SENSITIVE * truth.spread_apart(name, truth.bits)
    if not _within(error, explained) and kinks_of(point.model):  # few draws may miss a unit that rounding switches
        explained = np.maximum(explained, SENSITIVE * truth.spread(name, truth.bits, MANY_DRAWS))
    worst = _worst(error, explained)
    numbers = _numbers(error, explained, worst, size)
    if not _within(error, explained):
        if point.draws and own_draws:
            return Judged(
                INCONCLUSIVE, *numbers, f"{', '.join(point.draws)}: the backend draws random numbers of its own"
            )
        if truth.element_out_of_range and _confinement_explains(truth, name, error, explained):
            return Judged(INCONCLUSIVE, *numbers, truth.element_out_of_range)
        return Judged(DISAGREED, *numbers, f"{_element(got, worst)}, in float64 it is {expected[worst]:.6g}")
    if size <= largest(explained) and _is_noise(truth, name, size):
        return Judged(AGREED, *numbers, "both are zero up to rounding")
    note = "rounding hides more than 1% of it" if largest(explained) > _TELLING * size else ""
    note = "a kink is near: rounding moves single elements far" if near_a_kink else note
    hidden = note and np.linalg.norm(difference) > _TELLING * np.linalg.norm(expected)
    return Judged(INCONCLUSIVE if hidden else AGREED, *numbers, note)


def _with_spread(truth: Truth, name: str, bits: int, error: np.ndarray, explained: np.ndarray) -> np.ndarray:
    """The explained errors; with the spread of the gradient under rounding, by few draws and then by more, if need be."""
    found = explained
    for draws in (FEW_DRAWS, DRAWS):
        if _within(error, found):
            break
        found = explained + SENSITIVE * truth.spread(name, bits, draws)
    return found


def _is_noise(truth: Truth, name: str, size: float) -> bool:
    """True if the float64 gradient is no more than its own rounding."""
    return size <= SENSITIVE * largest(truth.moved(name, FLOAT64_BITS)) or size <= SENSITIVE * largest(
        truth.spread(name, FLOAT64_BITS)
    )


def _within(error: np.ndarray, explained: np.ndarray) -> bool:
    """True if each error is explained. One that is not a number never is, nor is any error that is explained without limit."""
    return bool(np.all((error <= explained) & (explained < np.inf)))


def _worst(error: np.ndarray, explained: np.ndarray) -> tuple[int, ...]:
    """The place of the error that is largest in relation to its explanation."""
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(error == 0, 0.0, error / explained)
    part = np.where(np.isnan(part), np.inf, part)
    return tuple(map(int, np.unravel_index(np.argmax(part), part.shape)))


def _numbers(
    error: np.ndarray, explained: np.ndarray, worst: tuple[int, ...], size: float
) -> tuple[float, float, float]:
    """The error of an element, the same relative to the largest element, and what explains it."""
    if not size:
        return float(error[worst]), np.inf, float(explained[worst])
    return float(error[worst]), float(error[worst] / size), float(explained[worst] / size)


def _element(got: np.ndarray, place: tuple[int, ...]) -> str:
    return f"element {place} is {float(got[place]):.6g}" if place else f"it is {float(got[place]):.6g}"


def _confinement_explains(truth: Truth, name: str, error: np.ndarray, explained: np.ndarray) -> bool:
    """True if each element with an error moves too where intermediate results stay within the range of their type."""
    expected = truth.gradients[name]
    try:
        confined = truth.confined(name)
    except BackendError:
        return True
    moved = np.zeros(expected.shape, bool)
    for value in confined:
        if value.shape != expected.shape:
            return True
        moved |= ~(np.abs(value - expected) <= explained)
    return bool(np.all(moved | (error <= explained)))


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
    said = estimates(point.evaluate, point.wide, names, point.cotangent_of, rng, directions=1)
    found = {one.name: one for one in said if isinstance(one, Directional)}
    judged = {
        name: against_directions(there, name, there.gradients[name], [one], tolerance, exact=True)
        for name, one in found.items()
    }
    return {name for name, one in judged.items() if one.verdict == AGREED and not one.note}


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
        return f"{bad} elements are not finite"
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
            return f"the output jumps at {_element(wide, place)}"
        if not low - off <= wide.flat[index] <= high + off:
            return f"{_element(wide, place)}, the derivatives of both sides are {low:.4g} and {high:.4g}"
    return ""
