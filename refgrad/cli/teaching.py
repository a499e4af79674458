"""The command of the course: `teach`."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from refgrad.cli.numbers import number
from refgrad.cli.options import Json
from refgrad.cli.output import AGREES, DISAGREES, Files, print_json, print_table, say, say_lines
from refgrad.errors import OptionError, counted
from refgrad.escaping import shell_path
from refgrad.teaching import CHAPTERS, Chapter, Verdict, chapter_of, judge, start


def teach(
    chapter: Annotated[
        int | None,
        number(
            "chapter",
            said="There is no chapter {}. ",
            kind=typer.Argument,
            metavar="CHAPTER",
            help="The number of a chapter.",
            show_default="list them",
        ),
    ] = None,
    answer: Annotated[
        Path | None,
        typer.Argument(
            metavar="ANSWER",
            help="Your answer, a Python file. refgrad runs it: use only files that you wrote or have read.",
        ),
        Files.READ,
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            "--start", metavar="FILE", help="Write an answer to begin with. An existing file is not overwritten."
        ),
        Files.WRITTEN,
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge an answer to an exercise of the course. Says which mistake it makes.

    The exit code is 1 if the answer is not right.
    """
    if chapter is None:
        _list(as_json)
        return
    asked = chapter_of(chapter)
    if begin is not None:
        if answer is not None:
            raise OptionError("Give an answer to judge, or --start with the file to write, and not both.")
        path = start(chapter, begin)
        if as_json:
            print_json({"chapter": chapter, "written": str(path)})
        else:
            say(f"{path}: written. Fill in the derivative; then: refgrad teach {chapter} {shell_path(path)}")
        return
    if answer is None:
        _ask(asked, as_json)
        return
    found = judge(chapter, answer)
    if as_json:
        print_json(found.document())
    else:
        _show(found, asked)
    raise typer.Exit(AGREES if found.right else DISAGREES)


def _list(as_json: bool) -> None:
    rows = [{"chapter": n, "title": c.title, "exercise": c.formula, "page": c.page} for n, c in CHAPTERS.items()]
    if as_json:
        print_json(rows)
        return
    print_table([{key: value for key, value in row.items() if key != "page"} for row in rows])
    say(f"The pages are in {PurePosixPath(CHAPTERS[1].page).parent}. Begin with: refgrad teach 1 --start answer.py")


def _ask(asked: Chapter, as_json: bool) -> None:
    """The questions of a chapter, and how to begin."""
    if as_json:
        print_json({"chapter": asked.number, "title": asked.title, "exercise": asked.formula, "page": asked.page})
        return
    say(f"Chapter {asked.number}: {asked.title} ({asked.page})")
    say(f"Write the derivative of {asked.formula} by {' and '.join(asked.floats)}.")
    say(f"Begin with: refgrad teach {asked.number} --start answer.py")


def _show(found: Verdict, asked: Chapter) -> None:
    if found.right:
        say(f"Right: at {counted(found.trials, 'point')}, says {', '.join(found.witnesses)}.")
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
    if found.printed:
        say("It printed:")
        for line in found.printed.splitlines():
            say(f"  {line}")
