"""The next steps that a report of a check or of a comparison recommends, with their commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refgrad.conformance.judge.check import DIALECTS
from refgrad.conformance.judge.found import BUILDER, Check, Row
from refgrad.conformance.locating.verdicts import Comparison, seen_of
from refgrad.conformance.oracles.differences import NAME as DIFFERENCES
from refgrad.conformance.verdicts import CONVENTION, FAULTS, UNDECIDED, WRONG
from refgrad.escaping import shell, shell_path

_OF_POINT = ("--feeds", "--seed", "--dim")
_OF_GRADIENT = ("--wrt", "--outputs")
_TAKEN = {  # the options of a check that another command takes too
    "compare": (*_OF_POINT, *_OF_GRADIENT, "--import"),
    "grad": (*_OF_GRADIENT, "--import"),
    "nan": (*_OF_POINT, *_OF_GRADIENT, "--import"),
    "reduce": (*_OF_POINT, "--import"),
    "walk": (*_OF_POINT, "--import"),
}
_TORCH = "To have the value that torch takes at a kink, write the gradient with torch's conventions:"
_OWN_WEIGHTS = (
    "--random-weights changed the weights for this check alone. The other commands use the weights of the file."
)


@dataclass(frozen=True)
class ModelCommand:
    """A command on a model: the model, and the values of each option that was given.

    `versions` has the versions here, by what has them.
    """

    model: str
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str | os.PathLike[str], options: Mapping[str, Any], versions: Mapping[str, str]) -> ModelCommand:
        """The command with these options. The value of one is None or empty if it was not given, and may be a list."""
        given = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
        texts = {name: [str(value) for value in values if value is not None] for name, values in given.items()}
        return cls(os.fspath(model), {name: values for name, values in texts.items() if values}, versions)

    def command(self, name: str = "check", *words: str, without: Sequence[str] = ()) -> str:
        """A command on this model, to be pasted into a shell: with `words`, and the options that the command takes too."""
        taken = [
            option for option in self.options if option in _TAKEN.get(name, self.options) and option not in without
        ]
        given = [word for option in taken for value in self.options[option] for word in _words(option, value)]
        return " ".join(["refgrad", name, shell_path(self.model), *map(shell, [*words, *given])])


def _words(option: str, value: str) -> list[str]:
    return [f"{option}={value}"] if value.startswith("-") else [option, value]


def steps(found: Check, asked: ModelCommand) -> list[tuple[str, str]]:
    """The next steps, which depend on the verdicts that occur: a sentence and its command, "" if there is none."""
    rows = [row for row in found.rows if row.dialect != BUILDER]
    verdicts = {row.verdict for row in rows}
    again = asked.command("check", "--seed", str(found.seed + 1), without=("--feeds", "--seed"))
    listed = list(_at_fault(rows, asked))
    if listed:
        listed.append(("See if it is the same at other feeds:", again))
    elif UNDECIDED in verdicts:
        listed.append(("Check at other feeds:", again))
    elif CONVENTION in verdicts:
        listed.append(("The point is a kink, where several answers are valid. Check at other feeds:", again))
    if UNDECIDED in verdicts:
        if "--random-weights" not in asked.options:
            with_weights = asked.command("check", "--random-weights", "0")
            listed.append(("If the weights are all equal, check with random ones:", with_weights))
        listed.append(("See if a number leaves the range of its type:", asked.command("nan")))
    if CONVENTION in verdicts:
        listed.append((_TORCH, asked.command("grad", "--kinks", "torch", "-o", "gradient.onnx")))
    if not listed:
        listed.append(("Nothing has to be mended. Write the gradient:", asked.command("grad", "-o", "gradient.onnx")))
    if "--random-weights" in asked.options:
        listed.append((_OWN_WEIGHTS, ""))
    return listed


def after_comparison(found: Comparison, asked: ModelCommand, given: Sequence[str]) -> list[tuple[str, str]]:
    """The next steps after a comparison: a sentence and its command, "" if there is none.

    :param given: the sides as they were given.
    """
    listed: list[tuple[str, str]] = []
    for place, (name, side) in enumerate((("a", found.a), ("b", found.b))):
        verdicts = {seen_of(tensor, place).verdict for tensor in found.tensors}
        if side.is_recorded and WRONG in verdicts:
            inputs = () if "--feeds" in asked.options else ("--feeds", given[place])
            walked = asked.command("walk", *inputs)
            listed.append((f"Step through the right gradient, beside the program that made {name}:", walked))
        elif side.failed or WRONG in verdicts:
            reduced = asked.command("reduce", "--side", given[place], "-o", "reduced")
            listed.append((f"Write the smallest model that shows the fault of {name}, as a bug report:", reduced))
        if UNDECIDED in verdicts and not side.is_recorded and ":" not in given[place].partition("@")[2]:
            in_double = asked.command("compare", "--a", "refgrad@numpy", "--b", f"{given[place]}:float64")
            listed.append((f"See if {name} is right in double, where rounding hides less:", in_double))
    if any(CONVENTION in (tensor.a.verdict, tensor.b.verdict) for tensor in found.tensors):
        listed.append((_TORCH, asked.command("grad", "--kinks", "torch", "-o", "gradient.onnx")))
    return listed or [("Nothing has to be mended.", "")]


def _at_fault(rows: Sequence[Row], asked: ModelCommand) -> Iterator[tuple[str, str]]:
    """The steps for faults: the first fault of each executor, and of the mathematics."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.verdict in FAULTS:
            first.setdefault((row.backend, row.oracle), row)
    for row in first.values():
        executor = row.backend.removesuffix(" float64")
        side = f"{'refgrad' if row.dialect == DIALECTS[0] else 'refgrad:ort'}@{executor}"
        reduced = asked.command("reduce", "--side", side, "-o", "reduced")
        if row.verdict == WRONG and row.oracle == DIFFERENCES:
            yield "A rule or its lowering is wrong. Find its node, and write the smallest model that shows it:", reduced
            continue
        other = "refgrad@numpy:float64" if side == "refgrad@numpy" else "refgrad@numpy"
        compared = asked.command("compare", "--a", other, "--b", side)
        what = "computes another gradient than in float64" if row.verdict == WRONG else "does not run the gradient"
        yield f"{executor} {what}. Find the node at fault:", compared
        yield f"Write the smallest model that shows it, as a bug report about {executor}:", reduced
