"""Judge an answer, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import refgrad
from refgrad.conformance.oracles.second_order import ORACLE as SECOND_ORDER
from refgrad.conformance.questions.evidence import Property
from refgrad.errors import BackendError, OptionError, RefgradError, WorkerError
from refgrad.notices import quiet
from refgrad.teaching.answers import Fault, Printed, explained, read_answer, short
from refgrad.teaching.chapter import Chapter
from refgrad.teaching.chapters import chapter_of
from refgrad.teaching.operators import register
from refgrad.teaching.recognition import Tried, example, hints
from refgrad.teaching.ties import hint_at
from refgrad.teaching.trials import Trial, further, plain
from refgrad.teaching.verdict import Verdict
from refgrad.worker import Worker

SECONDS = 60.0  # that an answer may take; a right one takes two, most of which is the start of the process
MEMORY = 1 << 30  # bytes that it may take, beside those of the libraries
_LARGEST = 1 << 20  # bytes of an answer


def judge(number: int, path: str | os.PathLike[str], seconds: float = SECONDS, memory: int = MEMORY) -> Verdict:
    """The verdict on the answer in the file `path` to the exercise of a chapter.

    The answer is Python, and it is run: in a process of its own, which ends after `seconds`, and gets no more than `memory`
    bytes where the system can limit it. That keeps accidents away, and not malice.

    :raises OptionError: there is no such chapter, or no such file, or it is larger than an answer can be.
    """
    chapter_of(number)
    source = _checked(Path(path), number)
    with Worker(seconds, room=memory) as worker:
        try:
            verdict: Verdict = worker.call(judge_here, number, str(source))
        except WorkerError as error:
            return Verdict(number, False, (_ended(error, seconds, memory),))
    return verdict


def _checked(path: Path, number: int) -> Path:
    shown = reprlib.repr(str(path))
    begin = f"`refgrad teach {number} --start {path if path.suffix == '.py' else 'answer.py'}` writes one to begin with."
    try:
        if path.is_dir():
            raise OptionError(f"{shown} is a folder. Give the path of an answer, such as answer.py in it. {begin}")
        if not path.exists():
            raise OptionError(f"There is no file {shown}. {begin}")
        if not path.is_file():
            raise OptionError(f"{shown} is no regular file. Give the path of an answer. {begin}")
        if path.stat().st_size > _LARGEST:
            raise OptionError(f"{shown} is larger than 1 MB: that is no answer. {begin}")
        with open(path, "rb"):
            return path.resolve()
    except OSError as error:
        raise OptionError(f"{shown} cannot be read: {error.strerror or error}.") from error


def _ended(error: WorkerError, seconds: float, memory: int) -> str:
    """What is said of an answer whose process ended."""
    if error.verdict == "timed out":
        return f"The answer did not finish within {seconds:g} s. Is there a loop that never ends?"
    if error.verdict == "out of memory":
        return f"The answer uses up the memory, {memory / 2**20:.4g} MB. A rule writes nodes; it needs no large arrays."
    if error.verdict == "raised":
        return f"The answer cannot be judged: {error.raised}: {short(error)}"
    return f"The answer ended its process: {short(error)}. A rule returns its adjoints, and ends nothing."


def judge_here(number: int, path: str) -> Verdict:
    """The verdict on an answer, which is run in this process: what it registers stays, and what it breaks is broken."""
    chapter, source, printed = chapter_of(number), Path(path), Printed()
    register(chapter)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            read_answer(chapter, source)
            verdict = _judged(chapter, source)
        except Fault as fault:
            verdict = Verdict(number, False, fault.hints)
        except (SystemExit, KeyboardInterrupt, MemoryError) as error:
            verdict = Verdict(number, False, explained(error, chapter, source))
    return replace(verdict, printed=printed.getvalue())


def _judged(chapter: Chapter, source: Path) -> Verdict:
    trials = plain(chapter)
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
    ties = [Trial(chapter, point) for point in chapter.points if point.together]
    for trial in ties:
        hint, shown = hint_at(trial, trial.gradients())
        if hint:
            return Verdict(chapter.number, False, (hint,), shown, trials=len(trials) + len(more))
    if chapter.second and (why := _second(trials[0])):
        return Verdict(chapter.number, False, why, trials=len(trials) + len(more))
    count = len(trials) + len(more) + len(ties) + chapter.second
    return Verdict(chapter.number, True, trials=count, witnesses=tuple(sorted(witnesses)))


def _answered(
    trials: Sequence[Trial], chapter: Chapter, source: Path
) -> tuple[list[Tried], list[tuple[Trial, tuple[str, ...]]]]:
    """What the answer gives at each point, and the points at which its gradient does not run, with the reasons.

    :raises Fault: refgrad does not take the rule.
    """
    tried, failures = [], []
    for trial in trials:
        try:
            tried.append(Tried(trial, trial.gradients()))
        except BackendError as error:  # a MatMul of sizes that do not fit, where others do
            failures.append((trial, explained(error, chapter, source)))
        except RefgradError as error:
            raise Fault(*explained(error, chapter, source)) from error
    return tried, failures


def _stands(trial: Trial, chapter: Chapter, source: Path) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Whether an answer that is right at plain points is right here too, who says so, and why not."""
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
            return False, (), (f"{begin}, d{name} is {got.dtype}. An adjoint has the type of its input.",)
    return False, (), (f"{begin}, it is wrong: {trial.verdict(gradients).note}.",)


def _second(trial: Trial) -> tuple[str, ...]:
    """What is wrong with the second derivative, or nothing."""
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
    found = SECOND_ORDER.examine(trial.question, built) if SECOND_ORDER.examine is not None else ()
    for one in found:
        if isinstance(one, Property) and not one.holds:
            return (
                "The first derivative is right, and the second is wrong: differentiated again, the gradient model is not "
                "what differences of the gradient are.",
                f"{one.note}.",
            )
    return ()
