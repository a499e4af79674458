"""Reports of conformance results, by the suffix of the file that they are written to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.results import Results
from refgrad.conformance.reports import html, junit, markdown
from refgrad.errors import OptionError, choices
from refgrad.model.writing import replacing

Writer = Callable[[Results, Iterable[Case]], str]

WRITERS: dict[str, Writer] = {
    ".json": lambda results, cases: results.text(),
    ".xml": lambda results, cases: junit.report(results),
    ".md": lambda results, cases: markdown.report(results, cases=cases),
    ".html": html.report,
}


def writer(path: str | os.PathLike[str]) -> Writer:
    """The function that writes the report that the suffix of `path` asks for.

    :raises OptionError: there is no report of that suffix.
    """
    suffix = Path(path).suffix
    if suffix not in WRITERS:
        raise OptionError(f"{str(path)!r}: there is no report {suffix!r}. There are {choices(WRITERS)}.")
    return WRITERS[suffix]


def write(results: Results, path: str | os.PathLike[str], cases: Iterable[Case] = ()) -> None:
    """Write the report that the suffix of `path` asks for; `cases` give the page (.html) their models and feeds.

    :raises OptionError: there is no report of that suffix.
    :raises OutputFileError: the file cannot be written.
    """
    text = writer(path)(results, cases)
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8")
