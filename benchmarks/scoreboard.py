"""Reduce large results of the suite to the numbers that pages and tests read.

python benchmarks/scoreboard.py FILE ...       # reports/results/scoreboard.json: the counts of operators
python benchmarks/scoreboard.py --cuda FILE    # reports/results/conformance_cuda.json: counts, and rows that are not right

Each FILE is what `refgrad conformance run -o FILE` wrote; `nox -s scoreboard` and `nox -s cuda` do all of it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from timing import write

from refgrad.conformance.judge.running.results import Results, load, merge
from refgrad.conformance.reports.tally import document_of
from refgrad.conformance.verdicts import RIGHT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--cuda", action="store_true", help="of a run on a GPU")
    arguments = parser.parse_args()
    results = merge([load(file) for file in arguments.files])
    if arguments.cuda:
        write("conformance_cuda.json", not_right(results), depth=2)
    else:
        write("scoreboard.json", document_of(results), depth=2)


def not_right(results: Results) -> dict[str, Any]:
    """How many rows have each verdict, and the operator, case, builder, executor and verdict of those that do not agree."""
    rows = sorted(
        (results.cases[row.case].operator, row.case, row.builder, row.executor, row.verdict)
        for row in results.rows
        if row.verdict != RIGHT
    )
    return {"counts": dict(Counter(row.verdict for row in results.rows)), "rows": rows}


if __name__ == "__main__":
    main()
