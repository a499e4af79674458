"""The output of the commands of `refgrad conformance`: progress, results, remarks, and the end of an interrupted run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from refgrad.cli.output import Bar, print_json, say, stdout
from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.limitations import Limitation, Limitations
from refgrad.conformance.judge.running.results import Results
from refgrad.conformance.judge.running.runner import Lanes, Plan
from refgrad.conformance.reports import groups, terminal
from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT, UNDECIDED, VERDICTS
from refgrad.errors import WorkerError, abridged, counted
from refgrad.worker import Worker


class RunProgress:
    """Shows on a bar how many cases are done, of which operators, and the verdicts so far."""

    def __init__(self, cases: list[Case], bar: Bar) -> None:
        self._bar, self._of = bar, {case.name: case.operator for case in cases}
        self._operators: set[str] = set()
        self._verdicts: Counter[str] = Counter()
        bar(0, len(cases), "starting processes")

    def __call__(self, done: int, total: int, case: str, rows: Sequence[ResultRow]) -> None:
        """Count the verdicts on one more case."""
        self._operators.add(self._of[case])
        self._verdicts.update(row.verdict for row in rows)
        so_far = ", ".join(f"{self._verdicts[verdict]} {verdict}" for verdict in VERDICTS if self._verdicts[verdict])
        self._bar(done, total, f"{self._of[case]}; {counted(len(self._operators), 'operator')}; {so_far}")


def kept_in(journal: Path | None) -> str:
    """The remark on what an interrupted run keeps, and how to go on."""
    if journal is None:
        return "Nothing is kept. A run with --journal FILE can be resumed."
    if not journal.exists():
        return "Nothing is kept: the journal begins with the first verdict."
    count = max(journal.read_bytes().count(b"\n") - 1, 0)  # the first line has the settings
    done = counted(count, "case")
    return f"The journal {str(journal)!r} has the verdicts on {done}: repeat the command with --resume to go on."


def wrong_forwards(cases: list[Case], plan: Plan, lanes: Lanes) -> dict[str, str]:
    """The operators whose independent forward computes another function, with the reason.

    The oracles skip these forwards, so no verdict reports them.
    """
    from refgrad.conformance.oracles import forwards

    if not {"complex-step", "reference"} & set(plan.oracles):
        return {}
    said: dict[str, str] = {}
    for case, why in lanes.each(_of_forward, forwards.few(cases)):
        if why:
            said.setdefault(case.operator, why)
    return said


def _of_forward(case: Case, worker: Worker) -> str:
    from refgrad.conformance.oracles import forwards

    try:
        return worker.call(forwards.fault, case) or ""
    except WorkerError as error:
        return f"The independent forward pass of {case.operator} cannot be compared in {case}: {error}"


def show(
    results: Results,
    cases: Iterable[Case],
    known: Limitations,
    remarks: Sequence[str],
    verbose: bool,
    as_json: bool,
    ok: bool,
) -> None:
    """Print the results, by groups of faults or as JSON."""
    operators = {name: about.operator for name, about in results.cases.items()}

    def is_known(row: ResultRow, what: str) -> bool:
        return known.covers_model(row, operators) if what == groups.MODEL else bool(known.covers(row, operators))

    found, without = groups.faults(results, cases, is_known), groups.not_answered(results)
    if as_json:
        print_json(terminal.document(results, found, without, ok) | {"remarks": list(remarks)})
        return
    terminal.show(results, stdout(), verbose, found, without)
    for line in remarks:
        say(line)


def remarks(
    results: Results,
    operators: Mapping[str, str],
    known: Limitations,
    explained: Sequence[ResultRow],
    stale: Sequence[tuple[Limitation, str]],
) -> Iterator[str]:
    """The lines beneath the results: known failures, and operators without a verdict."""
    if known.entries:
        are = "is a known failure" if len(explained) == 1 else "are known failures"
        yield f"{len(explained)} of {counted(len(results.faults), 'fault')} {are}."
    for entry, why in stale:
        yield f"The known failure {entry} {why}. Remove it from the file."
    if unverified := sorted(_doubtful(results, operators) - _decided(results, operators)):
        yield f"No case of these operators got a verdict: {abridged(unverified)}."
    if uncompared := [row for row in results.rows if row.forward_note and not row.forward]:
        first = uncompared[0]
        yield (
            f"{counted(len(uncompared), 'result')} of a model {'was' if len(uncompared) == 1 else 'were'} not compared, "
            f"such as the results of {first.executor} in {first.case}: "
            f"{first.forward_note}"
        )


def undecided(results: Results, operators: Mapping[str, str]) -> bool:
    """True if no case of any operator came to a verdict."""
    return bool(_doubtful(results, operators)) and not _decided(results, operators)


def _doubtful(results: Results, operators: Mapping[str, str]) -> set[str]:
    return {operators[row.case] for row in results.rows if row.verdict == UNDECIDED}


def _decided(results: Results, operators: Mapping[str, str]) -> set[str]:
    decisive = {*FAULTS, RIGHT, CONVENTION}
    return {operators[row.case] for row in results.rows if row.verdict in decisive}
