"""The result of a check, in a terminal: a summary by dialect and backend, what needs attention and why, or every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from refgrad.conformance.judge.check import Check, Row, gravity
from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT, UNDECIDED
from refgrad.errors import abridged, counted
from refgrad.escaping import printable
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
    for line in _reasons(found.rows, verbose):
        _print(console, line)
    counts = Counter(row.verdict for row in found.rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    for line in found.skipped:
        _print(console, f"skipped: {line}")
    _print(console, f"{counted(len(found.rows), 'comparison')}: {told}. Feeds: {found.feeds}; seed {found.seed}.")
    if found.ok and found.unsettled:
        named = abridged(found.unsettled, None if verbose else _NAMES)
        _print(console, f"Differences settled nothing for {named}: give other --feeds, or --random-weights.")
    if not verbose:
        _print(console, "Every gradient by itself: --verbose.")


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


def _reasons(rows: Sequence[Row], verbose: bool) -> list[str]:
    """A line for each verdict and reason: the gradients and the backends that have it, faults first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.note or row.verdict != RIGHT:
            groups.setdefault((row.verdict, row.note), []).append(row)
    order = sorted(groups, key=lambda key: _attention(key[0], groups[key]))
    lines = []
    for verdict, keys in groupby(order, key=lambda key: key[0]):
        listed = list(keys)
        shown = listed if verbose else listed[:REASONS_SHOWN]
        lines += [_line(verdict, note, groups[verdict, note], verbose) for _, note in shown]
        rest = [row for key in listed[len(shown) :] for row in groups[key]]
        if rest:
            more = f"{len(listed) - len(shown)} more reason{'s' * (len(listed) - len(shown) > 1)}"
            lines.append(f"{verdict} ({_whose(rest, False)}): {more}, see --verbose")
    return lines


def _attention(verdict: str, rows: Sequence[Row]) -> tuple[bool, bool, str, float]:
    return verdict == RIGHT, verdict not in FAULTS, verdict, -max(gravity(row)[1] for row in rows)


def _line(verdict: str, note: str, rows: Sequence[Row], verbose: bool) -> str:
    reason = " ".join(note.split()) or "no reason is given"
    if not verbose and len(reason) > _REASON:
        reason = f"{reason[:_REASON].rstrip()} …"
    return f"{verdict} ({_whose(rows, verbose)}): {reason}"


def _whose(rows: Sequence[Row], verbose: bool) -> str:
    """The gradients of rows, and who computed them."""
    gradients = list(dict.fromkeys(row.gradient for row in rows))
    witnesses = list(dict.fromkeys(f"{row.dialect} on {row.backend}" for row in rows))
    return f"{abridged(gradients, None if verbose else _NAMES)}; {', '.join(witnesses)}"


def document(found: Check) -> dict[str, Any]:
    """Return everything, for JSON."""
    return {"ok": found.ok, "answer": ": ".join(found.answer), **asdict(found)}
