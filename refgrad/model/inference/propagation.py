"""Data propagation within bounds: what onnx learns of shapes that nodes compute, at no more than the cost of shapes.

onnx writes down each element of a one-dimensional operand, whatever it holds: about 200 bytes per number, also where the
operand is a tensor of data. Shapes have few elements, so an operand that has many, or may turn out to, is hidden from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
)

from refgrad.model import native
from refgrad.model.external import array_of
from refgrad.protos.traverse import attribute_value, captured, graphs, nested, subgraphs
from refgrad.protos.types import UNNAMED, Shape, type_of

_LARGEST = 256  # elements of an operand whose numbers are propagated
_LARGEST_RANK = 1024  # of what onnx infers
_WRITTEN = 1 << 20  # elements of a vector in a function, where nothing is hidden
_ROUNDS = 4
_HIDDEN = "refgrad.hidden."  # the prefix of inputs that stand for operands that are hidden

_ELEMENTWISE = frozenset(("Add", "Sub", "Mul"))
# The operators that propagate numbers, with the inputs that they propagate; None is all of them. The last one has a body.
_READ: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_ELEMENTWISE | {"Gather"}, (0, 1)),
    **dict.fromkeys(("Cast", "Squeeze", "Unsqueeze", "Size", "MeanVarianceNormalization"), (0,)),
    **dict.fromkeys(("Concat", "Slice"), None),
}
_NO_LARGER = frozenset(("Cast", "Squeeze", "Unsqueeze", "Slice"))  # than their first input
# The operators that read propagated numbers, with the input.
_SHAPED = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0, "CenterCropPad": 1, "Resize": 3, "Upsample": 3}
SHAPED = frozenset(_SHAPED)
# What onnx says of a shape that is declared otherwise: without strict mode it says nothing, and the declared one stays.
_DIFFERS = (
    "Inferred shape and existing shape differ",
    "Both inferred and declared dimension have values but they differ",
)
_NEVER, _ANY = 0.0, float("inf")  # the size of what is no vector or has no known size, and of what may get any


class ContradictionError(Exception):
    """A model declares another type or shape of a result than onnx infers."""


def infer_shapes(model: ModelProto, shaped: bool = True, trusting: bool = False) -> GraphProto:
    """The graph with the types and shapes that onnx infers. Numbers are propagated where a node reads them as a shape.

    :param shaped: whether the graph has an operator of SHAPED.
    :param trusting: let stand what the model declares, whatever onnx infers.
    :raises ContradictionError: what the model declares of a result differs from what onnx infers.
    """
    fed = {value.name for value in model.graph.input}  # nothing is known of what they hold
    if not ((shaped or model.functions) and any(_is_shaped(graph, fed) for graph in _bodies(model))):
        return _inferred(model, False, trusting)
    known, before = _inferred(model, False, trusting), None
    for _ in range(_ROUNDS):
        hiding = _Hiding(known, fed)
        hidden = hiding.model(model)
        known = _inferred(hidden, True, trusting)
        inputs = [value for value in known.input if not value.name.startswith(_HIDDEN)]
        del known.input[:]
        known.input.extend(inputs)
        hiding.reveal(known)
        if hiding.open in ((), before):
            break
        before = hiding.open
    return known


def _writes_out(function: FunctionProto) -> bool:
    """True if a call of a function may make onnx write out a vector of more elements than shapes have."""
    bounds: dict[str, float] = {}
    numbers: dict[str, Sequence[int]] = {}
    for node in nested(function.node):
        read = [bounds.get(name, _LARGEST_RANK) for name in node.input]
        bound: float = _LARGEST_RANK
        if node.op_type == "Constant" and node.output:
            value = next(
                (attribute_value(a) for a in node.attribute if a.name in ("value", "value_ints", "value_int")), None
            )
            known = array_of(value) if isinstance(value, TensorProto) else np.asarray(value or 0)
            bound = known.size
            numbers[node.output[0]] = (
                known.ravel().tolist() if known.size <= _LARGEST and known.dtype.kind == "i" else ()
            )
        elif node.op_type == "ConstantOfShape" and node.input and node.input[0] in numbers:
            bound = float(math.prod(map(abs, numbers[node.input[0]])))
        elif node.op_type == "Concat":
            bound = sum(read)
        elif node.op_type in _NO_LARGER and read:
            bound = read[0]
        elif node.op_type in _ELEMENTWISE:
            bound = max(read, default=bound)
        if bound > _WRITTEN:
            return True
        bounds.update(dict.fromkeys(node.output, bound))
    return False


def _inferred(model: ModelProto, data: bool, trusting: bool) -> GraphProto:
    data = data and not any(map(_writes_out, model.functions))
    inferred: ModelProto
    try:
        inferred = native.infer_shapes(model, data_prop=data, strict_mode=not trusting)
    except native.InferenceError as error:
        if trusting:
            raise
        if any(text in str(error) for text in _DIFFERS):
            raise ContradictionError from error
        inferred = native.infer_shapes(model, data_prop=data)
    return inferred.graph


def _bodies(model: ModelProto) -> Iterator[GraphProto]:
    yield from graphs(model.graph)
    for function in model.functions:
        body = GraphProto()
        body.node.extend(function.node)
        yield from graphs(body)


def _is_shaped(graph: GraphProto, fed: set[str]) -> bool:
    """True if a node of the graph reads a shape that is not constant there."""
    read = [_shape_of(node) for node in graph.node if node.op_type in _SHAPED]
    return bool(read) and not (_constants(graph) | fed).issuperset(read)


def _shape_of(node: NodeProto) -> str:
    position = _SHAPED[node.op_type]
    return node.input[position] if position < len(node.input) else ""


class _Hiding:
    """Hides operands, given what is known without propagation, or with less of it."""

    def __init__(self, known: GraphProto, fed: set[str]) -> None:
        self._known, self._fed = known, fed
        self._names: dict[tuple[int, str, Shape | None], str] = {}  # of what stands for a value in a graph
        self._inputs: list[ValueInfoProto] = []
        self._open: list[tuple[int, str]] = []
        self._sizes: dict[str, str] = {}  # the names that the sizes of vectors have where they are hidden
        self._graphs = 0

    @property
    def open(self) -> tuple[tuple[int, str], ...]:
        """The operands that are hidden although their size is not known, each with the number of its graph."""
        return tuple(self._open)

    def model(self, model: ModelProto) -> ModelProto:
        """`model`, or a copy in which other inputs stand for the operands that are hidden."""
        copy = ModelProto()
        copy.CopyFrom(model)
        self._visit(copy.graph, self._known, _Scope(self._known))
        copy.graph.input.extend(self._inputs)
        return copy if self._inputs else model

    def reveal(self, found: GraphProto) -> None:
        """Give the sizes of vectors that were hidden, in place, the names that they have where they were not."""
        if not self._sizes:
            return
        values = [v for graph in graphs(found) for v in (*graph.value_info, *graph.input, *graph.output)]
        names = {}
        for value in values:
            if (hidden := self._sizes.get(value.name)) is not None:
                shape = type_of(value)[1]
                if shape is not None and len(shape) == 1 and shape[0] is not None:
                    names[hidden] = shape[0]
        for value in values:
            for dim in value.type.tensor_type.shape.dim:
                if isinstance(size := names.get(dim.dim_param), int):
                    dim.dim_value = size
                elif size is not None:
                    dim.dim_param = size

    def _visit(self, graph: GraphProto, known: GraphProto, scope: _Scope) -> None:
        self._graphs += 1
        number = self._graphs
        constants = _constants(graph) | self._fed
        declared: dict[str, TypeProto] = {}
        for node, twin in zip(graph.node, known.node, strict=True):
            inner = [
                pair
                for one, other in zip(node.attribute, twin.attribute, strict=True)
                for pair in zip(subgraphs(one), subgraphs(other), strict=True)
            ]
            reads = node.input if not inner else [*node.input, *(n for body, _ in inner for n in captured(body))]
            opened = not scope.opened.isdisjoint(reads)
            if inner:
                opened = opened or any(_is_shaped(each, self._fed) for body, _ in inner for each in graphs(body))
                for body, other in inner:
                    self._visit(body, other, _Scope(other, scope, body.input if opened else ()))
            elif node.op_type in _SHAPED:
                opened = opened or _shape_of(node) not in constants
            if opened:
                scope.open(node)
            if self._hide(node, number, scope):
                declared.update((name, scope.types[name]) for name in node.output if _is_static(scope.shape(name)))
        _declare(graph, declared)

    def _hide(self, node: NodeProto, number: int, scope: _Scope) -> bool:
        """Let a node read other inputs in place of the operands that are to be hidden; whether there are some."""
        positions = _READ.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else None
        hidden = False
        for position in range(len(node.input)) if positions is None else positions:
            name = node.input[position] if position < len(node.input) else ""
            if name and (size := scope.size(name)) > _LARGEST:
                if size == _ANY:
                    self._open.append((number, name))
                node.input[position] = self._stand_in(name, number, node, scope)
                hidden = True
        return hidden

    def _stand_in(self, name: str, number: int, node: NodeProto, scope: _Scope) -> str:
        """The input that stands for a value that `node` reads."""
        shape = scope.shape(name)
        if shape is not None and isinstance(size := shape[0], int):
            others = [scope.shape(other) for other in node.input if other != name]
            beside_matrix = any(other is not None and len(other) > 1 for other in others)
            # Beside a matrix a row broadcasts alike, and it is no vector.
            shape = (1, size) if node.op_type in _ELEMENTWISE and beside_matrix else (f"{UNNAMED}{size}_",)
        elif shape is not None:
            shape = (self._sizes.setdefault(name, f"{UNNAMED}{_HIDDEN}{len(self._sizes)}"),)
        key = number, name, shape
        if key not in self._names:
            self._names[key] = f"{_HIDDEN}{len(self._names)}"
            kind = scope.types.get(name)
            value = ValueInfoProto(name=self._names[key])
            if kind is not None:
                value.type.CopyFrom(helper.make_tensor_type_proto(kind.tensor_type.elem_type, shape))
            self._inputs.append(value)
        return self._names[key]


def _is_static(shape: Shape | None) -> bool:
    return shape is not None and all(isinstance(dim, int) for dim in shape)


def _constants(graph: GraphProto) -> set[str]:
    """The constants of the graph, and "" for an input that is left out."""
    constants = {"", *(tensor.name for tensor in graph.initializer)}
    constants.update(node.output[0] for node in graph.node if node.op_type == "Constant" and node.output)
    return constants


def _declare(graph: GraphProto, types: Mapping[str, TypeProto]) -> None:
    """Declare the types of results, which onnx may not infer from what stands for the operands."""
    left = dict(types)
    for value in (*graph.value_info, *graph.output):
        if value.name in left:
            value.type.CopyFrom(left.pop(value.name))
    for name, kind in left.items():
        graph.value_info.add(name=name, type=kind)


class _Scope:
    """The known types and shapes of the values that the nodes of a graph may read.

    `opened` are those whose shape a computed shape decides on: propagation may find out more about them.
    """

    def __init__(self, graph: GraphProto, outer: _Scope | None = None, opened: Iterable[ValueInfoProto] = ()) -> None:
        self.types: dict[str, TypeProto] = {} if outer is None else dict(outer.types)
        self.opened: set[str] = set() if outer is None else set(outer.opened)
        self._bounds: dict[str, float] = {} if outer is None else dict(outer._bounds)
        self.types.update((v.name, v.type) for values in (graph.value_info, graph.input, graph.output) for v in values)
        self.types.update((t.name, helper.make_tensor_type_proto(t.data_type, t.dims)) for t in graph.initializer)
        self.opened.update(value.name for value in opened)

    def shape(self, name: str) -> Shape | None:
        """The shape of a value as far as it is known."""
        kind = self.types.get(name)
        return None if kind is None else type_of(ValueInfoProto(type=kind))[1]

    def size(self, name: str) -> float:
        """How many elements a vector has, or at most can turn out to have; `_NEVER` for anything else."""
        shape = self.shape(name)
        if shape is not None and len(shape) != 1:
            return _NEVER
        if shape is not None and isinstance(shape[0], int):
            return shape[0]
        return self._bounds.get(name, _ANY if name in self.opened else _NEVER)

    def open(self, node: NodeProto) -> None:
        """Let the outputs of a node depend on a computed shape."""
        self.opened.update(node.output)
        if (bound := self._bound(node)) < _ANY:
            self._bounds.update(dict.fromkeys(node.output, bound))

    def _bound(self, node: NodeProto) -> float:
        if node.domain not in ("", "ai.onnx"):
            return _ANY
        if node.op_type == "Shape":
            return _LARGEST_RANK
        read = [self.size(name) or _ANY for name in node.input]
        if node.op_type in _NO_LARGER:
            return read[0] if read else _ANY
        if node.op_type in _ELEMENTWISE:
            return max(read, default=_ANY)
        return sum(read) if node.op_type == "Concat" else _ANY
