"""What the project says of itself is what the code says."""

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refgrad.tables.registry import ZERO

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_fresh():
    module = generator()
    stale = [path.name for path, text in module.generated().items() if not module.fresh(path, text)]
    assert not stale, f"{stale} are stale: run python docs/generate.py"


def test_a_stale_file_is_noticed(monkeypatch):
    module = generator()
    monkeypatch.setitem(ZERO, ("", "Floor"), "another reason")
    path = ROOT / "docs" / "operators.md"
    assert module.generated()[path] != path.read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_a_python_example_of_the_readme_prints_what_it_says(code):
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == re.search(r"# (\d.*)", code)[1]


@pytest.mark.parametrize("command", re.findall(r"^\| `refgrad (\w+)", README, re.MULTILINE))
def test_every_command_of_the_readme_exists(command):
    result = subprocess.run(
        [sys.executable, "-m", "refgrad", command, "--help"], capture_output=True, text=True, check=True
    )
    assert "--json" in result.stdout or command in ("conformance", "recipe")


@pytest.mark.parametrize("name", re.findall(r"^\| `nox -s ([\w ]+)`", README, re.MULTILINE))
def test_every_session_of_the_readme_exists(name):
    sessions = set(re.findall(r"@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
    assert set(name.split()) <= sessions


WITH_EXAMPLES = sorted(
    file
    for top in ("refgrad", "backends", "conformance")
    for file in (ROOT / top).rglob("*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: file.stem)
def test_examples_in_docstrings_run(file):
    inner = file.relative_to(ROOT).with_suffix("").parts
    name = ".".join(inner if inner[0] == "refgrad" else ("refgrad", *inner))
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed


@pytest.mark.parametrize("page", ["interpreter.md", "higher_order.md", "control_flow.md"])
def test_the_examples_of_a_page_print_what_it_says(page):
    failed, count = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert count > 5
    assert not failed
