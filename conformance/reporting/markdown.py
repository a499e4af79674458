"""The results as a scoreboard in Markdown: totals, what is wrong, then operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from refgrad.conformance.judging.verdicts import VERDICTS, ResultRow
from refgrad.conformance.reporting.tally import MARKS, by_operator, marked, occurring, shortened, totals
from refgrad.conformance.running.results import Results
from refgrad.escaping import markdown


def report(results: Results, title: str = "Scoreboard") -> str:
    """Return the page."""
    counts = totals(results)
    operators = by_operator(results)
    verdicts = occurring(counts)
    meanings = [(mark, verdict, VERDICTS[verdict]) for verdict, mark in MARKS.items() if verdict in verdicts]
    pairs = [f"{builder} on {executor}" for builder, executor in results.pairs]
    rows = [
        [pair, *(str(count[v] or "") for v in verdicts)] for pair, count in zip(pairs, counts.values(), strict=True)
    ]
    parts = [
        f"# {markdown(title)}\n",
        f"{len(results.cases)} cases of {len(operators)} operators.\n",
        table(("builder and executor", *verdicts), rows),
        table(("mark", "verdict", "what it means"), meanings),
        "## What is wrong\n",
        _faults(results),
        "## Operator by operator\n",
        f"{MARKS['agreed']} alone: every case agrees. Else how many cases have each verdict. Empty: not asked.\n",
        table(
            ("operator", *pairs),
            [[name, *(marked(row.get(pair, Counter())) for pair in results.pairs)] for name, row in operators.items()],
        ),
        "## Versions and settings\n",
        table(("builder or executor", "version"), results.versions.items()),
        table(
            ("setting", "value"),
            [(key, told(value)) for key, value in sorted(results.settings.items()) if value is not None],
        ),
    ]
    return "\n".join(parts)


def _faults(results: Results) -> str:
    """A line for each builder, executor, operator and verdict, with the largest error and the case that has it."""
    groups: dict[tuple[str, str, str, str], list[ResultRow]] = {}
    for row in results.faults:
        groups.setdefault((row.builder, row.executor, results.cases[row.case].operator, row.verdict), []).append(row)
    if not groups:
        return "Nothing.\n"
    lines = []
    for (builder, executor, operator, verdict), rows in groups.items():
        worst = max(rows, key=lambda row: row.relative or 0.0)
        error = "" if worst.relative is None else f"{worst.relative:.1e}"
        lines.append(
            (f"{builder} on {executor}", operator, verdict, str(len(rows)), error, worst.case, shortened(worst.note))
        )
    header = ("builder and executor", "operator", "verdict", "cases", "largest error", "as in", "note")
    return table(header, lines)


def told(setting: Any) -> str:
    """A setting in words; of a list, its entries."""
    return ", ".join(map(str, setting)) if isinstance(setting, list) else str(setting)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are text: no character of a name is taken for Markdown or HTML."""
    lines = [
        [markdown(cell) for cell in header],
        ["---"] * len(header),
        *([markdown(cell) for cell in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
