"""The results in a terminal: how often each verdict is, then what somebody has to mend."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refgrad.conformance.judging.verdicts import FAULTS, INCONCLUSIVE
from refgrad.conformance.reporting.tally import occurring, shortened, totals
from refgrad.conformance.running.results import Results

FAULTS_SHOWN = 40
_COLOURS = dict.fromkeys(FAULTS, "bold red") | {INCONCLUSIVE: "yellow"}


def show(results: Results, console: Console, limit: int | None = FAULTS_SHOWN) -> None:
    """Print the results on `console`.

    :param limit: how many faults are listed; None for all. It says how many it leaves out.
    """
    counts = totals(results)
    verdicts = occurring(counts)
    table = Table("builder", "executor", box=box.SIMPLE_HEAD)
    for verdict in verdicts:
        table.add_column(verdict, justify="right", style=_COLOURS.get(verdict))
    for pair, count in counts.items():
        table.add_row(*map(_text, pair), *(str(count[verdict] or "") for verdict in verdicts))
    console.print(table)
    faults = results.faults
    shown = faults[:limit]
    if shown:
        table = Table("verdict", "builder", "executor", box=box.SIMPLE_HEAD)
        table.add_column("case", overflow="fold")  # to be copied, so not cut
        table.add_column("error")
        table.add_column("note")
        for row in shown:
            error = "" if row.relative is None else f"{row.relative:.2g}"
            cells = row.verdict, row.builder, row.executor, row.case, error, shortened(row.note)
            table.add_row(*map(_text, cells))
        console.print(table)
        if len(faults) > len(shown):
            console.print(f"and {len(faults) - len(shown)} faults more", highlight=False)
        console.print(_text(f"Once more, alone: {results.command(shown[0])}"), soft_wrap=True)
    asked = len(results.cases), len({about.operator for about in results.cases.values()})
    console.print(
        f"{len(faults)} faults in {len(results.rows)} verdicts on {asked[0]} cases of {asked[1]} operators",
        highlight=False,
    )


def _text(name: str) -> Text:
    """The name as it is: no part of it is markup, none moves the cursor."""
    return Text("".join(letter if letter.isprintable() else "\ufffd" for letter in name))
