"""The results as a reader needs them first: whose fault, which operator, how many cases, the smallest case, what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import BUILDER, EXECUTOR, ResultRow
from refgrad.conformance.judge.running.results import Results
from refgrad.conformance.reports.tally import shortened
from refgrad.conformance.reports.traits import common
from refgrad.conformance.verdicts import (
    CONVENTION,
    CRASHED,
    FAULTS,
    OUT_OF_MEMORY,
    REFUSED,
    RIGHT,
    TIMED_OUT,
    UNDECIDED,
    UNSUPPORTED,
    VERDICTS,
    WRONG,
)
from refgrad.errors import abridged, counted
from refgrad.escaping import shell_line

Key: TypeAlias = tuple[str, str, str, str, str]  # the side, its name, the operator, what it gets wrong, the verdict
MODEL, GRADIENT = "forward", "gradient"  # what a side gets wrong: the operator itself, or its gradient
_NAMES = 8  # of operators, in a line
_SIDES = 4  # at fault, in a sentence
_SAID = {UNSUPPORTED: "does not support", REFUSED: "refuses", UNDECIDED: "cannot be judged for"}
_WORDS = {
    WRONG: "is wrong",
    CRASHED: "crashes",
    UNSUPPORTED: "is not supported",
    TIMED_OUT: "takes too long",
    OUT_OF_MEMORY: "runs out of memory",
}


@dataclass(frozen=True)
class Group:
    """The rows with one fault: `verdict` on `what`, "forward" or "gradient", of one operator, by one side.

    `side` is "builder" or "executor" with its `name`; "" where it is not known, then `name` has both. `rows` are sorted, the
    smallest case first. `asked` is the number of cases of the operator that the side was asked about. `when` says what the
    cases have in common that the others do not, "" where nothing separates them. `command` shows the smallest case.
    """

    side: str
    name: str
    operator: str
    what: str
    verdict: str
    rows: tuple[ResultRow, ...]
    asked: int
    when: str
    command: str

    @property
    def cases(self) -> int:
        """The number of different cases."""
        return len({row.case for row in self.rows})

    @property
    def smallest(self) -> ResultRow:
        """The row of the smallest case."""
        return self.rows[0]

    @property
    def note(self) -> str:
        """The difference in the smallest case."""
        row = self.smallest
        note = row.forward_note if self.what == MODEL else row.note
        return " ".join(note.split()) or VERDICTS[self.verdict]

    @property
    def is_fault(self) -> bool:
        """True if a gradient of the group is wrong, crashed, timed out or ran out of memory."""
        return any(row.verdict in FAULTS for row in self.rows)

    @property
    def who(self) -> str:
        """The side with its name."""
        return f"the {self.side} {self.name}" if self.side else f"{self.name} (builder or executor)"

    @property
    def fault(self) -> str:
        """The operator, its fault, and when the fault occurs."""
        words = _WORDS.get(self.verdict, self.verdict)
        if self.what == MODEL:
            what = "forward pass"
            beside = "" if self.is_fault or self.verdict not in FAULTS else ", but no gradient is wrong"
        else:
            what = "gradient"
            # Only rows with a `side` come from a runner that also ran the operator itself.
            judged = all(row.side == EXECUTOR for row in self.rows)
            beside = ", though the operator itself is right" if judged else ""
        return f"the {what} of {self.operator} {words}{self.when and f' {self.when}'}{beside}"

    @property
    def title(self) -> str:
        """One line: the side, the operator, its fault, when it occurs, and in how many cases."""
        count = counted(self.asked, "case")
        if self.asked > 1:
            count = f"all {count}" if self.cases == self.asked else f"{self.cases} of {count}"
        return f"{self.who}: {self.fault}: {count}"

    @property
    def certainty(self) -> str:
        """How sure the fault is in the smallest case: the oracles that say so, and the error beside the allowed one."""
        if self.verdict != WRONG:
            return "it gives no result"
        if self.what == MODEL:
            return "rounding does not explain the distance from the interpreter's result, in float64 and in the model's types"
        row = self.smallest
        told = f"{', '.join(row.witnesses)} say so" if row.witnesses else "the result is no gradient"
        allowed = "" if row.allowed is None else f", {row.allowed:.2g} is allowed"
        return told if row.relative is None else f"{told}; relative error {row.relative:.2g}{allowed}"

    def document(self) -> dict[str, Any]:
        """The group for JSON."""
        return {
            "title": self.title,
            "side": self.side,
            "name": self.name,
            "operator": self.operator,
            "what": self.what,
            "verdict": self.verdict,
            "is_fault": self.is_fault,
            "cases": self.cases,
            "asked": self.asked,
            "when": self.when,
            "who": self.who,
            "fault": self.fault,
            "smallest": self.smallest.case,
            "note": self.note,
            "command": self.command,
            "rows": [[row.case, row.builder, row.executor] for row in self.rows],
        }


def faults(
    results: Results, cases: Iterable[Case] = (), is_known: Callable[[ResultRow, str], bool] = lambda row, what: False
) -> list[Group]:
    """The groups of every fault, and of every executor's wrong results of a model whose gradient is right anyway.

    Those come last. Among faults, wrong results of an operator itself come first, then the groups with the most cases.

    :param cases: the cases, as far as they are known: without them no group says `when`.
    :param is_known: true of a row, and of "forward" or "gradient", that is left out.
    """
    known = {case.name: case for case in cases}
    found: dict[Key, list[ResultRow]] = {}
    of_case: dict[str, list[ResultRow]] = {}
    for row in results.rows:
        of_case.setdefault(row.case, []).append(row)
    for row in results.rows:
        side = row.side or _side(row, of_case[row.case])
        for key in _keys(row, side, results.cases[row.case].operator):
            if not is_known(row, key[3]):
                found.setdefault(key, []).append(row)
    return sorted(
        _groups(found, results, known),
        key=lambda one: (
            not one.is_fault,
            one.what != MODEL,
            one.verdict != WRONG,
            -one.cases,
            one.name,
            one.operator,
        ),
    )


def counts_of(results: Results) -> str:
    """The numbers of verdicts, cases and operators, in words."""
    operators = {about.operator for about in results.cases.values()}
    numbers = (
        counted(len(results.rows), "verdict"),
        counted(len(results.cases), "case"),
        counted(len(operators), "operator"),
    )
    return f"{numbers[0]} ({numbers[1]} of {numbers[2]})"


def sentence(results: Results, groups: Sequence[Group]) -> tuple[str, str]:
    """The verdict on all results together, and the result in one sentence: who is at fault in which operators."""
    if not results.faults:
        counts = Counter(row.verdict for row in results.rows)
        verdict = next((one for one in (RIGHT, CONVENTION, UNDECIDED, *VERDICTS) if counts[one]), UNDECIDED)
        told = ", ".join(f"{counts[one]} {one}" for one in VERDICTS if counts[one])
        return verdict, f"{verdict}: no fault in {counts_of(results)}{told and f': {told}'}"
    operators: dict[str, list[str]] = {}
    for group in groups:
        if group.is_fault:
            operators.setdefault(group.who, []).append(group.operator)
    sides = [f"{who} in {abridged(dict.fromkeys(names))}" for who, names in operators.items()]
    if len(sides) > _SIDES:
        sides[_SIDES:] = [f"{len(sides) - _SIDES} more"]
    return WRONG, f"{counted(len(results.faults), 'fault')} in {counts_of(results)}: {'; '.join(sides)}"


def not_answered(results: Results) -> list[Group]:
    """The groups of what executors say that they do not support, forward first, and of what builders refuse."""
    found: dict[Key, list[ResultRow]] = {}
    for row in results.rows:
        operator = results.cases[row.case].operator
        if row.forward == UNSUPPORTED:
            found.setdefault((EXECUTOR, row.executor, operator, MODEL, UNSUPPORTED), []).append(row)
        elif row.verdict == UNSUPPORTED:
            found.setdefault((EXECUTOR, row.executor, operator, GRADIENT, UNSUPPORTED), []).append(row)
        if row.verdict == REFUSED:
            found.setdefault((BUILDER, row.builder, operator, GRADIENT, REFUSED), []).append(row)
        if row.verdict == UNDECIDED:
            name = f"{row.builder} on {row.executor}"
            found.setdefault(("", name, operator, GRADIENT, UNDECIDED), []).append(row)
    groups = _groups(found, results, {})
    return sorted(groups, key=lambda one: (one.side, one.what != MODEL, one.name, one.operator))


def without_answer(groups: Iterable[Group], verbose: bool = False) -> Iterator[str]:
    """A line for each side and verdict with the operators concerned (`not_answered`); with `verbose`, for each operator."""
    if verbose:
        for group in groups:
            cases = f"{group.cases} of {counted(group.asked, 'case')}"
            yield f"{_heading(group)} {group.operator}: {cases}, such as {group.smallest.case}: {group.note}"
        return
    for heading, same in groupby(groups, key=_heading):
        listed = sorted(same, key=lambda group: -group.cases)
        names = abridged([f"{group.operator} ({group.cases})" for group in listed], _NAMES)
        yield f"{heading} {names}, such as {listed[0].smallest.case}: {shortened(listed[0].note)}"


def _heading(group: Group) -> str:
    who = f"the {group.side} {group.name}" if group.side else group.name
    of = "" if group.what == MODEL or group.side == BUILDER else " the gradient of"
    return f"{group.verdict}: {who} {_SAID[group.verdict]}{of}"


def _side(row: ResultRow, of_case: Sequence[ResultRow]) -> str:
    """The side at fault, as far as other verdicts on the same case tell; "" where they do not.

    A side that is right in another row of this case is not at fault.
    """
    if row.verdict not in FAULTS:
        return ""
    at_fault = [(other.builder, other.executor) for other in of_case if other.verdict in FAULTS]
    right = [(other.builder, other.executor) for other in of_case if other.verdict == RIGHT]
    builders, executors = {builder for builder, _ in right}, {executor for _, executor in right}
    if row.builder in builders:
        return EXECUTOR
    if row.executor in executors:
        return BUILDER
    if any(executor == row.executor and builder in builders for builder, executor in at_fault):
        return EXECUTOR
    return BUILDER if any(builder == row.builder and executor in executors for builder, executor in at_fault) else ""


def _keys(row: ResultRow, side: str, operator: str) -> Iterator[Key]:
    """The group of each side at fault; a row may belong to two."""
    if row.forward in FAULTS:
        yield EXECUTOR, row.executor, operator, MODEL, row.forward
        if side == EXECUTOR:
            return
    if row.verdict in FAULTS:
        names = {BUILDER: row.builder, EXECUTOR: row.executor}
        yield side, names.get(side, f"{row.builder} on {row.executor}"), operator, GRADIENT, row.verdict


def _groups(found: Mapping[Key, list[ResultRow]], results: Results, known: Mapping[str, Case]) -> list[Group]:
    of_operator: dict[str, list[ResultRow]] = {}
    for row in results.rows:
        of_operator.setdefault(results.cases[row.case].operator, []).append(row)
    return [_group(key, rows, of_operator[key[2]], results, known) for key, rows in found.items()]


def _group(
    key: Key,
    rows: Iterable[ResultRow],
    of_operator: Iterable[ResultRow],
    results: Results,
    known: Mapping[str, Case],
) -> Group:
    side, name, operator, what, verdict = key
    ordered = sorted(rows, key=lambda row: _size(row, known))
    mine = {row.case for row in ordered}
    asked = {row.case for row in of_operator if _is_by(row, key)}
    others = [known[case] for case in sorted(asked - mine) if case in known]
    when = common([known[case] for case in sorted(mine) if case in known], others)
    first = ordered[0]
    command = results.comparison(first, side) if verdict in FAULTS else results.command(first)
    return Group(side, name, operator, what, verdict, tuple(ordered), len(asked), when, shell_line(command))


def _is_by(row: ResultRow, key: Key) -> bool:
    """True if a row is about the side of a group."""
    side, name, *_ = key
    return {BUILDER: row.builder, EXECUTOR: row.executor}.get(side, f"{row.builder} on {row.executor}") == name


def _size(row: ResultRow, known: Mapping[str, Case]) -> tuple[int, int, int, str]:
    """The size of a case: fed numbers, nodes, and the length of its name."""
    if row.case not in known:
        return 0, 0, len(row.case), row.case
    case = known[row.case]
    size = sum(getattr(value, "size", 1) for value in case.feeds.values())
    return size, len(case.model.graph.node), len(row.case), row.case
