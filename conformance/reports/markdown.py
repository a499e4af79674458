"""The results as a scoreboard in Markdown: totals, the faults, then operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.results import Results
from refgrad.conformance.reports.groups import MODEL, faults, not_answered, without_answer
from refgrad.conformance.reports.tally import MARKS, by_operator, marked, occurring, shortened, totals
from refgrad.conformance.verdicts import RIGHT, VERDICTS
from refgrad.errors import counted
from refgrad.escaping import markdown

_INSIDE = "To look inside a case, node by node: refgrad compare --case CASE --a refgrad@numpy --b BUILDER@EXECUTOR"


def report(results: Results, title: str = "Scoreboard", cases: Iterable[Case] = ()) -> str:
    """Return the page. It says what the faulty ones among `cases` have in common."""
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
        f"{counted(len(results.cases), 'case')} of {counted(len(operators), 'operator')}.\n",
        table(("builder and executor", *verdicts), rows),
        table(("mark", "verdict", "what it means"), meanings),
        "## What is wrong\n",
        _faults(results, cases),
        "## Operator by operator\n",
        f"{MARKS[RIGHT]} alone: every case is right. Else how many cases have each verdict. Empty: not asked.\n",
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


def _faults(results: Results, cases: Iterable[Case]) -> str:
    """A line for each group of faults, with the largest error, the smallest case and what differs in it."""
    groups = faults(results, cases)
    without = "".join(f"- {markdown(line)}\n" for line in without_answer(not_answered(results)))
    if not groups:
        return f"Nothing.\n\n{without}" if without else "Nothing.\n"
    lines = []
    for group in groups:
        errors = [row.relative for row in group.rows if row.relative is not None]
        error = f"{max(errors):.1e}" if errors and group.what != MODEL else ""
        count, smallest = str(len(group.rows)), group.smallest.case
        lines.append((group.who, group.fault, group.verdict, count, error, smallest, shortened(group.note)))
    header = ("at fault", "what", "verdict", "verdicts", "largest error", "smallest case", "what differs")
    return f"{markdown(_INSIDE)}\n\n{table(header, lines)}" + (f"\n{without}" if without else "")


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
