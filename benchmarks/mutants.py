"""Every mutant of every rule and every function body, and what the suite says of it (`refgrad.conformance.mutating.mutants`).

python benchmarks/mutants.py [OPERATOR ...]    # results/mutants.json; with operators, the survivors are printed only
python benchmarks/mutants.py --kept CONTENT [OPERATOR ...]    # results/mutants_kept.json: those that the sessions of CI notice

The content is that of a package, eight digits of which the sample of the sessions depends (tests/conftest.py): "now" is this
package's, any other word makes another sample. Minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.progress import track
from timing import RESULTS

from refgrad.conformance.mutating.mutants import Outcome, defined, ruled, summary, survey

WORKERS = 2
ROOT = Path(__file__).resolve().parent.parent
KEPT = RESULTS / "mutants_kept.json"
ASKS = "tests/conformance/judging/test_every_case.py"  # the sessions of CI run a sample of it


def main(operators: Sequence[str]) -> None:
    """Survey, and write what came out."""
    names = list(operators or (*ruled(), *defined()))
    found = list(surveyed(names))
    for outcome in found:
        if not outcome.caught and not outcome.mutant.reason:
            print("no reason:", outcome.mutant, outcome.note)
    if not operators:
        (RESULTS / "mutants.json").write_text(json.dumps(summary(found, names), indent=1) + "\n")


def kept(content: str, operators: Sequence[str]) -> None:
    """Survey with the cases of a sample first, and write which mutants these do not catch."""
    names = list(operators or (*ruled(), *defined()))
    content, every, sampled = cases_of(content)
    row = noticed(list(surveyed(names, sampled)), sampled) | {"cases": len(sampled), "of": len(every)}
    rows = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    print(json.dumps(row, indent=1))
    if not operators:
        KEPT.write_text(json.dumps(rows | {content: row}, indent=1) + "\n")


def surveyed(names: Sequence[str], first: Collection[str] = ()) -> Iterator[Outcome]:
    """The outcome of every mutant of these operators."""
    with ProcessPoolExecutor(WORKERS) as pool:
        parts = pool.map(partial(survey, first=first), [[name] for name in names])
        for part in track(parts, "operators", len(names)):
            yield from part


def noticed(outcomes: Sequence[Outcome], sampled: Collection[str]) -> dict[str, Any]:
    """How many mutants all cases catch, how many the sampled ones do, and those that these miss."""
    caught = [one for one in outcomes if one.caught]
    missed = [asdict(one.mutant) for one in caught if one.case not in sampled]
    return {
        "operators": len({one.mutant.operator for one in outcomes}),
        "whole": len(caught),
        "noticed": len(caught) - len(missed),
        "missed": missed,
    }


def cases_of(content: str) -> tuple[str, set[str], set[str]]:
    """The content, the names of all cases that the test `ASKS` has, and of those in the sample for the content."""
    spec = importlib.util.spec_from_file_location("sampling", ROOT / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    sampling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sampling)
    cases: dict[str, str] = {}  # by the name of the test

    class Collected:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            cases.update((item.nodeid, item.callspec.params["case"].name) for item in session.items)

    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "--collect-only", "--rootdir", str(ROOT), str(ROOT / ASKS)], plugins=[Collected()])
    content = sampling.content() if content == "now" else content
    return content, {*cases.values()}, {cases[test] for test in sampling.one_of_each_form(cases, content)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kept"]:
        kept(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
