"""Compare two graphs up to the names of their values and the order of their nodes, and show where they differ.

Every value gets a canonical number, which stands for its operator, attributes and operands. Two graphs are isomorphic if
every output has the same number in both. These differences do not count: the names and the order of nodes, the names of
values between inputs and outputs, a repeated node, a node that no output needs, the order of the operands of Add, Mul, Sum
and their like, an attribute written with its default value, a Constant node instead of an initializer, an Identity.
Everything else counts, the types, shapes and elements of constants too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from refgrad import traits
from refgrad.errors import InvalidModelError, OptionError, choices
from refgrad.model.external import array_of, is_external
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import (
    attribute_value,
    positions_needed,
    reads_of,
    signatures,
    subgraphs,
    topological_positions,
    versions_of,
)
from refgrad.tables.schemas import find_schema

COMMUTATIVE = (
    (traits.ARITHMETIC - {"Clip", "Div", "Mod", "Sub"}) | traits.LOGIC | (traits.BITWISE - {"BitShift"}) | {"Equal"}
)
IN_THE_DEFAULT_DOMAIN = frozenset(("MaxPoolGrad", "AveragePoolGrad"))  # training operators that ONNX does not know
# Training operators with the attributes of a forward operator, whose defaults apply to them too.
FORWARD = {
    "AveragePoolGrad": "AveragePool",
    "ConcatTraining": "Concat",
    "ConvGrad": "Conv",
    "ConvTransposeGrad": "ConvTranspose",
    "FakeQuantGrad": "FakeQuant",
    "GatherElementsGrad": "GatherElements",
    "GatherGrad": "Gather",
    "GatherNDGrad": "GatherND",
    "LayerNormalizationGrad": "LayerNormalization",
    "LeakyReluGrad": "LeakyRelu",
    "LogSoftmaxGrad_13": "LogSoftmax",
    "MaxPoolGrad": "MaxPool",
    "ResizeGrad": "Resize",
    "SimplifiedLayerNormalizationGrad": "LayerNormalization",
    "SoftmaxCrossEntropyLossGrad": "SoftmaxCrossEntropyLoss",
    "SoftmaxGrad_13": "Softmax",
    "SplitTraining": "Split",
}
# Differences that `compare` can overlook, with their description.
OVERLOOKED = {
    "allowzero": "a Reshape has allowzero in one graph only; without it, it fails on some empty tensors",
    "one element": "a constant of one element has axes in one graph only; there it gives a scalar operand an axis",
}
_GRADIENT = re.compile(r"(?P<tensor>.+)_grad(_\d+)?")
_SUBGRAPHS = "subgraphs"
_FEW = 8  # elements of a constant that are printed


@dataclass(frozen=True)
class Mismatch:
    """A tensor that the two graphs compute differently, and the nodes that compute it from tensors that both graphs name."""

    tensor: str
    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.tensor}:"]
        for side, nodes in (("left ", self.left), ("right", self.right)):
            lines += [f"  {side}  {node}" for node in nodes or ("is not computed",)]
        return "\n".join(lines)


@dataclass(frozen=True)
class GraphComparison:
    """The result of `compare`, which is true where the graphs are isomorphic.

    `differences` has a row per tensor that both name but compute differently, and per output that one lacks.
    `operators` counts the training operators that only one has, (left, right); `names` are the gradient tensors
    (`<tensor>_grad`, `<tensor>_grad_0`, ...) that only one has, (left, right).
    """

    isomorphic: bool
    differences: tuple[Mismatch, ...]
    operators: tuple[Counter[str], Counter[str]]
    names: tuple[frozenset[str], frozenset[str]]

    def __bool__(self) -> bool:
        return self.isomorphic

    @property
    def same_operators(self) -> bool:
        """True if both have the same training operators, each equally often."""
        return not any(self.operators)

    @property
    def same_names(self) -> bool:
        """True if both name the same gradient tensors."""
        return not any(self.names)

    def __str__(self) -> str:
        if self.isomorphic:
            return "isomorphic"
        return "\n".join(map(str, self.differences))


def compare(left: ModelProto, right: ModelProto, apart_from: Iterable[str] = ()) -> GraphComparison:
    """Compare two graphs by canonical form: whether they are isomorphic and, if not, which tensors differ and in which nodes.

    Inputs and outputs are matched by name. An initializer that the other model has as an input is matched by name too; every
    other constant by type, shape and elements.

    :param apart_from: differences to overlook: names in `OVERLOOKED`.
    :raises InvalidModelError: a graph has a cycle, or reads a value that nothing gives.
    :raises OptionError: a name in `apart_from` that is not in `OVERLOOKED`.

    >>> import onnx.parser
    >>> def graph(body):
    ...     return onnx.parser.parse_model(
    ...         f'<ir_version: 8, opset_import: ["": 18]> g (float[N] x, float[N] b) => (float[N] y) {{ {body} }}'
    ...     )
    >>> bool(compare(graph("t = Exp(x) y = Mul(t, b)"), graph("e = Exp(x) y = Mul(b, e)")))
    True
    >>> print(compare(graph("t = Exp(x) y = Mul(t, b)"), graph("t = Exp(x) y = Div(t, b)")))
    y:
      left   y = Mul(b, t)
      right  y = Div(t, b)
    """
    overlooked = frozenset(apart_from)
    for name in overlooked - OVERLOOKED.keys():
        raise OptionError(f"There is no difference {name!r} to overlook; there are {choices(OVERLOOKED)}.")
    inputs = {value.name for model in (left, right) for value in model.graph.input}
    canon = _Canon(overlooked)
    sides = tuple(_Side(model, inputs, canon) for model in (left, right))
    outputs = [name for name in sides[0].outputs if name in sides[1].outputs]
    alone = [name for side, other in (sides, sides[::-1]) for name in side.outputs if name not in other.outputs]
    same = not alone and all(sides[0].number[name] == sides[1].number[name] for name in outputs)
    operators = tuple(side.training_operators() for side in sides)
    names = tuple(side.gradient_names(sides[0].forward | sides[1].forward) for side in sides)
    return GraphComparison(
        same,
        () if same else tuple(_differences(sides[0], sides[1], alone)),
        (operators[0] - operators[1], operators[1] - operators[0]),
        (names[0] - names[1], names[1] - names[0]),
    )


def _differences(left: _Side, right: _Side, alone: Iterable[str]) -> Iterator[Mismatch]:
    shared = [name for name in left.producer if name in right.producer]
    stops = frozenset(shared)
    local = [side.local(stops) for side in (left, right)]
    for name in shared:
        if local[0][name] != local[1][name]:
            yield Mismatch(name, left.text(name, stops), right.text(name, stops))
    for name in alone:
        yield Mismatch(name, *(side.text(name, stops) if name in side.producer else () for side in (left, right)))


class _Side:
    """One of the two graphs: the canonical number of each value, and the node that gives it."""

    def __init__(self, model: ModelProto, inputs: set[str], canon: _Canon) -> None:
        self.canon = canon
        self.opsets = versions_of(model)
        self.graph = model.graph
        self.outputs = list(dict.fromkeys(value.name for value in model.graph.output))
        self.constants = {t.name: t for t in model.graph.initializer if t.name not in inputs}
        self.nodes = _needed(model.graph)
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        names = {name for node in self.nodes for name in (*node.input, *node.output)} | inputs
        self.forward = {name for name in names if not _GRADIENT.fullmatch(name)}
        given = (name for name in inputs if name not in self.producer)  # this graph may compute what the other is fed
        self.leaves = {name: canon.number("input", name) for name in given} | {"": canon.number("absent")}
        self.leaves |= {name: canon.constant(tensor) for name, tensor in self.constants.items()}
        for sparse in self.graph.sparse_initializer:
            self.leaves[sparse.values.name] = canon.number("sparse", sparse.SerializeToString(deterministic=True))
        self.number = canon.values(self.nodes, self.leaves, self.opsets)

    def local(self, cut: Iterable[str]) -> dict[str, int]:
        """The canonical number of each value as computed from the values in `cut`, which are known by their names."""
        named = {name: self.canon.number("named", name) for name in cut}
        return self.canon.values(self.nodes, self.leaves | named, self.opsets)

    def text(self, name: str, stops: Collection[str]) -> tuple[str, ...]:
        """The nodes from those that read only named values up to the one that gives `name`."""
        chosen: set[int] = set()
        pending = [name]
        while pending:
            node = self.producer.get(pending.pop())
            if node is not None and id(node) not in chosen:
                chosen.add(id(node))
                pending += [read for read in node.input if read not in stops]
        return tuple(self._line(node) for node in self.nodes if id(node) in chosen)

    def _line(self, node: NodeProto) -> str:
        names = [self._argument(name) for name in node.input]
        if _commutes(node):
            names.sort()
        settings = [f"{name}={value}" for name, value in self.canon.attributes(node, self.opsets) if name != _SUBGRAPHS]
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
        inside = "; ".join(filter(None, (", ".join(names), ", ".join(settings))))
        return f"{', '.join(node.output)} = {domain}{node.op_type}({inside})"

    def _argument(self, name: str) -> str:
        tensor = self.constants.get(name)
        if tensor is None or is_external(tensor):
            return name or "-"
        array = array_of(tensor)
        return str(array.tolist()) if array.size <= _FEW else name

    def training_operators(self) -> Counter[str]:
        """How often each training operator occurs, counting nodes that compute the same value once."""
        found = {}
        for node in self.nodes:
            if node.domain == MICROSOFT or node.op_type in IN_THE_DEFAULT_DOMAIN:
                found[tuple(self.number[name] for name in node.output if name)] = node.op_type
        return Counter(found.values())

    def gradient_names(self, forward: set[str]) -> frozenset[str]:
        """The values in use that are named as the gradient of a forward tensor, or as a contribution to it."""
        names = {name for node in self.nodes for name in reads_of(node)}.union(self.outputs)
        matches = ((name, _GRADIENT.fullmatch(name)) for name in names)
        return frozenset(name for name, match in matches if match and match["tensor"] in forward)


def _needed(graph: GraphProto) -> list[NodeProto]:
    """The nodes that an output needs, in topological order."""
    nodes = _ordered(graph)
    return [nodes[k] for k in positions_needed(signatures(nodes), [value.name for value in graph.output])]


def _ordered(graph: GraphProto) -> list[NodeProto]:
    """The nodes in topological order: ONNX Runtime's builder writes them in any order."""
    positions = topological_positions(signatures(graph.node))
    if len(positions) < len(graph.node):
        stuck = graph.node[min(set(range(len(graph.node))).difference(positions))]
        raise InvalidModelError(f"The graph has a cycle through the node {stuck.name or stuck.op_type!r}.")
    return [graph.node[k] for k in positions]


class _Canon:
    """The canonical numbers: values that are computed in the same way have the same number."""

    def __init__(self, overlooked: frozenset[str]) -> None:
        self.overlooked = overlooked
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, *key: Any) -> int:
        """The number of the value that `key` describes."""
        return self._numbers.setdefault(key, len(self._numbers))

    def values(
        self, nodes: Iterable[NodeProto], known: Mapping[str, int], opsets: Mapping[str, int], depth: int = 0
    ) -> dict[str, int]:
        """The number of each value that `nodes` compute; nodes that read a value in `known` see the number given there."""
        result, read = dict(known), dict(known)
        for node in nodes:
            for name in reads_of(node):
                if name not in read:
                    called = node.name or node.op_type
                    raise InvalidModelError(f"The node {called!r} reads {name!r}, which nothing gives.")
            for name, number in zip(node.output, self._node(node, read, opsets, depth), strict=True):
                if name:
                    result[name] = number
                    read.setdefault(name, number)
        return result

    def _node(self, node: NodeProto, read: Mapping[str, int], opsets: Mapping[str, int], depth: int) -> list[int]:
        """The numbers of the outputs of a node."""
        domain = _domain(node.domain)
        if not domain and node.op_type == "Constant":
            return [self._constant_node(node)]
        if not domain and node.op_type == "Identity":
            return [read[node.input[0]]]
        operands = [read[name] for name in node.input]
        while operands and operands[-1] == read[""]:
            operands.pop()
        if _commutes(node):
            operands.sort()
        settings = []
        for name, value in self.attributes(node, opsets):
            if name == _SUBGRAPHS:
                value = tuple(self._subgraph(graph, read, opsets, depth + 1) for graph in value)
            settings.append((name, value))
        key = (domain, node.op_type, tuple(operands), tuple(settings))
        return [self.number(*key, k) for k in range(len(node.output))]

    def _subgraph(self, graph: GraphProto, outer: Mapping[str, int], opsets: Mapping[str, int], depth: int) -> Any:
        known = dict(outer) | {v.name: self.number("parameter", depth, k) for k, v in enumerate(graph.input)}
        known |= {tensor.name: self.constant(tensor) for tensor in graph.initializer}
        inner = self.values(_ordered(graph), known, opsets, depth)
        return tuple(inner[value.name] for value in graph.output)

    def attributes(self, node: NodeProto, opsets: Mapping[str, int]) -> list[tuple[str, Any]]:
        """The attributes that differ from their default; subgraphs come under the name `_SUBGRAPHS`."""
        domain, asked = _domain(node.domain), FORWARD.get(node.op_type, node.op_type)
        if asked != node.op_type and onnx.defs.has(asked):
            domain = ""
        version = opsets.get(domain, 1)
        known = find_schema(asked, domain)  # the newest: the model's opset may be older than the operator
        schema = find_schema(asked, domain, version) if known and known.since_version <= version else known
        defaults = {} if schema is None else {n: a.default_value for n, a in schema.attributes.items()}
        found: list[tuple[str, Any]] = []
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            if attribute.name == "allowzero" and "allowzero" in self.overlooked:
                continue
            inner = subgraphs(attribute)
            if inner:
                found.append((_SUBGRAPHS, tuple(inner)))
                continue
            value, default = self._value(attribute), defaults.get(attribute.name)
            if default is None or not default.name or self._value(default) != value:
                found.append((attribute.name, value))
        return found

    def _value(self, attribute: AttributeProto) -> Any:
        value = attribute_value(attribute)
        if isinstance(value, TensorProto):
            return self.constant(value)
        return tuple(value) if isinstance(value, list) else value

    def _constant_node(self, node: NodeProto) -> int:
        for attribute in node.attribute:
            if attribute.name == "value":
                return self.constant(attribute.t)
            if attribute.name in ("value_float", "value_floats", "value_int", "value_ints"):
                kind = np.float32 if "float" in attribute.name else np.int64
                return self.constant(numpy_helper.from_array(np.asarray(attribute_value(attribute), kind)))
        return self.number("constant", node.SerializeToString(deterministic=True))

    def constant(self, tensor: TensorProto) -> int:
        """The number of a constant: by type, shape and elements, or by the location of external data."""
        if is_external(tensor):
            where = tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))
            return self.number("external", tensor.data_type, tuple(tensor.dims), where)
        array = array_of(tensor)
        elements = tuple(array.ravel().tolist()) if array.dtype == object else array.tobytes()
        shape = () if array.size == 1 and "one element" in self.overlooked else array.shape
        return self.number("constant", tensor.data_type, shape, elements)


def _commutes(node: NodeProto) -> bool:
    return node.op_type in COMMUTATIVE and not _domain(node.domain)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
