"""Every mutant of every rule and function body, with the suite's verdict (`refgrad.conformance.tools.mutating.survey`).

python benchmarks/mutants.py [OPERATOR ...]    # mutants.json in reports/results; with operators, the survivors are printed only
python benchmarks/mutants.py --tests [--every N] [OPERATOR ...]    # mutants_tests.json there: those that the tests notice

An hour, and hours with --tests; --every 8 tries one of eight mutants of each operator.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.progress import track
from timing import write

from refgrad.conformance.case import Case
from refgrad.conformance.tools.mutating.mutants import Outcome, summary
from refgrad.conformance.tools.mutating.survey import defined, ruled, survey
from refgrad.protos.domains import MICROSOFT

WORKERS = 2
TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.append(str(TESTS / "helpers"))


def main(operators: Sequence[str]) -> None:
    """Survey, and write what came out."""
    names = list(operators or (*ruled(), *defined()))
    found = list(surveyed(names))
    for outcome in found:
        if not outcome.caught and not outcome.mutant.reason:
            print("no reason:", outcome.mutant, outcome.note)
    if not operators:
        write("mutants.json", summary(found, names), depth=2)


def by_tests(operators: Sequence[str], every: int) -> None:
    """Survey with the tests of single cases that the sessions `tests`, `thorough` and `conformance` run."""
    names = list(operators or (*ruled(), *defined()))
    row = {"every": every} | noticed(list(surveyed(names, (differences, body, judged), every)))
    print(json.dumps(row, indent=1))
    if not operators:
        write("mutants_tests.json", row)


def surveyed(names: Sequence[str], tests: Sequence[Callable[[Case], None]] = (), every: int = 1) -> Iterator[Outcome]:
    """The outcome of every mutant of these operators, or of one of so many."""
    with ProcessPoolExecutor(WORKERS) as pool:
        parts = pool.map(partial(survey, tests=tests, every=every), [[name] for name in names])
        for part in track(parts, "operators", len(names)):
            yield from part


def noticed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The number of mutants that the judge catches, the number of these that a test notices, and the others."""
    caught = [one for one in outcomes if one.caught]
    missed = [asdict(one.mutant) for one in caught if not one.tested]
    operators = len({one.mutant.operator for one in outcomes})
    return {"operators": operators, "caught": len(caught), "noticed": len(caught) - len(missed), "missed": missed}


def differences(case: Case) -> None:
    """The test that compares the gradient of a case with differences, on the interpreter."""
    from checking import assert_gradient

    assert_gradient(case, directions=1, runtime=False)


def body(case: Case) -> None:
    """The test that compares the body of an operator of ONNX Runtime with its kernel; it passes for other operators."""
    if case.node.domain == MICROSOFT:
        _module("microsoft/test_rules_microsoft.py").test_a_body_computes_what_the_operator_does(case)


def judged(case: Case) -> None:
    """The test in which the judge looks at control flow and sequences; it passes for other operators."""
    module = _module("conformance/judge/test_structures_by_the_judge.py")
    if case.name in {one.name for one in module.CASES}:
        module.test_its_gradient_is_right(case)


@cache
def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("operators", nargs="*", metavar="OPERATOR")
    asked.add_argument("--tests", action="store_true", help="ask the tests of rules too")
    asked.add_argument(
        "--every", type=int, default=1, metavar="N", help="with --tests: one of N mutants of each operator"
    )
    given = asked.parse_args()
    if given.tests:
        by_tests(given.operators, given.every)
    else:
        main(given.operators)
