"""The work of an answer's process: run the answer, try its rule at every point, and find its mistakes."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import refgrad
from refgrad.conformance.oracles.second_order import ORACLE as SECOND_ORDER
from refgrad.conformance.problems.observation import Property
from refgrad.errors import BackendError, RefgradError
from refgrad.notices import quiet
from refgrad.teaching.answers import FaultError, Printed, explained, read_answer, short
from refgrad.teaching.chapter import Chapter
from refgrad.teaching.chapters import chapter_of
from refgrad.teaching.operators import register
from refgrad.teaching.recognition import Tried, example, hints
from refgrad.teaching.ties import hint_at
from refgrad.teaching.trials import AnswerTrial, further, plain
from refgrad.teaching.verdict import Verdict


def judge_here(number: int, path: str) -> Verdict:
    """The verdict on an answer, which is run in this process: what it registers stays, and what it breaks is broken."""
    chapter, source, printed = chapter_of(number), Path(path), Printed()
    register(chapter)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _nothing_typed():
        try:
            read_answer(chapter, source)
            verdict = _judged(chapter, source, printed)
        except FaultError as fault:
            verdict = Verdict(number, False, fault.hints)
        except (SystemExit, KeyboardInterrupt, MemoryError) as error:
            verdict = Verdict(number, False, explained(error, chapter, source))
    return replace(verdict, printed=printed.getvalue())


@contextlib.contextmanager
def _nothing_typed() -> Iterator[None]:
    """No input for whoever asks for some: `input()` would wait for it."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def _judged(chapter: Chapter, source: Path, printed: Printed) -> Verdict:
    trials = plain(chapter)
    _answered(trials[:1], chapter, source)
    printed.enough = True  # the rule is called once more for every point
    tried, failures = _answered(trials, chapter, source)
    witnesses: set[str] = set()
    wrong, nearly = set[str](), ""
    for one in tried:
        right, said = one.trial.is_right(one.gradients)
        witnesses.update(said)
        if not right:
            off = {name for name in chapter.floats if one.is_off(name) or one.gradients[name].dtype != one.trial.kind}
            wrong |= off
            nearly = nearly or ("" if off else one.trial.verdict(one.gradients).note)
    if wrong:
        names = [name for name in chapter.floats if name in wrong]
        shown = next(filter(None, (example(tried, name) for name in names)), None)
        return Verdict(chapter.number, False, tuple(hints(chapter, tried, names)), shown, trials=len(trials))
    if nearly:
        return Verdict(chapter.number, False, (f"Nearly right, but not up to rounding: {nearly}.",), trials=len(trials))
    if failures:
        trial, why = failures[0]
        sizes = ", ".join(f"{n} of shape {x.shape}" for n, x in trial.point.inputs.items())
        return Verdict(chapter.number, False, (f"The gradient does not run with {sizes}.", *why), trials=len(trials))
    more = list(further(chapter))
    for trial in more:
        right, said, why = _stands(trial, chapter, source)
        witnesses.update(said)
        if not right:
            return Verdict(chapter.number, False, why, trials=len(trials) + len(more))
    ties = [AnswerTrial(chapter, point) for point in chapter.points if point.together]
    for trial in ties:
        hint, shown = hint_at(trial, trial.gradients())
        if hint:
            return Verdict(chapter.number, False, (hint,), shown, trials=len(trials) + len(more))
    if chapter.second and (why := _second(max(trials, key=lambda trial: trial.point.size))):
        return Verdict(chapter.number, False, why, trials=len(trials) + len(more))
    witnesses.update({SECOND_ORDER.name} if chapter.second else ())
    count = len(trials) + len(more) + len(ties) + chapter.second
    return Verdict(chapter.number, True, trials=count, witnesses=tuple(sorted(witnesses)))


def _answered(
    trials: Sequence[AnswerTrial], chapter: Chapter, source: Path
) -> tuple[list[Tried], list[tuple[AnswerTrial, tuple[str, ...]]]]:
    """The gradients of the answer at each point, and the points at which its gradient does not run, with the reasons.

    :raises FaultError: refgrad does not take the rule.
    """
    tried, failures = [], []
    for trial in trials:
        try:
            tried.append(Tried(trial, trial.gradients()))
        except BackendError as error:  # a MatMul of sizes that do not fit, where others do
            failures.append((trial, explained(error, chapter, source)))
        except RefgradError as error:
            raise FaultError(*explained(error, chapter, source)) from error
    return tried, failures


def _stands(trial: AnswerTrial, chapter: Chapter, source: Path) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """True if an answer that is right at plain points is right here too, who says so, and why not."""
    begin = f"Right at small points. Where {trial.what}" if trial.what else "Right at small points. At random numbers"
    try:
        gradients = trial.gradients()
    except RefgradError as error:
        said = explained(error, chapter, source)
        return False, (), (f"{begin}, it does not get as far as numbers.", *said)
    right, witnesses = trial.is_right(gradients)
    if right:
        return True, witnesses, ()
    for name, got in gradients.items():
        if got.dtype != trial.kind:
            return False, (), (f"{begin}, d{name} is {got.dtype}. A cotangent has the type of its input.",)
    return False, (), (f"{begin}, it is wrong: {trial.verdict(gradients).note}.",)


def _second(trial: AnswerTrial) -> tuple[str, ...]:
    """The hints on a second derivative that is missing or wrong; none where it is right."""
    built = trial.built
    names = list(built.gradients)
    try:
        with quiet():
            refgrad.gradient(built.model, names, list(built.gradients.values()))
    except RefgradError as error:
        return (
            "The first derivative is right, and the second is missing: the gradient model cannot be differentiated again. "
            "Write the rule in operators of ONNX alone, each of which has a derivative.",
            short(error),
        )
    found = SECOND_ORDER.examine(trial.problem, built) if SECOND_ORDER.examine is not None else ()
    for one in found:
        if isinstance(one, Property) and not one.holds:
            return (
                "The first derivative is right, and the second is wrong: differentiated again, the gradient model is not "
                "what differences of the gradient are.",
                f"{one.note}.",
            )
    return ()
