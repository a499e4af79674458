"""Docstrings say what the caller gets, and name things instead of pointing at them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
OPENING = re.compile(r"(What|Whether|Where|Which|That)\b")  # begin with "The names of", "True if", "Add"
POINTING = re.compile(r"\b(that of|those of|(is|are) due|is none of|for want of|such an?)\b", re.IGNORECASE)


@cache
def docstrings() -> list[tuple[str, str]]:
    """The docstrings of the package, each as one line, with its file."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    found = []
    for top in ("refgrad", "backends", "conformance"):
        for file in sorted((ROOT / top).rglob("*.py")):
            nodes = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, kinds))
            texts = (" ".join(text.split()) for node in nodes if (text := ast.get_docstring(node)))
            found += [(file.relative_to(ROOT).as_posix(), text) for text in texts]
    return found


def test_a_docstring_says_what_the_caller_gets():
    assert [one for one in docstrings() if OPENING.match(one[1])] == []


def test_a_docstring_names_what_it_means():
    assert [(file, found[0]) for file, text in docstrings() for found in POINTING.finditer(text)] == []
