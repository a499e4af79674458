"""The notebooks of docs/notebooks run, and show what is written in them."""

import importlib
import math
import re
import sys
from html import unescape
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?%?")
ROUNDING = 1e-4  # what machines compute differently; larger numbers are about results
DOORS = {"debug_a_gradient", "test_a_runtime", "teach_backprop", "train_and_explain"}


@pytest.fixture(scope="module")
def notebooks():
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        yield importlib.import_module("notebooks")
    finally:
        sys.path.remove(str(ROOT / "docs" / "site"))


def outputs(notebook):
    """The texts of each output, by its kind."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            yield from output.get("data", {"stream": output.get("text", [])}).items()


def readable(kind, text):
    return unescape(re.sub(r"<style>.*?</style>|<[^>]*>", "\n", text)) if kind == "text/html" else text


def assert_alike(found, stored):
    """The same words, and the same numbers up to rounding."""
    assert NUMBER.sub("#", found) == NUMBER.sub("#", stored)
    for one, other in zip(NUMBER.findall(found), NUMBER.findall(stored), strict=True):
        a, b = (float(text.rstrip("%")) for text in (one, other))
        assert math.isclose(a, b, rel_tol=0.02, abs_tol=ROUNDING), (one, other)


def test_there_is_one_for_each_door():
    assert set(NAMES) == DOORS


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_what_it_computes(notebooks, name):
    """If this fails after a change of what is printed: python docs/site/notebooks.py."""
    stored = notebooks.read(name)
    found = notebooks.executed(stored)
    pairs = list(zip(outputs(found), outputs(stored), strict=True))
    for (kind, now), (then_kind, then) in pairs:
        assert kind == then_kind
        assert_alike(readable(kind, "".join(now)), readable(kind, "".join(then)))
    assert any(kind == "image/svg+xml" for (kind, _), _ in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_says_nothing_of_a_machine(notebooks, name):
    notebook = notebooks.read(name)
    text = notebooks.written(notebook)
    assert 8 <= len(notebook["cells"]) <= 15
    assert (ROOT / "docs" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8") == text
    assert (notebook["nbformat"], notebook["cells"][0]["cell_type"]) == (4, "markdown")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not re.search(r"/tmp|/home|/root|/Users|[A-Z]:\\\\|\bseconds\b|0x[0-9a-f]{6}", text)
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or cell["execution_count"]


@pytest.mark.parametrize("name", NAMES)
def test_the_site_shows_every_output(notebooks, name):
    notebook = notebooks.read(name)
    page, pictures = notebooks.page(notebook, name)
    for kind, text in outputs(notebook):
        shown = pictures.values() if kind == "image/svg+xml" else (page,)
        assert any("".join(text).rstrip() in one for one in shown)
    assert all(f"({path})" in page for path in pictures)
    for target in re.findall(r"\]\((\.\./[^)#]+)", page):
        assert (ROOT / "docs" / "notebooks" / target).is_file()


def test_a_cell_that_fails_fails_its_notebook(notebooks):
    cell = {"cell_type": "code", "source": ["1 / 0"], "outputs": []}
    with pytest.raises(ZeroDivisionError):
        notebooks.executed({"cells": [cell]})


def test_what_a_cell_shows(notebooks):
    sources = ["print('a')\nx = 2", "x + 1", "x = 3", "import refgrad.show.svg as s\ns.Svg('<svg/>')"]
    cells = [{"cell_type": "code", "source": [source]} for source in sources]
    made = notebooks.executed({"cells": cells})
    assert [cell["execution_count"] for cell in made["cells"]] == [1, 2, 3, 4]
    assert list(outputs(made)) == [("stream", ["a\n"]), ("text/plain", ["3"]), ("image/svg+xml", ["<svg/>"])]
