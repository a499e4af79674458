"""The marks by which the sessions of the noxfile choose test files."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

TESTS = Path(__file__).parents[1]
MARKS = [
    text.partition(":")[0]
    for text in tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
]
OF_FILES = sorted({*MARKS} - {"matrix", "models"})  # these are of single tests


@pytest.mark.parametrize("file", sorted(TESTS.rglob("test_*.py")), ids=lambda file: file.stem)
def test_the_sessions_see_every_mark_of_a_file(file):
    text = file.read_text(encoding="utf-8")
    assigned = re.search(r"^pytestmark = (\[[^]]*\]|.*)", text, re.MULTILINE)
    used = set(re.findall(r"pytest\.mark\.(\w+)", text)).intersection(OF_FILES)
    of_tests = set(re.findall(r"^@pytest\.mark\.(\w+)", text, re.MULTILINE)) & {"torch"}
    assert used - of_tests == set(re.findall(r"mark\.(\w+)", assigned[0] if assigned else "")).intersection(OF_FILES)
    if assigned:
        assert text.count("pytestmark") == 1 or file == Path(__file__)


@pytest.mark.parametrize("file", sorted(TESTS.rglob("test_*.py")), ids=lambda file: file.stem)
def test_what_asks_for_torch_runs_where_torch_is(file):
    text = file.read_text(encoding="utf-8")
    if file != Path(__file__) and 'importorskip("torch"' in text:
        assert "mark.torch" in text


@pytest.mark.parametrize("mark", OF_FILES)
def test_every_mark_chooses_a_session(mark):
    assert f'"{mark}"' in (TESTS.parent / "noxfile.py").read_text(encoding="utf-8")
    assert any(f"pytest.mark.{mark}" in file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py"))


def test_ci_runs_the_sessions_that_run_every_night():
    """The two lines of .ci/run are those of the noxfile, from which the session `everything` takes them."""
    noxfile = (TESTS.parent / "noxfile.py").read_text(encoding="utf-8")
    [lines] = [
        ast.literal_eval(node.value)
        for node in ast.parse(noxfile).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CI"
    ]
    run = (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert sorted(tuple(names.split()) for names in re.findall(r"nox .*-s ([a-z ]*[a-z])", run)) == sorted(lines)
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)", noxfile, re.MULTILINE))
    assert {name for line in lines for name in line} < sessions


def test_what_is_sampled_is_listed():
    """By the name of the function, or of the file; only the session `everything` runs all of it."""
    page = (TESTS.parent / "docs" / "development.md").read_text(encoding="utf-8")
    sampled = re.compile(r"^@pytest\.mark\.matrix\n(?:[@ )\]].*\n)*def (\w+)", re.MULTILINE)
    files = [file for file in TESTS.rglob("test_*.py") if file.name != "test_sampling.py"]
    found = [(file.name, name) for file in files for name in sampled.findall(file.read_text(encoding="utf-8"))]
    assert len(found) > 10
    assert [one for one in found if f"`{one[0]}`" not in page and f"`{one[1]}`" not in page] == []


@pytest.mark.parametrize("name", ["planted", "planted_structures", "jets", "locating", "locating_known_bugs"])
def test_what_plants_faults_is_not_sampled(name):
    [file] = TESTS.rglob(f"test_{name}.py")
    assert not re.search(r"mark\.matrix", file.read_text(encoding="utf-8"))
