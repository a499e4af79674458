"""The result of a check of a gradient: a row for each comparison, and the answer in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from refgrad.conformance.oracles.differences import NAME as DIFFERENCES
from refgrad.conformance.verdicts import (
    CONVENTION,
    CRASHED,
    FAULTS,
    OUT_OF_MEMORY,
    RIGHT,
    TIMED_OUT,
    UNDECIDED,
    UNSUPPORTED,
    WRONG,
)
from refgrad.errors import abridged, choices, counted
from refgrad.markup import BAD, html_table

FLOAT64 = "float64"  # an oracle: the gradient on the interpreter
BUILDER = "onnxruntime"  # in place of a dialect: its own builder
ENDED = (CRASHED, TIMED_OUT, OUT_OF_MEMORY)  # verdicts on an executor that gave no answer

_NOTES = 4  # of rows that are wrong, in a notebook


@dataclass(frozen=True)
class Row:
    """One gradient as one executor computed it, against one oracle.

    `absolute` and `relative` are the largest error over the elements (or the directions) and that error relative to the
    largest element (or the norm); `allowed` is the largest relative error that rounding and the oracle explain. They are
    None where nothing was compared.
    """

    gradient: str
    dialect: str
    backend: str
    oracle: str
    verdict: str
    absolute: float | None = None
    relative: float | None = None
    allowed: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """The result of `check`.

    `skipped` says which dialects were not compared on which executor, and why. `tolerance` is the error that was allowed, or
    None for what rounding explains. `stopped` says why the check ended before all was compared, "" if it did not.
    """

    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    seed: int
    feeds: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...] = ()
    tolerance: float | None = None
    stopped: str = ""

    @property
    def ok(self) -> bool:
        """True if no gradient of refgrad's is wrong on a backend, or fails there."""
        return not self.faults

    @property
    def faults(self) -> tuple[Row, ...]:
        """The rows that show something wrong with refgrad or a backend. ONNX Runtime's own builder does not count."""
        return tuple(row for row in self.rows if row.verdict in FAULTS and row.dialect != BUILDER)

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The inputs whose gradient no difference confirms."""
        settled = {
            row.gradient
            for row in self.rows
            if row.oracle == DIFFERENCES and row.verdict == RIGHT and (row.allowed or 0) < 1
        }
        return tuple(name for name in self.wrt if name not in settled)

    @property
    def answer(self) -> tuple[str, str]:
        """The answer in one sentence: the verdict on the gradients together, and the rest of the sentence."""
        verdicts: dict[str, set[str]] = {name: set() for name in self.wrt}
        for row in self.rows:
            if row.dialect != BUILDER:
                verdicts.setdefault(row.gradient, set()).add(row.verdict)
        wrong = [name for name, found in verdicts.items() if WRONG in found]
        ended = [name for name, found in verdicts.items() if not found.isdisjoint(ENDED)]
        right = self._right
        if wrong:
            return WRONG, f"{_share(wrong, verdicts)}: {abridged(wrong)}"
        if ended:
            at_fault = sorted({row.backend for row in self.faults})
            word = next(verdict for verdict in ENDED if any(row.verdict == verdict for row in self.faults))
            return word, f"{abridged(at_fault)} did not run {_share(ended, verdicts)}"
        sound = {RIGHT, CONVENTION, UNSUPPORTED}
        chosen = [name for name, found in verdicts.items() if CONVENTION in found and found <= sound]
        others = [name for name in verdicts if name not in (*right, *chosen)]
        found = sorted(set().union(*(verdicts[name] for name in others)) - {RIGHT, UNDECIDED})
        undecided = abridged(others) + (f" ({', '.join(found)})" if found else "")
        by_choice = f"{abridged(chosen)}, at a kink"
        if not right and chosen and not others:
            return CONVENTION, by_choice
        if not right:
            return UNDECIDED, undecided + (f"; {CONVENTION}: {by_choice}" if chosen else "")
        compared = [
            row for row in self.rows if row.oracle == FLOAT64 and row.gradient in right and row.dialect != BUILDER
        ]
        agreeing = [row for row in compared if row.verdict == RIGHT]
        error = max((row.relative for row in agreeing if row.relative is not None), default=0.0)
        executors = {row.backend for row in agreeing}
        unsure = sorted({row.backend for row in compared if row.verdict == UNDECIDED})
        within = "rounding" if self.tolerance is None else f"the tolerance {self.tolerance:g}"
        ran = (
            f"on {counted(len(executors), 'executor')}, largest error {error:.1g}, within {within}"
            if executors
            else "in float64, and no executor ran them"
        )
        rest = [f"{UNDECIDED} on {choices(unsure)}"] * bool(unsure)
        rest += [f"{UNDECIDED}: {undecided}"] * bool(others) + [f"{CONVENTION}: {by_choice}"] * bool(chosen)
        return RIGHT, "; ".join([f"{_share(right, verdicts)} {ran}", *rest])

    @property
    def _right(self) -> list[str]:
        """The gradients that differences confirm, and that at least one of the executors which ran them computes."""
        in_double: dict[str, set[str]] = {}
        by_executors: dict[str, set[str]] = {}
        for row in self.rows:
            if row.dialect != BUILDER and row.verdict != UNSUPPORTED:
                found = in_double if row.oracle == DIFFERENCES else by_executors
                found.setdefault(row.gradient, set()).add(row.verdict)
        confirmed = set(self.wrt).difference(self.unsettled)
        computed = {name for name in self.wrt if RIGHT in by_executors.get(name, {RIGHT})}
        return [
            name
            for name in self.wrt
            if name in confirmed
            and name in computed
            and in_double[name] == {RIGHT}
            and by_executors.get(name, set()) <= {RIGHT, UNDECIDED}
        ]

    def summary(self) -> list[dict[str, Any]]:
        """A row for each dialect, executor and oracle: how often each verdict is, and the gradient with the largest error."""
        verdicts = sorted({row.verdict for row in self.rows}, key=_place)
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.dialect, row.backend, row.oracle), []).append(row)
        summary = []
        for (dialect, backend, oracle), group in groups.items():
            counts = Counter(row.verdict for row in group)
            compared = [row for row in group if row.relative is not None]
            worst = max(compared, key=gravity, default=None)
            asked: dict[str, Any] = {"dialect": dialect, "executor": backend, "compared with": oracle}
            summary.append(
                asked
                | {verdict: counts[verdict] or None for verdict in verdicts}
                | {
                    "largest error in": None if worst is None else worst.gradient,
                    "relative error": None if worst is None else worst.relative,
                    "allowed": None if worst is None else worst.allowed,
                }
            )
        return summary

    def _repr_html_(self) -> str:
        """The summary and the faults, for a notebook."""
        notes = [
            f"{row.gradient} ({row.dialect}, {row.backend}): {row.verdict} {row.note}".rstrip() for row in self.faults
        ]
        word, what = self.answer
        title = f"The gradient of {abridged(self.outputs)} by {abridged(self.wrt)} is {word}: {what}"
        notes = [
            *notes[:_NOTES],
            *(f"skipped: {one}" for one in self.skipped),
            f"Feeds: {self.feeds}; seed {self.seed}.",
        ]
        return html_table(self.summary(), title, notes, dict.fromkeys(FAULTS, BAD))


def _share(names: Collection[str], every: Collection[str]) -> str:
    """How many gradients there are, of how many: `5 gradients`, `2 of 5 gradients`."""
    part = "" if len(names) == len(every) else f"{len(names)} of "
    return f"{part}{counted(len(every), 'gradient')}"


def _place(verdict: str) -> tuple[bool, bool, str]:
    """The place of a verdict: right first, since it is a count in a table, then faults."""
    return verdict != RIGHT, verdict not in FAULTS, verdict


def gravity(row: Row) -> tuple[bool, float]:
    """How much a row needs attention, to sort by: its verdict counts first, then its error beside the allowed one."""
    return row.verdict in FAULTS, (row.relative or 0.0) / (row.allowed or 1.0)
