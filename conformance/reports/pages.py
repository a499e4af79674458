"""The parts that the pages of reports share: the style, the frame, tables, and the colours of verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT, UNDECIDED
from refgrad.escaping import html

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
_SHORT = 30  # characters of a cell that is not broken into lines
_TABLES = """
main { max-width: 75rem; margin: 0 auto; padding: 1.75rem 1rem 3rem; }
table { border-collapse: collapse; font-size: 0.87rem; }
td, th { border-bottom: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
td, th { white-space: nowrap; }
thead th { color: var(--soft); font-weight: 550; }
tbody th { font-weight: 500; }
td.long, th.long { white-space: normal; overflow-wrap: anywhere; min-width: 24rem; }
tr.right, tr.fault, tr.doubt, tr.none { color: inherit; }
tr.fault > * { background: var(--fault-tint); } tr.doubt > * { background: var(--doubt-tint); }
.wide { overflow-x: auto; margin: 0 0 1rem; }
li { overflow-wrap: anywhere; margin: 0.25rem 0; }
summary { font-weight: 600; padding: 0.25rem 0; overflow-wrap: anywhere; }
pre { margin: 0.25rem 0 0.75rem; padding: 0.4rem 0.75rem; white-space: pre-wrap; overflow-wrap: anywhere; max-height: none; }
"""


def kind_of(verdict: str) -> str:
    """The colour of a verdict: "right", "fault", "doubt" or "none"."""
    if verdict in FAULTS:
        return "fault"
    if verdict in (RIGHT, CONVENTION):
        return "right"
    return "doubt" if verdict == UNDECIDED else "none"


def framed(title: str, heading: str, verdict: str, kind: str, body: str, style: str = "") -> str:
    """A page that needs no other file and no scripts: the heading, the verdict in one sentence, and the markup `body`.

    :param kind: the colour of the verdict (`kind_of`).
    :param style: more style, for this page alone.
    """
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><title>{html(title)}</title>"
        f"<style>\n{STYLE}{_TABLES}{style}</style></head>\n<body><main><h1>{html(heading)}</h1>"
        f"<p class='verdict {kind}'>{html(verdict)}</p>\n{body}</main></body></html>\n"
    )


def table(label: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    """A table of `rows`, which are markup, in a frame that scrolls if the table is wider than the page."""
    head = "".join(f"<th scope='col'>{html(one)}</th>" for one in heads)
    body = "\n".join(rows)
    return (
        f"<div class='wide' tabindex='0' role='region' aria-label='{html(label)}'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"
    )


def next_steps(steps: Iterable[tuple[str, str]]) -> str:
    """A list of sentences, each with a command, "" if there is none."""
    items = [f"<li>{html(text)}{f'<pre>{html(command)}</pre>' if command else ''}</li>" for text, command in steps]
    return f"<h2>What to do next</h2><ol>{''.join(items)}</ol>" if items else ""


def row(cells: Sequence[str], kind: str = "none") -> str:
    """A row of a table whose cells are text. The first one is its head."""
    widths = ["long" if len(cell) > _SHORT else "short" for cell in cells]
    others = "".join(
        f"<td class='{width}'>{html(cell)}</td>" for width, cell in zip(widths[1:], cells[1:], strict=True)
    )
    return f"<tr class='{kind}'><th scope='row' class='{widths[0]}'>{html(cells[0])}</th>{others}</tr>"
