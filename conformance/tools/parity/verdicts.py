"""The verdict on every case, and the known difference that explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.known.differences import KnownDifference, known_differences
from refgrad.conformance.tools.parity.kept import Kept
from refgrad.conformance.tools.parity.pair import build
from refgrad.conformance.tools.parity.structure import OVERLOOKED, compare
from refgrad.conformance.tools.parity.values import compare_values
from refgrad.derivatives.ortbuilder import Builders
from refgrad.errors import BuilderError, InvalidModelError
from refgrad.worker import Worker


@dataclass(frozen=True)
class ParityRow:
    """The result of one case.

    `verdict`: "isomorphic"; "isomorphic apart from ..." (names in `OVERLOOKED`); "different"; or "refused": the builder did not
    make a gradient, and `detail` is its message. `values`: "equal", "theirs fail", "theirs are wrong", "ours fail",
    "both fail", or "ours are wrong"; `proof` is the measurement behind it.
    """

    operator: str
    case: str
    verdict: str
    detail: str = ""
    values: str = ""
    proof: str = ""
    same_names: bool = True
    same_operators: bool = True

    @property
    def kind(self) -> str:
        """The kind of known difference (`refgrad.conformance.known.differences.KINDS`), or ""."""
        if self.verdict == "refused":
            return "refused"
        by_values = {"theirs fail": "fails", "both fail": "kernel", "ours fail": "kernel", "theirs are wrong": "wrong"}
        return by_values.get(self.values) or ("form" if self.verdict == "different" or not self.same_names else "")


def measure(
    operator: str, case: Case, builders: Builders, runner: Worker | None = None, kept: Kept | None = None
) -> ParityRow:
    """Compare the two builders on one case; with a `runner`, also what their graphs compute on ONNX Runtime.

    Two gradients that compute the same are added to `kept`.
    """
    row = partial(ParityRow, operator, case.name)
    try:
        pair = build(case, builders)
        found = compare(pair.ours, pair.theirs)
    except BuilderError as error:
        return row("refused", f"{error.verdict}: {error}")
    except InvalidModelError as error:
        return row("refused", f"its graph is broken: {error}")
    verdict = "isomorphic"
    if not found:
        overlooked_sets = [[name] for name in OVERLOOKED] + [list(OVERLOOKED)]
        overlooked = next((names for names in overlooked_sets if compare(pair.ours, pair.theirs, names)), None)
        verdict = "different" if overlooked is None else f"isomorphic apart from {' and '.join(overlooked)}"
    detail = str(compare(pair.ours, pair.theirs, OVERLOOKED)) if verdict == "different" else ""
    values, proof, results = ("", "", {}) if runner is None else compare_values(pair, runner)
    if kept is not None and values == "equal":
        kept.add(case.name, pair, results)
    return row(verdict, detail, values, proof, found.same_names, found.same_operators)


def survey(
    operator: str, cases: Iterable[Case], builders: Builders, runner: Worker, folder: Path | None = None
) -> list[ParityRow]:
    """Measure `cases` of a registered operator (`by_operator` has all of them), in processes of these two.

    The cases whose gradients are equal are written to `folder`/`operator`.npz (see `Kept`), except the cases of Dropout: no
    two runtimes draw the same random numbers.
    """
    kept = None if folder is None or operator == "Dropout" else Kept()
    rows = [measure(operator, case, builders, runner, kept) for case in cases]
    if kept is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        kept.save(folder / f"{operator}.npz")
    return rows


def reason(row: ParityRow) -> KnownDifference | None:
    """The known difference that explains `row`; None where there is none or none is needed."""
    return next((d for d in known_differences() if d.covers(row.operator, row.kind, row.case)), None)


def unexplained(rows: Iterable[ParityRow]) -> list[ParityRow]:
    """The rows that differ from ONNX Runtime's graph or names without a reason, and those where refgrad is wrong."""
    return [row for row in rows if row.values == "ours are wrong" or (row.kind and reason(row) is None)]


def counts(rows: Iterable[ParityRow]) -> dict[str, dict[str, int]]:
    """The number of cases by operator and by verdict, or by kind of known difference where there is one.

    "right" counts the cases in which the builder and refgrad are both right; "same operators" and "same names" count
    in how many of these cases the two agree.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        right = row.kind in ("", "form")
        column = found.setdefault(row.operator, Counter())
        column["cases"] += 1
        column[row.kind or row.verdict] += 1
        column["right"] += right
        column["same operators"] += right and row.same_operators
        column["same names"] += right and row.same_names
    return {operator: dict(sorted(column.items())) for operator, column in sorted(found.items())}


def grounds(rows: Iterable[ParityRow]) -> list[dict[str, Any]]:
    """Every known difference that explains a row: how many rows of which operators, and one of them with its measurement."""
    found: dict[KnownDifference, list[ParityRow]] = {}
    for row in rows:
        difference = reason(row) if row.kind else None
        if difference is not None:
            found.setdefault(difference, []).append(row)
    return [
        {
            "kind": difference.kind,
            "reason": difference.reason,
            "cases": dict(Counter(row.operator for row in explained)),
            "example": explained[0].case,
            "detail": explained[0].detail,
            "proof": explained[0].proof,
        }
        for difference in known_differences()
        if (explained := found.get(difference))
    ]
