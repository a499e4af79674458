"""Messages have the plural where it belongs, as `counted` has it: no message has a number before a plural."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import refgrad
from refgrad.errors import counted

pytestmark = pytest.mark.interpreter

ROOT = Path(refgrad.__file__).parent
# Nouns that are counted in messages. A number of bytes, of steps or of outputs that is a limit or is compared is never 1.
NOUNS = (
    "batches cases classes crashes elements epochs executors faults files findings gradients graphs inputs kernels letters "
    "lines models mutants nodes numbers operators parts places points reasons results rows runs sides "
    "tensors tests verdicts weights"
)
PLURAL = re.compile(rf"^ ((more|recorded|other|different|wrong|random) )*({NOUNS.replace(' ', '|')})\b")


def messages() -> Iterator[tuple[str, ast.JoinedStr]]:
    for folder in (ROOT / "conformance", ROOT / "cli"):
        for file in sorted(folder.resolve().rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield f"{file.name}:{node.lineno}", node


def test_no_message_has_a_number_before_a_plural() -> None:
    found = [
        f"{place}: {ast.unparse(number.value)}{text.value[:20]}"
        for place, message in messages()
        for number, text in zip(message.values, message.values[1:], strict=False)
        if isinstance(number, ast.FormattedValue) and isinstance(text, ast.Constant) and PLURAL.match(str(text.value))
    ]
    assert found == []


def test_a_number_is_told_with_its_noun() -> None:
    assert [counted(number, "node") for number in range(3)] == ["0 nodes", "1 node", "2 nodes"]
    assert [counted(number, "element is", "elements are") for number in (1, 2)] == ["1 element is", "2 elements are"]
