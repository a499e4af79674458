"""The counts of every report, and the marks that it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from refgrad.conformance import verdicts
from refgrad.conformance.judge.running.results import Pair, Results
from refgrad.errors import beginning

_LONG = 160  # characters of a note in a table
MARKS = {  # in the order in which they are listed: right, to be mended, unknown
    verdicts.RIGHT: "✓",
    verdicts.CONVENTION: "≈",
    verdicts.WRONG: "✗",
    verdicts.CRASHED: "†",
    verdicts.TIMED_OUT: "◷",
    verdicts.OUT_OF_MEMORY: "▣",
    verdicts.UNDECIDED: "?",
    verdicts.REFUSED: "–",
    verdicts.UNSUPPORTED: "○",
}


def totals(results: Results) -> dict[Pair, Counter[str]]:
    """How often each builder and executor has each verdict."""
    counts: dict[Pair, Counter[str]] = {pair: Counter() for pair in results.pairs}
    for row in results.rows:
        counts[row.builder, row.executor][row.verdict] += 1
    return counts


def by_operator(results: Results) -> dict[str, dict[Pair, Counter[str]]]:
    """The same for each operator, in alphabetical order."""
    operators = sorted({about.operator for about in results.cases.values()})
    counts: dict[str, dict[Pair, Counter[str]]] = {operator: {} for operator in operators}
    for row in results.rows:
        of_operator = counts[results.cases[row.case].operator]
        of_operator.setdefault((row.builder, row.executor), Counter())[row.verdict] += 1
    return counts


def document_of(results: Results) -> dict[str, Any]:
    """The counts for JSON: of each operator, how often each pair of `pairs` has each verdict. It has no cases."""
    return {
        "cases": len(results.cases),
        "versions": dict(results.versions),
        "pairs": [list(pair) for pair in results.pairs],
        "operators": {
            operator: {
                verdict: [row.get(pair, Counter())[verdict] for pair in results.pairs]
                for verdict in MARKS
                if any(count[verdict] for count in row.values())
            }
            for operator, row in by_operator(results).items()
        },
    }


def counts_in(document: Mapping[str, Any]) -> dict[str, dict[Pair, Counter[str]]]:
    """The counts of `by_operator`, read from a document of `document_of`."""
    pairs = [(builder, executor) for builder, executor in document["pairs"]]
    counts: dict[str, dict[Pair, Counter[str]]] = {}
    for operator, verdicts_of in document["operators"].items():
        every = [
            (pair, Counter({verdict: numbers[place] for verdict, numbers in verdicts_of.items() if numbers[place]}))
            for place, pair in enumerate(pairs)
        ]
        counts[operator] = {pair: count for pair, count in every if count}
    return counts


def occurring(counts: Mapping[Pair, Counter[str]]) -> list[str]:
    """The verdicts that occur."""
    return [verdict for verdict in MARKS if any(count[verdict] for count in counts.values())]


def marked(count: Counter[str]) -> str:
    """A cell of a table: "✓" where all is right, else how often each verdict is, as "✓30 ✗2 –1"."""
    parts = [f"{mark}{count[verdict]}" for verdict, mark in MARKS.items() if count[verdict]]
    return MARKS[verdicts.RIGHT] if set(+count) == {verdicts.RIGHT} else " ".join(parts)


def shortened(note: str, length: int = _LONG) -> str:
    """The beginning of a long note, for a table; the results have all of it."""
    return beginning(note, length)
