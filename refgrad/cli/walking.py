"""The command that explains a gradient with its numbers: `walk`."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Unpack

import typer

from refgrad.backends.base import graph_inputs, load_model
from refgrad.cli.options import WRT, Dim, Feeds, Json, Model, names, sizes_of, with_conventions
from refgrad.cli.output import Bar, Files, print_json, refuse_overwriting, say, saying_what_is_kept, stdout
from refgrad.conformance.problems.feeds import read_feeds
from refgrad.conformance.problems.point import inputs_of
from refgrad.errors import OptionError, abridged, counted
from refgrad.escaping import shell
from refgrad.model.writing import replacing
from refgrad.tables.conventions import ConventionOptions
from refgrad.walks.page import QuizQuestion, answers, page, questions
from refgrad.walks.records import Walk
from refgrad.walks.text import show, step_of
from refgrad.walks.walk import walk as walked


@with_conventions
def walk(
    model: Model,
    feeds: Feeds = None,
    of: Annotated[
        str | None,
        typer.Option(
            metavar="OUTPUT",
            help="What to differentiate: an output, an inner result, or one element of either, such as 'logits[0, 3]'.",
            show_default="the only float output, or its largest element if it has several",
        ),
    ] = None,
    wrt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES", help=WRT, show_default="float inputs, and the parameters that `refgrad weights` lists"
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Print only this step: its number in the walk, or the name of its node.",
        ),
    ] = None,
    differences: Annotated[bool, typer.Option(help="Compare each step with a finite difference, in float64.")] = True,
    seed: Annotated[
        str,
        typer.Option(
            metavar="SEED",
            help="The seed of all random numbers. With --html, 1:30 writes a page for each of the seeds 1 to 30, and a "
            "table of the answers to their quizzes.",
        ),
    ] = "0",
    dim: Dim = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            "--output",
            "-o",
            metavar="PAGE.html",
            help="Write the walk as an HTML page that works offline. It also shows the terms of each sum.",
        ),
        Files.WRITTEN,
    ] = None,
    quiz: Annotated[
        bool,
        typer.Option(
            "--quiz", help="On the page, hide what a step contributes until you have answered a question about it."
        ),
    ] = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Walk through the gradient of MODEL with its numbers.

    The walk goes backwards. For each node it prints the formula of the derivative, the values that the formula reads, and the
    cotangents that the results are added to. Inputs that are not in --feeds are random.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"{str(html)!r}: the page is HTML. Give a name that ends in .html.")
    seeds = _seeds(seed)
    is_class = ":" in seed
    if html is None and (quiz or is_class):
        raise OptionError(f"{'--quiz' if quiz else f'--seed {seed}'} needs --html PAGE.html. Give it, too.")
    if html is not None and step is not None:
        raise OptionError("--step prints one step, and a page has them all. Leave out --step or --html.")
    size, sizes = sizes_of(dim)
    pages = {} if html is None else _pages(html, seeds) if is_class else {seeds[0]: html}
    sheet = html.with_name(f"{html.stem}_answers.csv") if html is not None and is_class else None
    if sheet is not None:  # the command knows PAGE.html alone, which is not written
        named = [(Files.MODEL, model), *((Files.WRITTEN, path) for path in (*pages.values(), sheet))]
        refuse_overwriting(named if feeds is None else [(Files.READ, feeds), *named])
    proto = load_model(model)
    inputs = inputs_of(proto)
    given = None if feeds is None else read_feeds(feeds, inputs, some=True)
    if is_class and all(one.name in (given or ()) for one in graph_inputs(proto.graph)):
        raise OptionError(
            "Every page would be the same: no input of the model is random. Leave out --feeds, or its inputs."
        )

    def walked_with(own: int) -> Walk:
        return walked(
            proto,
            given,
            wrt=names(wrt),
            of=of,
            seed=own,
            differences=differences,
            size=size,
            sizes=sizes,
            **conventions,
        )

    if html is None:
        with Bar("walking"):
            found = walked_with(seeds[0])
        if as_json:
            print_json(found.to_dict() if step is None else step_of(found, step).to_dict())
        else:
            show(found, stdout(), step)
        return
    asked: dict[str, tuple[str, list[QuizQuestion]]] = {}
    written: list[Path] = []
    kept = f"of {counted(len(pages), 'page')} were written."
    with saying_what_is_kept(lambda: f"{len(written)} {kept}"), Bar() as bar:
        for done, (own, path) in enumerate(pages.items()):
            bar(done, len(pages), path.name)
            found = walked_with(own)
            asked[path.name] = found.of, questions(found)
            _write(path, page(found, f"{model.stem}, {own}" if is_class else model.stem, quiz))
            written.append(path)
    if sheet is not None:
        _write(sheet, answers(asked))
        written.append(sheet)
    if as_json:
        print_json({"pages": [str(path) for path in pages.values()], "answers": None if sheet is None else str(sheet)})
    else:
        for note in _note_of_class(asked) if is_class else found.notes:
            say(f"note: {note}")
        say(", ".join(map(str, written if len(written) < 4 else (written[0], "…", *written[-2:]))) + ": written")


def _note_of_class(asked: Mapping[str, tuple[str, list[QuizQuestion]]]) -> list[str]:
    """The note that the pages differentiate different elements, if they do."""
    elements = list(dict.fromkeys(of for of, _ in asked.values()))
    if len(elements) < 2:
        return []
    return [
        f"each page starts from the largest element of its output: {abridged(elements)}. "
        f"To take the same on all pages: --of {shell(elements[0])}"
    ]


_MOST = 1000  # pages at a time


def _seeds(given: str) -> range:
    """The seeds that 7, or 1:30, stands for."""
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", given)
    if found is None:
        raise OptionError(
            f"--seed {reprlib.repr(given)}: give a whole number from 0 on, or the first and the last of several, as in 1:30."
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first or last - first >= _MOST:
        raise OptionError(
            f"--seed {given}: the last seed must be at least the first, and at most {_MOST - 1} above it."
        )
    return range(first, last + 1)


def _pages(html: Path, seeds: range) -> dict[int, Path]:
    """The file of each seed: PAGE_01.html of PAGE.html."""
    digits = max(2, len(str(seeds[-1])))
    return {seed: html.with_name(f"{html.stem}_{seed:0{digits}}{html.suffix}") for seed in seeds}


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8")
