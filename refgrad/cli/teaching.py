"""The command of the course: `teach`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from refgrad.cli.options import Json
from refgrad.cli.output import AGREES, DISAGREES, Files, print_json, print_table, say, say_lines
from refgrad.errors import OptionError, counted
from refgrad.escaping import shell_path
from refgrad.teaching import CHAPTERS, Chapter, Verdict, chapter_of, judge, start


def teach(
    chapter: Annotated[
        str | None,
        typer.Argument(metavar="CHAPTER", help="The number of a chapter.", show_default="list them"),
    ] = None,
    answers: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="ANSWER",
            help="Your answer, a Python file. refgrad runs it, so give only files that you wrote or have read. If you give "
            "several answers, each gets one line.",
        ),
        Files.READ,
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            "--start",
            metavar="FILE",
            help="Write a file to fill in with your answer. An existing file is not overwritten.",
        ),
        Files.WRITTEN,
    ] = None,
    formula: Annotated[bool, typer.Option("--formula", help="Also print the right derivative.")] = False,
    as_json: Json = False,
) -> None:
    """Judge an answer to an exercise of the course. If it is wrong, says which mistake it makes.

    The exit code is 1 if an answer is not right.
    """
    if chapter is None:
        if begin is not None:
            raise OptionError(f"Give a chapter, too: refgrad teach 1 --start {shell_path(begin)}")
        _list(as_json)
        return
    asked = _chapter(chapter)
    if begin is not None:
        if answers:
            raise OptionError("Give an answer to judge, or --start with the file to write, and not both.")
        _start(asked, begin, as_json)
    elif answers:
        _judge(asked, answers, formula, as_json)
    else:
        _ask(asked, formula, as_json)


def _chapter(text: str) -> Chapter:
    """The chapter with this number.

    :raises OptionError: there is none.
    """
    if text.endswith(".py"):
        raise OptionError(f"Give a chapter first: refgrad teach 1 {shell_path(Path(text))}")
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise OptionError(f"There is no chapter {text}. A chapter is a number, 1 to {len(CHAPTERS)}.")
    return chapter_of(int(text))


def _start(asked: Chapter, begin: Path, as_json: bool) -> None:
    path = start(asked.number, begin)
    if as_json:
        print_json({"chapter": asked.number, "written": str(path)})
    else:
        say(f"{path}: written. Fill in the derivative; then: refgrad teach {asked.number} {shell_path(path)}")


def _judge(asked: Chapter, answers: list[Path], formula: bool, as_json: bool) -> None:
    """Print the verdict on an answer, or a line for each of several."""
    found = [judge(asked.number, answer) for answer in answers]
    if as_json:
        documents = [verdict.document() for verdict in found]
        several = [{"answer": str(path), **document} for path, document in zip(answers, documents, strict=True)]
        print_json(several if len(found) > 1 else documents[0])
    elif len(found) == 1:
        _show(found[0], asked, answers[0], formula)
    else:
        for path, verdict in zip(answers, found, strict=True):
            say(f"{path}: {'right' if verdict.right else f'not right. {verdict.hints[0]}'}")
        if formula:
            say(f"Right: {asked.derivative}")
    raise typer.Exit(AGREES if all(verdict.right for verdict in found) else DISAGREES)


def _list(as_json: bool) -> None:
    rows = [{"chapter": n, "title": c.title, "exercise": c.formula, "page": c.page} for n, c in CHAPTERS.items()]
    if as_json:
        print_json(rows)
        return
    print_table([{key: value for key, value in row.items() if key != "page"} for row in rows])
    say("The pages are in the source of refgrad, and on the site of its documentation.")
    say("Begin with: refgrad teach 1 --start answer.py")


_METHODS = {  # of the oracles that judge answers
    "complex-step": "complex steps",
    "differences": "finite differences",
    "reference": "finite differences on onnx.reference",
    "second-order": "differences of the gradient",
}


def _ask(asked: Chapter, formula: bool, as_json: bool) -> None:
    """The questions of a chapter, and how to begin."""
    if as_json:
        print_json({"chapter": asked.number, "title": asked.title, "exercise": asked.formula, "page": asked.page})
        return
    say(f"Chapter {asked.number}: {asked.title} ({asked.page})")
    say(f"Write the derivative of {asked.formula} with respect to {' and '.join(asked.floats)}.")
    if formula:
        say(f"Right: {asked.derivative}")
    say(f"Begin with: refgrad teach {asked.number} --start answer.py")


def _show(found: Verdict, asked: Chapter, answer: Path, formula: bool) -> None:
    if found.right:
        methods = [_METHODS.get(name, name) for name in found.witnesses]
        say(
            f"Right at all {counted(found.trials, 'input')} tried, by {counted(len(methods), 'method')}: {', '.join(methods)}."
        )
        if asked.number + 1 in CHAPTERS:
            say(f"Next: refgrad teach {asked.number + 1}")
    else:
        say("Not right yet.")
        for hint in found.hints:
            say(hint)
    if found.example is not None:
        say("The smallest input that shows it:")
        for line in found.example.lines():
            say_lines("  " + line.replace("\n", "\n  "))
    if not found.right and formula:
        say(f"Right: {asked.derivative}")
    elif found.example is not None:
        say(f"The right formula: refgrad teach {asked.number} {shell_path(answer)} --formula")
    if found.printed:
        say("It printed:")
        for line in found.printed.splitlines():
            say(f"  {line}")
