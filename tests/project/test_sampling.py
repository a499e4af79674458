"""Sampling of test matrices: a share of every matrix, the same one for the same package, and everything by default."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sampling

pytestmark = pytest.mark.interpreter

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
MECHANISM = ("conftest.py", "helpers/sampling.py")
FILE = """
import pytest
from pytest import mark

@pytest.mark.matrix
@pytest.mark.parametrize("case", [f"{op}-{form}" for op in ("Add", "Conv", "Mul") for form in range(20)])
def test_of_a_matrix(case):
    assert case

@pytest.mark.parametrize("case", range(40))
def test_of_no_matrix(case):
    assert case >= 0

@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("case", range(10))
def test_of_a_dialect(case, dialect):
    assert dialect

@mark.training
@pytest.mark.parametrize("case", range(10))
def test_of_the_training_wheel(case):
    assert case >= 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the mechanism, with a package of one file."""
    made = tmp_path_factory.mktemp("sampled")
    (made / "tests" / "helpers").mkdir(parents=True)
    (made / "backends").mkdir()
    (made / "backends" / "kernel.py").write_text("1\n")
    for file in MECHANISM:
        (made / "tests" / file).write_text((ROOT / "tests" / file).read_text(encoding="utf-8"), encoding="utf-8")
    (made / "tests" / "test_it.py").write_text(FILE)
    (made / "pytest.ini").write_text("[pytest]\npythonpath = tests/helpers\nmarkers =\n    matrix\n    training\n")
    return made


def run(folder: Path, sample: str | None, every: bool = False) -> tuple[set[str], str, int]:
    """The tests that passed, what was printed, and the exit status."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("REFGRAD_SAMPLE")}
    env |= {} if sample is None else {"REFGRAD_SAMPLE": sample}
    env |= {"REFGRAD_SAMPLE_ALL": "1"} if every else {}
    command = (sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "tests")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return set(re.findall(r"^PASSED \S*::(\S+)", done.stdout, re.MULTILINE)), done.stdout + done.stderr, done.returncode


@pytest.mark.parametrize("sample", [None, "1"])
def test_all_run_where_none_is_sampled(folder: Path, sample: str | None) -> None:
    passed, said, status = run(folder, sample)
    assert len(passed) == 130
    assert "One of" not in said
    assert status == 0


def test_a_matrix_keeps_a_share_with_tests_of_every_operator(folder: Path) -> None:
    passed, said, _ = run(folder, "8")
    matrix = {name for name in passed if name.startswith("test_of_a_matrix")}
    assert len(passed) - len(matrix) == 70
    assert len(matrix) in (7, 8)
    assert {name.partition("[")[2].partition("-")[0] for name in matrix} == {"Add", "Conv", "Mul"}
    assert re.search(r"One of 8 tests of a matrix, those of the content [0-9a-f]{8}", said)
    assert run(folder, "8")[0] == passed


def test_all_tests_with_parameters_can_be_sampled_but_for_those_that_only_one_session_asks(folder: Path) -> None:
    passed, said, _ = run(folder, "8", every=True)
    count = Counter(name.partition("[")[0] for name in passed)
    assert "One of 8 tests with parameters" in said
    assert count["test_of_no_matrix"] == 5
    assert count["test_of_the_training_wheel"] == 10
    assert sum(name.endswith("-ort]") for name in passed) == 10
    assert count["test_of_a_dialect"] in (11, 12)


def test_another_content_keeps_other_tests_until_all_had_their_turn() -> None:
    names = [f"tests/test_it.py::test[{operator}-{form}]" for operator in ("Add", "Conv", "Mul") for form in range(20)]
    found = [frozenset(sampling.kept(names, 3, f"{content:08x}")) for content in range(20)]
    assert {len(one) for one in found} == {20}
    assert len({*found}) == len(found)
    assert frozenset.union(*found) == {*names}
    assert sampling.kept(names[:2], 8, "0") < {*names}  # one at least
    assert sampling.kept(reversed(names), 3, "00000000") == found[0]


@pytest.mark.parametrize("sample", ["0", "half"])
def test_an_invalid_number_is_refused(folder: Path, sample: str) -> None:
    _, said, status = run(folder, sample)
    assert status != 0
    assert f"REFGRAD_SAMPLE={sample!r} is not a positive integer: 1 runs all tests, 8 one of eight" in said
