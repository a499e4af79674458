"""The options that several commands have, and what their text means."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from refgrad.conformance.questions.feeds import SIZE
from refgrad.errors import OptionError

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]
Wrt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Names of inputs and initializers, separated by commas, or the option repeated; \\, is a comma inside a name. "
        "Default: every float input and every float initializer.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Names of outputs to differentiate, as for --wrt. Default: every float output."),
]
Feeds = Annotated[
    Path | None, typer.Option(help="Inputs by name, a .npz file. Default: random ones of the declared types.")
]
Dim = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES",
        help=f"Sizes for random feeds: N=8 for the dimension N, 8 for every undeclared one. Default: {SIZE}.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Quantization = Annotated[str, typer.Option(help="The derivative of quantization: zero, straight-through, clipped.")]
Keep = Annotated[bool, typer.Option("--keep-outputs", help="Also return the model's outputs.")]
Kinks = Annotated[
    str, typer.Option(help="Whose choice where a derivative does not exist: refgrad, torch, onnxruntime.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything. Default: a summary.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Result = Annotated[Path, typer.Option("--output", "-o", help="Where the result is written.", show_default=False)]
Of = Annotated[
    str | None,
    typer.Option(
        metavar="SELECTION",
        help="What is differentiated: an output, or the sum of some elements of one, as NumPy has them: 'logits[3]', "
        "'logits[:, 3]'. A name for an index, 'logits[:, target]', is an integer input. Default: the only float output.",
    ),
]


def names(given: Sequence[str] | None) -> list[str] | None:
    """`--wrt a,b --wrt c` is a, b, c; a comma that belongs to a name is written with a backslash before it."""
    if not given:
        return None
    parts = [part for value in given for part in re.split(r"(?<!\\),", value)]
    return [part.replace("\\,", ",").strip() for part in parts if part.strip()]


def sizes_of(given: Sequence[str] | None) -> tuple[int, dict[str, int]]:
    """`--dim N=8 --dim 3`: 8 elements along N, 3 along every other dimension that is not declared."""
    size, symbols = SIZE, {}
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


def in_bytes(size: str) -> int:
    """`size` in bytes: a number, or one with K, M or G behind it."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([KMG]?)(?:i?B)?", size, re.IGNORECASE)
    if found is None:
        raise OptionError(
            f"--max-memory {reprlib.repr(size)} is not a size. Give a number of bytes, or one like 500M or 8G."
        )
    return int(float(found[1]) * 1024 ** " KMG".index(found[2].upper() or " "))
