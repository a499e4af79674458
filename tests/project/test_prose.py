"""Docstrings, messages, help and pages name things instead of pointing at them, and their sentences are short."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from refgrad.cli import app

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
TOPS = ("refgrad", "backends", "conformance")
OPENING = re.compile(r"(What|Whether|Where|Which|That)\b")  # begin with "The names of", "True if", "Add"
POINTING = re.compile(
    r"\b(that of|those of|the ones? of|(is|are) due|is none of|for want of|nothing of no|such an?)\b", re.IGNORECASE
)
METAPHOR = re.compile(r"\b(witness(es)?|testimony|testify|testifies|excuses?|excused)\b", re.IGNORECASE)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
CODE = re.compile(r"`[^`]*`")
TELLING = {"notice", "warn", "refuse", "wrong", "say"}  # functions whose texts people read
LONGEST = 40  # words of a sentence in a page
BEGINNING = re.compile(r"\s*(?:[-*>]|\d+\.)\s|#")  # of an entry of a list, or a heading
BLOCK = re.compile(r"^( *)(`{3,})\w*\n.*?^ *\2$|^(    .*\n)+", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
NAMES = re.compile(r"[\w./-]+(, [\w./-]+)+")  # a list of names counts as one word


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


def helps() -> Iterator[tuple[str, str]]:
    """The help of every command and of its parameters, each as one line, with the name of the command."""
    pending = [("refgrad", typer.main.get_command(app))]
    for name, command in pending:
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            yield name, " ".join((text or "").split())
        pending.extend((f"{name} {inner}", one) for inner, one in getattr(command, "commands", {}).items())


def pages() -> Iterator[tuple[str, str]]:
    """Every page of the documentation, and its text."""
    files = [*(ROOT / "docs").rglob("*.md")]
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(files)):
        yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page outside of code, and the cells of tables, the entries of lists and the parts before colons."""
    for paragraph in re.split(r"\n\s*\n", BLOCK.sub("\n\n", page)):
        parts: list[str] = []
        for line in paragraph.splitlines():
            if line.lstrip().startswith("|"):
                parts.extend(line.strip().strip("|").split("|"))
            elif BEGINNING.match(line) or not parts:
                parts.append(line)
            else:
                parts[-1] += " " + line
        for part in parts:
            words = NAMES.sub("names", CODE.sub("`code`", LINK.sub(r"\1", " ".join(part.split()))))
            yield from re.split(r"(?<=[.?!:;])\s+(?=\S)", words)


def pointing(text: str) -> list[str]:
    """The words of a text that point at a thing, or that are a metaphor for a term."""
    words = CODE.sub("", text)
    return [found[0] for pattern in (POINTING, METAPHOR) for found in pattern.finditer(words)]


def test_a_docstring_says_what_the_caller_gets():
    assert [(file, text) for file, tree in modules() for text in docstrings(tree) if OPENING.match(text)] == []


@pytest.mark.parametrize("kind", [docstrings, messages])
def test_code_names_what_it_means(kind):
    assert [(file, text) for file, tree in modules() for text in kind(tree) if pointing(text)] == []


def test_help_names_what_it_means():
    assert [(command, text) for command, text in helps() if pointing(text)] == []


def test_pages_name_what_they_mean():
    assert [(page, found) for page, text in pages() if (found := pointing(" ".join(text.split())))] == []


def test_no_sentence_of_a_page_is_long():
    assert [(page, one) for page, text in pages() for one in sentences(text) if len(one.split()) > LONGEST] == []


def test_a_long_sentence_is_found():
    page = (
        "# A\n\n- one two\n  three. Four [five six](a.md): `a b`\n\n| a | b c |\n\n```python\nx y z\n```\nA, B, C and D"
    )
    assert list(sentences(page)) == ["# A", "- one two three.", "Four five six:", "`code`", "a", "b c", "names and D"]


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


def test_every_page_and_every_command_is_read():
    assert {"README.md", "docs/api.md", "docs/kinks.md", "docs/course/1_contributions.md"} <= {
        page for page, _ in pages()
    }
    assert {"refgrad grad", "refgrad conformance run", "refgrad recipe fgsm"} <= {command for command, _ in helps()}
