"""reports/precision.md and docs/precision.md, from the results that benchmarks/precision.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from refgrad.conformance.tools.precision.scan import BOUND

Rows = Sequence[Mapping[str, Any]]
Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]

EXECUTORS = {"numpy": "interpreter", "ort-cpu": "ONNX Runtime"}


def page(rows: Rows, table: Table) -> str:
    """The report; `table` writes a table in Markdown."""
    reasons: dict[str, int] = {}
    for row in rows:
        if row["reason"]:
            reasons.setdefault(row["reason"], len(reasons) + 1)
    groups: dict[tuple[str, str], dict[tuple[str, int], Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["function"], row["type"]), {})[row["executor"], row["order"]] = row
    header = ("function", "type", *EXECUTORS.values(), "second derivative", "worst point", "why")
    lines = [_line(name, found, reasons) for name, found in groups.items()]
    return (
        "# Precision, function by function\n\n[Precision](../docs/precision.md) says what was measured, and in which "
        "units. An empty entry: the executor does not run the type.\n\n"
        + table(header, lines)
        + "\n## Why\n\n"
        + "\n".join(f"{number}. {text}" for text, number in reasons.items())
        + "\n"
    )


def summary(rows: Rows, table: Table) -> str:
    """The first screen: how it was measured, and how many errors are within the bound in each type on each executor."""
    within = sum(row["error"] <= BOUND for row in rows)
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["type"], EXECUTORS[row["executor"]]), []).append(row["error"])
    lines = [
        (*name, str(len(errors)), str(sum(error <= BOUND for error in errors)), f"{max(errors):.2g}")
        for name, errors in groups.items()
    ]
    return (
        "# Precision\n\nHow exact are the gradients of scalar functions? `python benchmarks/precision.py` measures the "
        "error of each over its whole\ndomain.\n\n**Points.** They cover all magnitudes from the smallest subnormal number "
        "to the largest, with both signs. They are dense where\nfunctions turn and at the ends of domains. Kinks are left "
        "out.\n\n**Reference.** mpmath differentiates the function, without refgrad's rules. A derivative that the type "
        "cannot hold has to be infinite.\n\n**Units.** A unit is one unit in the last place of the derivative, or how far "
        "the derivative moves when each input moves by one\nunit in its last place, whichever is larger. For a second "
        "derivative it is no smaller than a unit in the last place of the first.\nA few roundings explain an error up to "
        f"{BOUND:g} units.\n\n{len(rows)} scans: {within} within {BOUND:g} units, {len(rows) - within} with a reason. [The "
        "report](../reports/precision.md) has every function with its worst\npoint, and the reasons. A test fails if an "
        "error has no reason, or if a reason has no error.\n\n"
        + table(("type", "executor", "scans", f"within {BOUND:g} units", "largest error"), lines)
    )


def _line(
    name: tuple[str, str], found: Mapping[tuple[str, int], Mapping[str, Any]], reasons: Mapping[str, int]
) -> list[str]:
    """The worst of one function in one type."""
    worst = max(found.values(), key=lambda row: row["error"])
    second = max((row["error"] for (_, order), row in found.items() if order == 2), default=None)
    numbers = sorted({reasons[row["reason"]] for row in found.values() if row["reason"]})
    firsts = [found[executor, 1]["error"] if (executor, 1) in found else None for executor in EXECUTORS]
    where = ", ".join(f"{x:.6g}" for x in worst["at"])
    return [
        *name,
        *map(_error, firsts),
        _error(second),
        f"{where}: {worst['got']:.4g} for {_short(worst['expected'])}",
        ", ".join(map(str, numbers)),
    ]


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


def _short(expected: str) -> str:
    """A number in few digits; its exponent may have many."""
    mantissa, mark, exponent = expected.partition("e")
    shown = f"{float(mantissa):.4g}"
    return shown + (f"e{exponent}" if len(exponent) < 6 else f"e{exponent[:1]}…") if mark else shown
