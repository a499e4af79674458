"""The results of a comparison, and of a search for NaN: in a terminal, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from refgrad.conformance.judge.nan.nonfinite import NonFinite
from refgrad.conformance.locating.bisection import Fault
from refgrad.conformance.locating.location import Culprit, Located
from refgrad.conformance.locating.verdicts import Comparison, Seen, Sided, Tensor, seen_of
from refgrad.conformance.locating.windows import NodeGroup
from refgrad.conformance.problems.ranges import IN_RANGE
from refgrad.conformance.verdicts import CONVENTION, MISSING, REFUSED, RIGHT, UNDECIDED, WRONG
from refgrad.errors import abridged, counted
from refgrad.escaping import markdown, printable
from refgrad.show import tables
from refgrad.show.tables import table

_SHOWN = 12  # tensors of a summary
_ORIGINS = 8
_BETWEEN = 12  # nodes that can be at fault
_LONGEST = 300  # letters of the reason why a side has no gradient, in a sentence
_COLOURS = {RIGHT: tables.GOOD, WRONG: tables.WRONG, MISSING: tables.WRONG, UNDECIDED: tables.UNKNOWN}
_NO_IDENTITY = "it makes no gradient of a model of one Identity either"
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
        _print(console, f"{abridged(names)} ({side}) have one cause: {cause}")
    for tensor in listed:
        for side, seen, told in (("a", tensor.a, comparison.a), ("b", tensor.b, comparison.b)):
            if seen.reason and seen.reason != told.failed and (verbose or seen.verdict != "right"):
                reason = seen.reason if (side, seen.cause) in shared else told_of(seen)
                _print(console, f"{tensor.name} ({side}): {seen.verdict}: {reason}")
    for side, told in (("a", comparison.a), ("b", comparison.b)):
        for line in (*lines_of(told), *ways_of(told)):
            _print(console, f"{side} = {told.label}: {line}")
    counts = Counter(tensor.verdict for tensor in comparison.tensors)
    told_all = "; ".join(f"{verdict} in {counted(count, 'tensor')}" for verdict, count in counts.items())
    _print(
        console,
        f"{'ok' if comparison.ok else 'DIFFERENT'}: {told_all or 'there is nothing to compare'}. {judged(comparison)}",
    )
    for line in stopped_lines(comparison):
        _print(console, line)
    if not comparison.ok:
        _print(console, sentence(comparison, with_messages=False))  # the lines above have them
        _print(console, f"Versions: {versions_of(comparison)}.")


def _shared_causes(comparison: Comparison) -> dict[tuple[str, str], list[str]]:
    """The causes that several tensors of a side share, with the tensors."""
    names: dict[tuple[str, str], list[str]] = {}
    for tensor in comparison.tensors:
        for side, seen in (("a", tensor.a), ("b", tensor.b)):
            if seen.cause:
                names.setdefault((side, seen.cause), []).append(tensor.name)
    return {key: tensors for key, tensors in names.items() if len(tensors) > 1}


def sentence(comparison: Comparison, with_messages: bool = True) -> str:
    """The verdict in one sentence: which side is wrong, in what, and for which nodes or values.

    :param with_messages: quote the message of a side that has no gradient.
    """
    if comparison.ok:
        by_choice = sum(CONVENTION in (tensor.a.verdict, tensor.b.verdict) for tensor in comparison.tensors)
        rest = f" or, in {by_choice}, follow a convention at a kink" if by_choice else ""
        return f"{comparison.a.label} (a) and {comparison.b.label} (b) are right in every tensor{rest}."
    parts = []
    for name, side, place in (("a", comparison.a, 0), ("b", comparison.b, 1)):
        if side.failed:
            reason = _why_none(side, with_messages)
            parts.append(f"{side.label} ({name}) has no gradient{reason and f': {_shortened(reason)}'}")
            continue
        verdicts = Counter(seen_of(tensor, place).verdict for tensor in comparison.tensors)
        doubtful = [(verdict, count) for verdict, count in verdicts.items() if verdict not in (RIGHT, CONVENTION)]
        told = " and ".join(f"{_AS_SAID.get(verdict, f'{verdict} in')} {count}" for verdict, count in doubtful)
        if told:
            reason = _reason(side, [seen_of(tensor, place) for tensor in comparison.tensors])
            parts.append(f"{side.label} ({name}) {told} of {counted(len(comparison.tensors), 'tensor')}{reason}")
    return f"{'; '.join(parts)}." if parts else "There is no gradient to compare."


def _reason(side: Sided, seen: Sequence[Seen]) -> str:
    """The nodes or values that a side is wrong for, in words."""
    if side.unsteady is not None:
        return f", from {side.unsteady.node!r} on" if side.unsteady.node else ""
    causes = {one.cause for one in seen if one.verdict == WRONG}
    if len(causes) == 1 and causes != {""}:
        return f": {next(iter(causes))}"
    faults = [fault for fault in side.rules.faults if fault.kind != REFUSED] if side.rules else []
    rules = [
        f"the cotangent of {fault.value!r}" if fault.value else f"the rule of {abridged(fault.nodes)}"
        for fault in faults
    ]
    kernels: list[str] = []
    disputes: Mapping[str, None] = {}
    if side.kernels is not None:
        kernels = [f"the kernel of {culprit.found.label}" for culprit in side.kernels.culprits]
        disputes = dict.fromkeys(filter(None, (culprit.disputed for culprit in side.kernels.culprits)))
        kernels += _together(side.kernels.groups)
    if rules or kernels:
        disputed = f" (disputed: {'; '.join(disputes)})" if disputes else ""
        return f", because of {abridged([*rules, *kernels], 4)}{disputed}"
    if side.kernels is not None and side.kernels.unexplained:
        return ", but no node at fault could be found"
    return ""


def _together(groups: Sequence[NodeGroup]) -> list[str]:
    """A text for each list of operators: the first group of nodes that are wrong together, and how many more there are."""
    alike: dict[tuple[str, ...], list[NodeGroup]] = {}
    for group in groups:
        alike.setdefault(group.operators, []).append(group)
    return [
        f"{abridged(first.labels, 4)} together"
        + (f" (and {counted(len(others), 'more such group')})" if others else "")
        for first, *others in alike.values()
    ]


def _shortened(reason: str) -> str:
    """The reason in one line, without its middle if it is long: the end of a message says what was wrong. No word is cut."""
    line = " ".join(reason.split()).removesuffix(".")
    if len(line) <= _LONGEST:
        return line
    first, last = line[: _LONGEST // 2], line[-_LONGEST // 2 :]
    return f"{first.rpartition(' ')[0] or first} … {last.partition(' ')[2] or last}"


def _why_none(side: Sided, with_messages: bool) -> str:
    """The reason why a side has no gradient: the nodes that it does not run or differentiate, if they are known."""
    groups = _alike(side.rules.faults) if side.rules else []
    if groups:
        first, *others = groups
        shown = _fault_line(first) if with_messages or first[0].kind == WRONG else _nodes_line(first)
        return shown + (f" (and {counted(sum(map(len, others)), 'more node')})" if others else "")
    if side.kernels is None:
        return side.failed if with_messages else ""
    failing = [one.found for one in side.kernels.culprits if one.found.failed]
    if failing:
        wrong = [one.found.label for one in side.kernels.culprits if not one.found.failed]
        beside = f"it gets {abridged(wrong)} wrong, and " if wrong else ""
        nodes = f"{beside}it does not run {abridged(one.label for one in failing)}"
        return f"{nodes}: {failing[0].failed}" if with_messages else nodes
    if side.kernels.groups:
        nodes = f"it does not run {abridged(_together(side.kernels.groups))}"
        return f"{nodes}: {side.failed}" if with_messages else nodes
    return (side.kernels.failed or side.failed) if with_messages else ""


def _alike(faults: Iterable[Fault]) -> list[list[Fault]]:
    """The faults, those together that differ in the node alone: a builder may say the same of every node."""
    groups: dict[object, list[Fault]] = {}
    for fault in faults:
        key = (fault.kind, fault.message, fault.is_no_gradient) if fault.kind != WRONG else fault
        groups.setdefault(key, []).append(fault)
    return list(groups.values())


def _nodes_line(alike: Sequence[Fault]) -> str:
    """The nodes of a group, and a verb: the builder refuses them, or fails on them."""
    first, *others = alike
    return f"it {first.deed} {first.label}" + (f" and {counted(len(others), 'more node')}" if others else "")


def _fault_line(alike: Sequence[Fault]) -> str:
    """A group of `_alike`, with its message."""
    [first, *others] = alike
    return f"{_nodes_line(alike)}: {first.message}" if others else str(first)


def stopped_lines(comparison: Comparison) -> Iterator[str]:
    """Lines that say what a comparison has not judged or searched, for it was stopped."""
    if not comparison.stopped:
        return
    sides = (("a", comparison.a), ("b", comparison.b))
    missing = [f"{step} of {side.label} ({name})" for name, side in sides for step in side.unsearched]
    if comparison.unjudged:
        missing = [comparison.unjudged, "the search for what is at fault"]
    yield f"Stopped: {comparison.stopped}. Not done to the end: {', '.join(missing) or 'the versions'}."


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
        "difference": tensor.difference,
        "allowed": max((side.allowed for side in (tensor.a, tensor.b) if side.allowed is not None), default=None),
        "verdict": tensor.verdict,
    }


def lines_of(side: Sided) -> Iterator[str]:
    """The findings about a side, a line each."""
    if side.failed and not (side.rules and any(fault.message == side.failed for fault in side.rules.faults)):
        yield f"it has no gradient: {side.failed}"
    if side.unsteady is not None:
        yield str(side.unsteady)
    if side.rules is not None:
        for alike in _alike(side.rules.faults):
            fault = alike[0]
            yield f"the rule is at fault: {fault}" if fault.kind == WRONG else _fault_line(alike)
            if fault.formula and fault.kind == WRONG:
                yield f"the right formula: {fault.formula}"
            for known in dict.fromkeys(one.known for one in alike if one.known):
                yield f"known of this operator: {known}"
        for node, why in side.rules.silent.items():
            yield f"nothing can be said of {node!r}: {why}"
        if not side.rules.is_whole and side.rules.within:
            yield f"the search for the rule was stopped: a fault is in one of {abridged(side.rules.within)}"
        elif side.rules.nothing:
            same = side.rules.nothing == side.failed
            yield f"no node is at fault: {_NO_IDENTITY}{'' if same else f': {side.rules.nothing}'}"
        elif not side.rules.faults and side.rules.is_whole:
            built = counted(side.rules.built, "part")
            yield f"no rule is wrong by itself: the gradients of {built} of the model were tried"
    for step, why in side.unsearched.items():
        if why:
            yield f"{step} could not be searched: {why}"
    for one in side.ranges:
        yield str(one)
    if side.kernels is not None:
        yield from _of_kernels(side.kernels, side)
    for origin in side.origins[:_ORIGINS]:
        yield f"not finite: {origin}"
    if side.between:
        nodes = abridged(side.between, _BETWEEN)
        yield f"it is recorded and cannot be run; if one node alone is at fault, it is one of {nodes}"
    reasons: dict[str, list[str]] = {}
    for name, why in side.unmatched.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        if len(names) == 1:
            yield f"recorded {names[0]!r} is not compared: {why}"
        else:
            yield f"{len(names)} of the recorded gradients are not compared ({abridged(names)}): {why}"


def verdicts_of(comparison: Comparison, place: int) -> str:
    """A sentence about the tensors of a side: how many have which verdict, and which are not right."""
    by_verdict: dict[str, list[str]] = {}
    for tensor in comparison.tensors:
        by_verdict.setdefault(seen_of(tensor, place).verdict, []).append(tensor.name)
    others = [
        f"{verdict} in {counted(len(names), 'tensor')}: {abridged(names)}"
        for verdict, names in by_verdict.items()
        if verdict != RIGHT
    ]
    right = f"right in {counted(len(by_verdict.get(RIGHT, ())), 'tensor')}"
    return f"It is {'; '.join([*others, right])}."


def ways_of(side: Sided) -> Iterator[str]:
    """A line about the way of the error to the tensor that is furthest off."""
    if side.paths:
        yield f"the error spreads: {max(side.paths, key=lambda path: path.error or 0.0)}"


def _of_kernels(located: Located, side: Sided) -> Iterator[str]:
    if located.failed and (not side.failed or not located.culprits):
        yield f"the executor does not run it: {located.failed}"
    failing: dict[str, list[Culprit]] = {}
    for culprit in located.culprits:
        if culprit.found.failed:
            failing.setdefault(culprit.found.operator, []).append(culprit)
    before = located.error
    for first, *others in failing.values():
        more = f" (and {abridged(one.found.name for one in others)})" if others else ""
        last = [first, *others][-1]
        yield f"the kernel is at fault: {first.found}{more}; {_repaired(before, last.left)}"
        before = last.left
    for culprit in located.culprits:
        if not culprit.found.failed:
            proof = (
                f"with the right values for it, the error of {culprit.helped!r} falls from {culprit.was:.2g} to "
                f"{culprit.now:.2g}"
            )
            verdict = "the kernel differs, which is disputed" if culprit.disputed else "the kernel is at fault"
            yield f"{verdict}: {culprit.found}; {proof if culprit.helped else _repaired(before, culprit.left)}"
            before = culprit.left
        for inner in culprit.found.inside:
            yield f"in its body: {inner}"
    yield from dict.fromkeys(filter(None, map(_known, located.culprits)))
    for group in located.groups:
        yield f"nodes are wrong together: {group}; {_repaired(before, group.left)}"
        before = group.left
    if located.optimisation:
        yield f"the runtime's optimisation: {located.optimisation}"
    for node in located.suspects[:_ORIGINS]:
        yield f"wrong by itself, but not proved to be at fault: {node}"
    for node in located.acquitted[:_ORIGINS]:
        yield f"wrong by itself, but with no effect on the results: {node}"
    if not located.is_whole:
        yield f"the search for the kernel was stopped: {counted(located.judged, 'node was', 'nodes were')} looked at"
    elif located.unexplained:
        if located.judged:
            yield f"an error of {located.left:.2g} is unexplained"
    elif not located.culprits and not located.groups and not side.ranges:
        nodes = counted(located.judged, "node")
        yield f"each of its {nodes} is right for its inputs, and the results are right up to rounding"


def _known(culprit: Culprit) -> str:
    """A line about the known bugs, or the dispute, that the fault of a kernel may be; "" if there are none."""
    if culprit.disputed:
        return f"a dispute about the specification of {culprit.found.operator}: {culprit.disputed}"
    return f"known of {culprit.found.operator}: {culprit.known}" if culprit.known else ""


def _repaired(before: float, left: float) -> str:
    """A text about the error before and after a repair; it is infinite where the model does not run."""
    if math.isinf(left):
        return "with the right values for it, there are no results either"
    if math.isinf(before):
        return f"with the right values for it, there are results, with an error of {left:.2g}"
    return f"with the right values for it, the error goes from {before:.2g} to {left:.2g}"


def document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "ok": comparison.ok,
        "sentence": sentence(comparison),
        "versions": dict(comparison.versions),
        "judge": comparison.judge,
        "feeds": comparison.feeds,
        "seed": comparison.seed,
        "stopped": comparison.stopped,
        "not_judged": comparison.unjudged,
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


def text_of(comparison: Comparison, _: Sequence[tuple[str, str]] = ()) -> str:
    """The comparison as the text of a JSON file."""
    return json_of(document(comparison))


def json_of(document: Any) -> str:
    """The text of a JSON file. Infinities and NaN are texts: JSON has none."""
    return json.dumps(_finite(document), indent=2) + "\n"


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
            "is_whole": side.rules.is_whole,
            "within": list(side.rules.within),
            "nothing": side.rules.nothing,
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
        "not_searched": dict(side.unsearched),
        "paths": [asdict(path) for path in side.paths],
    }


def markdown_of(comparison: Comparison, steps: Sequence[tuple[str, str]] = ()) -> str:
    """The comparison as Markdown, for an issue: the sentence, the tensors that differ, the nodes at fault, the versions."""
    doubtful = [tensor for tensor in comparison.tensors if not tensor.ok]
    parts = [f"# {markdown(title(comparison))}", markdown(sentence(comparison))]
    for name, side in (("a", comparison.a), ("b", comparison.b)):
        if lines := [*lines_of(side), *ways_of(side)]:
            parts += [f"## {name} = {markdown(side.label)}", "\n".join(f"- {markdown(line)}" for line in lines)]
    if steps:
        told = [f"- {markdown(' '.join(filter(None, step)))}" for step in steps]
        parts += ["## What to do next", "\n".join(told)]
    if doubtful:
        rows = [cells_of(tensor) for tensor in doubtful[:_SHOWN]]
        heads = ("tensor", "kind", "a", "b", "difference", "verdict", "reason")
        lines = [f"| {' | '.join(map(markdown, row))} |" for row in (heads, *rows)]
        parts += ["## Tensors", "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])]
        if len(doubtful) > len(rows):
            parts.append(f"And {len(doubtful) - len(rows)} more that differ.")
    elements = [
        f"- {markdown(f'{tensor.name} ({side}) at {list(one.at)}')}: expected {one.expected:.9g}, found {one.found:.9g}"
        for tensor in doubtful[:_SHOWN]
        for side, seen in (("a", tensor.a), ("b", tensor.b))
        for one in seen.elements
    ]
    parts += ["## The elements that are furthest off", "\n".join(elements)] if elements else []
    parts += [markdown(f"Versions: {versions_of(comparison)}."), markdown(judged(comparison))]
    return "\n\n".join(parts) + "\n"


def title(comparison: Comparison) -> str:
    """The shortest form of the verdict."""
    which = "agree" if comparison.ok else "differ"
    return f"The two {which}: {comparison.a.label} and {comparison.b.label}"


def judged(comparison: Comparison) -> str:
    """The judge, the feeds and the seed in one line."""
    return f"Judge: {comparison.judge}. Feeds: {comparison.feeds}; seed {comparison.seed}."


def cells_of(tensor: Tensor) -> tuple[str, ...]:
    """A tensor as texts: its name, its kind, the verdict on each side, their difference, the verdict, the reasons."""
    reason = "; ".join(dict.fromkeys(filter(None, (told_of(tensor.a), told_of(tensor.b)))))
    difference = "" if tensor.difference is None else f"{tensor.difference:.3g}"
    return tensor.name, tensor.kind, tensor.a.verdict, tensor.b.verdict, difference, tensor.verdict, reason


# NaN


def show_origins(nonfinite: NonFinite, console: Console, verbose: bool = False) -> None:
    """Print the origins of NaN and infinities, and what to do about them."""
    shown = nonfinite.origins if verbose else nonfinite.origins[:_ORIGINS]
    for number, origin in enumerate(shown, 1):
        _print(console, f"{number}. {origin}")
        _print(console, f"   what helps: {origin.remedy}")
        if origin.of:
            _print(
                console, f"   its operands come from number {' and '.join(str(position + 1) for position in origin.of)}"
            )
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
    if nonfinite.stopped:
        _print(console, f"Stopped: {nonfinite.stopped}. Not done to the end: {', '.join(nonfinite.untried)}.")
    if nonfinite.results:
        origin_text = "" if nonfinite.origins or nonfinite.elsewhere else ", as the model or its inputs have it"
        _print(console, f"not finite{origin_text}: {abridged(nonfinite.results, None if verbose else 5)}")
    elif nonfinite.ok and not nonfinite.stopped:
        _print(console, "ok: every result is finite")


def document_of_origins(nonfinite: NonFinite) -> dict[str, Any]:
    """The same as JSON."""
    values = asdict(nonfinite)
    return {"ok": nonfinite.ok, "results": values.pop("results"), "births": values.pop("origins"), **values}
