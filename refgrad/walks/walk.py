"""`refgrad.walk`: the backward pass of a model, step by step and with its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from refgrad import traits
from refgrad.backends.base import ModelLike, Value, by_names, check_feeds, graph_inputs, graph_outputs, load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.problems.feeds import DOMAINS, SIZE
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.conformance.problems.kinked import OPERATORS
from refgrad.conformance.problems.point import inputs_of, with_values, without_wrong_sizes
from refgrad.errors import FeedError, OptionError, RefgradError, UnknownNameError, abridged, choices, did_you_mean
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.model.graph import Node
from refgrad.model.printing import onnx_text
from refgrad.parameters.weights import weights
from refgrad.protos.traverse import attribute_value, reads_of
from refgrad.ranges import checked
from refgrad.reverse.gradient import preflight, recorded
from refgrad.reverse.path import Path
from refgrad.reverse.recording import with_contributions
from refgrad.reverse.report import UselessGradient
from refgrad.reverse.sweep import SweepResults
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.tables.registry import RULES
from refgrad.walks.differences import Differences
from refgrad.walks.kinks import kinks_at
from refgrad.walks.records import Contribution, Cotangent, Difference, Element, Emitted, Kink, Step, Walk

__all__ = ["Contribution", "Cotangent", "Difference", "Element", "Emitted", "Kink", "Step", "Walk", "walk"]

_ELEMENT = re.compile(r"(.+?)\s*\[([-\d,\s]*)\]", re.DOTALL)
_OF_PRIMALS = frozenset(("sum", "identity", "zero", "cotangent"))  # rules of what belongs to a value, and to no node
_FEW = 3


@explained
def walk(
    model: ModelLike,
    feeds: Mapping[str, Any] | None = None,
    *,
    wrt: Sequence[str] | None = None,
    of: str | None = None,
    seed: int = 0,
    differences: bool = True,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    **conventions: Unpack[ConventionOptions],
) -> Walk:
    """Return the backward pass of a model, step by step and with its numbers.

    The gradient is `refgrad.gradient(model, wrt, outputs=[of], keep_outputs=True, **conventions)`, run on the interpreter in
    the types of the model.

    :param model: a model, or the path of one.
    :param feeds: arrays by the names of inputs, or of initializers in place of their own values. Missing arrays are drawn at
        random; the notes say so.
    :param wrt: as in `refgrad.gradient`; by default every float input, and the parameters that `refgrad.weights` finds and the
        output depends on. Constants, such as an exponent, count where `wrt` names them or they are fed.
    :param of: the output or inner result to differentiate, "loss", or one element of it, "logits[0, 3]". By default the only
        float output.
        Of an output with several elements, the walk starts from the largest one, and the notes say so.
    :param seed: of the random feeds.
    :param differences: take a central difference beside each step, in float64, as far as that takes little time.
    :param size: the number of elements of random feeds along dimensions that are not declared; `sizes` has it by symbol.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises OptionError: `of` is missing and there are several float outputs, or the output has no element;
        `seed` is no integer, or negative.
    :raises UnknownNameError: an output or a name in `wrt` that the model does not have.
    :raises FeedError: feeds that do not fit.
    :raises RefgradError: what `refgrad.gradient` and the interpreter refuse.

    >>> import numpy as np, onnx.parser, refgrad
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float x) => (float z) { z = Mul(x, x) }'
    ... )
    >>> [step] = refgrad.walk(model, {"x": np.float32(3)}).steps
    >>> step.formula, [(one.of, one.position) for one in step.outgoing]
    ('dA = dC·B, dB = dC·A', [('x', 0), ('x', 1)])
    """
    number, chosen = _checked_seed(seed), Conventions.of("walk", conventions)
    fed_by_name = by_names({} if feeds is None else feeds)
    proto = load_model(model, lift=True)
    output, element = _asked(proto, of)
    notes: list[str] = []
    proto = _ending_at(proto, output, fed_by_name)
    proto, given = _fed(proto, fed_by_name, number, size, sizes, output, notes)
    shown = np.asarray(NumpyBackend().prepare(proto).run(given, [output])[output])
    place = _place(output, element, shown)
    proto = without_wrong_sizes(proto, {**given, output: shown}, [output])
    title = (
        output
        if element is None and shown.size == 1
        else f"{output}[{', '.join(map(str, np.unravel_index(place, shown.shape)))}]"
    )
    if element is None and shown.size > 1:
        notes.append(
            f"The output {output!r} has {shown.size} elements: the walk starts from the largest, {title}. "
            f"To choose another: --of '{output}[{', '.join('0' * shown.ndim)}]' (in Python of=…)."
        )
    names = _sources(proto, output, given, chosen.quantization) if wrt is None else wrt
    written = recorded(proto, names, [output], chosen)
    gradient, swept = written.model, written.sweep_results
    useless = (*written.planned.zeros, *written.planned.leaks)
    notes += map(str, useless)
    cotangent = np.zeros(shown.shape, shown.dtype)
    cotangent.reshape(-1)[place] = 1
    seeds = {swept.cotangents[output]: cotangent}
    needed = {value.name for value in gradient.graph.input}
    fed = {name: value for name, value in given.items() if name in needed}
    assert swept.sweep.record is not None
    whole = with_contributions(gradient, swept.op, swept.sweep.names, swept.sweep.record)
    every = [name for node in whole.graph.node for name in node.output if name]  # the values of constants too
    values = NumpyBackend().prepare(whole).run({**fed, **seeds}, list(dict.fromkeys(every))) | fed | seeds
    values |= {t.name: array_of(t) for t in whole.graph.initializer if t.name not in values}
    more = tuple(whole.graph.node[len(gradient.graph.node) :])
    return _Reading(gradient, more, swept, values).walk(proto, given, title, output, place, notes, differences, useless)


# The output to differentiate, and the feeds


def _asked(model: ModelProto, of: str | None) -> tuple[str, tuple[int, ...] | None]:
    """The output that `of` names, and the element; None where it names no element."""
    outputs = graph_outputs(model.graph)
    floats = [value.name for value in outputs if _may_be_float(value)]
    names = [value.name for value in outputs]
    if of is None:
        if not floats:
            raise OptionError(
                f"The model has no float output that could be walked back from; its outputs: {choices(names)}. Add a loss "
                "to it (refgrad.add_loss_output), or make an output of a value within (refgrad.select_model_inputs_outputs)."
            )
        if len(floats) > 1:
            raise OptionError(
                f"The model has {len(floats)} float outputs: {choices(floats)}. Say which one is walked back from: "
                f"of={floats[0]!r}, or one element of it, of={floats[0] + '[0]'!r}."
            )
        return floats[0], None
    if not isinstance(of, str):
        raise OptionError(f"of={of!r} is not a text. Write the name of an output, or one element of it: 'logits[3]'.")
    if of in names:
        return of, None
    match = _ELEMENT.fullmatch(of.strip())
    output = match[1] if match else of
    if output not in names and output not in _results(model):
        raise UnknownNameError(
            f"of={of!r}: the model has no output {output!r}.{_known_output(model, output)} Its outputs are {choices(names)}."
        )
    if match is None:
        return output, None
    try:
        return output, tuple(int(text) for text in match[2].split(",") if text.strip())
    except ValueError as error:
        raise OptionError(f"of={of!r}: an element is written with its indices, such as {output}[0, 3].") from error


def _known_output(model: ModelProto, name: str) -> str:
    """The words for what an unknown output may mean: an output of the node with this name, or a similar name."""
    made = [value for node in model.graph.node if node.name == name for value in node.output if value]
    if made:
        return f" {name!r} is a node, and its output is {made[0]!r}."
    return did_you_mean(name, (*(value.name for value in graph_outputs(model.graph)), *_results(model)))


def _results(model: ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output if name]


def _ending_at(model: ModelProto, output: str, feeds: Iterable[str]) -> ModelProto:
    """The model, if it has this output; else the part that computes this inner result, with all inputs that are fed."""
    if any(value.name == output for value in model.graph.output):
        return model
    needed = {value.name for value in select_model_inputs_outputs(model, [output]).graph.input}
    kept = [value.name for value in model.graph.input if value.name in needed or value.name in feeds]
    return select_model_inputs_outputs(model, [output], kept)


def _sources(model: ModelProto, output: str, feeds: Mapping[str, Any], quantization: str) -> list[str] | None:
    """The float inputs and the parameters: the derivative by a constant, such as an exponent, need not exist."""
    constants = {name for name, weight in weights(model).items() if weight.kind != "parameter"}
    known = preflight(model, outputs=[output], quantization=quantization).wrt
    names = [name for name in known if name not in constants or name in feeds]
    return names or None


def _may_be_float(value: Value) -> bool:
    return value.kind == "tensor" and (value.dtype is None or is_float(np.zeros(0, value.dtype)))


def _place(output: str, element: tuple[int, ...] | None, value: np.ndarray) -> int:
    """The element of an output as a position in its flattened array; by default the largest element."""
    if not is_float(value):
        raise OptionError(
            f"The output {output!r} is {value.dtype.name}: it has no derivative. Choose a float output with of=NAME."
        )
    sizes = list(value.shape)
    if not value.size:
        raise OptionError(f"The output {output!r} has the shape {sizes}, and no element. Feed something larger.")
    if element is None:
        wide = value.astype(np.float64)
        return int(np.where(np.isnan(wide), -np.inf, wide).argmax())
    if len(element) != value.ndim or any(not -n <= k < n for k, n in zip(element, value.shape, strict=True)):
        last = ", ".join(str(n - 1) for n in sizes)
        raise OptionError(
            f"The output {output!r} has the shape {sizes}, and no element [{', '.join(map(str, element))}]. "
            f"The last one is {output}[{last}]."
        )
    return int(np.ravel_multi_index(tuple(k % n for k, n in zip(element, value.shape, strict=True)), value.shape))


def _checked_seed(seed: Any) -> int:
    return int(checked("seed", seed))


def _fed(
    model: ModelProto,
    feeds: Mapping[str, Any],
    seed: int,
    size: int,
    sizes: Mapping[str, int] | None,
    output: str,
    notes: list[str],
) -> tuple[ModelProto, dict[str, Any]]:
    """The model with the values that are fed for its initializers, and a feed for each input: random where none is given."""
    known = inputs_of(model)
    inputs = graph_inputs(model.graph)
    missing = [
        value for value in inputs if value.name not in feeds and not value.has_default and value.kind != "optional"
    ]
    if not missing:
        return with_values(model, check_feeds(feeds, known))
    known_sizes = dict(sizes or {})
    for value in inputs:
        if value.name in feeds and value.shape is not None:
            shape = np.shape(feeds[value.name])
            known_sizes |= {d: n for d, n in zip(value.shape, shape, strict=False) if isinstance(d, str)}
    symbols = {d for value in missing for d in value.shape or () if isinstance(d, str)}
    fitting = {d: n for d, n in known_sizes.items() if d in symbols or d in (sizes or {})}
    undeclared = [value for value in missing if value.kind != "tensor"]
    if undeclared:
        raise FeedError(
            f"No feed for {', '.join(map(str, undeclared))}, and only tensors are drawn at random. Add it to the feeds."
        )

    def run(drawn: dict[str, Any]) -> tuple[ModelProto, dict[str, Any], Any]:
        fed_model, whole = with_values(model, check_feeds({**drawn, **feeds}, known))
        return fed_model, whole, NumpyBackend().prepare(fed_model).run(whole, [output])[output]

    try:
        found = fitting_feeds(
            model,
            run,
            lambda ran: not is_float(ran[2]) or bool(np.isfinite(ran[2].astype(np.float64)).all()),
            inputs=missing,
            seed=seed,
            size=size,
            sizes=fitting,
        )
    except FeedError:
        raise
    except RefgradError as error:
        raise FeedError(
            f"The model does not run with random feeds for {choices(v.name for v in missing)}: {error} Feed them "
            "with feeds={...}, or choose the sizes with sizes={...}."
        ) from error
    fed_model, whole, _ = found.result
    domain_text = "" if found.described == DOMAINS[0] else f", {found.described}"
    several = len(missing) > 1
    notes.append(
        f"{abridged((repr(v.name) for v in missing), _FEW)} {'were' if several else 'was'} not fed: "
        f"{'they are' if several else 'it is'} random, drawn with seed {seed}{domain_text}."
    )
    return fed_model, whole


# The record of the sweep, with numbers


class _Reading:
    """A gradient model, the record of the sweep that wrote it, and what a run of it computed: read as steps."""

    def __init__(
        self, gradient: ModelProto, more: tuple[NodeProto, ...], swept: SweepResults, values: dict[str, Any]
    ) -> None:
        record = swept.sweep.record
        assert record is not None
        self.gradient, self.more, self.found, self.values, self.record = gradient, more, swept, values, record
        self.graph, self.sweep = swept.path.graph, swept.sweep
        self._names = swept.sweep.names
        emitted = {self.name(value) for value in swept.op.emission.made}
        nodes = [*gradient.graph.node, *more]
        self.backward = [node for node in nodes if not emitted.isdisjoint(filter(None, node.output))]
        self.forward = [node for node in nodes if emitted.isdisjoint(filter(None, node.output))]
        self._functions = {(f.domain, f.name): f for f in gradient.functions}
        self._made = emitted | swept.op.emission.constants.keys() | set(swept.cotangents.values())
        self._results = {name: self.name(value) for name, value in swept.adjoints.items()}
        self._sized = self._of_sizes()
        self._wide: dict[str, Any] = {}

    def name(self, value: str) -> str:
        """The name of a value in the gradient model."""
        return self._names.get(value, value)

    def walk(
        self,
        model: ModelProto,
        feeds: dict[str, Any],
        title: str,
        output: str,
        place: int,
        notes: list[str],
        differences: bool,
        useless: Sequence[UselessGradient],
    ) -> Walk:
        """The steps of the walk."""
        totals = self.sweep.totals
        visited = [n for n in reversed(self.found.path.active) if not totals.keys().isdisjoint(filter(None, n.outputs))]
        numbers = {node.name: number for number, node in enumerate(visited, 1)}
        by_owner: dict[tuple[bool, str], list[NodeProto]] = {}
        for node in self.backward:
            rule, owner = _owner(node)
            by_owner.setdefault((rule in _OF_PRIMALS, owner), []).append(node)
        contributions = self._contributions(numbers, by_owner)
        cotangents = self._cotangents(contributions, by_owner)
        kinked: dict[str, np.ndarray] = {}
        steps = [self._step(node, numbers[node.name], contributions, cotangents, by_owner, kinked) for node in visited]
        if differences:
            steps, difference_notes = self._with_differences(steps, cotangents, kinked, output, place)
            notes += difference_notes
        notes += _flat(steps, cotangents, self.values, self.found.adjoints, useless)
        return Walk(
            model=model,
            gradient=self.gradient,
            more=self.more,
            feeds=feeds,
            values=self.values,
            of=title,
            wrt=tuple(self.found.adjoints),
            steps=tuple(steps),
            cotangents=cotangents,
            forward=tuple(self._emitted(node) for node in self.forward),
            notes=tuple(notes),
        )

    def _contributions(
        self, numbers: Mapping[str, int], by_owner: Mapping[tuple[bool, str], list[NodeProto]]
    ) -> dict[str, list[Contribution]]:
        """The contributions to each cotangent as they are summed: in the order of the forward nodes, the seed last."""
        by_node: dict[str, dict[str, list[Contribution]]] = {}  # primal: node: its contributions
        summed: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for sum_ in self.record.summed:
            pair = self.name(sum_.before), self.name(sum_.after)
            summed.setdefault((sum_.node, sum_.primal), []).append(pair)
        needed, totals = self.found.path.needed, self.sweep.totals
        with_graphs = self.graph.control_flow
        nodes = {node.name: node for node in self.found.path.active}
        seen: dict[tuple[str, str], int] = {}
        for entry in self.record.given:
            if entry.primal not in needed or entry.primal not in totals or self.name(entry.adjoint) not in self.values:
                continue
            node = nodes[entry.node]
            position = entry.position
            if node.key in with_graphs:
                places = [k for k, name in enumerate(node.inputs) if name == entry.primal]
                nth = seen.get((node.name, entry.primal), 0)
                seen[node.name, entry.primal] = nth + 1
                position = places[nth] if nth < len(places) else -1
            short = _short(node.name)
            value = self.name(entry.adjoint)
            before, after = self._before(summed.get((short, entry.primal), []), value, by_owner.get((False, short), []))
            axes = self._axes(before, entry.primal) if before else ()
            if not axes:
                before = after = ""
            contribution = Contribution(entry.primal, numbers[node.name], position, value, before, axes, after)
            by_node.setdefault(entry.primal, {}).setdefault(node.name, []).append(contribution)
        by_primal = {
            primal: [contribution for group in reversed(groups.values()) for contribution in group]
            for primal, groups in by_node.items()
        }
        for output, cotangent in self.found.cotangents.items():
            by_primal.setdefault(output, []).append(Contribution(output, None, -1, cotangent))
        return by_primal

    def _before(self, summed: Sequence[tuple[str, str]], value: str, emitted: Sequence[NodeProto]) -> tuple[str, str]:
        """The summed value and its sum, which is the contribution `value`, or of which it is made; "" and "" without a sum."""
        for before, after in summed:
            if after == value:
                return before, after
        producers = {name: node for node in emitted for name in node.output if name}
        pending, reached = [value], {value}
        while pending and summed:
            node = producers.get(pending.pop())
            for name in node.input if node is not None else ():
                if name not in reached:
                    reached.add(name)
                    pending.append(name)
        return next(((before, after) for before, after in summed if after in reached), ("", ""))

    def _axes(self, before: str, primal: str) -> tuple[int, ...]:
        """The axes along which an operand was repeated, from the shapes that the run had."""
        whole, part = self.values.get(before), self.values.get(primal)
        if not isinstance(whole, np.ndarray) or not isinstance(part, np.ndarray):
            return ()
        lead = whole.ndim - part.ndim
        if lead < 0:
            return ()
        inner = (lead + k for k, size in enumerate(part.shape) if size == 1 and whole.shape[lead + k] != 1)
        return (*range(lead), *inner)

    def _cotangents(
        self,
        contributions: Mapping[str, Sequence[Contribution]],
        by_owner: Mapping[tuple[bool, str], list[NodeProto]],
    ) -> dict[str, Cotangent]:
        first: dict[str, str] = {}  # adjoint: the first primal that had it
        cotangents: dict[str, Cotangent] = {}
        for primal, adjoint in self.sweep.totals.items():
            owner = first.setdefault(adjoint, primal)
            value = self._results.get(primal, self.name(adjoint))
            if value not in self.values:
                continue
            emitted = tuple(self._emitted(node) for node in by_owner.get((True, _short(primal)), ()))
            parts = tuple(contributions.get(primal, ()))
            cotangents[primal] = Cotangent(primal, value, parts, owner if owner != primal else "", emitted)
        for output, seed in self.found.cotangents.items():  # also of one that no derivative leaves
            cotangents.setdefault(output, Cotangent(output, seed, tuple(contributions[output])))
        for primal, value in self._results.items():
            if primal not in cotangents:
                emitted = tuple(self._emitted(node) for node in by_owner.get((True, _short(primal)), ()))
                cotangents[primal] = Cotangent(primal, value, tuple(contributions.get(primal, ())), "", emitted)
        return cotangents

    def _step(
        self,
        node: Node,
        number: int,
        contributions: Mapping[str, Sequence[Contribution]],
        cotangents: Mapping[str, Cotangent],
        by_owner: Mapping[tuple[bool, str], list[NodeProto]],
        kinked: dict[str, np.ndarray],
    ) -> Step:
        emitted = by_owner.get((False, _short(node.name)), [])
        read = dict.fromkeys(
            name
            for item in emitted
            for name in reads_of(item)
            if name and name not in self._made and name in self.values
        )
        outgoing = sorted(
            (item for name in dict.fromkeys(node.reads) for item in contributions.get(name, ()) if item.step == number),
            key=lambda item: item.position if item.position >= 0 else len(node.inputs),
        )
        control_flow_rule = self.graph.control_flow.get(node.key)
        formula = control_flow_rule.formula() if control_flow_rule is not None else RULES[node.key].formula
        return Step(
            number=number,
            node=node.name,
            operator=node.op_type,
            domain=node.domain,
            formula=formula,
            inputs=node.inputs,
            outputs=node.outputs,
            attributes={name: _told(value) for name, value in node.attributes.items()},
            read=tuple(read),
            incoming=tuple(cotangents[name] for name in node.outputs if name in cotangents),
            outgoing=tuple(outgoing),
            kinks=self._kinks(node, outgoing, kinked),
            emitted=tuple(self._emitted(item) for item in emitted),
            values=self.values,
        )

    def _kinks(self, node: Node, outgoing: Sequence[Contribution], kinked: dict[str, np.ndarray]) -> tuple[Kink, ...]:
        """The kinks of a node; `kinked` learns which elements of a value are at one."""
        if node.op_type not in OPERATORS:
            return ()
        asked = sorted({contribution.position for contribution in outgoing if contribution.position >= 0})
        inputs = [self._widened(name) if name else None for name in node.inputs]
        if not asked or any(name and name not in self.values for name in node.inputs):
            return ()
        kinks = []
        with np.errstate(all="ignore"):
            whose = self.found.op.kinks
            for kink, mask in kinks_at(node.proto, node.inputs, inputs, node.attributes, asked, self.gradient, whose):
                kinks.append(kink)
                kinked[kink.input] = kinked.get(kink.input, np.zeros(mask.shape, bool)) | mask
        return tuple(kinks)

    def _widened(self, name: str) -> Any:
        if name not in self._wide:
            value: Any = self.values.get(name)
            self._wide[name] = value.astype(np.float64) if is_float(value) else value
        return self._wide[name]

    def _with_differences(
        self,
        steps: Sequence[Step],
        cotangents: Mapping[str, Cotangent],
        kinked: Mapping[str, np.ndarray],
        output: str,
        place: int,
    ) -> tuple[list[Step], list[str]]:
        try:
            taken = Differences(self.gradient, self.forward, self.values, output, place)
        except RefgradError as error:
            return list(steps), [f"There are no finite differences: {error}"]
        if taken.random:
            return list(steps), ["There are no finite differences: the model draws random numbers in each run."]
        if not taken.is_finite:
            return list(steps), [
                f"There are no finite differences: the output {output!r} is not finite at these feeds."
            ]
        rounded = _rounded(self.found.path)
        known: dict[str, Difference | None] = dict.fromkeys(rounded)
        steps_checked = []
        for step in steps:
            for contribution in _complete_first(step, cotangents):
                if contribution.of not in known and contribution.of in cotangents:
                    value = self.values[cotangents[contribution.of].value]
                    array = value if isinstance(value, np.ndarray) and is_float(value) else None
                    known[contribution.of] = (
                        None if array is None else taken.by(contribution.of, array, kinked.get(contribution.of))
                    )
                if known.get(contribution.of) is not None:
                    step = replace(step, difference=known[contribution.of])
                    break
            steps_checked.append(step)
        without = [step for step in steps_checked if step.outgoing and step.difference is None]
        result = np.asarray(self.values[output])
        if not np.isfinite(result.reshape(-1)[place]):  # in float64 it is finite
            why = f"the output {output!r} is not finite in {result.dtype} at these feeds"
        else:
            whys = ["more would take long"] if taken.is_spent else []
            if rounded:
                whys.insert(0, "a difference would see the steps of a later rounding, which the gradient ignores")
            why = "; ".join(whys)
        if not without or not why:
            return steps_checked, []
        return steps_checked, [
            f"{len(steps_checked) - len(without)} of {len(steps_checked)} steps have a finite difference beside them: {why}."
        ]

    def _of_sizes(self) -> set[str]:
        """The values that depend on sizes and constants alone."""
        sized = {*self.found.op.emission.constants}
        sized |= {
            t.name for t in self.graph.initializers.values() if t.data_type in (TensorProto.INT64, TensorProto.INT32)
        }
        sized -= set(self.graph.inputs)
        shown = {*self._results.values(), *(self.name(entry.adjoint) for entry in self.record.given)}
        for node in self.gradient.graph.node:
            reads = [name for name in reads_of(node) if name]
            alone = node.op_type in traits.SIZES or sized.issuperset(reads)
            if (
                alone
                and shown.isdisjoint(node.output)
                and not node.op_type.startswith(("Random", "Multinomial", "Bernoulli"))
            ):
                sized.update(filter(None, node.output))
        return sized

    def _emitted(self, node: NodeProto) -> Emitted:
        attributes = {a.name: _told(attribute_value(a)) for a in node.attribute}
        function = self._functions.get((node.domain, node.op_type))
        if function is not None:
            attributes["body"] = _told(function)
        is_shape = self._sized.issuperset(filter(None, node.output))
        domain = "" if node.domain == "ai.onnx" else node.domain
        operator = f"{domain}.{node.op_type}" if domain else node.op_type
        return Emitted(node.name, operator, tuple(node.input), tuple(node.output), attributes, is_shape)


def _flat(
    steps: Sequence[Step],
    cotangents: Mapping[str, Cotangent],
    values: Mapping[str, Any],
    wrt: Iterable[str],
    useless: Sequence[UselessGradient],
) -> list[str]:
    """The note on gradients that are 0 in every element at these feeds, though not everywhere, with the step that begins it."""
    told = {name for contribution in useless for name in contribution.names}
    flat = [
        name
        for name in wrt
        if name not in told
        and name in cotangents
        and _is_zero(value := values[cotangents[name].value])
        and np.size(value)
    ]
    if not flat:
        return []
    several = len(flat) > 1
    sentence = f"The gradient{'s' if several else ''} of {choices(flat, limit=_FEW)} {'are' if several else 'is'} 0"
    sentence += " in every element"
    for step in steps:
        alive = any(not _is_zero(values[contribution.value]) for contribution in step.incoming)
        if alive and step.outgoing and all(_is_zero(values[contribution.value]) for contribution in step.outgoing):
            at = f" ({'; '.join(kink.text for kink in step.kinks)})" if step.kinks else ""
            return [
                f"{sentence} at these feeds. "
                f"The derivative becomes 0 in step {step.number}, {step.operator} {step.node!r}{at}: "
                "feed other values, with which it lets a derivative through."
            ]
    return [f"{sentence} at these feeds."]


def _complete_first(step: Step, cotangents: Mapping[str, Cotangent]) -> list[Contribution]:
    """The contributions of a step, those first whose cotangent has no later contribution: its numbers are in sight."""

    def is_open(contribution: Contribution) -> bool:
        return contribution.of in cotangents and cotangents[contribution.of].complete > step.number

    return sorted(step.outgoing, key=is_open)


def _rounded(path: Path) -> set[str]:
    """The values whose derivative passes straight through a later rounding."""
    rounded = set(path.adjoint_types)
    for node in reversed(path.active):
        within = path.routes[node.name].paths if node.name in path.routes else ()
        if not rounded.isdisjoint(node.outputs) or any(inner.adjoint_types for inner in within):
            rounded.update(path.varied.intersection(node.reads))
    return rounded


def _is_zero(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_zero, value))
    return isinstance(value, np.ndarray) and not np.any(value)


def _owner(node: NodeProto) -> tuple[str, str]:
    """The rule that emitted a node, and the forward node or the value that it belongs to."""
    known = {entry.key: entry.value for entry in node.metadata_props}
    return known.get("refgrad.rule", ""), known.get("refgrad.node", "")


def _short(name: str) -> str:
    """A name as the metadata of emitted nodes have it."""
    return name if len(name) <= 1000 else f"{name[:1000]}..."


def _told(value: Any) -> Any:
    """An attribute for people: graphs and functions are text, tensors are arrays."""
    match value:
        case GraphProto() | FunctionProto():
            return onnx_text(value)
        case TensorProto():
            return array_of(value)
        case list() | tuple():
            return [_told(item) for item in value]
    return value
