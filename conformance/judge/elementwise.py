"""Comparison of gradients element by element: is an error larger than rounding explains?

The conformance suite, `refgrad check` and `refgrad compare` use it. The allowed error of an element is the tolerance at first.
As long as it does not explain the error, these effects are added one after the other:

1. the change of the element if every intermediate result is rounded to the nearest number;
2. the spread of the element if every intermediate result is rounded up or down at random (each such run is a draw);
3. the spread under coarser rounding, and with each node of the backward pass rounding on its own.

`compare` differs in three points, because its models are large and no oracle checks most of their tensors. An error within
the tolerance is not enough, because in a narrow type the tolerance can be half of the gradient. The spread under coarser
rounding is allowed only if the model has kinks. No further draws are made if they will not explain an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from refgrad.conformance.oracles.comparison import FLOAT64_BITS, SENSITIVE, TELLING, Judged, element_text
from refgrad.conformance.problems.kinked import kinks_of
from refgrad.conformance.problems.observation import Elementwise
from refgrad.conformance.problems.point import Truth, largest
from refgrad.conformance.problems.rounding import DRAWS, FEW_DRAWS, MANY_DRAWS, limits
from refgrad.conformance.verdicts import RIGHT, UNDECIDED, WRONG
from refgrad.errors import BackendError

# The outcomes of `within_rounding`
WITHIN, ZERO, HIDDEN, BEYOND = "within rounding", "zero up to rounding", "hidden by rounding", "beyond rounding"

# The number of bits that coarser rounding removes. If plain rounding does not explain an error, a kink may be near: coarser
# rounding moves values across it.
_COARSER = 4
_NEAR_A_KINK = "a kink is near: rounding moves single elements far"
_CLEARLY = 100  # times what a few draws explain, more draws do not explain
_HIDES = "rounding hides more than 1% of it"

GivesUp = Callable[[np.ndarray, np.ndarray], bool]


@dataclass(frozen=True)
class Effects:
    """The effects of rounding on a compared tensor: functions for the change of each element.

    `moved` takes the number of bits to which results are rounded. `spread` and `spread_apart` take this number and the number
    of draws. See the methods of `Truth` with these names. `has_kinks` is True if the model has an operator with a kink.
    """

    moved: Callable[[int], np.ndarray]
    spread: Callable[[int, int], np.ndarray]
    spread_apart: Callable[[int, int], np.ndarray]
    has_kinks: bool

    @classmethod
    def of(cls, truth: Truth, combined: Callable[[Callable[[str], np.ndarray]], np.ndarray]) -> Effects:
        """The effects on one tensor that is combined from several gradients.

        :param combined: combines the gradients' effects. It gets a function from a gradient's name to its effect.
        """
        return cls(
            lambda bits: combined(lambda name: np.abs(truth.moved(name, bits))),
            lambda bits, draws: combined(lambda name: truth.spread(name, bits, draws)),
            lambda bits, draws: combined(lambda name: truth.spread_apart(name, bits, draws)),
            bool(kinks_of(truth.point.model)),
        )

    @classmethod
    def on(cls, truth: Truth, name: str) -> Effects:
        """The effects on one gradient."""
        return cls.of(truth, lambda sizes: sizes(name))


@dataclass(frozen=True)
class Rounding:
    """The result of `within_rounding`.

    `outcome` is WITHIN, ZERO, HIDDEN or BEYOND. `allowed` is the error of each element that rounding explains. `note` is a
    remark for the reader of a report, or "".
    """

    outcome: str
    allowed: np.ndarray
    note: str = ""


def within_rounding(
    error: np.ndarray,
    expected: np.ndarray,
    effects: Effects,
    tolerated: float,
    bits: int,
    *,
    coarser: bool,
    gives_up: GivesUp | None = None,
) -> Rounding:
    """Decide if rounding explains the error of a gradient in the types of a model.

    :param error: the absolute difference of each element from the float64 gradient.
    :param expected: the float64 gradient.
    :param tolerated: the error that is allowed in every element.
    :param bits: the significant bits of the coarsest float type in the model.
    :param coarser: allow the spread under coarser rounding too: rounding may move a value across a kink near it.
    :param gives_up: see `allowed_error`.
    """
    plain = np.full(error.shape, tolerated)
    allowed, note = allowed_error(error, plain, effects, bits, through_kinks=True, coarser=coarser, gives_up=gives_up)
    if not is_within(error, allowed):
        return Rounding(BEYOND, allowed, note)
    size = largest(expected)
    if size <= largest(allowed) and _is_noise(effects, size):
        return Rounding(ZERO, allowed)
    note = note or (_HIDES if largest(allowed) > TELLING * size else "")
    hidden = note and np.linalg.norm(error) > TELLING * np.linalg.norm(expected)
    return Rounding(HIDDEN if hidden else WITHIN, allowed, note)


def allowed_error(
    error: np.ndarray,
    plain: np.ndarray,
    effects: Effects,
    bits: int,
    *,
    through_kinks: bool = False,
    coarser: bool = False,
    gives_up: GivesUp | None = None,
) -> tuple[np.ndarray, str]:
    """The error of each element that rounding explains, and a note for the reader. Stops as soon as `error` is explained.

    :param plain: the error that is allowed without any effect of rounding.
    :param bits: the significant bits to which results are rounded.
    :param through_kinks: allow the effects of rounding near a kink, and on terms that cancel each other.
    :param coarser: see `within_rounding`.
    :param gives_up: a function that returns True to make no further draws. Each draw runs the gradient once, which takes long
        for a large model. It gets the errors that remain without random rounding, and the part of them that the draws so far
        explain.
    """
    if is_within(error, plain):
        return plain, ""
    fixed = plain + SENSITIVE * effects.moved(bits)
    if is_within(error, fixed):
        return fixed, ""
    allowed, note = fixed, ""
    for allowed, note in _with_draws(effects, fixed, bits, through_kinks, coarser):
        if is_within(error, allowed) or (gives_up is not None and gives_up(error - fixed, allowed - fixed)):
            return allowed, note
    return allowed, note


def _with_draws(
    effects: Effects, fixed: np.ndarray, bits: int, through_kinks: bool, coarser: bool
) -> Iterator[tuple[np.ndarray, str]]:
    """Yield larger and larger allowed errors, each with a note, from random roundings. The first needs the fewest draws."""
    allowed, note = fixed, ""
    for draws in (FEW_DRAWS, DRAWS):
        allowed = fixed + SENSITIVE * effects.spread(bits, draws)
        yield allowed, note
    if not through_kinks:
        return
    if coarser:
        allowed, note = allowed + effects.spread(bits - _COARSER, DRAWS), _NEAR_A_KINK
        yield allowed, note
    # Terms that cancel each other exactly no longer do so if each term is rounded on its own.
    allowed = allowed + SENSITIVE * effects.spread_apart(bits, DRAWS)
    yield allowed, note
    if effects.has_kinks:  # few draws may miss a unit that rounding moves across its kink
        yield np.maximum(allowed, SENSITIVE * effects.spread(bits, MANY_DRAWS)), _NEAR_A_KINK


def is_within(error: np.ndarray, allowed: np.ndarray) -> bool:
    """True if each error is at most the allowed error. False if an error is NaN or an allowed error is infinite."""
    return bool(np.all((error <= allowed) & (allowed < np.inf)))


def _is_noise(effects: Effects, size: float) -> bool:
    """True if the float64 gradient, of the given size, is no larger than the rounding error of its own computation."""
    if size <= SENSITIVE * largest(effects.moved(FLOAT64_BITS)):
        return True
    seen = SENSITIVE * largest(effects.spread(FLOAT64_BITS, FEW_DRAWS))
    return size <= _CLEARLY * seen and size <= SENSITIVE * largest(effects.spread(FLOAT64_BITS, DRAWS))


def against_float64(truth: Truth, name: str, got: np.ndarray, tolerance: float, own_draws: bool = False) -> Judged:
    """The judgement of a gradient in the model's types, compared with the float64 gradient element by element.

    The allowed error of an element is the tolerance times the largest element, plus the effect of rounding on the element.

    :param own_draws: the executor draws its own random numbers.
    """
    point, expected = truth.point, truth.gradients[name]
    if got.shape != expected.shape:
        return Judged(WRONG, note=f"shape {got.shape}, the float64 gradient has {expected.shape}")
    kind = point.dtype(name)
    if got.dtype not in (kind, np.dtype(np.float64)):
        return Judged(WRONG, note=f"dtype {got.dtype}, {name!r} has {kind}")
    if not np.all(np.isfinite(expected)):
        return Judged(UNDECIDED, note="the float64 gradient is not finite")
    error, size = np.abs(got.astype(np.float64) - expected), largest(expected)
    # Results below the smallest normal number of the type are not accurate.
    tolerated = max(tolerance * size, limits(kind)[1] * max(got.size, 1) ** 0.5)
    if (most := largest(error)) <= tolerated:  # enough, because oracles have confirmed the float64 gradient
        return Judged(
            RIGHT,
            most,
            most / size if size else 0.0,
            tolerance,
            "" if size else "this gradient and the expected one are zero",
        )
    found = within_rounding(error, expected, Effects.on(truth, name), tolerated, truth.bits, coarser=True)
    worst = _worst(error, found.allowed)
    numbers = _numbers(error, found.allowed, worst, size)
    if found.outcome == BEYOND:
        if point.draws and own_draws:
            return Judged(
                UNDECIDED, *numbers, f"{', '.join(point.draws)}: the executor draws random numbers of its own"
            )
        if truth.element_out_of_range and _confinement_explains(truth, name, error, found.allowed):
            return Judged(UNDECIDED, *numbers, truth.element_out_of_range)
        return Judged(WRONG, *numbers, f"{element_text(got, worst)}, in float64 it is {expected[worst]:.6g}")
    if found.outcome == ZERO:
        return Judged(RIGHT, *numbers, "this gradient and the expected one are zero up to rounding")
    return Judged(UNDECIDED if found.outcome == HIDDEN else RIGHT, *numbers, found.note)


def against_elements(truth: Truth, said: Elementwise, got: np.ndarray, tolerance: float, exact: bool = False) -> Judged:
    """The judgement of a gradient, compared element by element with the gradient of another autodiff.

    :param exact: the gradient was computed in float64, not in the model's types.
    """
    if got.shape != said.gradient.shape:
        return Judged(WRONG, note=f"shape {got.shape}, {said.oracle} has {said.gradient.shape}")
    if not np.all(np.isfinite(said.gradient)):
        return Judged(UNDECIDED, note=f"the gradient of {said.oracle} is not finite")
    error, size = np.abs(got - said.gradient), largest(said.gradient)
    allowed = np.full(error.shape, (tolerance + said.error) * max(size, largest(got)))
    if said.name in truth.gradients:
        bits = FLOAT64_BITS if exact else truth.bits
        allowed, _ = allowed_error(error, allowed, Effects.on(truth, said.name), bits)
    if not size and is_within(error, allowed):
        return Judged(RIGHT, 0.0, 0.0, tolerance, "this gradient and the expected one are zero")
    worst = _worst(error, allowed)
    numbers = _numbers(error, allowed, worst, size)
    if is_within(error, allowed):
        return Judged(RIGHT, *numbers)
    return Judged(WRONG, *numbers, f"{element_text(got, worst)}, {said.oracle} has {said.gradient[worst]:.6g}")


def _worst(error: np.ndarray, allowed: np.ndarray) -> tuple[int, ...]:
    """The index of the element whose error is the largest multiple of its allowed error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(error == 0, 0.0, error / allowed)
    part = np.where(np.isnan(part), np.inf, part)
    return tuple(map(int, np.unravel_index(np.argmax(part), part.shape)))


def _numbers(error: np.ndarray, allowed: np.ndarray, worst: tuple[int, ...], size: float) -> tuple[float, float, float]:
    """Three numbers of the element `worst`: its error, its error over `size`, and its allowed error over `size`.

    `size` is the largest element. If it is 0, the second number is infinite, and the third one is not divided.
    """
    if not size:
        return float(error[worst]), np.inf, float(allowed[worst])
    return float(error[worst]), float(error[worst] / size), float(allowed[worst] / size)


def _confinement_explains(truth: Truth, name: str, error: np.ndarray, allowed: np.ndarray) -> bool:
    """True if each element whose error is too large also changes if intermediate results are kept in the range of their type.

    Also True if the gradients of that computation are missing or have another shape.
    """
    expected = truth.gradients[name]
    try:
        confined = truth.confined(name)
    except BackendError:
        return True
    moved = np.zeros(expected.shape, bool)
    for value in confined:
        if value.shape != expected.shape:
            return True
        moved |= ~(np.abs(value - expected) <= allowed)
    return bool(np.all(moved | (error <= allowed)))
