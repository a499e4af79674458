"""The reverse sweep: one rule per node of a path, from the cotangents of the outputs to the cotangents of the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto, helper

from refgrad.builder.op import Emitter
from refgrad.errors import BrokenRuleError, RefgradError, abridged
from refgrad.model.graph import Graph, Node
from refgrad.protos.traverse import fresh
from refgrad.protos.types import type_text
from refgrad.reverse.concatenated_slices import joined
from refgrad.reverse.path import Path
from refgrad.reverse.returned import adjoints_by_control_flow_rule, adjoints_of
from refgrad.tables.once import qualified, raised_at
from refgrad.tables.registry import RULES, BoundParameter
from refgrad.tables.schemas import find_schema

_VALUES = frozenset(("input", "cotangent", "output"))
_FEW = 8  # if a broadcast has more operands, only two of each shape are compared: a Sum may have thousands


class Sweep:
    """One pass over the active nodes of a path, in a model or in a body. It computes the cotangent of each primal.

    `totals` has the cotangents by the name of their primal. `names` has the name in the result of each emitted value.
    Each name that the sweep gives begins with `scope`. The scope of a body keeps the names of gradients free for the model.
    `withheld` are pairs of a node and a value that it reads: the node contributes nothing to the cotangent of this value.
    If `op` has a record, the sweep writes down in it which node contributed to which cotangent.
    """

    def __init__(self, path: Path, op: Emitter, scope: str = "") -> None:
        self.path, self.graph, self.op, self.scope = path, path.graph, op, scope
        self.record = op.record
        self.names: dict[str, str] = {}
        self.totals: dict[str, str] = {}  # by primal: its cotangent, after all contributions are summed
        self.withheld: Set[tuple[str, str]] = frozenset()
        self._made = op.emission.made
        self._owner: dict[str, str] = {}  # by emitted value: the first primal that had this value as its cotangent
        self._contributions: dict[str, list[list[str]]] = {}  # by primal: one list per node, the last node first

    def seed(self, output: str, cotangent: str) -> None:
        """Start from the cotangent `cotangent` of `output`."""
        self.op.describe(cotangent, like=output)
        self._owner[cotangent] = output
        self._contributions[output] = [[cotangent]]

    def run(self) -> None:
        """Visit the active nodes from the last to the first."""
        for node in reversed(self.path.active):
            self._visit(node)

    def _visit(self, node: Node) -> None:
        adjoints = [self.adjoint(name) for name in node.outputs]
        if not any(adjoints):
            return
        needed, quantised, contributions = self.path.needed, self.path.adjoint_types, self._contributions
        mine: dict[str, list[str]] = {}
        by = self._by_control_flow_rule if node.key in self.graph.control_flow else self._by_rule
        pairs = by(node, adjoints)
        if self.record is not None:
            pairs = self.record.watched(self.graph, node, pairs)
        for name, adjoint in pairs:
            if adjoint is None or name not in needed or (node.name, name) in self.withheld:
                continue
            if quantised and name in quantised:
                adjoint = self.op.as_type(adjoint, quantised[name])
            if name in mine:
                mine[name].append(adjoint)
                continue
            mine[name] = [adjoint]
            if name in contributions:
                contributions[name].append(mine[name])
            else:
                contributions[name] = [mine[name]]

    def _by_control_flow_rule(self, node: Node, adjoints: list[str | None]) -> Iterable[tuple[str, str | None]]:
        self.op.enter(node.op_type, node.name, node)
        route = self.path.routes[node.name]
        cotangents = {name: adjoint for name, adjoint in zip(node.outputs, adjoints, strict=True) if adjoint}
        rule, known = route.rule, self.op.emission.taken
        try:
            returned = rule.differentiate(self.op, route, cotangents)
            return list(adjoints_by_control_flow_rule(type(rule).__name__, returned, node.name, node.reads, known))
        except (RefgradError, MemoryError) as error:
            error.add_note(_in_rule(node.domain, node.op_type, rule.differentiate, node, error))
            raise
        except Exception as error:
            raise self._failed(node.domain, node.op_type, rule.differentiate, node, error) from error

    def _by_rule(self, node: Node, adjoints: list[str | None]) -> Iterable[tuple[str, str | None]]:
        """Pairs of an input of the node and its cotangent from the node's rule, summed over the axes of a broadcast."""
        rule = RULES[node.key]
        bound, places = rule.bind(self.graph.opsets.get(rule.domain, 1))
        op = self.op
        op.enter(rule.op_type, node.name, node)
        arguments, keywords = self._arguments(node, bound, adjoints)
        try:
            result = rule.function(op, *arguments, **keywords)
        except (RefgradError, MemoryError) as error:
            error.add_note(_in_rule(rule.domain, rule.op_type, rule.function, node, error))
            raise
        except Exception as error:
            raise self._failed(rule.domain, rule.op_type, rule.function, node, error) from error
        pairs = adjoints_of(rule, places, result, node.name, node.inputs, op.emission.taken)
        operands = self._facing(node) if rule.broadcast else ()
        return self._summed(pairs, operands) if len(operands) > 1 else pairs

    def _failed(self, domain: str, op_type: str, function: Any, node: Node, error: Exception) -> BrokenRuleError:
        """The error to raise if a rule fails with an exception that is not one of refgrad's."""
        types = [(name, self.op.values.type_of(name)) for name in node.inputs if name]
        reads = abridged(f"{name!r} {type_text(kind) if kind else 'of unknown type'}" for name, kind in types)
        message = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": .")
        return BrokenRuleError(
            f"{_in_rule(domain, op_type, function, node, error).removesuffix('.')}: {message}. The node reads {reads}. "
            "Check that these inputs fit the operator. If a runtime runs the model, the rule is wrong: report it."
        )

    def _summed(
        self, adjoints: Iterable[tuple[str, str | None]], operands: tuple[str, ...]
    ) -> Iterator[tuple[str, str | None]]:
        """The cotangents of operands of a broadcast, each summed over the axes along which its operand was repeated."""
        needed, lower = self.path.needed, self.op.grad.BroadcastGradient
        for name, adjoint in adjoints:
            if adjoint is not None and name in needed:
                facing = operands if name in operands else (*operands, name)
                adjoint = lower(adjoint, name, facing)
            yield name, adjoint

    def _facing(self, node: Node) -> tuple[str, ...]:
        """The operands of a broadcast. If there are many, two of each known shape: more of the same shape add nothing."""
        names = node.inputs if "" not in node.inputs else tuple(filter(None, node.inputs))
        if len(names) <= _FEW:
            return names
        alike: dict[Any, list[str]] = {}
        for name in names:
            shape = self.op.shape(name)
            group = alike.setdefault(name if shape is None or None in shape else shape, [])
            if len(group) < 2 and name not in group:
                group.append(name)
        return tuple(name for group in alike.values() for name in group)

    def _arguments(
        self, node: Node, bound: tuple[BoundParameter, ...], adjoints: list[str | None]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the rule, in the order of its parameters."""
        attributes = node.attributes
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for read in bound:
            kind = read.kind
            if kind in _VALUES:
                where: Any = adjoints if kind == "cotangent" else node.inputs if kind == "input" else node.outputs
                if read.variadic:
                    value: Any = [name or None for name in where[read.position :]]
                    if kind == "output" and None in value:
                        value = [name or self._name_output(node, read, k) for k, name in enumerate(value)]
                else:
                    value = where[read.position] or None if read.position < len(where) else None
                    if value is None and kind == "output":
                        value = self._name_output(node, read, 0)
            elif kind == "constant":
                value = attributes.get(read.name, read.default)
                value = None if value is None else self.op.const(value)
            elif kind == "keyword":
                keywords[read.name] = attributes.get(read.name, read.default)
                continue
            else:
                value = attributes.get(read.name, read.default)
            arguments.append(value)
        return arguments, keywords

    def _name_output(self, node: Node, read: BoundParameter, place: int) -> str:
        """Name an output that the node leaves out: an optional one, or the one at `place` among variadic ones."""
        name = self.op.fresh(f"{node.name}_{read.name}")
        self.op.edits.name_output(node, read.position + place, name)
        return self.op.values.record(name, _output_type(node, read.position, self.graph, self.op.values.types))

    def adjoint(self, name: str) -> str | None:
        """The cotangent of `name`: the sum of its contributions in the order of the nodes. None if nothing contributes."""
        groups = self._contributions.get(name)
        if not groups:
            return None
        if len(groups) == 1 and len(groups[0]) == 1:
            total = groups[0][0]
            if self._owner.get(total) == name:
                self.totals[name] = total
                return total
            self.op.enter("identity", name)
            if total in self._made and total not in self.names:  # the usual case: no alias is needed
                self.names[total] = fresh(f"{self.scope}{name}_grad", self.op.emission.taken)
                self._owner[total] = name
            else:
                total = self._own(total, f"{name}_grad", name)
        else:
            parts = [part for group in reversed(groups) for part in group]
            self.op.enter("sum", name)
            parts = joined(self.op, parts, like=name)
            if len(parts) == 1:
                total = self._own(parts[0], f"{name}_grad", name)
            else:
                parts = [self._own(part, f"{name}_grad_{k}", name) for k, part in enumerate(parts)]
                total = self.name_value(self.op.sum(parts, like=name), f"{name}_grad", name)
        self.op.values.record_like(total, name)
        self._contributions[name], self.totals[name] = [[total]], total
        return total

    def _own(self, value: str, name: str, primal: str) -> str:
        """A value that has the name `name` in the result: `value`, or an alias of it if `value` has a name already."""
        if value not in self._made or value in self.names:
            value = self.op.grad.Alias(value)
        return self.name_value(value, name, primal)

    def name_value(self, value: str, name: str, primal: str) -> str:
        """Give a cotangent of `primal` its name in the result, if it is emitted and has no name there. Return the cotangent."""
        if value in self._made and value not in self.names:
            self.names[value] = self.op.fresh(self.scope + name)
            self._owner[value] = primal
        return value

    def result(self, name: str) -> str:
        """The value that becomes the output `<name>_grad`. It is not a graph input, and not the gradient of another name."""
        adjoint = self.adjoint(name)
        if adjoint is None:
            self.op.enter("zero", name)
            adjoint = self.op.zeros_like(name)
        elif self._owner.get(adjoint) == name and adjoint in self._made:
            return adjoint
        else:
            self.op.enter("identity", name)
        return self.name_value(self.op.copy(adjoint), f"{name}_grad", name)


def _in_rule(domain: str, op_type: str, function: Any, node: Node, error: Exception) -> str:
    """A sentence with the rule, the node and the line of code where an exception was raised."""
    return f"In the rule for {qualified(domain, op_type)} of node {node.name!r}, at {raised_at(error, function)}."


def _output_type(node: Node, position: int, graph: Graph, types: dict[str, int]) -> int | None:
    """The element type of an optional output that the node leaves out. None if the schema does not determine it."""
    schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
    type_str = schema.outputs[position].type_str
    for parameter, value in zip(schema.inputs, node.inputs, strict=False):
        if parameter.type_str == type_str and value in types:
            return types[value]
    if "stash_type" in node.attributes:  # the type of a normalization's statistics
        return int(node.attributes["stash_type"])
    allowed = {type_str}.union(*(c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == type_str))
    for kind in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL):
        if f"tensor({helper.tensor_dtype_to_string(kind).partition('.')[2].lower()})" in allowed:
            return int(kind)
    return None


@dataclass(frozen=True)
class SweepResults:
    """The results of a sweep.

    `adjoints` has the cotangent of each name in `wrt`. `cotangents` has the cotangents that are graph inputs, by output.
    `seeds` has the element type of every cotangent that the sweep started from, by the cotangent's name in the result.
    """

    path: Path
    op: Emitter
    sweep: Sweep
    adjoints: dict[str, str]
    cotangents: dict[str, str]
    seeds: dict[str, int]


def sweep(
    path: Path,
    op: Emitter,
    wrt: Sequence[str],
    outputs: Sequence[str],
    cotangent: str,
) -> SweepResults:
    """Sweep the path of a model from the cotangents of `outputs` to the gradients of `wrt`."""
    sweep_of_path = Sweep(path, op)
    names = _seed(sweep_of_path, op, outputs, cotangent)
    sweep_of_path.run()
    adjoints = {name: sweep_of_path.result(name) for name in wrt}
    seeds = {name: op.values.adjoint_type(output) for output, name in names.items()}
    return SweepResults(path, op, sweep_of_path, adjoints, names if cotangent == "input" else {}, seeds)


def _seed(sweep: Sweep, op: Emitter, outputs: Sequence[str], cotangent: str) -> dict[str, str]:
    """Give every output its cotangent. Return the names of the cotangents in the result, by output."""
    names = {output: op.fresh(f"{output}_grad") for output in outputs}
    op.enter("cotangent", "cotangent")
    if cotangent == "yield":
        # YieldOp hands every output to the caller, and returns a cotangent for each output that is differentiated.
        every = list(sweep.graph.outputs)
        others = [k for k, output in enumerate(every) if output not in names]
        returned = op.com_microsoft(
            "YieldOp",
            *every,
            outputs=len(names),
            full_shape_outputs=list(range(len(every))),
            non_differentiable_outputs=others or None,
        )
        seeds = dict(
            zip((o for o in every if o in names), (returned,) if isinstance(returned, str) else returned, strict=True)
        )
    elif cotangent == "ones":
        seeds = {output: op.full_like(output, 1.0) for output in names}
        if op.strong_zero:  # each cotangent gets a name of its own: other constants 1 are not cotangents
            seeds = {output: op.copy(seed) for output, seed in seeds.items()}
    else:
        seeds = names
    for output, seed in seeds.items():
        if cotangent != "input" and seed not in sweep.names:
            sweep.names[seed] = names[output]
        sweep.seed(output, seed)
    return names
