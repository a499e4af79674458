"""Recognise the mistake of an answer: its numbers are compared with the numbers of wrong rules, planted on purpose.

The chapter's own mistakes come first, then what can go wrong with any derivative (a factor, the cotangent forgotten, an
order), then both at once, and then the mutants of the conformance suite: a right rule with one change in one node. An answer
has made a mistake if it equals it at every point where it gives numbers, and is wrong at one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refgrad.conformance.tools.mutating.survey import mutants_of
from refgrad.errors import RefgradError
from refgrad.tables.registry import RULES, rule
from refgrad.teaching.chapter import DOMAIN, Chapter, Mistake
from refgrad.teaching.trials import AnswerTrial, Gradients, close
from refgrad.teaching.verdict import Example

_FACTORS = {
    2.0: "A factor of 2 too many.",
    0.5: "A factor of ½ too many: it has to be twice as large.",
    -1.0: "The sign is wrong.",
    -2.0: "The sign is wrong, and a factor of 2 too many.",
    -0.5: "The sign is wrong, and a factor of ½ too many.",
}
_EMPTY = "a sum of nothing, zeros of the shape of the input"
_NOT_FINITE = (
    "It is infinite or NaN, where the derivative is a number: look for a division by 0, a logarithm of 0, or a softmax over "
    "nothing but −∞."
)
_UNKNOWN = "None of the known mistakes gives these numbers. Follow the example below with a pencil, term by term."


@dataclass(frozen=True)
class Tried:
    """A trial with what the answer gave there."""

    trial: AnswerTrial
    gradients: Gradients

    def is_off(self, name: str) -> bool:
        """True if the derivative by an input is wrong."""
        return not close(self.gradients[name], self.trial.expected[name])


def hints(chapter: Chapter, tried: Sequence[Tried], names: Sequence[str]) -> list[str]:
    """A sentence for each input in `names`, the derivatives by which are wrong at some of these trials."""
    some = [trial_run for trial_run in tried if not trial_run.trial.point.is_empty]
    hints_by_input: dict[str, str] = {}
    for name in names:
        if hint := _of_type(name, tried):
            hints_by_input[name] = hint
        elif not any(trial_run.is_off(name) for trial_run in some):
            hints_by_input[name] = f"Right, except where an input has no elements: the derivative is then {_EMPTY}."
        elif hint := _recognised(chapter, some, name):
            hints_by_input[name] = hint
        elif any(not np.all(np.isfinite(trial_run.gradients[name])) for trial_run in some):
            hints_by_input[name] = _NOT_FINITE
    left = [name for name in names if name not in hints_by_input]
    hints_by_input |= _of_mutants(chapter, some, left) if left else {}
    return [f"d{name}: {hints_by_input.get(name) or _unrecognised(some, name)}" for name in names]


def example(tried: Sequence[Tried], name: str) -> Example | None:
    """The smallest point at which the derivative by an input is wrong."""
    off = [trial_run for trial_run in tried if trial_run.is_off(name)]
    if not off:
        return None
    least = min(off, key=lambda trial_run: (trial_run.trial.point.is_empty, trial_run.trial.point.size))
    point, chapter = least.trial.point, least.trial.chapter
    arguments: dict[str, Any] = {**point.inputs, **point.attributes, f"d{chapter.output}": point.cotangent}
    return Example(arguments, name, least.gradients[name], least.trial.expected[name])


def _of_type(name: str, tried: Sequence[Tried]) -> str:
    """The hint on a wrong element type of an answer, or ""."""
    for trial_run in tried:
        got, due = trial_run.gradients[name], np.dtype(trial_run.trial.kind)
        if got.dtype != due:
            return f"Its elements are {got.dtype}, and {name} has {due}. A cotangent has the type of its input."
    return ""


def _recognised(chapter: Chapter, tried: Sequence[Tried], name: str) -> str:
    planted = [mistake for mistake in chapter.mistakes if mistake.of == name]
    for mistake in planted:
        if _equals(tried, name, _planted(mistake)):
            return mistake.hint
    for hint, wrong in _of_any(chapter, name):
        if _equals(tried, name, wrong):
            return hint
    if factor := _factor(tried, name, lambda trial_run: trial_run.trial.expected[name]):
        return _FACTORS.get(factor, f"It is {factor:.4g} times as large as it should be, everywhere.")
    for mistake in planted:
        if factor := _factor(tried, name, _planted(mistake)):
            more = _FACTORS.get(factor, f"Besides, it is {factor:.4g} times as large.")
            return f"{mistake.hint} {more}"
    return ""


Wrong = Callable[[Tried], Any]


def _planted(mistake: Mistake) -> Wrong:
    return lambda trial_run: mistake.wrong(trial_run.trial.point.named(trial_run.trial.chapter.output))


def _of_any(chapter: Chapter, name: str) -> Iterator[tuple[str, Wrong]]:
    """The hints on mistakes that any derivative can have, each with the wrong derivative at a point."""
    zero = "It is 0 everywhere: the rule returns None, or nothing of the cotangent reaches it."
    yield zero, lambda trial_run: np.zeros_like(trial_run.trial.expected[name])
    missing = f"The cotangent d{chapter.output} is missing: by the chain rule every term has it as a factor."
    yield missing, lambda trial_run: trial_run.trial.without_cotangent[name]
    for other in chapter.floats:
        if other != name:
            order = ", ".join(f"d{each}" for each in chapter.floats)
            swapped = f"Yours is d{other}: the cotangents may be in the wrong order. Return {order}."
            yield swapped, lambda trial_run, other=other: trial_run.trial.expected[other]  # type: ignore[misc]
    yield (
        "Yours is the cotangent itself: the derivative of the operator is missing.",
        lambda trial_run: trial_run.trial.point.cotangent,
    )
    yield "Yours is its input, not a derivative.", lambda trial_run: trial_run.trial.point.inputs[name]
    yield "It is transposed.", lambda trial_run: trial_run.trial.expected[name].T
    yield "Its elements are in reverse order.", lambda trial_run: np.flip(trial_run.trial.expected[name])


def _equals(tried: Sequence[Tried], name: str, wrong: Wrong) -> bool:
    """True if an answer is what a mistake gives, at every point; and a wrong one at some."""
    telling = False
    with np.errstate(all="ignore"):
        for trial_run in tried:
            try:
                wrong_gradient = np.asarray(wrong(trial_run))
            except (ValueError, IndexError):  # its operands do not fit here, and the answer has numbers
                return False
            if not close(trial_run.gradients[name], wrong_gradient):
                return False
            telling |= trial_run.is_off(name)
    return telling


def _factor(tried: Sequence[Tried], name: str, wrong: Wrong) -> float:
    """By how much an answer is larger than what `wrong` gives, at every point; 0 where that is no one number."""
    factor = 0.0
    with np.errstate(all="ignore"):
        for trial_run in tried:
            got = trial_run.gradients[name].astype(np.float64)
            try:
                wrong_gradient = np.asarray(wrong(trial_run), np.float64)
            except (ValueError, IndexError):
                return 0.0
            if got.shape != wrong_gradient.shape:
                return 0.0
            if not factor and np.any(wrong_gradient):
                place = np.unravel_index(np.argmax(np.abs(wrong_gradient)), wrong_gradient.shape)
                factor = float(got[place] / wrong_gradient[place])
            if not close(got, factor * wrong_gradient):
                return 0.0
    rounded = next((known for known in _FACTORS if abs(factor - known) < 1e-3), factor)
    return rounded if np.isfinite(factor) and abs(factor - 1) > 1e-3 else 0.0


def _of_mutants(chapter: Chapter, tried: Sequence[Tried], names: Sequence[str]) -> dict[str, str]:
    """The hints for the inputs whose derivative equals the derivative by a mutant of the chapter's right rule."""
    hints_by_input: dict[str, str] = {}
    answered = RULES[chapter.key]
    try:
        rule(chapter.operator, domain=DOMAIN, replace=True)(chapter.solution)
        trials = [AnswerTrial(chapter, trial_run.trial.point) for trial_run in tried]
        largest = max(trials, key=lambda trial: trial.point.size)
        for mutant, breaking in mutants_of(chapter.key, largest.case):
            with breaking():
                try:
                    gradients = [AnswerTrial(chapter, trial_run.trial.point).gradients() for trial_run in tried]
                except RefgradError:  # broken, it does not run at some point
                    continue
            for name in names:
                wrong_gradients = [gradient[name] for gradient in gradients]
                same = all(
                    close(trial_run.gradients[name], wrong)
                    for trial_run, wrong in zip(tried, wrong_gradients, strict=True)
                )
                if name not in hints_by_input and same:
                    hints_by_input[name] = (
                        f"These are the numbers of a right rule with one change, in {mutant.place}: {mutant.change}."
                    )
            if len(hints_by_input) == len(names):
                break
    finally:
        RULES[chapter.key] = answered
    return hints_by_input


def _unrecognised(tried: Sequence[Tried], name: str) -> str:
    """The hint on an answer that has made no known mistake."""
    off = [trial_run for trial_run in tried if trial_run.is_off(name)]
    least = min(off, key=lambda trial_run: trial_run.trial.point.size)
    got, right = least.gradients[name], least.trial.expected[name]
    if got.shape != right.shape:
        return f"It has shape {got.shape}, and {name} has {right.shape}. A cotangent has the shape of its input."
    if len(off) < len(tried):
        return f"It is right at {len(tried) - len(off)} of {len(tried)} points. {_UNKNOWN}"
    return _UNKNOWN
