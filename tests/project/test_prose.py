"""Docstrings, messages and pages name things instead of pointing at them, and a docstring says what the caller gets."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
TOPS = ("refgrad", "backends", "conformance")
OPENING = re.compile(r"(What|Whether|Where|Which|That)\b")  # begin with "The names of", "True if", "Add"
POINTING = re.compile(r"\b(that of|those of|(is|are) due|is none of|for want of|such an?)\b", re.IGNORECASE)
METAPHOR = re.compile(r"\b(witness(es)?|testimony|testify|testifies|excuses?|excused)\b", re.IGNORECASE)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
CODE = re.compile(r"`[^`]*`")
TELLING = {"notice", "warn", "refuse", "wrong", "say"}  # functions whose texts people read
UNREAD = ("backends/numpy/registry.py", "refgrad/builder/misuse.py")  # whose messages still say "is due"
# Pages that docs/generate.py writes as a whole.
GENERATED = [
    "backend_tests",
    "benchmarks",
    "findings",
    "kinks",
    "models",
    "mutants",
    "node_models",
    "operators",
    "opsets",
    "parity",
    "precision",
    "runtimes",
    "scoreboard",
    "special_points",
]


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Every module of the package: its file, and its tree."""
    files = [file for top in TOPS for file in sorted((ROOT / top).rglob("*.py"))]
    return [(file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module, each as one line."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield " ".join(text.split())


def messages(tree: ast.Module) -> Iterator[str]:
    """The texts of errors, notices and refusals, each as one line; a value in a text is "{}"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from texts(node.exc)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in TELLING:
            yield from texts(node)


def texts(node: ast.AST) -> Iterator[str]:
    """The string literals within a node."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield " ".join("".join(parts).split())
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield " ".join(node.value.split())
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, ast.JoinedStr) or not isinstance(child, ast.Constant):
            yield from texts(child)


def pages() -> Iterator[tuple[str, str]]:
    """The pages that people write, each as one line and without the output of commands."""
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "course").glob("*.md")]
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(files)):
        if file.stem not in GENERATED:
            yield file.relative_to(ROOT).as_posix(), " ".join(file.read_text(encoding="utf-8").split())


def pointing(text: str) -> list[str]:
    """The words of a text that point at a thing, or that are a metaphor for a term."""
    words = CODE.sub("", text)
    return [found[0] for pattern in (POINTING, METAPHOR) for found in pattern.finditer(words)]


def test_a_docstring_says_what_the_caller_gets():
    assert [(file, text) for file, tree in modules() for text in docstrings(tree) if OPENING.match(text)] == []


@pytest.mark.parametrize("kind", [docstrings, messages])
def test_code_names_what_it_means(kind):
    read = [(file, tree) for file, tree in modules() if kind is docstrings or file not in UNREAD]
    assert [(file, text) for file, tree in read for text in kind(tree) if pointing(text)] == []


def test_pages_name_what_they_mean():
    assert [(page, found) for page, text in pages() if (found := pointing(text))] == []


@pytest.mark.parametrize(
    ("code", "planted"),
    [
        ('raise FeedError(f"{name} has {n} sizes, and 2 are due.")', ["are due"]),
        ('raise FeedError("No model has "\n    "such an axis: " + hint)', ["such an"]),
        ("def f():\n    raise OptionError(f'the {x or \"type is that of y\"}')", ["that of"]),
        ('notice(f"{n} failed for want of memory.")', ["for want of"]),
        ('"""A witness of what the shape is none of."""', []),  # a docstring, not a message
        ('said = "those of the rows"', []),
    ],
)
def test_a_message_that_points_is_found(code, planted):
    assert [found for text in messages(ast.parse(code)) for found in pointing(text)] == planted


def test_a_docstring_that_points_is_found():
    tree = ast.parse('def f():\n    """The type of `that of` x, for which those\n    of y are no excuse."""')
    assert [found for text in docstrings(tree) for found in pointing(text)] == ["those of", "excuse"]


def test_the_pages_that_are_written_are_known():
    assert {ROOT / "docs" / f"{name}.md" for name in GENERATED} <= {*(ROOT / "docs").glob("*.md")}
    assert {"README.md", "docs/api.md", "docs/course/1_contributions.md"} <= {page for page, _ in pages()}
