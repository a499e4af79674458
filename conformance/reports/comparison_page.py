"""A comparison as one HTML page without any other file: who is wrong, where, how the error goes on, and what it looks like."""

from __future__ import annotations

import math
from collections.abc import Sequence

from refgrad.conformance.locating.paths import ErrorPath, Neighbourhood
from refgrad.conformance.locating.verdicts import Comparison, Seen, Sided, Tensor
from refgrad.conformance.reports import pages
from refgrad.conformance.reports.comparisons import (
    cells_of,
    judged,
    lines_of,
    sentence,
    stopped_lines,
    title,
    told_of,
    verdicts_of,
    versions_of,
)
from refgrad.errors import abridged
from refgrad.escaping import html
from refgrad.show.svg import drawn

_WAYS = 4  # of errors to tensors
_PICTURES = 12  # tensors with heat maps
_AROUND = 12  # graphs around nodes at fault
_HEADS = ("tensor", "kind", "a", "b", "difference", "verdict", "reason")
_WORDS = (
    "refgrad, a differentiator of ONNX models, compared two gradients of one model, a and b, with each other and with an "
    "expected one. A side is builder@executor: who writes the gradient model, and what runs it. A <b>rule</b> is what the "
    "builder writes for an operator, a <b>kernel</b> what the executor computes for one. A gradient is <b>right</b> if "
    "rounding explains its distance from the expected one, and <b>wrong</b> if nothing does. The expected one is computed in "
    "double precision. <b>Apart</b> is the distance between the two sides, relative to the largest element. To <b>repair</b> "
    "a node is to put its right values in the place of its own: how far the error of the results falls by it is the proof "
    "that it is at fault."
)
_COLOURS = (
    "Each cell is an element, or the one of several that is furthest off. Red is above 0, blue below, white 0; black is not "
    "finite, grey is no element. Expected and found have the same scale."
)


def page(comparison: Comparison, steps: Sequence[tuple[str, str]] = ()) -> str:
    """One HTML page without any other file and without scripts.

    :param steps: what to do next, each a sentence and its command.
    """
    parts = [f"<p>{html(line)}</p>" for line in stopped_lines(comparison)]
    parts.append(f"<p>{_WORDS}</p>")
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        place = "ab".index(name)
        parts.append(f"<h2>{name} = {html(side.label)}</h2><p>{html(verdicts_of(comparison, place))}</p>{_side(side)}")
    parts.append(pages.next_steps(steps))
    listed = sorted(comparison.tensors, key=lambda tensor: tensor.ok)
    rows = [pages.row(cells_of(tensor), "none" if tensor.ok else "fault") for tensor in listed]
    parts.append(f"<h2>Tensors</h2>{pages.table('Tensors', _HEADS, rows)}")
    wrong = [(tensor, seen) for tensor in comparison.tensors for seen in (tensor.a, tensor.b) if seen.maps is not None]
    wrong.sort(key=lambda one: -(one[1].error or 0.0))
    if wrong:
        parts.append(f"<h2>What is wrong, element by element</h2><p>{_COLOURS}</p>")
    parts += [_heat_maps(tensor, seen) for tensor, seen in wrong[:_PICTURES]]
    if len(wrong) > _PICTURES:
        parts.append(f"<p>And {len(wrong) - _PICTURES:.0f} more.</p>")
    parts.append(f"<h2>How it was compared</h2><p>{html(judged(comparison))}</p>")
    parts.append(f"<p>Versions: {html(versions_of(comparison))}.</p>")
    kind = "right" if comparison.ok else "fault"
    return pages.framed("refgrad compare", title(comparison), sentence(comparison), kind, "".join(parts), _STYLE)


def _side(side: Sided) -> str:
    """The findings about a side: in words, the graphs around the nodes at fault, the ways of the error."""
    lines = "".join(f"<li>{html(line)}</li>" for line in lines_of(side))
    parts = [f"<ul>{lines}</ul>"] if lines else []
    parts += [_graph(one) for one in side.around[:_AROUND]]
    if side.paths:
        parts.append(
            "<h3>The way of the error</h3><p>From the node at fault to the tensors that are furthest off, the worst first.</p>"
        )
        ordered = sorted(side.paths, key=lambda path: -(path.error or 0.0))
        parts += [_way(path, is_open=path is ordered[0]) for path in ordered[:_WAYS]]
    return "".join(parts)


def _graph(around: Neighbourhood) -> str:
    named = abridged(list(map(repr, around.nodes)))
    picture = drawn(around.model, around.marked, "at fault", f"the graph around {named}")
    return (
        f"<h3>The graph around {html(named)}</h3><figure class='wide' tabindex='0' role='region' "
        f"aria-label='{html(f'The graph around {named}')}'>{picture}</figure>"
        "<p>The node in the red frame is at fault. Each box has the operator, its attributes, and its results with their "
        "types; arrows are values. Two steps before and after are drawn.</p>"
    )


def _way(path: ErrorPath, *, is_open: bool) -> str:
    """A table of the values that have the error, from the node at fault to the tensor."""
    stations = [(one.node, one.value, one.error) for one in path.stations] + [("", f"tensor {path.tensor}", path.error)]
    rows = [
        f"<tr><td>{number:.0f}</td><td>{html(node)}</td><td>{html(value)}</td><td>{html(_relative(error))}</td>"
        f"<td>{_bar(error)}</td></tr>"
        for number, (node, value, error) in enumerate(stations, 1)
    ]
    way = pages.table(f"The way to {path.tensor}", ("step", "made by", "value", "relative error", "as a bar"), rows)
    return (
        f"<details{' open' if is_open else ''}><summary>to tensor {html(path.tensor)}: {html(_relative(path.error))}"
        f"</summary>{way}</details>"
    )


def _relative(error: float | None) -> str:
    return "not known" if error is None else f"{error:.2g}"


def _bar(error: float | None) -> str:
    """A bar from 1e-9 to 1, in decades."""
    if error is None or math.isnan(error):
        return ""
    length = 160 if error >= 1 else max(2, 160 * (1 + math.log10(max(error, 1e-9)) / 9))
    return f"<svg aria-hidden='true' width='160' height='10'><rect class='bar' width='{length:.0f}' height='10'/></svg>"


def _heat_maps(tensor: Tensor, seen: Seen) -> str:
    """The expected numbers of a wrong tensor, the actual ones and the difference, as three pictures and a list."""
    maps = seen.maps
    assert maps is not None
    side = "a" if seen is tensor.a else "b"
    sizes = [
        abs(value) for grid in (maps.expected, maps.found) for row in grid for value in row if math.isfinite(value)
    ]
    most = max((abs(value) for row in maps.difference for value in row if math.isfinite(value)), default=0.0)
    figures = "".join(
        f"<figure>{_heat_map(grid, size or 1.0, f'{kind} of {tensor.name}')}"
        f"<figcaption>{kind}, ±{size:.3g}</figcaption></figure>"
        for kind, grid, size in (
            ("expected", maps.expected, max(sizes, default=0.0)),
            ("found", maps.found, max(sizes, default=0.0)),
            ("difference", maps.difference, most),
        )
    )
    items = "".join(
        f"<li>{html(str(list(one.at)))}: expected {one.expected:.9g}, found {one.found:.9g}</li>"
        for one in seen.elements
    )
    elements = f"<p>The elements that are furthest off:</p><ul>{items}</ul>" if items else ""
    return (
        f"<h3>{html(tensor.name)} ({side})</h3><p>{html(told_of(seen))}</p><div class='maps'>{figures}</div>{elements}"
    )


def _heat_map(grid: Sequence[Sequence[float]], size: float, label: str) -> str:
    """Numbers as coloured cells: blue below 0, white at 0, red above, grey where there is none, black if not finite."""
    cell, cells = 8, []
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if math.isnan(value):
                fill = "#ccc"
            elif math.isinf(value):
                fill = "#000"
            else:
                share = round(255 * (1 - min(abs(value) / size, 1.0)))
                fill = f"rgb(255,{share},{share})" if value > 0 else f"rgb({share},{share},255)"
            cells.append(f"<rect x='{x * cell}' y='{y * cell}' width='{cell}' height='{cell}' fill='{fill}'/>")
    width, height = cell * max(map(len, grid)), cell * len(grid)
    return (
        f"<svg role='img' aria-label='{html(label)}' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
        f"{''.join(cells)}</svg>"
    )


_STYLE = """
.maps { display: flex; flex-wrap: wrap; gap: 1.5rem; }
.bar { fill: var(--fault-bar); }
figure { margin: 0 0 1rem; }
.maps figure svg { border: 1px solid var(--line); max-width: 100%; height: auto; }
"""
