"""The nodes between the inputs and the outputs of a derivative, and the verdict on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnx import TensorProto

from refgrad import traits
from refgrad.errors import UnknownNameError, choices
from refgrad.model.graph import Graph, Node
from refgrad.protos.types import FLOATS
from refgrad.reverse.function_bodies import expanded
from refgrad.reverse.reasons import CASTS, flat_within, reason_of, title
from refgrad.reverse.report import OperatorVerdict
from refgrad.reverse.requested import requested_outputs, requested_wrt
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.registry import (
    NO_DERIVATIVE,
    QUANTIZED,
    QUANTIZERS,
    RULES,
    ZERO,
    ControlFlowRule,
    Route,
    VaryingValues,
)

_BITWISE = frozenset(("", op_type) for op_type in traits.BITWISE)
_NEVER = frozenset((None, TensorProto.BOOL, TensorProto.STRING))  # element types of values that carry no derivative


@dataclass(frozen=True, eq=False)
class Path:
    """The nodes that the reverse sweep visits.

    `active` are the nodes to differentiate, in topological order, `varied` the values that depend on `wrt`, `needed` the
    ones that an output depends on, `routes` the ways through nodes with graphs of their own, by name. `blocked` are the
    active nodes that have no derivative, `refusals` why not where it is not the operator alone that tells, `found` the nodes
    by operator and verdict. With a `quantization` other than "zero" what QuantizeLinear makes varies too, and whatever moves
    its elements: `adjoint_types` has these values, and the types of their cotangents. So does the text or the bits of a float,
    until something is made of it in which no derivative hides: a way back to a float is refused.
    """

    graph: Graph
    active: list[Node]
    varied: set[str]
    needed: set[str]
    routes: dict[str, Route]
    adjoint_types: dict[str, int]
    blocked: list[Node]
    refusals: dict[tuple[str, str], str]
    found: dict[tuple[tuple[str, str], str], list[str]]

    @property
    def within(self) -> list[Path]:
        """The paths through the graphs of nodes."""
        return list(dict.fromkeys(path for route in self.routes.values() for path in route.paths))

    @property
    def blocked_within(self) -> list[Node]:
        """The nodes without a derivative in the graphs of active nodes."""
        return [node for path in self.within for node in (*path.blocked, *path.blocked_within)]

    @property
    def rows(self) -> tuple[OperatorVerdict, ...]:
        """The verdict on every operator, of the graphs of nodes too."""
        in_the_way = {node.name for node in self.blocked}
        rows = [
            OperatorVerdict(title(*key), verdict, self._reason(key, verdict), tuple(names))
            for (key, verdict), names in self.found.items()
            if (names and verdict in ("rule", "zero")) or in_the_way.intersection(names)
        ]
        inner = self.within
        return joined([*rows, *(row for path in inner for row in path.rows)]) if inner else tuple(rows)

    def stop(self, node: Node, flat: Sequence[str]) -> OperatorVerdict:
        """The verdict on a node whose results `flat` have no derivative by what varies, although it may have a rule."""
        if node.name not in self.found.get((node.key, "rule"), ()):
            reason = self._reason(node.key, "zero") + flat_within(node)
            return OperatorVerdict(title(*node.key), "zero", reason, (node.name,))
        results = f"its result{'s' if len(flat) > 1 else ''} {choices(flat)}"
        reason = f"{results} {'are no floats' if len(flat) > 1 else 'is no float'}"
        if any(self.graph.is_float(name) for name in flat):
            reason = f"it has no derivative by {choices(name for name in node.reads if name in self.varied)}"
        return OperatorVerdict(title(*node.key), "rule", reason, (node.name,))

    def _reason(self, key: tuple[str, str], verdict: str) -> str:
        refused = verdict in ("none", "missing") and self.refusals.get(key)
        return refused or reason_of(key, verdict, self.graph)


def find_path(
    control_flow: ControlFlowRules,
    wrt: Iterable[str],
    outputs: Iterable[str],
    *,
    carried: Mapping[str, int] | None = None,
    refusals: Mapping[tuple[str, str], str] | None = None,
) -> Path:
    """The path from `wrt` to `outputs` in the graph of `control_flow`, with the operators that stand in the way, if any.

    :param carried: quantised values outside that carry a derivative, and the types of their cotangents.
    :param refusals: operators whose function body does not cover a node, and why not.
    """
    graph, varying = control_flow.graph, VaryingValues(set(wrt), dict(carried or {}))
    verdicts = _Verdicts(graph, varying, control_flow.quantization != "zero")
    varied = varying.names
    nodes_by_verdict: dict[tuple[tuple[str, str], str], list[str]] = {}
    moved: list[tuple[Node, Sequence[str]]] = []
    blocked: set[str] = set()
    for node in graph.nodes:
        if varied.isdisjoint(node.reads):
            continue
        if node.key in graph.control_flow:
            if by := control_flow.of(node).outputs_of(varying):
                varied.update(by)
                moved.append((node, ()))
            nodes_by_verdict.setdefault((node.key, "rule" if by else "zero"), []).append(node.name)
            continue
        verdict, carrying, differentiable = verdicts.of(node)
        if verdict in ("none", "missing"):
            blocked.add(node.name)
        if carrying:
            varied.update(carrying)
            moved.append((node, differentiable))
        nodes_by_verdict.setdefault((node.key, verdict), []).append(node.name)
    needed, active = varied.intersection(outputs), []
    routes: dict[str, Route] = {}
    refused = dict(refusals or {})
    for node, differentiable in reversed(moved):
        if needed.isdisjoint(node.outputs):
            continue
        active.append(node)
        if node.key in graph.control_flow:
            route = control_flow.of(node).route(varying, needed)
            routes[node.name], differentiable = route, list(route.reads)
            if route.refusal:
                blocked.add(node.name)
                nodes_by_verdict[node.key, "rule"].remove(node.name)
                nodes_by_verdict.setdefault((node.key, "none"), []).append(node.name)
                refused[node.key] = route.refusal
        for name in differentiable:
            if name in varied:
                needed.add(name)
    active.reverse()
    in_the_way = [node for node in active if node.name in blocked]
    return Path(graph, active, varied, needed, routes, varying.adjoint_types, in_the_way, refused, nodes_by_verdict)


def complete_path(
    control_flow: ControlFlowRules, wrt: Sequence[str], outputs: Sequence[str], carried: Mapping[str, int] | None = None
) -> Path:
    """The path, with the nodes in the way replaced by the function bodies of their operators: its graph has these."""
    refusals: dict[tuple[str, str], str] = {}
    path = find_path(control_flow, wrt, outputs, carried=carried)
    while path.blocked:
        graph, more = expanded(path.graph, path.blocked)
        refusals |= more
        if graph is not None:
            control_flow = control_flow.over(graph)
        elif not more:
            break
        path = find_path(control_flow, wrt, outputs, carried=carried, refusals=refusals)
        if graph is None:
            break
    return path


class ControlFlowRules:
    """The bodies of a graph, each read once: what If, Loop, Scan, SequenceMap and calls of functions hold.

    `names` are those that are taken in the whole model; whoever needs another one adds it.
    """

    def __init__(self, graph: Graph, quantization: str = "zero", model: ControlFlowRules | None = None) -> None:
        """:param model: the bodies of the model that `graph` is a part of."""
        self.graph, self.quantization = graph, quantization
        self._model = model
        self._read: dict[str, ControlFlowRule] = {}

    @cached_property
    def names(self) -> set[str]:
        """The names that are taken in the model."""
        return set(self.graph.names) if self._model is None else self._model.names

    def over(self, graph: Graph) -> ControlFlowRules:
        """The bodies of another graph of the same model."""
        return ControlFlowRules(graph, self.quantization, self)

    def of(self, node: Node) -> ControlFlowRule:
        """The control-flow rule of `node`."""
        if node.name not in self._read:
            self._read[node.name] = self.graph.control_flow[node.key].read(self, node)
        return self._read[node.name]


class _Verdicts:
    """The verdicts on the nodes of a graph, in topological order."""

    def __init__(self, graph: Graph, varying: VaryingValues, rounds: bool) -> None:
        self._graph, self._varying, self._rounds = graph, varying, rounds
        self._encoded: set[str] = set()  # text and bits that depend on `wrt`

    def of(self, node: Node) -> tuple[str, list[str], Sequence[str]]:
        """The verdict on `node`, its outputs that vary, and the inputs that a derivative may flow to."""
        quantised = self._quantised(node) if self._rounds else {}
        is_float = self._graph.is_float
        carrying = [name for name in node.outputs if name and is_float(name)]
        if not carrying and not quantised:
            encoded = self._encoded_by(node)
            self._encoded.update(encoded)
            return "none" if encoded and self._is_encoder(node) else "zero", encoded, node.reads if encoded else ()
        verdict, differentiable = self._verdict(node)
        if verdict == "zero" or self._varying.names.isdisjoint(differentiable):
            return verdict, [], ()
        self._varying.adjoint_types.update(quantised)
        return verdict, [*carrying, *quantised], differentiable

    def _quantised(self, node: Node) -> dict[str, int]:
        """The outputs of a quantised type that carry a derivative, and the element type of their cotangents.

        It is the type of the quantised value that the node reads. If the node rounds, it is the type of the scale.
        """
        if node.key in ZERO:
            return {}
        types, carried = self._graph.types, self._varying.adjoint_types
        quantised = [carried[name] for name in node.reads if name in carried]
        rounded = [types[name] for name in reversed(node.inputs) if types.get(name) in FLOATS]
        element_types = {}
        for name in node.outputs:
            kind = types.get(name)
            if kind in _NEVER or kind in FLOATS:
                continue
            if quantised:
                element_types[name] = quantised[0]
            elif kind in QUANTIZERS.get(node.key, ()) and rounded:
                element_types[name] = rounded[0]
        return element_types

    def _encoded_by(self, node: Node) -> list[str]:
        """The outputs that are text or bits of what varies: they have no derivative, and a float can be had back from them."""
        if node.key in ZERO and node.key not in _BITWISE:
            return []
        if self._encoded.isdisjoint(node.reads) and not self._is_encoder(node):
            return []
        return [name for name in node.outputs if name]

    def _is_encoder(self, node: Node) -> bool:
        to_text = node.key in CASTS and self._graph.types.get(node.outputs[0]) == TensorProto.STRING
        return to_text or node.key == ("", "BitCast")

    def _verdict(self, node: Node) -> tuple[str, Sequence[str]]:
        """The verdict on `node`, an output of which may carry a derivative, and the inputs that the derivative may flow to."""
        rule = RULES.get(node.key)
        if node.key in DEFINITIONS and DEFINITIONS[node.key].mismatch(node.proto):
            return "missing", node.reads
        if rule is not None:
            opset = self._graph.opsets.get(rule.domain, 1)
            if rule.refused and any(
                k < len(node.inputs) and node.inputs[k] in self._varying.names for k in rule.refuses(opset)
            ):
                return "none", node.reads
            if node.reads is not node.inputs and not self._varying.names.isdisjoint(node.reads[len(node.inputs) :]):
                return "none", node.reads  # a rule returns no cotangents of captured values
            names: list[str] = []
            for position, variadic in rule.bind(opset)[1]:
                names += node.inputs[position:] if variadic else node.inputs[position : position + 1]
            quantised = self._varying.adjoint_types
            if quantised and node.key not in QUANTIZED and not quantised.keys().isdisjoint(names):
                return "missing", node.reads
            return "rule", names
        if node.key in ZERO:
            return "zero", ()
        return ("none" if node.key in NO_DERIVATIVE else "missing"), node.reads


def joined(rows: Iterable[OperatorVerdict]) -> tuple[OperatorVerdict, ...]:
    """One row per operator and verdict, of the model and of the bodies in it."""
    operators: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for row in rows:
        key = row.operator, row.verdict, row.reason
        operators[key] = operators.get(key, ()) + row.nodes
    return tuple(OperatorVerdict(*key, nodes) for key, nodes in operators.items())


def find_requested_path(
    graph: Graph, wrt: Sequence[str] | None, outputs: Sequence[str] | None, quantization: str = "zero"
) -> tuple[list[str], list[str], Path]:
    """The names to differentiate with respect to, the outputs to differentiate, and the path between them.

    In the graph of the path an operator without a rule whose schema has a function body is replaced by that body.

    :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
    """
    targets = requested_outputs(graph, outputs)
    sources = requested_wrt(graph, wrt)
    path = complete_path(ControlFlowRules(graph, quantization), sources, targets)
    if wrt is None:
        sources = [name for name in sources if name in graph.inputs or name in path.needed]
        if not sources:
            raise UnknownNameError(
                "The model has no float input and no float initializer to differentiate with respect to."
            )
    return sources, targets, path
