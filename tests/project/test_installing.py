"""Every page and message installs refgrad from the same place, which a release changes in `refgrad.installing.SOURCE`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from refgrad import installing

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSTALLED = re.compile(r"pip install '?(\.|refgrad)(?:\[([\w,-]+)\])?(?=['`\s])")
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_installs_from_the_one_place(page):
    """docs/add_an_operator.md installs a package of its own without an extra."""
    text = page.read_text(encoding="utf-8")
    sources = {source for source, extras in INSTALLED.findall(text) if extras or page.stem != "add_an_operator"}
    assert sources <= {installing.SOURCE}
    named = {extra for _, extras in INSTALLED.findall(text) for extra in extras.split(",") if extra}
    assert named <= EXTRAS


def test_the_code_asks_for_it_in_one_place():
    code = [file for top in ("refgrad", "backends", "conformance") for file in (ROOT / top).rglob("*.py")]
    found = [file.name for file in code if "pip install 'refgrad" in file.read_text(encoding="utf-8")]
    assert found == []
    asked = {
        extra for file in code for extra in re.findall(r"\binstall\('([\w-]+)'\)", file.read_text(encoding="utf-8"))
    }
    assert asked <= EXTRAS
    assert "torch" in asked


@pytest.mark.parametrize(
    ("source", "command"),
    [(".", "pip install '.[train]' in a checkout of refgrad"), ("refgrad", "pip install 'refgrad[train]'")],
)
def test_a_release_changes_one_line(monkeypatch, source, command):
    monkeypatch.setattr(installing, "SOURCE", source)
    assert installing.install("train") == command
