"""The results of a comparison, and of a search for NaN: in a terminal, as JSON and as a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from onnx import ModelProto
from rich.console import Console

from refgrad.conformance.judge.nan.nonfinite import NonFinite
from refgrad.conformance.locating.location import Located
from refgrad.conformance.locating.verdicts import (
    CONVENTION,
    MISSING,
    RIGHT,
    UNDECIDED,
    WRONG,
    Comparison,
    Seen,
    Sided,
    Tensor,
    seen_of,
)
from refgrad.conformance.problems.ranges import IN_RANGE
from refgrad.errors import abridged
from refgrad.escaping import html, printable
from refgrad.show import tables
from refgrad.show.tables import table

_SHOWN = 12  # tensors of a summary
_ORIGINS = 8
_PICTURES = 12  # tensors with heat maps
_COLOURS = {RIGHT: tables.GOOD, WRONG: tables.WRONG, MISSING: tables.WRONG, UNDECIDED: tables.UNKNOWN}
_AS_SAID = {WRONG: "is wrong in", UNDECIDED: "cannot be judged in", MISSING: "lacks"}


def show(comparison: Comparison, console: Console, verbose: bool = False) -> None:
    """Print the tensors that differ, and the nodes at fault; with `verbose` every tensor."""
    doubtful = [tensor for tensor in comparison.tensors if not tensor.ok]
    listed = list(comparison.tensors) if verbose else doubtful[:_SHOWN]
    if listed:
        console.print(table(map(_row, listed), dict.fromkeys(("a", "b"), _COLOURS)))
    if len(doubtful) > len(listed):
        _print(console, f"and {len(doubtful) - len(listed)} more that differ: --verbose prints all")
    shared = _shared_causes(comparison)
    for (side, cause), names in shared.items():
        _print(console, f"{len(names)} tensors ({side}) have one cause: {cause}: {abridged(names)}")
    for tensor in listed:
        for side, seen, told in (("a", tensor.a, comparison.a), ("b", tensor.b, comparison.b)):
            if seen.reason and seen.reason != told.failed and (verbose or seen.verdict != "right"):
                reason = seen.reason if (side, seen.cause) in shared else told_of(seen)
                _print(console, f"{tensor.name} ({side}): {seen.verdict}: {reason}")
    for side, told in (("a", comparison.a), ("b", comparison.b)):
        for line in lines_of(told):
            _print(console, f"{side} = {told.label}: {line}")
    counts = Counter(tensor.verdict for tensor in comparison.tensors)
    told_all = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "there is nothing to compare"
    _print(
        console,
        f"{'ok' if comparison.ok else 'DIFFERENT'}: {told_all}. Judge: {comparison.judge}. "
        f"Feeds: {comparison.feeds}; seed {comparison.seed}.",
    )
    if not comparison.ok:
        _print(console, sentence(comparison))
        _print(console, f"Versions: {versions_of(comparison)}.")


def _shared_causes(comparison: Comparison) -> dict[tuple[str, str], list[str]]:
    """The causes that several tensors of a side share, with the tensors."""
    names: dict[tuple[str, str], list[str]] = {}
    for tensor in comparison.tensors:
        for side, seen in (("a", tensor.a), ("b", tensor.b)):
            if seen.cause:
                names.setdefault((side, seen.cause), []).append(tensor.name)
    return {key: tensors for key, tensors in names.items() if len(tensors) > 1}


def sentence(comparison: Comparison) -> str:
    """The verdict in one sentence: which side is wrong, in what, and for which nodes or values."""
    if comparison.ok:
        return f"{comparison.a.label} (a) and {comparison.b.label} (b) are right in every tensor."
    parts = []
    for name, side, place in (("a", comparison.a, 0), ("b", comparison.b, 1)):
        if side.failed:
            parts.append(f"{side.label} ({name}) has no gradient")
            continue
        verdicts = Counter(seen_of(tensor, place).verdict for tensor in comparison.tensors)
        doubtful = [(verdict, count) for verdict, count in verdicts.items() if verdict not in (RIGHT, CONVENTION)]
        told = " and ".join(f"{_AS_SAID.get(verdict, f'{verdict} in')} {count}" for verdict, count in doubtful)
        if told:
            reason = _reason(side, [seen_of(tensor, place) for tensor in comparison.tensors])
            parts.append(f"{side.label} ({name}) {told} of {len(comparison.tensors)} tensors{reason}")
    return f"{'; '.join(parts)}." if parts else "There is no gradient to compare."


def _reason(side: Sided, seen: Sequence[Seen]) -> str:
    """The nodes or values that a side is wrong for, in words."""
    if side.unsteady is not None:
        return f", from {side.unsteady.node!r} on" if side.unsteady.node else ""
    causes = {one.cause for one in seen if one.verdict == WRONG}
    if len(causes) == 1 and causes != {""}:
        return f": {next(iter(causes))}"
    values = [f"the adjoint of {fault.value!r}" for fault in (side.rules.faults if side.rules else ()) if fault.value]
    alone = [fault.nodes for fault in (side.rules.faults if side.rules else ()) if not fault.value]
    rules = [f"the rule of {abridged(nodes)}" for nodes in alone] + values
    kernels: list[str] = []
    if side.kernels is not None:
        kernels = [f"the kernel of {culprit.found.name!r}" for culprit in side.kernels.culprits]
        kernels += [f"{abridged(group.nodes)} together" for group in side.kernels.groups]
    return f", for {abridged([*rules, *kernels], 4)}" if rules or kernels else ""


def versions_of(comparison: Comparison) -> str:
    """The versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in comparison.versions.items())


def told_of(seen: Seen) -> str:
    """The reason of a verdict, and the cause where it is known."""
    return f"{seen.cause}: {seen.reason}" if seen.cause else seen.reason


def _print(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _row(tensor: Tensor) -> dict[str, Any]:
    of = "" if tensor.of == (tensor.name,) else f" = {abridged(tensor.of)} ({tensor.how})"
    return {
        "tensor": f"{tensor.name}{of}",
        "kind": tensor.kind,
        "a": tensor.a.verdict,
        "b": tensor.b.verdict,
        "apart": tensor.apart,
        "explained": max((side.allowed for side in (tensor.a, tensor.b) if side.allowed is not None), default=None),
        "verdict": tensor.verdict,
    }


def lines_of(side: Sided) -> Iterator[str]:
    """The findings about a side, a line each."""
    if side.failed:
        yield f"it has no gradient: {side.failed}"
    if side.unsteady is not None:
        yield str(side.unsteady)
    if side.rules is not None:
        for fault in side.rules.faults:
            yield f"the rule is at fault: {fault}"
            if fault.formula:
                yield f"the formula that holds: {fault.formula}"
            if fault.known:
                yield f"this is known: {fault.known}"
        for node, why in side.rules.silent.items():
            yield f"nothing can be said of {node!r}: {why}"
        if not side.rules.faults:
            yield f"no rule is wrong by itself: {side.rules.built} gradients of parts were built"
    for one in side.ranges:
        yield str(one)
    if side.kernels is not None:
        yield from _of_kernels(side.kernels, bool(side.ranges))
    for origin in side.origins[:_ORIGINS]:
        yield f"not finite: {origin}"
    reasons: dict[str, list[str]] = {}
    for name, why in side.unmatched.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        if len(names) == 1:
            yield f"recorded {names[0]!r} is not compared: {why}"
        else:
            yield f"{len(names)} recorded gradients are not compared ({abridged(names)}): {why}"


def _of_kernels(located: Located, is_explained: bool) -> Iterator[str]:
    if located.failed:
        yield f"the executor does not run it: {located.failed}"
    for culprit in located.culprits:
        yield f"the kernel is at fault: {culprit.found}; repaired, the error is {culprit.left:.2g} of {located.error:.2g}"
        for inner in culprit.found.inside:
            yield f"in its body: {inner}"
    for group in located.groups:
        yield f"nodes are wrong together: {group}; repaired, the error is {group.left:.2g} of {located.error:.2g}"
    if located.optimisation:
        yield f"the runtime's optimisation: {located.optimisation}"
    for node in located.acquitted[:_ORIGINS]:
        yield f"wrong by itself, without influence on the results: {node}"
    if located.unexplained:
        yield f"an error of {located.left:.2g} is unexplained"
    elif not located.culprits and not located.groups and not is_explained:
        yield f"each of its {located.judged} nodes is right for its inputs, and so are the results but for rounding"


def document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "ok": comparison.ok,
        "sentence": sentence(comparison),
        "versions": dict(comparison.versions),
        "judge": comparison.judge,
        "feeds": comparison.feeds,
        "seed": comparison.seed,
        "tensors": [_document_of(tensor) for tensor in comparison.tensors],
        "a": _side(comparison.a),
        "b": _side(comparison.b),
    }


def _document_of(tensor: Tensor) -> dict[str, Any]:
    """A tensor as JSON, without its pictures."""
    document = asdict(tensor) | {"verdict": tensor.verdict}
    for side in ("a", "b"):
        del document[side]["maps"]
    return document


def text_of(comparison: Comparison) -> str:
    """The comparison as the text of a JSON file. Infinities and NaN are texts: JSON has none."""
    return json.dumps(_finite(document(comparison)), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _side(side: Sided) -> dict[str, Any]:
    rules = None
    if side.rules is not None:
        rules = {
            "faults": [asdict(fault) for fault in side.rules.faults],
            "gradients_built": side.rules.built,
            "silent": dict(side.rules.silent),
        }
    kernels = None
    if side.kernels is not None:
        kernels = asdict(side.kernels) | {"unexplained": side.kernels.unexplained, "left": side.kernels.left}
    return {
        "label": side.label,
        "failed": side.failed,
        "ranges": [asdict(one) for one in side.ranges],
        "unsteady": None if side.unsteady is None else asdict(side.unsteady),
        "rules": rules,
        "kernels": kernels,
        "not_finite": [asdict(origin) for origin in side.origins],
        "unmatched": dict(side.unmatched),
    }


# NaN


def show_origins(nonfinite: NonFinite, console: Console, verbose: bool = False) -> None:
    """Print the origins of NaN and infinities, and what to do about them."""
    shown = nonfinite.origins if verbose else nonfinite.origins[:_ORIGINS]
    for number, origin in enumerate(shown, 1):
        _print(console, f"{number}. {origin}")
        _print(console, f"   what helps: {origin.remedy}")
        if origin.of:
            _print(console, f"   its operands come from {', '.join(str(position + 1) for position in origin.of)}")
        if origin.source:
            _print(console, f"   source: {origin.source}")
    if len(shown) < len(nonfinite.origins):
        _print(console, f"and {len(nonfinite.origins) - len(shown)} more: --verbose prints all")
    for one in nonfinite.ranges:
        _print(console, str(one))
    if nonfinite.ranges:
        _print(console, f"   what helps: {IN_RANGE}")
    if nonfinite.cure:
        _print(console, nonfinite.cure)
    if nonfinite.elsewhere:
        _print(console, nonfinite.elsewhere)
    if nonfinite.note:
        _print(console, nonfinite.note)
    if nonfinite.results:
        origin_text = "" if nonfinite.origins or nonfinite.elsewhere else ", as the model or its inputs have it"
        _print(console, f"not finite{origin_text}: {abridged(nonfinite.results, None if verbose else 5)}")
    elif nonfinite.ok:
        _print(console, "ok: every result is finite")


def document_of_origins(nonfinite: NonFinite) -> dict[str, Any]:
    """The same as JSON."""
    values = asdict(nonfinite)
    return {"ok": nonfinite.ok, "results": values.pop("results"), "births": values.pop("origins"), **values}


# A page


def page(comparison: Comparison, model: ModelProto) -> str:
    """One HTML page without any other file: the verdicts, the nodes at fault with their neighbours, the proof."""
    parts = []
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        parts.append(f"<h2>{name} = {html(side.label)}</h2>")
        parts += [f"<p>{html(line)}</p>" for line in lines_of(side)]
        parts += [_picture(model, names) for names in _blamed(side)]
    head = "".join(f"<th>{title}</th>" for title in ("tensor", "kind", "a", "b", "apart", "verdict", "reason"))
    rows = "".join(map(_tr, sorted(comparison.tensors, key=lambda tensor: tensor.ok)))
    wrong = [(tensor, seen) for tensor in comparison.tensors for seen in (tensor.a, tensor.b) if seen.maps is not None]
    pictures = ["<h2>What is wrong, element by element</h2>"] if wrong else []
    pictures += [_heat_maps(tensor, seen) for tensor, seen in wrong[:_PICTURES]]
    verdict = "The two agree" if comparison.ok else "The two differ"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>refgrad compare</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<h1>{verdict}: {html(comparison.a.label)} and {html(comparison.b.label)}</h1>"
        f"<p><strong>{html(sentence(comparison))}</strong></p>"
        f"<p>Versions: {html(versions_of(comparison))}.</p>"
        f"<p>Judge: {html(comparison.judge)}. Feeds: {html(comparison.feeds)}; seed {comparison.seed}.</p>{''.join(parts)}"
        f"<h2>Tensors</h2><table><tr>{head}</tr>{rows}</table>{''.join(pictures)}</body></html>\n"
    )


def _tr(tensor: Tensor) -> str:
    reason = "; ".join(filter(None, (told_of(tensor.a), told_of(tensor.b))))
    apart = "" if tensor.apart is None else f"{tensor.apart:.3g}"
    cells = (tensor.name, tensor.kind, tensor.a.verdict, tensor.b.verdict, apart, tensor.verdict, reason)
    return f"<tr class='{'ok' if tensor.ok else 'bad'}'>{''.join(f'<td>{html(cell)}</td>' for cell in cells)}</tr>"


def _heat_maps(tensor: Tensor, seen: Seen) -> str:
    """The expected numbers of a wrong tensor, the actual ones and the difference, as three pictures and a list."""
    maps = seen.maps
    assert maps is not None
    side = "a" if seen is tensor.a else "b"
    sizes = [
        abs(value) for grid in (maps.expected, maps.found) for row in grid for value in row if math.isfinite(value)
    ]
    least = max((abs(value) for row in maps.difference for value in row if math.isfinite(value)), default=0.0)
    drawn = "".join(
        f"<figure>{_heat_map(grid, size or 1.0, f'{title} of {tensor.name}')}"
        f"<figcaption>{title}, ±{size:.3g}</figcaption></figure>"
        for title, grid, size in (
            ("expected", maps.expected, max(sizes, default=0.0)),
            ("found", maps.found, max(sizes, default=0.0)),
            ("difference", maps.difference, least),
        )
    )
    items = "".join(
        f"<li>{html(str(list(one.at)))}: expected {one.expected:.9g}, found {one.found:.9g}</li>"
        for one in seen.elements
    )
    return f"<h3>{html(tensor.name)} ({side})</h3><p>{html(told_of(seen))}</p><div class='maps'>{drawn}</div><ul>{items}</ul>"


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


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.25rem .5rem;text-align:left}"
    "tr.bad td{background:#fff0f0}svg{max-width:100%;height:auto}"
    ".maps{display:flex;flex-wrap:wrap;gap:1.5rem}figure{margin:0}figure svg{border:1px solid #999}"
)


def _blamed(side: Sided) -> Iterable[tuple[str, ...]]:
    """The nodes at fault, by name."""
    if side.rules is not None:
        yield from (fault.nodes for fault in side.rules.faults)
    if side.kernels is not None:
        yield from ((culprit.found.name,) for culprit in side.kernels.culprits)
        yield from (group.nodes for group in side.kernels.groups)


def _picture(model: ModelProto, names: tuple[str, ...]) -> str:
    """The nodes of the model that are blamed, with those before and after them: boxes from top to bottom."""
    nodes = list(model.graph.node)
    labels = [node.name or next(filter(None, node.output), "") for node in nodes]
    stems = {name.partition("_Grad/")[0] for name in names}
    blamed = [k for k, label in enumerate(labels) if label in stems]
    if not blamed:
        return ""
    producers = {name: k for k, node in enumerate(nodes) for name in node.output if name}
    around = {producers[name] for k in blamed for name in nodes[k].input if name in producers}
    around |= {k for k, node in enumerate(nodes) if any(producers.get(name) in blamed for name in node.input)}
    shown = sorted({*blamed, *around})[:24]
    rows = {k: place for place, k in enumerate(shown)}
    boxes, lines = [], []
    for k in shown:
        y, fill = 10 + 50 * rows[k], "#ffd9d9" if k in blamed else "#eef3ff"
        boxes.append(f"<rect x='10' y='{y}' width='430' height='32' rx='5' fill='{fill}' stroke='#668'/>")
        boxes.append(f"<text x='20' y='{y + 21}' font-size='14'>{html(f'{nodes[k].op_type} {labels[k]}'[:52])}</text>")
        for name in nodes[k].input:
            if producers.get(name) in rows:
                start, end = 26 + 50 * rows[producers[name]], 26 + 50 * rows[k]
                path = f"M 440 {start} C 500 {start} 500 {end} 440 {end}"
                lines.append(f"<path d='{path}' fill='none' stroke='#668'/>")
    size = f"viewBox='0 0 520 {20 + 50 * len(shown)}' width='520'"
    label = html(f"{', '.join(names)} and neighbours")
    return f"<svg role='img' aria-label='{label}' {size}>{''.join(lines)}{''.join(boxes)}</svg>"
