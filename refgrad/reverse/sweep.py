"""The reverse sweep: one rule per node of a path, from the adjoints of the outputs to those of the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from refgrad.forward.graph import Graph, Node
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitted, Emitter
from refgrad.reverse.path import Path
from refgrad.reverse.returned import adjoints_of
from refgrad.tables.registry import RULES, Read

_VALUES = frozenset(("input", "cotangent", "output"))
_FEW = 8  # operands; each is compared with all others, and a Sum may have thousands


class Sweep:
    """One pass over the active nodes of a path, of a model or of a body: adjoints by the name of their primal.

    What it names begins with `scope`, by which a body leaves the names of gradients to the model.
    """

    def __init__(self, path: Path, op: Emitter, scope: str = "") -> None:
        self.path, self.graph, self.op, self.scope = path, path.graph, op, scope
        self.rename: dict[str, str] = {}  # emitted value: its name in the result
        self._owner: dict[str, str] = {}  # emitted value: the primal whose adjoint it was first
        self._contributions: dict[str, list[list[str]]] = {}  # a list per node, the last node first

    def seed(self, output: str, cotangent: str) -> None:
        """Start from the adjoint `cotangent` of `output`."""
        self.op.describe(cotangent, like=output)
        self._owner[cotangent] = output
        self._contributions[output] = [[cotangent]]

    def run(self) -> None:
        """Visit the nodes, the last one first."""
        for node in reversed(self.path.active):
            self._visit(node)

    def _visit(self, node: Node) -> None:
        adjoints = [self.adjoint(name) for name in node.outputs]
        if not any(adjoints):
            return
        mine: dict[str, list[str]] = {}
        by = self._by_structure if node.key in self.graph.structures else self._by_rule
        for name, adjoint in by(node, adjoints):
            if adjoint is None or name not in self.path.needed:
                continue
            if name in self.graph.adjoint_types:
                adjoint = self.op.as_type(adjoint, self.graph.adjoint_types[name])
            if name in mine:
                mine[name].append(adjoint)
            else:
                mine[name] = [adjoint]
                self._contributions.setdefault(name, []).append(mine[name])

    def _by_structure(self, node: Node, adjoints: list[str | None]) -> Iterable[tuple[str, str | None]]:
        self.op.enter(node.op_type, node.name, node)
        passage = self.path.passages[node.name]
        cotangents = {name: adjoint for name, adjoint in zip(node.outputs, adjoints, strict=True) if adjoint}
        return passage.structure.differentiate(self.op, passage, cotangents)

    def _by_rule(self, node: Node, adjoints: list[str | None]) -> Iterator[tuple[str, str | None]]:
        """The inputs of a node and the adjoints that its rule gives them, summed over the axes of a broadcast."""
        rule = RULES[node.key]
        bound, places = rule.bind(self.graph.opsets.get(rule.domain, 1))
        op, needed = self.op, self.path.needed
        op.enter(rule.op_type, node.name, node)
        arguments, keywords = self._arguments(node, bound, adjoints)
        try:
            result = rule.function(op, *arguments, **keywords)
        except Exception as error:
            error.add_note(f"In the rule for {rule.op_type} of node {node.name!r}.")
            raise
        operands = self._facing(node) if rule.broadcast else ()
        for name, adjoint in adjoints_of(rule, places, result, node.name, node.inputs, op.taken):
            if adjoint is not None and name in needed and len(operands) > 1:
                facing = operands if name in operands else (*operands, name)
                adjoint = op.grad.BroadcastGradient(adjoint, name, facing)
            yield name, adjoint

    def _facing(self, node: Node) -> tuple[str, ...]:
        """The operands of a broadcast. Of many it is two of each shape that is known: more tell no more."""
        names = list(filter(None, node.inputs))
        if len(names) <= _FEW:
            return tuple(names)
        alike: dict[Any, list[str]] = {}
        for name in names:
            shape = self.op.shape(name)
            group = alike.setdefault(name if shape is None or None in shape else shape, [])
            if len(group) < 2 and name not in group:
                group.append(name)
        return tuple(name for group in alike.values() for name in group)

    def _arguments(
        self, node: Node, bound: tuple[Read, ...], adjoints: list[str | None]
    ) -> tuple[list[Any], dict[str, Any]]:
        """What the rule reads, in the order of its parameters."""
        attributes = node.attributes
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for read in bound:
            if read.kind in _VALUES:
                where = adjoints if read.kind == "cotangent" else node.inputs if read.kind == "input" else node.outputs
                if read.variadic:
                    value: Any = [name or None for name in where[read.position :]]
                    if read.kind == "output" and None in value:
                        value = [name or self._add_output(node, read, k) for k, name in enumerate(value)]
                else:
                    value = where[read.position] or None if read.position < len(where) else None
                    if value is None and read.kind == "output":
                        value = self._add_output(node, read, 0)
            elif read.kind == "constant":
                value = attributes.get(read.name, read.default)
                value = None if value is None else self.op.const(value)
            elif read.kind == "keyword":
                keywords[read.name] = attributes.get(read.name, read.default)
                continue
            else:
                value = attributes.get(read.name, read.default)
            arguments.append(value)
        return arguments, keywords

    def _add_output(self, node: Node, read: Read, place: int) -> str:
        """Name an output that the node leaves out: an optional one, or the one at `place` among variadic ones."""
        name = self.op.fresh(f"{node.name}_{read.name}")
        node.add_output(read.position + place, name)
        self.op.describe_output(node, read.position, name)
        return name

    def adjoint(self, name: str) -> str | None:
        """The adjoint of `name`, the sum of its contributions in the order of the nodes; None where there are none."""
        groups = self._contributions.get(name)
        if not groups:
            return None
        parts = [part for group in reversed(groups) for part in group]
        if len(parts) == 1:
            total = parts[0]
            if self._owner.get(total) == name:
                return total
            self.op.enter("identity", name)
            total = self.call(self._own(total), f"{name}_grad", name)
        else:
            self.op.enter("sum", name)
            parts = [self.call(self._own(part), f"{name}_grad_{k}", name) for k, part in enumerate(parts)]
            total = self.call(self.op.sum(parts, like=name), f"{name}_grad", name)
        self.op.describe(total, like=name)
        self._contributions[name] = [[total]]
        return total

    def _own(self, value: str) -> str:
        """`value`, or an alias of it where it has a name already."""
        return value if value in self.op.made and value not in self.rename else str(self.op.grad.Alias(value))

    def call(self, value: str, name: str, primal: str) -> str:
        """Give an emitted value its name in the result, unless it has one there already."""
        if value in self.op.made and value not in self.rename:
            self.rename[value] = self.op.fresh(self.scope + name)
            self._owner[value] = primal
        return value

    def result(self, name: str) -> str:
        """The value that becomes the output `<name>_grad`: no graph input, and no other name's gradient."""
        adjoint = self.adjoint(name)
        if adjoint is None:
            self.op.enter("zero", name)
            adjoint = self.op.zeros_like(name)
        elif self._owner.get(adjoint) == name and adjoint in self.op.made:
            return adjoint
        else:
            self.op.enter("identity", name)
        return self.call(self.op.copy(adjoint), f"{name}_grad", name)


def live_nodes(op: Emitter, live: set[str]) -> list[Emitted]:
    """The emitted nodes that the values in `live` need, to which whatever they read is added."""
    kept = []
    for emitted in reversed(op.nodes):
        if live.isdisjoint(emitted.outputs):
            continue
        if emitted.optional_outputs:
            emitted.outputs = [name if name in live else "" for name in emitted.outputs]
        live.update(emitted.inputs, emitted.captured)
        kept.append(emitted)
    kept.reverse()
    return kept


def settle(graph: Graph, op: Emitter, live: set[str]) -> None:
    """Make a forward node its training form if one of the outputs that this has more is in `live`, else take them away."""
    for node in graph.nodes if op.training_forms else ():
        form = op.training_forms.get(node.name)
        if form is None:
            continue
        if live.isdisjoint(form.more):
            node.drop_outputs(len(form.more))
        else:
            node.become(form.op_type, MICROSOFT, form.attributes)


def live_forward(graph: Graph, live: set[str]) -> list[Node]:
    """The forward nodes that the values in `live` need, to which whatever they read is added."""
    kept = []
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.reads)
            kept.append(node)
    kept.reverse()
    return kept
