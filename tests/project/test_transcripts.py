"""The commands of the pages that a newcomer follows print what the pages say (docs/transcripts.py)."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def transcripts():
    """docs/transcripts.py as a module."""
    spec = importlib.util.spec_from_file_location("transcripts", ROOT / "docs" / "transcripts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["transcripts"] = module  # its dataclass looks for its module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["transcripts"]


def faults(transcripts, page):
    """The commands that print something else than the page says, with what they print."""
    pytest.importorskip("onnxruntime")
    done = transcripts.run((ROOT / page).read_text(encoding="utf-8"))
    assert done
    return [(command.text, command.printed) for command in done if not command.agrees]


def test_the_commands_of_the_readme_print_what_it_says(transcripts):
    assert faults(transcripts, "README.md") == []


@pytest.mark.parametrize(
    "name", ["start/debug", "start/test_a_runtime", "start/teach", "start/train", "troubleshooting"]
)
def test_the_commands_of_a_page_print_what_it_says(transcripts, name):
    assert faults(transcripts, f"docs/{name}.md") == []


def test_every_page_is_tried(transcripts):
    starts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "start").glob("*.md")}
    assert starts | {"README.md", "docs/troubleshooting.md"} == set(transcripts.PAGES)


def test_no_command_is_left_without_its_output(transcripts):
    """A command that prints nothing is fine, but no block is of commands alone which all print something."""
    for page in transcripts.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        shown = [
            command.said
            for kind, block in transcripts.blocks(text)
            if kind == "console"
            for command in transcripts.commands(block)
        ]
        assert any(shown), page


def test_a_file_says_the_same_on_every_page(transcripts):
    """README.md and the first quick start have one program."""
    texts = [
        dict(re.findall(r"```python\n(# by_hand\.py)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
        for page in transcripts.PAGES[:2]
    ]
    assert texts[0] == texts[1] != {}


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("error 4.0e-08\n", "error 9.1e-08\n", True),  # rounding
        ("is 1.06922 instead\n", "is 1.06921 instead\n", True),
        ("is 1.06922 instead\n", "is 1.16922 instead\n", False),
        ("3 of 4 elements\n", "4 of 4 elements\n", False),
        ("a  1.5\n", "a      1.5\n", True),  # a column
        ("w1 is wrong\n", "w2 is wrong\n", False),
        ("w is wrong\n", "w is right\n", False),
        ("Versions: ...\n", "Versions: onnx 2\n", True),
        ("a\n...\nb\n", "a\n1\n2\nb\n", True),
        ("a\n...\nb\n", "a\n1\n2\nc\n", False),
        ("a\n", "a\nb\n", False),
    ],
)
def test_what_agrees(transcripts, said, printed, same):
    assert transcripts.agrees(said, printed) is same


def test_a_page_is_run_and_filled(transcripts):
    page = (
        "```python\n# a.py\nprint(6 * 7)\n```\n\n```console\n$ pip install nothing\n```\n\n"
        "```console\n$ python a.py\n41\n$ python \\\n    a.py\n```\n"
    )
    done = transcripts.run(page)
    assert [(command.text, command.printed) for command in done] == [
        ("python a.py", "42\n"),
        ("python \\\n    a.py", "42\n"),
    ]
    filled = transcripts.filled(page, done)
    assert filled == page.replace("41\n", "42\n").replace("    a.py\n```", "    a.py\n42\n```")
    assert all(command.agrees for command in transcripts.run(filled))
