"""Attention in blocks of rows: a recomputed gradient never holds the scores of all queries and keys at once.

A row of softmax(q·Kᵀ + mask)·V depends on its own query alone. So the queries, and what has a row for each, are split into
blocks, each block is a segment of nodes that the backward pass computes again (`recompute`), and the results are joined:

    y = Concat(softmax(q_1·Kᵀ + mask_1)·V, softmax(q_2·Kᵀ + mask_2)·V, ...)

The keys and the values pass from block to block by an Identity. So their cotangents are added up block by block, and no two
blocks have to wait for each other's (Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from refgrad import traits
from refgrad.builder.nodes import NodeBuilder
from refgrad.model.graph import Graph, Node, view
from refgrad.protos.traverse import names_of, refill
from refgrad.protos.types import Dim, is_unnamed

_LONG = 512  # rows from which on it is worth while
_ROWS = 128  # of a block
_BLOCKS = 8  # where the number of rows is not known
_MOST_BLOCKS = 16
_DEEPEST = 45  # nodes between a product and the Softmax
_ATTENTION = ("", "Attention")


@dataclass(frozen=True)
class _Region:
    """Nodes from the scores, or from an Attention, to the result: `rows` are the values that are split.

    Those in `either` have one row for all queries or a row for each: only the run tells.
    """

    nodes: list[Node]
    rows: list[str]
    whole: list[str]  # keys and values
    result: str
    length: Dim
    either: frozenset[str] = frozenset()


def split_into_blocks(graph: Graph, chosen: Sequence[frozenset[str]]) -> tuple[Graph, list[frozenset[str]]] | None:
    """The graph with attention among the chosen nodes split into blocks of rows, and the new segments; None if none is split.

    Attention is not split if it has few rows, or if it is not known whether a value has a row per query.

    :param chosen: the segments of nodes that are computed again.
    """
    among = frozenset(name for segment in chosen for name in segment)
    regions = [region for region in _regions(graph) if among.issuperset(node.name for node in region.nodes)]
    if not regions:
        return None
    made = _Splitting(graph, regions)
    gone = {node.name for region in regions for node in region.nodes}
    kept = [segment - gone for segment in chosen]
    rewritten = view(graph.source, made.model, graph.large, graph.functions, graph.outer, graph.captures)
    return rewritten, [*(segment for segment in kept if segment), *made.blocks]


def _regions(graph: Graph) -> list[_Region]:
    found, taken = [], set[str]()
    for node in graph.nodes:
        region = None
        if node.key == ("", "Softmax"):
            region = _around_softmax(graph, node)
        elif node.key == _ATTENTION:
            region = _around_attention(graph, node)
        if region is not None and taken.isdisjoint(n.name for n in region.nodes):
            taken.update(n.name for n in region.nodes)
            found.append(region)
    return found


# softmax(elementwise(q·k))·v


def _around_softmax(graph: Graph, softmax: Node) -> _Region | None:
    shape = graph.shapes.get(softmax.inputs[0])
    if shape is None or len(shape) < 2 or softmax.attributes.get("axis", -1) not in (-1, len(shape) - 1):
        return None
    inside: dict[str, Node] = {}
    starts = {node.name: node for node in _behind(graph, softmax.inputs[0], inside)}
    if len(starts) != 1:
        return None
    start = next(iter(starts.values()))
    ends = _before(graph, softmax, inside)
    if ends is None or len(ends) != 1:
        return None
    end = ends[0]
    inside |= {start.name: start, end.name: end, softmax.name: softmax}
    nodes = [node for node in graph.nodes if node.name in inside]
    made = {name for node in nodes for name in node.outputs if name} - set(end.outputs)
    if made & graph.outputs.keys():
        return None
    if any(reader.name not in inside for name in made for reader in graph.readers(name)):
        return None
    length = _rows(graph, start.inputs[0])
    if not _is_long(length) or not (shape[-2] == length or is_unnamed(shape[-2])):
        return None
    rows, either = [start.inputs[0]], set()
    for node in nodes:
        if node.name in (start.name, end.name):
            continue
        for name in _elements(node):
            if not name or name in made:
                continue
            known = graph.shapes.get(name)
            if known is None:
                return None
            if len(known) < 2 or known[-2] == 1:
                continue
            if is_unnamed(known[-2]):
                either.add(name)
            elif known[-2] != length:
                return None
            rows.append(name)
    whole = [start.inputs[1], end.inputs[1]]
    if set(whole) & {*rows, *made}:
        return None
    parts = list(dict.fromkeys(rows)), list(dict.fromkeys(whole))
    return _Region(nodes, *parts, end.outputs[0], length, frozenset(either))


def _keeps_rows(graph: Graph, node: Node) -> bool:
    """True if a row of the result depends on the same row of the operands alone. Rows lie along the last axis but one."""
    if node.domain or node.op_type in traits.ELEMENTWISE:
        return not node.domain
    if node.op_type not in ("Concat", "Slice"):
        return False
    shape = graph.shapes.get(node.inputs[0])  # its own: a broadcast may have added axes since the Softmax
    last = {-1} if shape is None else {-1, len(shape) - 1}
    if node.op_type == "Concat":
        return node.attributes.get("axis") in last
    axes = graph.constant(node.inputs[3]) if len(node.inputs) > 3 else None
    return axes is not None and set(np.ravel(axes).tolist()) <= last


def _elements(node: Node) -> Sequence[str]:
    """The inputs of a node that keeps rows, without those that give types and bounds."""
    return node.inputs[:1] if node.op_type in ("CastLike", "Slice") else node.inputs


def _behind(graph: Graph, name: str, inside: dict[str, Node], depth: int = 0) -> Iterable[Node]:
    """The products that a value is computed from row by row; what lies between goes to `inside`."""
    node = graph.producer.get(name)
    if node is None or depth > _DEEPEST:
        return
    if node.key == ("", "MatMul"):
        yield node
    elif _keeps_rows(graph, node):
        found = [one for read in _elements(node) if read for one in _behind(graph, read, inside, depth + 1)]
        if found:
            inside[node.name] = node
            yield from found


def _before(graph: Graph, softmax: Node, inside: dict[str, Node]) -> list[Node] | None:
    """The products whose first factor is computed from the shares row by row; None where something else reads them."""
    ends: dict[str, Node] = {}
    pending = [softmax.outputs[0]]
    while pending:
        name = pending.pop()
        for reader in graph.readers(name):
            if reader.key == ("", "MatMul") and reader.inputs[0] == name and reader.inputs[1] != name:
                ends[reader.name] = reader
            elif _keeps_rows(graph, reader):
                if reader.name not in inside:
                    inside[reader.name] = reader
                    pending += reader.outputs
            else:
                return None
    return list(ends.values())


def _rows(graph: Graph, name: str) -> Dim:
    shape = graph.shapes.get(name)
    return None if shape is None or len(shape) < 2 else shape[-2]


def _is_long(length: Dim) -> bool:
    return length is not None and (not isinstance(length, int) or length >= _LONG)


# The operator Attention


def _around_attention(graph: Graph, node: Node) -> _Region | None:
    """An Attention without a past, whose rows differ by their queries and their mask alone."""
    inputs = [*node.inputs, *[""] * 7][:7]
    length = _rows(graph, inputs[0])
    windows = (node.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if not _is_long(length) or any(inputs[4:]) or any(node.outputs[1:]) or any(size >= 0 for size in windows):
        return None
    if node.attributes.get("is_causal", 0):  # a row would have to know its number
        return None
    rows, mask = [inputs[0]], inputs[3]
    if mask:
        found = _rows(graph, mask)
        if found is None or found not in (1, length):
            return None
        rows += [mask] if found == length else []
    return _Region([node], rows, list(dict.fromkeys(inputs[1:3])), node.outputs[0], length)


# The blocks


class _Splitting:
    """The model of `graph` with each region in blocks; `blocks` has the names of the nodes of each block."""

    def __init__(self, graph: Graph, regions: Sequence[_Region]) -> None:
        self.model = ModelProto()
        self.model.CopyFrom(graph.model)
        self.blocks: list[frozenset[str]] = []
        self._graph = graph
        self._builder = NodeBuilder(names_of(self.model.graph) | {node.name for node in graph.nodes}, start=0)
        self._nodes: list[NodeProto] = []
        self._parts: dict[tuple[str, int], list[str]] = {}  # of what several regions read: a mask
        self._sizes: dict[tuple[Dim, int], str] = {}
        last = {region.nodes[-1].name: region for region in regions}
        gone = {node.name for region in regions for node in region.nodes}
        for node in graph.nodes:
            if node.name in last:
                self._split(last[node.name])
            elif node.name not in gone:
                self._nodes.append(node.proto)
        values = {name for region in regions for node in region.nodes for name in node.outputs}
        refill(self.model.graph.value_info, [v for v in self.model.graph.value_info if v.name not in values])
        refill(self.model.graph.node, self._nodes)

    def _split(self, region: _Region) -> None:
        count = _BLOCKS
        if isinstance(region.length, int):
            count = min(-(-region.length // _ROWS), _MOST_BLOCKS)
        parts = {name: self._split_rows(name, region, count) for name in region.rows}
        whole = {name: name for name in region.whole}
        results = []
        for k in range(count):
            if k:
                whole = {name: self._node("Identity", [now], f"{name}_block{k}") for name, now in whole.items()}
            names = {name: of[k] for name, of in parts.items()} | whole
            block = []
            for name in names:  # what the backward pass then reads is part of the block, and waits for the block before
                names[name] = self._node("Identity", [names[name]], f"{names[name]}_here")
                block.append(self._nodes[-1].name)
            for node in region.nodes:
                copy = NodeProto()
                copy.CopyFrom(node.proto)
                copy.name = self._builder.fresh(f"{node.name}_block{k}")
                copy.input[:] = [names.get(name, name) for name in node.inputs]
                names |= {name: self._builder.fresh(f"{name}_block{k}") for name in node.outputs if name}
                copy.output[:] = [names.get(name, "") for name in node.outputs]
                self._nodes.append(copy)
                block.append(copy.name)
            self.blocks.append(frozenset(block))
            results.append(names[region.result])
        self._node("Concat", results, region.result, final=True, axis=-2)

    def _split_rows(self, name: str, region: _Region, count: int) -> list[str]:
        if (name, count) not in self._parts:
            queries, each = region.rows[0], name
            sizes = self._sizes_of(queries, region.length, count)
            if name in region.either:
                shape = self._node("Shape", [queries], "rows_shape", start=-2)
                zero, one = self._constant(np.array([0]), "zero"), self._constant(np.array([1]), "one")
                rows = self._node("Slice", [shape, zero, one], "rows_count")
                column = self._node("Concat", [rows, one], "rows_column", axis=0)
                each = self._node("Expand", [name, column], f"{name}_of_rows")
            outputs = [self._builder.fresh(f"{name}_block{k}") for k in range(count)]
            self._add("Split", [each, sizes], outputs, f"{name}_split", axis=-2)
            self._parts[name, count] = outputs
        return self._parts[name, count]

    def _sizes_of(self, name: str, length: Dim, count: int) -> str:
        """How many rows each block has: as many as every other, the last one what is left."""
        if (length, count) in self._sizes:
            return self._sizes[length, count]
        if isinstance(length, int):
            most = -(-length // count)
            sizes = [min(most, max(length - k * most, 0)) for k in range(count)]
            found = self._constant(np.array(sizes), "rows")
        else:
            one, zero = self._constant(np.array([1]), "one"), self._constant(np.array([0]), "zero")
            shape = self._node("Shape", [name], "rows_shape", start=-2)
            rows = self._node("Slice", [shape, zero, one], "rows_count")
            each = self._node("Div", [rows, self._constant(np.array([count]), "blocks")], "rows_each")
            others = self._node("Mul", [each, self._constant(np.array([count - 1]), "others")], "rows_before")
            left = self._node("Sub", [rows, others], "rows_left")
            found = self._node("Concat", [*[each] * (count - 1), left], "rows", axis=0)
        self._sizes[length, count] = found
        return found

    def _constant(self, array: np.ndarray, name: str) -> str:
        tensor = numpy_helper.from_array(array.astype(np.int64))
        assert tensor.data_type == TensorProto.INT64
        return self._node("Constant", [], name, value=tensor)

    def _node(self, op_type: str, inputs: Sequence[str], name: str, final: bool = False, **attributes: Any) -> str:
        output = name if final else self._builder.fresh(name)
        self._add(op_type, inputs, [output], f"{output}_node", **attributes)
        return output

    def _add(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: Any) -> None:
        self._builder.append(op_type, inputs, outputs, self._builder.fresh(name), attributes=attributes)
        self._nodes += self._builder.take()
