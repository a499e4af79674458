"""The results as one page that needs no network: a board to filter, and every case with its model behind it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.results import LETTERS, Results, options_of
from refgrad.conformance.oracles import oracles
from refgrad.conformance.reports.groups import Group, faults, not_answered, sentence, without_answer
from refgrad.conformance.reports.pages import STYLE, kind_of
from refgrad.conformance.reports.tally import MARKS, shortened
from refgrad.conformance.verdicts import VERDICTS
from refgrad.errors import ResultsError
from refgrad.escaping import html, shell_line
from refgrad.model.printing import onnx_text

TEMPLATE = Path(__file__).with_name("page.html")
_PLACE = re.compile(r"\{\{(style|kind|verdict|faults|data)\}\}")  # in the template
_DATA = re.compile(r'<script id="data" type="text/plain">(.*?)</script>', re.DOTALL)
_FEW = 8  # elements of a feed that are shown


def report(results: Results, cases: Iterable[Case] = ()) -> str:
    """Return the page. A case of `results` that is among `cases` is shown with its model and its feeds."""
    known = {case.name: case for case in cases if case.name in results.cases}
    ordered = [known.get(name) for name in sorted(results.cases)]
    groups = faults(results, known.values())
    data = results.document() | {
        "groups": [_shown(one) for one in groups],
        "without": list(without_answer(not_answered(results))),
        "marks": [
            [letter, verdict, MARKS[verdict], kind_of(verdict), VERDICTS[verdict]] for letter, verdict in _by_mark()
        ],
        "models": ["" if case is None else onnx_text(case.model) for case in ordered],
        "feeds": [[] if case is None else _feeds(case.feeds) for case in ordered],
        "oracles": {name: oracle.trust for name, oracle in oracles().items()},
        "commands": [shell_line(results.command_of(name)) for name in sorted(results.cases)],
        "options": [shell_line(options_of(pair)) for pair in results.pairs],
    }
    packed = zlib.compress(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(), 9)
    verdict, text = sentence(results, groups)
    parts = {
        "style": STYLE,
        "kind": kind_of(verdict),
        "verdict": html(text),
        "faults": _listed(groups),
        "data": base64.b64encode(packed).decode(),
    }
    return _PLACE.sub(lambda place: parts[place[1]], TEMPLATE.read_text(encoding="utf-8"))  # at once: names may look so


def _shown(group: Group) -> dict[str, Any]:
    """A group as the page shows it: without its rows, with the certainty of its smallest case."""
    return {key: value for key, value in group.document().items() if key != "rows"} | {"sure": group.certainty}


def _listed(groups: Sequence[Group]) -> str:
    """The faults as a list, for browsers without JavaScript."""
    lines = [
        (one.title, f"{one.smallest.case}: {shortened(one.note)}", f"How sure: {one.certainty}", one.command)
        for one in groups
    ]
    return "".join(
        f"<li>{html(title)}<br>{html(case)}<br>{html(sure)}<br><code>{html(command)}</code></li>"
        for title, case, sure, command in lines
    )


def data_of(page: str) -> dict[str, Any]:
    """The data of a page: `Results.document`, with the models and feeds.

    :raises ResultsError: it is not a page of results.
    """
    found = _DATA.search(page)
    if not found:
        raise ResultsError("This is no page of conformance results: it has no data in it.")
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def _by_mark() -> list[tuple[str, str]]:
    letters = {verdict: letter for letter, verdict in LETTERS.items()}
    return [(letters[verdict], verdict) for verdict in MARKS]


def _feeds(feeds: Mapping[str, Any]) -> list[list[str]]:
    """The name, type, shape and values of each feed; the range of many values."""
    return [[name, *_summary(value)] for name, value in feeds.items()]


def _summary(value: Any) -> tuple[str, str, str]:
    if not isinstance(value, np.ndarray):
        return type(value).__name__, "", str(value)[:80]
    shape = " × ".join(map(str, value.shape)) or "scalar"
    if value.size <= _FEW:
        return value.dtype.name, shape, ", ".join(map(_number, value.flat))
    if value.dtype.kind in "OUSbc":
        return value.dtype.name, shape, ""
    wide = value.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    ends = [f"{finite.min():.4g} to {finite.max():.4g}"] if finite.size else []
    others = [f"{kind:g}" for kind in (-np.inf, np.inf) if np.any(wide == kind)] + ["nan"] * bool(np.isnan(wide).any())
    return value.dtype.name, shape, ", ".join(ends + others)


def _number(value: Any) -> str:
    if isinstance(value, str | bytes | bool | np.bool_):
        return str(value)
    return f"{value:.4g}" if isinstance(value, complex | np.complexfloating) else f"{float(value):.4g}"
