"""Small tables in HTML for notebooks: names are text, nothing is loaded, and the colours come from the page.

A table inherits its colours from the page. Dark and light themes both show it well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refgrad.escaping import html

ROWS = 30  # of a table in a notebook
BAD = "#e5534b"  # of a verdict: it can be read on black and on white

_TABLE = "border-collapse:collapse;font-size:90%;color:inherit;background:transparent"
_CELL = "text-align:{};padding:2px 10px;border:0;border-bottom:1px solid rgba(128,128,128,.35);background:transparent;color:{}"


def text_of(value: Any) -> str:
    """The text of a value in a table: "-" for None, yes or no for a bool, three digits of a float."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case _:
            return str(value)


def html_table(
    rows: Iterable[Mapping[str, Any]],
    title: str,
    notes: Iterable[str] = (),
    colors: Mapping[str, str] | None = None,
    most: int = ROWS,
) -> str:
    """A title, a table of rows that have the same keys, and notes below; the first `most` rows, and how many there are more.

    :param colors: of cells with these texts.
    """
    listed = list(rows)
    known = colors or {}
    parts = [f"<div><strong>{html(title)}</strong>"]
    if listed:
        numbers = {key for key in listed[0] if any(isinstance(row[key], float | int) for row in listed)}
        parts.append(f'<table style="{_TABLE}"><thead><tr>')
        parts += [_cell("th", key, key in numbers, "inherit") for key in listed[0]]
        parts.append("</tr></thead><tbody>")
        for row in listed[:most]:
            cells = ((text_of(value), key in numbers) for key, value in row.items())
            parts.append(
                "<tr>" + "".join(_cell("td", text, n, known.get(text, "inherit")) for text, n in cells) + "</tr>"
            )
        parts.append("</tbody></table>")
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    parts += [f'<div style="margin:4px 0">{html(note)}</div>' for note in (*more, *notes)]
    return "".join((*parts, "</div>"))


def _cell(tag: str, text: str, number: bool, color: str) -> str:
    style = _CELL.format("right" if number else "left", color)
    return f'<{tag} style="{style}">{html(text)}</{tag}>'


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    """Sizes in brackets, ? for one that is unknown."""
    return "?" if shape is None else f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
