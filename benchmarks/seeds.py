"""Is a right rule ever called wrong? Cases of the tables, judged with other cotangents and directions each time.

Each seed takes every fifth case, beginning with another one than the seed before: in 20 seeds each case comes up four times.

python benchmarks/seeds.py        # 20 seeds, and reports/results/conformance_seeds.json
python benchmarks/seeds.py 3      # as many seeds, printed only
"""

from __future__ import annotations

import sys
from collections import Counter

from timing import save

from refgrad.conformance.judge.running.runner import Plan
from refgrad.conformance.judge.running.sources import select, tables
from refgrad.conformance.judge.running.suite import run_suite

SEEDS = 20
APART = 5


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    cases = list(select(tables(), dtype="float32", values="smooth"))
    rows = []
    for seed in range(seeds):
        results = run_suite(cases[seed % APART :: APART], Plan(builders=("refgrad",), seed=seed))
        counts = Counter(row.verdict for row in results.rows)
        rows.append({"seed": seed, "cases": len(results.rows), **counts})
        print(rows[-1], *(f"{row.case}: {row.note}" for row in results.faults), sep="\n  ", flush=True)
    if len(sys.argv) == 1:
        save("conformance_seeds", rows)


if __name__ == "__main__":
    main()
