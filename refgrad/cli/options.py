"""The options that several commands share, and how their text is read."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints, overload

import typer

from refgrad.cli.commands import choice
from refgrad.cli.numbers import number
from refgrad.cli.output import Files
from refgrad.conformance.problems.feeds import SIZE
from refgrad.conformance.problems.systems.executors import executor_names
from refgrad.errors import OptionError
from refgrad.tables.conventions import DEFAULT, QUANTIZATION
from refgrad.tables.kinks import CONVENTIONS as KINKS

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False), Files.MODEL]
WRT = (
    "Inputs and initializers to differentiate with respect to: names, or patterns such as 'head.*', separated by commas. Write "
    "\\, for a comma in a name. May be repeated."
)
Wrt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help=WRT,
        show_default="every float input and initializer",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Outputs to differentiate, written like --wrt.",
        show_default="every float output",
    ),
]
Feeds = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A .npz file with the inputs by name.",
        show_default="random inputs of the declared types",
    ),
    Files.READ,
]
Dim = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES",
        help="Sizes of random inputs: N=8 for the dimension N, x[0]=8 for the first axis of x, or 8 for all dimensions "
        "without a size.",
        show_default=str(SIZE),
    ),
]
Seed = Annotated[int, number("seed", help="The seed of all random numbers.")]
Quantization = Annotated[
    str,
    choice(
        QUANTIZATION,
        help="The derivative of quantization. zero: 0. straight-through: as if nothing were rounded or clipped. clipped: the "
        "same, but 0 where something is clipped. The derivative of Round is always 0.",
    ),
]
Keep = Annotated[bool, typer.Option("--keep-outputs", help="The new model also returns the outputs of MODEL.")]
Kinks = Annotated[str, choice(KINKS, help="Whose value to take at a point without a derivative, such as Relu at 0.")]
Backend = Annotated[
    str,
    choice(
        executor_names,
        "--backend",
        others="package.module:Class",
        metavar="NAME",
        help="The executor: one of these names, or your own class.",
    ),
]
StrongZero = Annotated[
    bool,
    typer.Option(
        "--strong-zero",
        help="A cotangent of 0 contributes 0 even if the derivative is infinite: 0 * inf is 0 instead of NaN.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything instead of a summary.")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Result = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="The file to write.", show_default=False),
    Files.WRITTEN_MODEL,
]
Reports = Annotated[
    list[Path] | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write a report: .html, .md or .json. May be repeated."),
    Files.WRITTEN,
]
OF = (
    "The output to differentiate, or the sum of some of its elements, selected as in NumPy: 'logits[3]', 'logits[:, 3]'. An "
    "index can be a name: for 'logits[:, target]' you feed an integer, target."
)
Of = Annotated[
    str | None,
    typer.Option(
        metavar="SELECTION",
        help=OF,
        show_default="the only float output",
    ),
]


_CONVENTIONS = {"kinks": Kinks, "quantization": Quantization, "strong_zero": StrongZero}  # a Typer option for each


def with_conventions(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose `**conventions` become options: one for each convention of a derivative."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in signature(command).parameters.items()
        if name != "conventions"
    ]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(DEFAULT, name), annotation=option)
        for name, option in _CONVENTIONS.items()
    ]

    @wraps(command)
    def taking(**given: Any) -> None:
        command(**given)

    return _showing(taking, [*own, *added])


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, in which a parameter that is a dataclass becomes options: one for each of its fields, in their order."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    shown: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name not in groups:
            shown.append(parameter.replace(annotation=hints[name]))
            continue
        options = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            annotation = options[field.name]
            shown.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation))

    @wraps(command)
    def taking(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    return _showing(taking, shown)


def _showing(command: Callable[..., None], shown: Sequence[Parameter]) -> Callable[..., None]:
    """`command` with these parameters for Typer."""
    command.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command


def names(given: Sequence[str] | None) -> list[str] | None:
    """Return the names a, b, c of `--wrt a,b --wrt c`. A comma after a backslash belongs to a name."""
    if not given:
        return None
    parts = [part for value in given for part in re.split(r"(?<!\\),", value)]
    return [part.replace("\\,", ",").strip() for part in parts if part.strip()]


@overload
def sizes_of(given: Sequence[str] | None) -> tuple[int, dict[str, int]]: ...
@overload
def sizes_of(given: Sequence[str] | None, default: None) -> tuple[int | None, dict[str, int]]: ...
def sizes_of(given: Sequence[str] | None, default: int | None = SIZE) -> tuple[int | None, dict[str, int]]:
    """Return the size of undeclared dimensions, and the sizes by symbol: 3 and {"N": 8} for `--dim N=8 --dim 3`."""
    size, symbols = default, {}
    for part in names(given) or ():
        symbol, separator, number = part.rpartition("=")
        if not re.fullmatch(r"\d{1,18}", number):
            raise OptionError(
                f"--dim {reprlib.repr(part)}: give a size, as in --dim 8, or one for a symbol, as in --dim N=8."
            )
        if separator:
            symbols[symbol] = int(number)
        else:
            size = int(number)
    return size, symbols
