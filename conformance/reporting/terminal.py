"""The results in a terminal: how often each verdict is, what has no answer and why, then what somebody has to mend."""

from __future__ import annotations

import re

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refgrad.conformance.judging.verdicts import FAULTS, INCONCLUSIVE, REFUSED, UNSUPPORTED, VERDICTS, ResultRow
from refgrad.conformance.reporting.tally import occurring, shortened, totals
from refgrad.conformance.running.results import Results
from refgrad.escaping import printable, shell_line

FAULTS_SHOWN = 40
REASONS_SHOWN = 10
_COLOURS = dict.fromkeys(FAULTS, "bold red") | {INCONCLUSIVE: "yellow"}
_WITHOUT_ANSWER = (INCONCLUSIVE, REFUSED, UNSUPPORTED)
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def show(results: Results, console: Console, limit: int | None = FAULTS_SHOWN) -> None:
    """Print the results on `console`.

    :param limit: how many faults are listed, and fewer reasons; None for all. It says how many it leaves out.
    """
    counts = totals(results)
    verdicts = occurring(counts)
    table = Table("builder", "executor", box=box.SIMPLE_HEAD)
    for verdict in verdicts:
        table.add_column(verdict, justify="right", style=_COLOURS.get(verdict))
    for pair, count in counts.items():
        table.add_row(*map(_text, pair), *(str(count[verdict] or "") for verdict in verdicts))
    console.print(table)
    lines = _reasons(results, whole=limit is None)
    shown = lines if limit is None else lines[:REASONS_SHOWN]
    for line in shown:
        console.print(_text(line), soft_wrap=True)
    if len(lines) > len(shown):
        console.print(f"and {len(lines) - len(shown)} reasons more: --verbose", highlight=False)
    _show_faults(results, console, limit)
    asked = len(results.cases), len({about.operator for about in results.cases.values()})
    console.print(
        f"{len(results.faults)} faults in {len(results.rows)} verdicts on {asked[0]} cases of {asked[1]} operators",
        highlight=False,
    )


def _reasons(results: Results, whole: bool) -> list[str]:
    """A line for each reason why there is no answer, the most frequent first. Numbers do not make a reason another one."""
    groups: dict[tuple[int, str, str, str], list[ResultRow]] = {}
    for row in results.rows:
        if row.verdict in _WITHOUT_ANSWER:
            key = _WITHOUT_ANSWER.index(row.verdict), row.builder, row.executor, _NUMBER.sub("#", row.note)
            groups.setdefault(key, []).append(row)
    lines = []
    for (place, builder, executor, _), rows in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        first = min(rows, key=lambda row: row.case)
        cases = first.case if len(rows) == 1 else f"{len(rows)} cases, such as {first.case}"
        note = " ".join(first.note.split()) or VERDICTS[first.verdict]
        reason = note if whole else shortened(note)
        lines.append(f"{_WITHOUT_ANSWER[place]} ({builder} on {executor}; {cases}): {reason}")
    return lines


def _show_faults(results: Results, console: Console, limit: int | None) -> None:
    faults = results.faults
    shown = faults[:limit]
    if shown:
        table = Table("verdict", "builder", "executor", box=box.SIMPLE_HEAD)
        table.add_column("case", overflow="fold")  # to be copied, so not cut
        table.add_column("error")
        table.add_column("note")
        for row in shown:
            error = "" if row.relative is None else f"{row.relative:.2g}"
            note = row.note if limit is None else shortened(row.note)
            cells = row.verdict, row.builder, row.executor, row.case, error, note
            table.add_row(*map(_text, cells))
        console.print(table)
        if len(faults) > len(shown):
            console.print(f"and {len(faults) - len(shown)} faults more: --verbose", highlight=False)
        console.print(_text(f"Once more, alone: {shell_line(results.command(shown[0]))}"), soft_wrap=True)


def _text(name: str) -> Text:
    """The name as it is: no part of it is markup, none moves the cursor."""
    return Text(printable(name))
