"""Leaked gradients: they pass rounding only through the scales of the rounded values. They are correct but useless.

A model quantises a tensor h by its own range: s = max|h|/127, q = round(h/s), and q·s goes on. Rounding has the derivative
zero, so the gradient passes only through s, to the element of h with the largest magnitude. The labels of a value depend on
the graph only, not on numbers:

- *direct*: a derivative reaches the value along a path that is not made of statistics only;
- *statistic*: elementwise operators compute the value from a reduction of a tensor that is rounded later;
- *rounded*: the value is computed from rounded numbers, not from a rounded index or size.

A statistic that multiplies rounded values is their scale. A statistic that is used before the rounding, and then added to
rounded values, is their offset. A derivative that reaches the outputs only through scales and offsets is a leak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from onnx import NodeProto, TensorProto

from refgrad import traits
from refgrad.model.graph import Graph, Node
from refgrad.model.normalise import normalise
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import nested
from refgrad.protos.types import FLOATS
from refgrad.reverse.path import Path, find_requested_path
from refgrad.reverse.report import LeakedGradient, OperatorVerdict
from refgrad.tables.registry import QUANTIZERS
from refgrad.tables.schemas import find_schema

_ROUNDING = frozenset(("", name) for name in traits.STEPS)
_CASTS = frozenset((("", "Cast"), ("", "CastLike")))
_INTEGERS = frozenset(
    getattr(TensorProto, sign + bits) for sign in ("INT", "UINT") for bits in ("2", "4", "8", "16", "32", "64")
)
_REDUCTIONS = frozenset(
    ("", name) for name in traits.REDUCTIONS | {"TopK", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"}
)
# Operators that compute a scale from a reduction, and those between a tensor and its rounding.
_LOCAL = frozenset(("", name) for name in traits.ELEMENTWISE | traits.MOVING)
_PRODUCTS = frozenset(
    (
        *(("", name) for name in traits.PRODUCTS | {"Mul", "Div", "DequantizeLinear"}),
        (MICROSOFT, "DequantizeLinear"),
    )
)
_SUMS = frozenset(("", name) for name in traits.SUMS)
_NUMBERS_ALONE = frozenset(
    (("", "Range"), ("", "OneHot"), ("", "ConstantOfShape"))
)  # their inputs are counts or positions


_FIRST_ALONE = frozenset((("", "Resize"), ("", "CastLike")))  # the other inputs give sizes or a type
_NUMBERS = frozenset(("tensor(float)", "tensor(int8)", "tensor(uint8)", "tensor(int16)"))  # types that no index has


def leaks(
    path: Path, graph: Graph, wrt: Iterable[str], outputs: Sequence[str], quantization: str
) -> tuple[LeakedGradient, ...]:
    """The leaked gradients of `wrt`, grouped by the first operator that rounds.

    :param graph: the graph of the model. The graph of `path` has function bodies in place of some of its nodes.
    """
    if any(map(_may_round, nested(node for function in graph.functions.protos.values() for node in function.node))):
        graph = normalise(graph.source)  # the labels do not look into functions
        path = find_requested_path(graph, list(wrt), list(outputs), quantization)[2]
    if not any(_rounds(path.graph, node) for node in path.graph.nodes):
        return ()
    reads_by_node = _Labels(path, wrt, outputs).leaked()
    if not reads_by_node:
        return ()
    helped: set[str] = set()
    if quantization == "zero":
        names = [name for names in reads_by_node.values() for name in names]
        sources, targets, other = find_requested_path(graph, names, list(outputs), "straight-through")
        if not (other.blocked or other.blocked_within):
            still = _Labels(other, sources, targets).leaked().values()
            helped = other.needed.intersection(sources).difference(*still)
    leaked, nodes = [], {node.name: node for node in path.graph.nodes}
    for first, names in reads_by_node.items():
        for group in (
            [name for name in names if name in helped],
            [name for name in names if name not in helped],
        ):
            if group:
                node = _in_model(path.graph, graph, nodes[first])
                title = f"{node.key[0]}.{node.op_type}" if node.key[0] else node.op_type
                reason = "rounding is piecewise constant"
                verdict = OperatorVerdict(title, "zero", reason, (node.name,))
                leaked.append(LeakedGradient(tuple(group), (verdict,), _advice(title, group[0] in helped)))
    return tuple(leaked)


def _advice(title: str, is_helped: bool) -> str:
    if is_helped:
        return "Use quantization='straight-through' or quantization='clipped'."
    return (
        f"{title} has the derivative zero in any case: write QuantizeLinear and DequantizeLinear in its place and choose "
        "quantization='straight-through', or choose other inputs or outputs: wrt=[...] or outputs=[...]."
    )


def _may_round(node: NodeProto) -> bool:
    key = "" if node.domain == "ai.onnx" else node.domain, node.op_type
    return key in _ROUNDING or key in QUANTIZERS or node.op_type.startswith("Dynamic")


def _rounds(graph: Graph, node: Node) -> bool:
    """True if `node` makes whole numbers, or floats of a few bits, of the numbers that it reads."""
    if node.key in _ROUNDING:
        return True
    kind = graph.types.get(node.outputs[0]) if node.outputs else None
    if node.key in _CASTS and kind in _INTEGERS:
        return graph.types.get(node.inputs[0]) in FLOATS
    return kind in QUANTIZERS.get(node.key, ())


def _in_model(expanded: Graph, graph: Graph, node: Node) -> Node:
    """The node of the model that `node` belongs to. In an operator's body, it is the next node that the model has."""
    reached = set(node.outputs)
    for inner in expanded.nodes:
        if inner is node or not reached.isdisjoint(inner.reads):
            for name in inner.outputs:
                if name and name in graph.producer:
                    return graph.producer[name]
            reached.update(filter(None, inner.outputs))
    return node


class _Labels:
    """The labels of all values. Each label is a bit mask with one bit per name."""

    def __init__(self, path: Path, wrt: Iterable[str], outputs: Sequence[str]) -> None:
        self._path, self._graph = path, path.graph
        self._outputs = outputs
        self._bits = {name: 1 << k for k, name in enumerate(name for name in wrt if name in path.needed)}

    def leaked(self) -> dict[str, list[str]]:
        """The names that reach the outputs only as a scale, by the first node that rounds a value which depends on them."""
        smooth = self._smooth()
        rounding = [
            node
            for node in self._graph.nodes
            if _rounds(self._graph, node)
            and smooth.keys().isdisjoint(node.outputs)
            and any(smooth.get(name) for name in node.inputs)
        ]
        if not rounding:
            return {}
        before = self._local(name for node in rounding for name in node.inputs)
        direct: dict[str, int] = defaultdict(int, self._bits)
        statistic: dict[str, int] = defaultdict(int)
        offset: dict[str, int] = defaultdict(int)  # of the statistics: those that are used before the rounding as well
        rounded: dict[str, int] = defaultdict(int)
        first: dict[int, str] = {}
        starts = {node.name for node in rounding}
        for node in self._graph.nodes:
            data = self._data(node)
            flat = _union(rounded, data)
            if node.name in starts:
                new = _union(direct, node.inputs)
                flat |= new
                for bit in _each(new):
                    first.setdefault(bit, node.name)
            is_bool = bool(node.outputs) and self._graph.types.get(node.outputs[0]) == TensorProto.BOOL
            if flat and not is_bool:
                for name in node.outputs:
                    rounded[name] |= flat
            if self._path.varied.isdisjoint(node.outputs):
                continue
            of = node.inputs[:1] if node.key in _FIRST_ALONE else node.reads
            reads = [name for name in of if name in self._path.varied]
            straight, scales = _union(direct, reads), _union(statistic, reads)
            offsets = scales & ~_union({name: statistic[name] & ~offset[name] for name in reads}, reads)
            scales &= ~straight
            if node.key in _REDUCTIONS and straight and not before.isdisjoint(self._local(node.inputs[:1])):
                scales |= straight
                offsets |= 0 if before.isdisjoint(node.outputs) else straight
                straight = 0
            elif scales:
                merged = 0
                for name in data:
                    merged |= scales & rounded[name] & ~(direct[name] | statistic[name])
                if node.key in _PRODUCTS or self._is_quantised(node):
                    scales &= ~merged
                elif node.key in _SUMS:
                    scales &= ~(merged & offsets)
                if node.key not in _LOCAL and node.key not in _REDUCTIONS:
                    straight, scales = straight | scales, 0  # a layer makes features of a statistic
            for name in node.outputs:
                if name in self._path.varied:
                    direct[name] |= straight
                    statistic[name] |= scales
                    offset[name] |= offsets & scales
        reached = _union(direct, self._outputs) | _union(statistic, self._outputs)
        crossed = _union(rounded, self._outputs)
        reads_by_node: dict[str, list[str]] = {}
        for name, bit in self._bits.items():
            if crossed & bit and not reached & bit:
                reads_by_node.setdefault(first[bit], []).append(name)
        return reads_by_node

    def _smooth(self) -> dict[str, int]:
        """The values that a derivative flows to from the names."""
        bits_by_name = dict(self._bits)
        for node in self._graph.nodes:
            bits = _union(bits_by_name, node.reads)
            if bits:
                bits_by_name |= {name: bits for name in node.outputs if name in self._path.varied}
        return bits_by_name

    def _local(self, names: Iterable[str]) -> set[str]:
        """The names, and the values that they are computed from by elementwise operators alone."""
        reached, pending = set[str](), list(names)
        while pending:
            name = pending.pop()
            if name in reached or name not in self._path.varied:
                continue
            reached.add(name)
            node = self._graph.producer.get(name)
            if node is not None and node.key in _LOCAL:
                pending.extend(node.reads)
        return reached

    def _data(self, node: Node) -> list[str]:
        """The inputs that a node computes with: no index, no size and no condition of a branch."""
        if node.key in _NUMBERS_ALONE:
            return []
        if node.key in _FIRST_ALONE:
            return [*node.inputs[:1]]
        schema = find_schema(node.op_type, node.domain, self._graph.opsets.get(node.domain, 1))
        if schema is None or not schema.inputs:
            return [name for name in node.reads if name]
        last = len(schema.inputs) - 1
        return [
            name
            for k, name in enumerate(node.inputs)
            if name and not _NUMBERS.isdisjoint(schema.inputs[min(k, last)].types)
        ]

    def _is_quantised(self, node: Node) -> bool:
        """True if a node of ONNX Runtime multiplies whole numbers by scales that it reads."""
        return node.key[0] == MICROSOFT and any(self._graph.types.get(name) in _INTEGERS for name in node.inputs)


def _union(labels: dict[str, int], names: Iterable[str]) -> int:
    union = 0
    for name in names:
        union |= labels.get(name, 0)
    return union


def _each(bits: int) -> Iterable[int]:
    while bits:
        yield bits & -bits
        bits &= bits - 1
