"""The examples of pages in docs print what the pages show: Python, and commands in the shell."""

import re
import shlex
from pathlib import Path

import pytest

from refgrad.cli import main

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("forgetful")]

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["api", "check", "executors"]
OUTCOME = re.compile(r"\s*# exit code (\d)$")


def words(text: str) -> str:
    """A text with one space between words, and without errors: rounding differs between machines."""
    return " ".join(re.sub(r"\d[\d.]*e[-+]\d+", "#", text).split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_is_printed(page, tmp_path, monkeypatch, capsys):
    """In the order of the page, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    names: dict[str, object] = {}
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for language, block in blocks:
        capsys.readouterr()
        if language == "python":
            exec(block, names)
            expected = " ".join(re.findall(r"^(?:print.*  )?# (.*)", block, re.MULTILINE))
            assert words(capsys.readouterr().out) == words(expected)
            continue
        for command, shown in re.findall(r"^\$ refgrad (.*)\n((?:(?!\$).*\n)*)", block, re.MULTILINE):
            code = OUTCOME.search(command)
            assert main(shlex.split(OUTCOME.sub("", command), comments=True)) == (int(code[1]) if code else 0)
            assert words(shown) in words(capsys.readouterr().out)
