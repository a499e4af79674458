"""The HTML page about a check. It names the faults and their places, the certainty of each, and the next steps."""

from __future__ import annotations

from refgrad.conformance.judge.found import BUILDER, Check
from refgrad.conformance.reports import pages
from refgrad.conformance.reports.advice import ModelCommand, steps
from refgrad.conformance.reports.checks import compared, reasons, summary_of, title, versions_of
from refgrad.conformance.verdicts import RIGHT, VERDICTS
from refgrad.errors import abridged
from refgrad.escaping import html
from refgrad.markup import text_of

_HEADS = (
    "gradient of", "verdict", "dialect", "executor", "compared with", "absolute error", "relative error", "allowed", "reason",
)  # fmt: skip
_SURE = (
    "Each gradient is compared with two things that do not depend on each other. <b>differences</b> are central differences of "
    "the model itself in float64, which know no rule: they say if the mathematics is right. <b>float64</b> is the gradient in "
    "float64 on the interpreter: it says if an executor computes it. An error is relative to the largest element of the "
    "gradient, or to its norm for differences. Up to the <b>allowed</b> error, "
)
_OF_BUILDER = (
    "Rows with the dialect onnxruntime are gradients by ONNX Runtime's own builder, which the verdict leaves out."
)


def page(found: Check, asked: ModelCommand) -> str:
    """One HTML page without any other file and without scripts."""
    word = found.answer[0]
    parts = ["<h2>What is wrong, and where</h2>", _places(found), "<h2>How sure it is</h2>", _certainty(found)]
    parts += [pages.next_steps(steps(found, asked))]
    rows = [
        pages.row(
            (
                row.gradient, row.verdict, row.dialect, row.backend, row.oracle, text_of(row.absolute), text_of(row.relative),
                text_of(row.allowed), row.note,
            ),
            pages.kind_of(row.verdict),
        )
        for row in found.rows
    ]  # fmt: skip
    parts += ["<h2>Every gradient</h2>", pages.table("Every gradient", _HEADS, rows)]
    about = f"The gradient of {abridged(found.outputs)} by {abridged(found.wrt)}. {compared(found)}"
    parts.append(f"<h2>How it was checked</h2><p>{html(about)}</p><pre>{html(asked.command())}</pre>")
    parts.append(f"<p>Versions: {html(versions_of(asked))}.</p>")
    return pages.framed(
        "refgrad check", title(asked), ": ".join(found.answer), pages.kind_of(word), "\n".join(parts), _STYLE
    )


def _places(found: Check) -> str:
    """The verdicts that are not right, with the gradients, who computed them, and the reason."""
    not_right = [row for row in found.rows if row.verdict != RIGHT]
    items = [
        f"<li><b class='{pages.kind_of(verdict)}'>{html(verdict)}</b>: the gradient of {html(whose)}<br>{html(reason)}</li>"
        for verdict, whose, reason in reasons(not_right, more="see the table below")
    ]
    items += [f"<li><b>skipped</b>: {html(line)}</li>" for line in found.skipped]
    nothing = "" if found.faults else "<p>No fault was found.</p>"
    return f"{nothing}<ul>{''.join(items)}</ul>" if items else nothing


def _certainty(found: Check) -> str:
    """The things that the gradients were compared with, the errors beside the allowed ones, and the meaning of the verdicts."""
    within = "rounding" if found.tolerance is None else f"the tolerance {found.tolerance:g}"
    heads, rows = summary_of(found)
    occurring = {row.verdict for row in found.rows}
    meanings = "".join(
        f"<dt><b class='{pages.kind_of(verdict)}'>{html(verdict)}</b></dt><dd>{html(meaning)}</dd>"
        for verdict, meaning in VERDICTS.items()
        if verdict in occurring
    )
    of_builder = f"<p>{_OF_BUILDER}</p>" if any(row.dialect == BUILDER for row in found.rows) else ""
    return (
        f"<p>{_SURE}{html(within)} explains it.</p>{of_builder}"
        f"{pages.table('Errors by dialect and executor', heads, map(pages.row, rows))}<dl>{meanings}</dl>"
    )


_STYLE = """
ol { padding-left: 1.5rem; } ul { padding-left: 1.25rem; }
"""
