"""The result of a check: in a terminal, as JSON, and as Markdown for an issue.

Each has a summary by dialect and backend, and what needs attention and why; the terminal and JSON have every row too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from refgrad.conformance.judge.found import Check, Row, gravity
from refgrad.conformance.reports.advice import ModelCommand, steps
from refgrad.conformance.reports.comparisons import json_of
from refgrad.conformance.reports.markdown import table as table_of
from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT, UNDECIDED
from refgrad.errors import abridged, beginning, counted
from refgrad.escaping import markdown, printable
from refgrad.markup import text_of as text_of_value
from refgrad.show.tables import GOOD, UNKNOWN, table
from refgrad.show.tables import WRONG as BAD

STYLES = {RIGHT: GOOD, CONVENTION: GOOD, UNDECIDED: UNKNOWN, **dict.fromkeys(FAULTS, BAD)}
_NAMES = 3  # of a list, in a summary
REASONS_SHOWN = 4  # of each verdict, in a summary
_REASON = 300  # characters of a reason, in a summary


def show(found: Check, console: Console, verbose: bool = False) -> None:
    """Print a summary on `console`, or every row and every reason."""
    word, what = found.answer
    console.print(Text.assemble((word, STYLES[word]), printable(f": {what}")), soft_wrap=True)
    console.print(table(_every(found.rows) if verbose else found.summary(), {"verdict": STYLES}))
    for verdict, whose, reason in reasons(found.rows, verbose):
        _print(console, f"{verdict} ({whose}): {reason}")
    for line in found.skipped:
        _print(console, f"skipped: {line}")
    _print(console, compared(found))
    if found.ok and found.unsettled:
        named = abridged(found.unsettled, None if verbose else _NAMES)
        _print(console, f"Finite differences could not decide {named}: give other --feeds.")
    if not verbose:
        _print(console, "Every gradient by itself: --verbose.")


def compared(found: Check) -> str:
    """The number of comparisons by verdict, the feeds and the seed, in one line."""
    counts = Counter(row.verdict for row in found.rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{counted(len(found.rows), 'comparison')}: {told}. Feeds: {found.feeds}; seed {found.seed}."


def _print(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _every(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [
        {
            "gradient of": row.gradient,
            "dialect": row.dialect,
            "executor": row.backend,
            "compared with": row.oracle,
            "absolute error": row.absolute,
            "relative error": row.relative,
            "allowed": row.allowed,
            "verdict": row.verdict,
        }
        for row in rows
    ]


def reasons(rows: Sequence[Row], verbose: bool = False, more: str = "see --verbose") -> list[tuple[str, str, str]]:
    """Each verdict with a reason, and each that is not right: the verdict, its gradients and who computed them, the reason.

    Faults are first. Without `verbose` the reasons of a verdict are cut after a few, and `more` says where the others are.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.note or row.verdict != RIGHT:
            groups.setdefault((row.verdict, row.note), []).append(row)
    order = sorted(groups, key=lambda key: _attention(key[0], groups[key]))
    found = []
    for verdict, keys in groupby(order, key=lambda key: key[0]):
        listed = list(keys)
        shown = listed if verbose else listed[:REASONS_SHOWN]
        found += [(verdict, _whose(groups[key], verbose), _reason(key[1], verbose)) for key in shown]
        rest = [row for key in listed[len(shown) :] for row in groups[key]]
        if rest:
            found.append((verdict, _whose(rest, False), f"{counted(len(listed) - len(shown), 'more reason')}, {more}"))
    return found


def _attention(verdict: str, rows: Sequence[Row]) -> tuple[bool, bool, str, float]:
    return verdict == RIGHT, verdict not in FAULTS, verdict, -max(gravity(row)[1] for row in rows)


def _reason(note: str, verbose: bool) -> str:
    reason = " ".join(note.split()) or "no reason is given"
    return reason if verbose else beginning(reason, _REASON)


def _whose(rows: Sequence[Row], verbose: bool) -> str:
    """The gradients of rows, and who computed them."""
    gradients = list(dict.fromkeys(row.gradient for row in rows))
    witnesses = list(dict.fromkeys(f"{row.dialect} on {row.backend}" for row in rows))
    return f"{abridged(gradients, None if verbose else _NAMES)}; {', '.join(witnesses)}"


def document(found: Check) -> dict[str, Any]:
    """Return everything, for JSON."""
    return {"ok": found.ok, "answer": ": ".join(found.answer), **asdict(found)}


def text_of(found: Check, asked: ModelCommand) -> str:
    """The result as the text of a JSON file. It does not depend on `asked`."""
    return json_of(document(found))


def markdown_of(found: Check, asked: ModelCommand) -> str:
    """The result as Markdown, to be pasted into an issue: what is wrong, where, how sure, and how to repeat it."""
    heads, rows = summary_of(found)
    told = [
        f"- **{verdict}** ({markdown(whose)}): {markdown(reason)}" for verdict, whose, reason in reasons(found.rows)
    ]
    told += [f"- skipped: {markdown(line)}" for line in found.skipped]
    told_steps = [f"- {markdown(' '.join(filter(None, step)))}" for step in steps(found, asked)]
    parts = [
        f"# {markdown(title(asked))}",
        markdown(": ".join(found.answer)),
        "## What is wrong, and where",
        "\n".join(told),
        "## How sure it is",
        table_of(heads, rows).rstrip(),
        markdown(compared(found)),
        "## What to do next",
        "\n".join(told_steps),
        "## How to repeat it",
        markdown(asked.command()),
        markdown(f"Versions: {versions_of(asked)}."),
    ]
    return "\n\n".join(parts) + "\n"


def title(asked: ModelCommand) -> str:
    """The question that a check answers."""
    return f"Is the gradient of {Path(asked.model).name} right?"


def versions_of(asked: ModelCommand) -> str:
    """The versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in asked.versions.items())


def summary_of(found: Check) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of the summary, as text."""
    rows = found.summary()
    return list(rows[0]) if rows else [], [[text_of_value(value) for value in row.values()] for row in rows]
