"""A model as a picture in the DOT language of Graphviz."""

from __future__ import annotations

import os
import re
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from refgrad.escaping import dot
from refgrad.model.checks.malformed import explained
from refgrad.model.reading import read
from refgrad.protos.traverse import subgraphs
from refgrad.show.text import (
    FEW,
    attributes,
    dimension,
    is_small,
    kind_of,
    operator,
    shape_text,
    shown,
    type_of,
    values_of,
)

_HEADER = ["digraph{", "  orientation=portrait;", "  size=7;", "  nodesep=0.05;", "  ranksep=0.25;"]
_KEYWORDS = frozenset(("node", "edge", "graph", "digraph", "subgraph", "strict"))

_PLAIN = re.compile("[A-Za-z_][A-Za-z0-9_]*")

Scope = ChainMap[str, str]  # a value's name: its identifier in the picture


@explained
def to_dot(model: ModelProto | str | os.PathLike[str]) -> str:
    r"""Return `model` in the DOT language: a box for each input (red), output (green), initializer, result and node (orange).

    The layout is as in the graphs in the documentation of onnxcustom's `onnx_derivative`. A box shows the name. It
    also shows the type and shape of an input or output ('' is an unknown dimension), the type, shape and first ten values of an
    initializer, and the attributes of a node. An identifier is the name of the value or node, in quotes if the language
    needs them, with a number if the name is taken. Subgraphs and local functions are clusters. A dashed arrow leads from the
    outputs of a subgraph to its node. No name ends the quotes around it, and one with a control character is quoted as Python
    quotes it.

    :param model: a model, or the path of one. It is not checked, and its external data is not read.
    :raises InvalidModelError: the model cannot be read.

    >>> import onnx.parser, refgrad
    >>> print(refgrad.to_dot(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) { y = Elu<alpha = 0.5>(x) }'
    ... )))
    digraph{
      orientation=portrait;
      size=7;
      nodesep=0.05;
      ranksep=0.25;
    <BLANKLINE>
      x [shape=box color=red label="x\nTensorProto.FLOAT\nshape=['N', 2]" fontsize=10];
    <BLANKLINE>
      y [shape=box color=green label="y\nTensorProto.FLOAT\nshape=['N', 2]" fontsize=10];
    <BLANKLINE>
    <BLANKLINE>
      Elu [shape=box style="filled,rounded" color=orange label="Elu\nalpha=0.5" fontsize=10];
      x -> Elu;
      Elu -> y;
    }
    """
    return "\n".join([*_HEADER, *_Picture().lines(read(model, weights=False, sort=False)), "}"])


@dataclass
class _Ends:
    """The boxes of a graph's inputs, outputs and initializers."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    arrows: list[str] = field(default_factory=list)  # to the outputs that no node of the graph computes
    returned: list[str] = field(default_factory=list)  # the identifiers of the outputs


class _Picture:
    """Writes the statements of one picture, in which no two boxes have the same identifier."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(1))
        self._clusters = count()

    def lines(self, model: ModelProto) -> Iterator[str]:
        """Yield the lines between the braces: paragraphs of inputs, of outputs, of initializers, and one for each node."""
        scope = Scope()
        ends = self._ends(model.graph, scope)
        for paragraph in (ends.inputs, ends.outputs, ends.constants):
            yield from ("", *paragraph)
        for node in model.graph.node:
            boxes, arrows = self._node(node, scope)
            yield from ("", *boxes, *arrows)
        yield from ends.arrows
        for function in model.functions:
            yield from ("", *self._function(function))

    def _ends(self, graph: GraphProto, scope: Scope) -> _Ends:
        initializers = {tensor.name: tensor for tensor in graph.initializer}
        computed = {name for node in graph.node for name in node.output}
        ends = _Ends()
        for value in graph.input:
            default = _first(initializers[value.name]) if value.name in initializers else []
            ends.inputs.append(self._value(value.name, scope, [*_interface(value), *default], "red"))
        for name, tensor in initializers.items():
            if name not in scope.maps[0]:
                kind = f"{kind_of(tensor.data_type)}({shape_text(tensor.dims)})"
                ends.constants.append(self._value(name, scope, [kind, *_first(tensor)]))
        for sparse in graph.sparse_initializer:
            kind = f"sparse {kind_of(sparse.values.data_type)}({shape_text(sparse.dims)})"
            ends.constants.append(self._value(sparse.values.name, scope, [kind]))
        for value in graph.output:
            place = scope if value.name in computed else Scope()
            ends.outputs.append(self._value(value.name, place, _interface(value), "green"))
            ends.returned.append(place[value.name])
            if place is not scope and value.name in scope:
                ends.arrows.append(f"  {scope[value.name]} -> {place[value.name]};")
        return ends

    def _node(self, node: NodeProto, scope: Scope) -> tuple[list[str], list[str]]:
        """Return the boxes of a node, its results and its subgraphs, and the arrows between them."""
        boxes = [self._value(name, scope) for name in dict.fromkeys(node.input) if name and name not in scope]
        boxes += [self._value(name, scope) for name in node.output if name and name not in scope.maps[0]]
        kind = operator(node)
        graphs = [(attribute, graph) for attribute in node.attribute for graph in subgraphs(attribute)]
        lines = [kind, *attributes(node, ["(graph)"] * len(graphs))]
        own = self._identifier(node.name or kind)
        boxes.append(f'  {own} [shape=box style="filled,rounded" color=orange label={_label(lines)} fontsize=10];')
        arrows = [f"  {scope[name]} -> {own};" for name in node.input if name]
        arrows += [f"  {own} -> {scope[name]};" for name in node.output if name]
        for attribute, graph in graphs:
            inner = scope.new_child()
            ends = self._ends(graph, inner)
            content, between = self._nodes(graph.node, inner)
            title = f"{attribute.name} of {node.name or kind}"
            boxes += self._cluster(title, [*ends.inputs, *ends.outputs, *ends.constants, *content])
            arrows += [*between, *ends.arrows, *(f"  {name} -> {own} [style=dashed];" for name in ends.returned)]
        return boxes, arrows

    def _nodes(self, nodes: Iterable[NodeProto], scope: Scope) -> tuple[list[str], list[str]]:
        found = [self._node(node, scope) for node in nodes]
        return [box for boxes, _ in found for box in boxes], [arrow for _, arrows in found for arrow in arrows]

    def _function(self, function: FunctionProto) -> list[str]:
        scope = Scope()
        names = dict.fromkeys((*function.input, *function.output))
        ends = [self._value(name, scope, (), "red" if name in function.input else "green") for name in names]
        content, arrows = self._nodes(function.node, scope)
        name = f"{function.domain}.{function.name}" if function.domain else function.name
        return [*self._cluster(f"function {name}", [*ends, *content]), *arrows]

    def _cluster(self, title: str, content: Iterable[str]) -> list[str]:
        """Return a cluster of boxes. It has no arrows: an arrow would draw the boxes at both ends into the cluster."""
        name = f"cluster_{next(self._clusters)}"
        return [
            f"  subgraph {name} {{",
            f"    label={_label([title])} fontsize=10;",
            *(f"  {c}" for c in content),
            "  }",
        ]

    def _value(self, name: str, scope: Scope, lines: Iterable[str] = (), color: str = "") -> str:
        """Return a new box for the value `name` of `scope`."""
        scope[name] = self._identifier(name)
        colored = f" color={color}" if color else ""
        return f"  {scope[name]} [shape=box{colored} label={_label([name, *lines])} fontsize=10];"

    def _identifier(self, name: str) -> str:
        """Return `name` with a number if it is taken, in quotes if the language needs them."""
        name = base = shown(name)
        while name in self._taken:
            name = f"{base}_{next(self._numbers[base])}"
        self._taken.add(name)
        if _PLAIN.fullmatch(name) and name.lower() not in _KEYWORDS:
            return name
        return f'"{dot(name)}"'


def _label(lines: Iterable[str]) -> str:
    """Return a label in quotes. Graphviz reads HTML's entities in it, so & is escaped too."""
    return '"' + "\\n".join(dot(shown(line)).replace("&", "&amp;") for line in lines) + '"'


def _interface(value: ValueInfoProto) -> list[str]:
    """Return the lines of a label with the type of an input or output, or no lines if it has none."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return [type_of(value.type)] if value.type.WhichOneof("value") else []
    known = tensor.elem_type in TensorProto.DataType.values()
    lines = [f"TensorProto.{TensorProto.DataType.Name(tensor.elem_type) if known else tensor.elem_type}"]
    if tensor.HasField("shape"):
        lines.append(f"shape={[dimension(dim, '') for dim in tensor.shape.dim]}")
    return lines


def _first(tensor: TensorProto) -> list[str]:
    """Return the lines of a label with the first values of an initializer, or no lines for external data."""
    value = values_of(tensor)
    if value is None:
        return []
    if is_small(tensor.dims):
        return np.array2string(value).splitlines()
    return [f"{np.array2string(value.ravel()[:FEW])[:-1]} ...]"]
