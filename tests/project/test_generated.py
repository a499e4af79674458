"""What the project says of itself is what the code says."""

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refgrad.cli import main
from refgrad.tables.registry import ZERO

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("forgetful")]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "reports").rglob("*.md")))


@pytest.fixture
def module(monkeypatch):
    """docs/generate.py, as a script has it: what is beside it can be imported."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "docs"))  # as for a script: it imports the module beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_a_stale_page_is_noticed(monkeypatch, module):
    """One page with one reason changed: the session `lint` generates all of them."""
    page, reason, other = ROOT / "docs" / "operators.md", ZERO["", "Floor"], "a reason that no operator has"
    monkeypatch.setitem(ZERO, ("", "Floor"), other)
    text = module.operators()
    assert other in text
    assert not module.fresh(page, text)
    assert module.fresh(page, text.replace(other, reason))


def test_the_picture_of_the_readme_shows_what_a_gradient_reads_and_returns(module):
    picture = (ROOT / "docs" / "pictures" / "in_and_out.svg").read_text(encoding="utf-8")
    assert picture == module.pictures.in_and_out()
    named = re.findall(r">(\w+)</text>", picture)
    assert named == ["x", "w", "y", "x", "w", "y_grad", "x_grad", "w_grad"]


def test_what_the_readme_and_the_contents_say_of_themselves_is_fresh(module):
    """The figures of README.md, and the comparison with other tools."""
    assert module.fill(README, "speed", module.speed()) == README
    assert module.fill(DOCS["comparisons"], "comparisons", module.comparisons()) == DOCS["comparisons"]
    assert module.fill(DOCS["README"], "operators", module.operators_summary()) == DOCS["README"]


@pytest.mark.parametrize("code", re.findall(r"```python\n((?!>>>).*?)```", DOCS["training"], re.DOTALL))
def test_a_python_example_prints_what_it_says(code, tmp_path):
    for name in re.findall(r"^from (\w+)", code, re.MULTILINE):
        pytest.importorskip(name)
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert printed.splitlines()[-1] == re.search(r"# (\d.*)", code)[1]


@pytest.mark.parametrize("page", ["fine_tuning", "estimators", "locating", "many_processes"])
def test_the_examples_of_a_page_print_what_they_say(page, capsys, tmp_path, monkeypatch):
    """In the order of the page, each going on where the one before ended."""
    monkeypatch.chdir(tmp_path)
    blocks, names = re.findall(r"```python\n(.*?)```", DOCS[page], re.DOTALL), {}
    for name in re.findall(r"^from (\w+)", "\n".join(blocks), re.MULTILINE):
        pytest.importorskip(name)
    for code in blocks:
        exec(code, names)
        printed = capsys.readouterr().out.split()
        assert printed == " ".join(re.findall(r"^(?:print.*  )?# (.*)", code, re.MULTILINE)).split()


def test_the_readme_can_be_read_in_a_few_minutes():
    assert len(README.encode()) < 8_000


@pytest.mark.parametrize("command", re.findall(r"^\| `refgrad (\w+)", DOCS["commands"], re.MULTILINE))
def test_every_command_of_the_docs_exists(command, capsys):
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out or command in ("conformance", "recipe")


def test_the_docs_have_every_session():
    sessions = set(re.findall(r"@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
    named = re.findall(r"^\| `nox -s ([\w ]+)", DOCS["development"], re.MULTILINE)
    assert {name for names in named for name in names.split()} == sessions


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_links_to_exists(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_contents_have_every_page():
    linked = set(re.findall(r"\]\(([\w.]+)\)", DOCS["README"]))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


WITH_EXAMPLES = sorted(
    file
    for top in ("refgrad", "backends", "conformance")
    for file in (ROOT / top).rglob("*.py")
    if ">>>" in file.read_text() and file.parent.name not in ("jax", "torch")  # their sessions run those
)


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: file.stem)
def test_examples_in_docstrings_run(file):
    inner = file.relative_to(ROOT).with_suffix("").parts
    name = ".".join(inner if inner[0] == "refgrad" else ("refgrad", *inner))
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed


@pytest.mark.parametrize(
    "page", ["interpreter.md", "higher_order.md", "control_flow.md", "weights.md", "showing.md", "walking.md"]
)
def test_the_examples_of_a_page_print_what_it_says(page):
    failed, count = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert count > 5
    assert not failed


def test_a_rule_without_mutants_is_not_said_to_round(module):
    every = module.ruled().keys() | module.defined().keys()
    rounding, unmeasured = module.without_mutants(every - {"Softsign", "QuantizeLinear"})
    assert (rounding, unmeasured) == (["QuantizeLinear"], ["Softsign"])
