"""The rate of the conformance suite, and what it costs that every builder, executor and oracle is called in another process.

python benchmarks/conformance.py    # and reports/results/conformance_rate.json
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from timing import alternate, save

from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.runner import Plan, run_case
from refgrad.conformance.judge.running.sources import select, tables
from refgrad.conformance.judge.running.suite import run_suite
from refgrad.worker import Worker

SAMPLE = 25  # every so many cases are run in both ways
ROUNDS = 3
PLAN = Plan(executors=("numpy", "ort-cpu"))


class Here:
    """A worker that is no process of its own: what isolation is measured against."""

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """What `function` returns."""
        return function(*arguments, **keywords)


def main() -> None:
    cases = list(select(tables(), dtype="float32", values="smooth"))
    start = time.perf_counter()
    results = run_suite(cases, PLAN)
    seconds = time.perf_counter() - start
    print(
        f"{len(cases)} cases, {len(results.rows)} verdicts in {seconds:.0f} s: {Counter(r.verdict for r in results.rows)}"
    )
    clean = Counter(row.case for row in results.rows if row.verdict == "right")
    sample = [case for case in cases if clean[case.name] == len(PLAN.builders) * len(PLAN.executors)][::SAMPLE]
    isolated, here, ratio = alternate(lambda: _isolated(sample), lambda: _here(sample), ROUNDS)
    print(f"{len(sample)} cases: {isolated:.2f} s in a process of their own, {here:.2f} s in this one: {ratio:.2f}")
    row = {
        "cases": len(cases),
        "verdicts": len(results.rows),
        "cores": os.cpu_count(),
        "seconds": round(seconds),
        "cases per s": round(len(cases) / seconds, 1),
        "isolated ms a case": round(1e3 * isolated / len(sample), 1),
        "in one process ms a case": round(1e3 * here / len(sample), 1),
        "ratio": round(ratio, 2),
    }
    save("conformance_rate", [row])


def _isolated(cases: list[Case]) -> None:
    with Worker(PLAN.seconds, PLAN.memory) as worker:
        for case in cases:
            run_case(case, PLAN, worker)


def _here(cases: list[Case]) -> None:
    worker: Any = Here()
    for case in cases:
        run_case(case, PLAN, worker)


if __name__ == "__main__":
    main()
