"""The results in a terminal: how often each verdict is, whose fault is what, then what nobody answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.results import Results
from refgrad.conformance.reports.groups import MODEL, Group, counts_of, faults, not_answered, without_answer
from refgrad.conformance.reports.tally import occurring, shortened, totals
from refgrad.conformance.verdicts import FAULTS, UNDECIDED
from refgrad.errors import counted
from refgrad.escaping import printable, shell_line

GROUPS_SHOWN = 6
LINES_SHOWN = 8
_NOTE = 240  # characters of a note
_NAMES = 8  # of sides, in a line
_COLOURS = dict.fromkeys(FAULTS, "bold red") | {UNDECIDED: "yellow"}


def show(
    results: Results,
    console: Console,
    verbose: bool = False,
    groups: Sequence[Group] | None = None,
    without: Sequence[Group] | None = None,
) -> None:
    """Print the results on `console`: the first groups of each kind, or with `verbose` every group with all its cases.

    :param groups: the faults, by default `groups.faults` of the results alone.
    :param without: the groups that have no answer, by default `groups.not_answered`.
    """
    groups = faults(results) if groups is None else groups
    without = not_answered(results) if without is None else without
    _show_totals(results, console)
    shown = groups if verbose else groups[:GROUPS_SHOWN]
    for number, group in enumerate(shown, 1):
        _print(console, f"{number}. {group.title}", "bold red" if group.is_fault else "yellow")
        rows = group.rows if verbose else group.rows[:1]
        for one in rows:
            _print(console, f"   {_about(one, group, verbose)}")
        _print(console, f"   {group.command}")
    if len(groups) > len(shown):
        rest = Counter(group.name for group in groups[len(shown) :])
        of = ", ".join(f"{count} of {name}" for name, count in rest.most_common(_NAMES))
        _print(console, f"and {counted(len(groups) - len(shown), 'more group')} of faults ({of}): --verbose prints all")
    lines = list(without_answer(without, verbose))
    for line in lines if verbose else lines[:LINES_SHOWN]:
        _print(console, line)
    if not verbose and len(lines) > LINES_SHOWN:
        _print(console, f"and {counted(len(lines) - LINES_SHOWN, 'more line')}: --verbose prints all")
    if groups:
        _print(console, f"To repeat the first fault: {shell_line(results.command(groups[0].smallest))}")
    _print(console, f"{counted(len(results.faults), 'fault')} in {counts_of(results)}")


def _show_totals(results: Results, console: Console) -> None:
    counts = totals(results)
    verdicts = occurring(counts)
    table = Table("builder", "executor", box=box.SIMPLE_HEAD)
    for verdict in verdicts:
        table.add_column(verdict, justify="right", style=_COLOURS.get(verdict))
    for pair, count in counts.items():
        table.add_row(*map(_text, pair), *(str(count[verdict] or "") for verdict in verdicts))
    console.print(table)


def _about(row: ResultRow, group: Group, verbose: bool) -> str:
    """A case, and what differs in it."""
    by = f" ({row.builder} on {row.executor})" if verbose else ""
    note = " ".join((row.forward_note if group.what == MODEL else row.note).split())
    if not verbose:
        note = shortened(group.note, _NOTE)
    error = "" if group.what == MODEL or row.relative is None else f" (relative error {row.relative:.2g})"
    return f"{row.case}{by}: {note}{error}"


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(printable(line), style=style), soft_wrap=True)


def _text(name: str) -> Text:
    """The name as it is: no part of it is markup, none moves the cursor."""
    return Text(printable(name))


def document(results: Results, groups: Sequence[Group], without: Sequence[Group], ok: bool) -> dict[str, Any]:
    """Return everything, for JSON."""
    return {
        "ok": ok,
        "cases": len(results.cases),
        "operators": len({about.operator for about in results.cases.values()}),
        "verdicts": len(results.rows),
        "faults": len(results.faults),
        "totals": [
            {"builder": builder, "executor": executor, **count}
            for (builder, executor), count in totals(results).items()
        ],
        "groups": [group.document() for group in groups],
        "without_answer": [group.document() for group in without],
        "settings": dict(results.settings),
        "versions": dict(results.versions),
    }
