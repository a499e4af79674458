"""The formula of a step, with the names of the step's tensors in place of the letters of its rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from onnx.defs import OpSchema

from refgrad.escaping import printable
from refgrad.tables.schemas import find_schema
from refgrad.walks.records import Step

_WORD = re.compile("([^\\W\\d_][\\w'′\u0300-\u036f]*)")  # with its accents: x̂ is not x
_PRIMES = "'′"


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the step in its formula, or the gradient of one."""

    name: str
    is_gradient: bool

    def __str__(self) -> str:
        return f"∂{self.name}" if self.is_gradient else self.name


def formula_pieces(step: Step) -> list[str | NamedTensor]:
    """The formula in order: texts, and the tensors that its letters stand for. A word of prose, such as input, stays a word."""
    letters = _letters(step)
    return [piece for text in _WORD.split(step.formula) for piece in _piece(text, letters, step) if piece]


def formula_text(step: Step) -> str:
    """The formula as text: `∂z = ∂h where h > 0, else 0`. Names of tensors begin no line."""
    return "".join(piece if isinstance(piece, str) else printable(str(piece)) for piece in formula_pieces(step))


def _piece(text: str, letters: dict[str, str], step: Step) -> Iterator[str | NamedTensor]:
    word, turned = (text[:-1], "ᵀ") if len(text) > 1 and text.endswith("ᵀ") else (text, "")
    letter = word.rstrip(_PRIMES)
    is_gradient = letter not in letters and letter.startswith("d") and letter[1:] in letters
    base = letter[1:] if is_gradient else letter
    is_primed = letter != word
    if base not in letters or not (len(letter) == 1 or is_gradient) or (is_primed and base not in _TURNED):
        yield text
        return
    yield NamedTensor(letters[base], is_gradient)
    is_turned = is_primed and bool(step.attributes.get(_TURNED[base]))  # A' is A, or Aᵀ if transA
    yield "" if is_turned and turned else "ᵀ" if is_turned else turned


_TURNED = {"A": "transA", "B": "transB"}


def _letters(step: Step) -> dict[str, str]:
    """The names of the step's tensors by the letters of its formula: the schema's names, and x and y for one operand."""
    schema = find_schema(step.operator, step.domain)
    if schema is None:
        return {}
    letters: dict[str, str] = {}
    for formal, names in ((schema.inputs, step.inputs), (schema.outputs, step.outputs)):
        for parameter, name in zip(formal, names, strict=False):
            if name and parameter.option != OpSchema.FormalParameterOption.Variadic:
                letters[parameter.name] = name
    for letter, names in (("x", step.inputs), ("y", step.outputs)):
        if names and names[0] and f"with {letter} =" not in step.formula:
            letters = {letter: names[0], letter.upper(): names[0]} | letters
    return letters
