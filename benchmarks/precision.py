"""The error of the gradient of every function of numbers, over its whole domain (reports/precision.md).

python benchmarks/precision.py [OPERATOR ...]    # reports/results/precision.json; with operators, their rows are printed only

Minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.progress import track
from timing import write

from refgrad.conformance.tools.precision.explanations import reason, unexplained
from refgrad.conformance.tools.precision.functions import FUNCTIONS
from refgrad.conformance.tools.precision.points import TYPES
from refgrad.conformance.tools.precision.scan import scan

WORKERS = 2


def rows(question: tuple[int, str]) -> list[dict[str, Any]]:
    """The rows of one function in one type."""
    number, dtype = question
    made = []
    for measured in scan([FUNCTIONS[number]], [dtype]):
        worst = measured.worst
        made.append(
            {
                "function": measured.function,
                "type": dtype,
                "executor": measured.executor,
                "order": measured.order,
                "error": float(f"{worst.error:.3g}"),
                "at": list(worst.at),
                "got": worst.got,
                "expected": worst.expected,
                "beyond": len(measured.beyond),
                "unexplained": len(unexplained(measured)),
                "reason": reason(measured, worst) if measured.beyond else "",
            }
        )
    return made


def main(operators: Sequence[str]) -> None:
    """Scan, and write what came out."""
    questions = [(k, t) for k, f in enumerate(FUNCTIONS) for t in TYPES if not operators or f.operator in operators]
    with ProcessPoolExecutor(WORKERS) as pool:
        found = [row for part in track(pool.map(rows, questions), "scans", len(questions)) for row in part]
    for row in found:
        if operators or row["unexplained"]:
            print(row)
    if not operators:
        write("precision.json", found)


if __name__ == "__main__":
    main(sys.argv[1:])
