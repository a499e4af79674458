"""Every mutant of every rule and every function body, and what the suite says of it (`refgrad.conformance.mutating.mutants`).

python benchmarks/mutants.py [OPERATOR ...]    # results/mutants.json; with operators, the survivors are printed only

Minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.progress import track
from timing import RESULTS

from refgrad.conformance.mutating.mutants import Outcome, defined, ruled, summary, survey

WORKERS = 2


def main(operators: Sequence[str]) -> None:
    """Survey, and write what came out."""
    names = list(operators or (*ruled(), *defined()))
    with ProcessPoolExecutor(WORKERS) as pool:
        surveyed = pool.map(survey, [[name] for name in names])
        found: list[Outcome] = [one for part in track(surveyed, "operators", len(names)) for one in part]
    for outcome in found:
        if not outcome.caught and not outcome.mutant.reason:
            print("no reason:", outcome.mutant, outcome.note)
    if not operators:
        (RESULTS / "mutants.json").write_text(json.dumps(summary(found, names), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
