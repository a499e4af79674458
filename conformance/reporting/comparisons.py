"""The results of a comparison, and of a search for NaN: in a terminal, as JSON and as a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from onnx import ModelProto
from rich.console import Console

from refgrad.conformance.locating.location import Located
from refgrad.conformance.locating.verdicts import Comparison, Sided, Tensor
from refgrad.conformance.tracing.nonfinite import NonFinite
from refgrad.errors import abridged
from refgrad.escaping import html, printable
from refgrad.show.tables import table

_SHOWN = 12  # tensors of a summary
_BIRTHS = 8


def show(found: Comparison, console: Console, verbose: bool = False) -> None:
    """Print the tensors that differ, and the nodes at fault; with `verbose` every tensor."""
    doubtful = [tensor for tensor in found.tensors if not tensor.ok]
    listed = list(found.tensors) if verbose else doubtful[:_SHOWN]
    if listed:
        console.print(table(map(_row, listed)))
    if len(doubtful) > len(listed):
        _print(console, f"and {len(doubtful) - len(listed)} more that differ: --verbose prints all")
    for tensor in listed:
        for side, seen, told in (("a", tensor.a, found.a), ("b", tensor.b, found.b)):
            if seen.reason and seen.reason != told.failed and (verbose or seen.verdict != "right"):
                _print(console, f"{tensor.name} ({side}): {seen.verdict}: {seen.reason}")
    for side, told in (("a", found.a), ("b", found.b)):
        for line in lines_of(told):
            _print(console, f"{side} = {told.label}: {line}")
    counts = Counter(tensor.verdict for tensor in found.tensors)
    told_all = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "there is nothing to compare"
    _print(
        console,
        f"{'ok' if found.ok else 'DIFFERENT'}: {told_all}. Judge: {found.judge}. Feeds: {found.feeds}; seed {found.seed}.",
    )


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
        "explained": max((one.allowed for one in (tensor.a, tensor.b) if one.allowed is not None), default=None),
        "verdict": tensor.verdict,
    }


def lines_of(side: Sided) -> Iterator[str]:
    """The findings about a side, a line each."""
    if side.failed:
        yield f"it has no gradient: {side.failed}"
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
    if side.kernels is not None:
        yield from _of_kernels(side.kernels)
    for birth in side.born[:_BIRTHS]:
        yield f"not finite: {birth}"
    for name, why in side.unmatched.items():
        yield f"recorded {name!r} is not compared: {why}"


def _of_kernels(found: Located) -> Iterator[str]:
    if found.failed:
        yield f"the executor does not run it: {found.failed}"
    for culprit in found.culprits:
        yield f"the kernel is at fault: {culprit.found}; repaired, the error is {culprit.left:.2g} of {found.error:.2g}"
        for inner in culprit.found.inside:
            yield f"in its body: {inner}"
    for group in found.groups:
        yield f"nodes are wrong together: {group}; repaired, the error is {group.left:.2g} of {found.error:.2g}"
    if found.optimisation:
        yield f"the runtime's optimisation: {found.optimisation}"
    for one in found.acquitted[:_BIRTHS]:
        yield f"wrong by itself, without influence on the results: {one}"
    if found.unexplained:
        yield f"an error of {found.left:.2g} is unexplained"
    elif not found.culprits and not found.groups:
        yield f"each of its {found.judged} nodes is right for its inputs, and so are the results but for rounding"


def document(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "ok": found.ok,
        "judge": found.judge,
        "feeds": found.feeds,
        "seed": found.seed,
        "tensors": [asdict(tensor) | {"verdict": tensor.verdict} for tensor in found.tensors],
        "a": _side(found.a),
        "b": _side(found.b),
    }


def text_of(found: Comparison) -> str:
    """The comparison as the text of a JSON file. Infinities and NaN are texts: JSON has none."""
    return json.dumps(_finite(document(found)), indent=2) + "\n"


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
        "rules": rules,
        "kernels": kernels,
        "not_finite": [asdict(birth) for birth in side.born],
        "unmatched": dict(side.unmatched),
    }


# NaN


def show_births(found: NonFinite, console: Console, verbose: bool = False) -> None:
    """Print where NaN and infinities are born, and what to do about it."""
    shown = found.births if verbose else found.births[:_BIRTHS]
    for number, birth in enumerate(shown, 1):
        _print(console, f"{number}. {birth}")
        _print(console, f"   what helps: {birth.remedy}")
        if birth.of:
            _print(console, f"   its operands come from {', '.join(str(one + 1) for one in birth.of)}")
        if birth.source:
            _print(console, f"   source: {birth.source}")
    if len(shown) < len(found.births):
        _print(console, f"and {len(found.births) - len(shown)} more: --verbose prints all")
    if found.cure:
        _print(console, found.cure)
    if found.elsewhere:
        _print(console, found.elsewhere)
    if found.note:
        _print(console, found.note)
    if found.results:
        given = "" if found.births or found.elsewhere else ", as the model or its inputs have it"
        _print(console, f"not finite{given}: {abridged(found.results, None if verbose else 5)}")
    elif found.ok:
        _print(console, "ok: every result is finite")


def document_of_births(found: NonFinite) -> dict[str, Any]:
    """The same as JSON."""
    return {"ok": found.ok, **asdict(found)}


# A page


def page(found: Comparison, model: ModelProto) -> str:
    """One HTML page without any other file: the verdicts, the nodes at fault with their neighbours, the proof."""
    parts = []
    for name, side in (("a", found.a), ("b", found.b)):
        parts.append(f"<h2>{name} = {html(side.label)}</h2>")
        parts += [f"<p>{html(line)}</p>" for line in lines_of(side)]
        parts += [_picture(model, names) for names in _blamed(side)]
    head = "".join(f"<th>{title}</th>" for title in ("tensor", "kind", "a", "b", "apart", "verdict", "reason"))
    rows = "".join(map(_tr, sorted(found.tensors, key=lambda one: one.ok)))
    verdict = "The two agree" if found.ok else "The two differ"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>refgrad compare</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head><body>"
        f"<h1>{verdict}: {html(found.a.label)} and {html(found.b.label)}</h1>"
        f"<p>Judge: {html(found.judge)}. Feeds: {html(found.feeds)}; seed {found.seed}.</p>{''.join(parts)}"
        f"<h2>Tensors</h2><table><tr>{head}</tr>{rows}</table></body></html>\n"
    )


def _tr(tensor: Tensor) -> str:
    reason = "; ".join(filter(None, (tensor.a.reason, tensor.b.reason)))
    apart = "" if tensor.apart is None else f"{tensor.apart:.3g}"
    cells = (tensor.name, tensor.kind, tensor.a.verdict, tensor.b.verdict, apart, tensor.verdict, reason)
    return f"<tr class='{'ok' if tensor.ok else 'bad'}'>{''.join(f'<td>{html(cell)}</td>' for cell in cells)}</tr>"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.25rem .5rem;text-align:left}"
    "tr.bad td{background:#fff0f0}svg{max-width:100%;height:auto}"
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
    made = {name: k for k, node in enumerate(nodes) for name in node.output if name}
    around = {made[name] for k in blamed for name in nodes[k].input if name in made}
    around |= {k for k, node in enumerate(nodes) if any(made.get(name) in blamed for name in node.input)}
    shown = sorted({*blamed, *around})[:24]
    rows = {k: place for place, k in enumerate(shown)}
    boxes, lines = [], []
    for k in shown:
        y, fill = 10 + 50 * rows[k], "#ffd9d9" if k in blamed else "#eef3ff"
        boxes.append(f"<rect x='10' y='{y}' width='430' height='32' rx='5' fill='{fill}' stroke='#668'/>")
        boxes.append(f"<text x='20' y='{y + 21}' font-size='14'>{html(f'{nodes[k].op_type} {labels[k]}'[:52])}</text>")
        for name in nodes[k].input:
            if made.get(name) in rows:
                start, end = 26 + 50 * rows[made[name]], 26 + 50 * rows[k]
                path = f"M 440 {start} C 500 {start} 500 {end} 440 {end}"
                lines.append(f"<path d='{path}' fill='none' stroke='#668'/>")
    size = f"viewBox='0 0 520 {20 + 50 * len(shown)}' width='520'"
    label = html(f"{', '.join(names)} and neighbours")
    return f"<svg role='img' aria-label='{label}' {size}>{''.join(lines)}{''.join(boxes)}</svg>"
