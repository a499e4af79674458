"""The places of weights in a model: initializers, Constant nodes, bodies.

The exporters of PaddlePaddle and spox write weights as Constant nodes, and an If or a Loop may hold weights in its bodies.
`lifted` makes initializers of the main graph of them, so the rest of refgrad knows initializers alone. `places` finds the
tensors by the same names, and writes a trained value back to its place in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.model.external import array_of, is_external
from refgrad.model.roles import Read, Reads, angle_tables, is_of_layer, role_of
from refgrad.protos.traverse import fresh, graphs, names_of, refill, rename_shadows, rename_values
from refgrad.protos.types import FLOATS

_QUANTIZED = frozenset((TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4))


@dataclass(frozen=True)
class Place:
    """A tensor of a model that may be a weight.

    `name` is its name among the initializers of `lifted(model)`, and `own` the name in the graph that it lies in. `reads` are
    the places where it is read. `node` is the Constant that holds it, None if it is an initializer. `body` is the body that it
    lies in, None for the main graph.
    """

    name: str
    own: str
    tensor: TensorProto
    reads: tuple[Read, ...]
    node: NodeProto | None = None
    body: GraphProto | None = None

    @property
    def is_lifted(self) -> bool:
        """True if it is no initializer of the main graph yet."""
        return self.node is not None or self.body is not None

    def put(self, tensor: TensorProto) -> None:
        """Give it another value, where it lies."""
        if self.node is not None:
            del self.node.attribute[:]
            self.node.attribute.append(AttributeProto(name="value", type=AttributeProto.TENSOR, t=tensor))
        else:
            self.tensor.CopyFrom(tensor)


def places(model: ModelProto) -> list[Place]:
    """Each initializer of the main graph, and the tensors of Constant nodes and of bodies that may be weights.

    These are floats with an axis, and integers of 4 and 8 bits, that are no results of their graph.
    """
    reads = Reads(model)
    outputs = {value.name for value in model.graph.output}
    as_output = (Read("", 0, ""),)
    held = [
        Place(t.name, t.name, t, reads.of(t.name) + (as_output if t.name in outputs else ()))
        for t in model.graph.initializer
    ]
    if not any(_tensors(model.graph)):
        return held
    taken, given = names_of(model.graph), set(_defined(model.graph))
    for number, graph in enumerate(reads.graphs):
        for name, tensor, node in _of_graph(graph, is_main=not number):
            unique = fresh(name, taken) if number and name in given else name
            given.add(unique)
            held.append(Place(unique, name, tensor, reads.of(name, number), node, graph if number else None))
    return held


def kinds_of(held: list[Place], values: Callable[[TensorProto], np.ndarray]) -> dict[str, str]:
    """The role of each tensor by name, a key of `refgrad.model.roles.KINDS`.

    :param values: returns the values of a tensor; called where the graph does not tell what it is.
    """
    kinds = {one.name: role_of(one.tensor, one.reads, partial(values, one.tensor)) for one in held}
    tables = {
        one.name: values(one.tensor) for one in held if kinds[one.name] == "parameter" and not is_of_layer(one.reads)
    }
    return kinds | dict.fromkeys(angle_tables(tables), "constant")


def lifted(model: ModelProto) -> ModelProto:
    """The model itself, or a copy in which the weights of Constant nodes and of bodies are initializers of the main graph.

    Weights are parameters and the statistics of normalizations. They keep their names; only a name that several bodies define
    becomes another one from the second of them on. Tables, masks and other constants stay where they are.
    """
    if not any(_tensors(model.graph)):
        return model
    elsewhere = [one for one in places(model) if one.is_lifted and one.tensor.data_type in FLOATS]
    chosen = {name for name, kind in kinds_of(elsewhere, array_of).items() if kind in ("parameter", "statistic")}
    if not chosen:
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    moved = [one for one in places(copy) if one.name in chosen]
    initializers = [_named(one.tensor, one.name) for one in moved]
    bodies = list({id(one.body): one.body for one in moved if one.body is not None}.values())  # the outer ones first
    for graph in (*reversed(bodies), copy.graph):  # refilling a graph copies the bodies in it
        here = [one for one in moved if (copy.graph if one.body is None else one.body) is graph]
        constants = {one.own for one in here if one.node is not None}
        within = {one.own for one in here if one.node is None}
        refill(graph.node, [n for n in graph.node if n.op_type != "Constant" or constants.isdisjoint(n.output)])
        refill(graph.initializer, [t for t in graph.initializer if t.name not in within])
        renamed = {one.own: one.name for one in here if one.own != one.name}
        for node in graph.node if renamed else ():
            rename_values(node, renamed)
    copy.graph.initializer.extend(initializers)
    if bodies:
        rename_shadows(copy.graph)
    if copy.ir_version < 4:  # there every initializer is an input, too
        copy.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in initializers)
    return copy


def _tensors(graph: GraphProto) -> Iterator[tuple[str, TensorProto, NodeProto | None]]:
    """The tensors outside the initializers of the main graph that may be weights."""
    yield from _of_graph(graph, is_main=True)
    for body in graphs(graph):
        if body is not graph:
            yield from _of_graph(body, is_main=False)


def _of_graph(graph: GraphProto, is_main: bool) -> Iterator[tuple[str, TensorProto, NodeProto | None]]:
    """The tensors of one graph that may be weights: each with its name, and the Constant that holds it."""
    ends = None
    for node in graph.node:
        if node.op_type == "Constant" and not node.domain and len(node.output) == 1:
            tensor = _held_by(node)
            if tensor is not None and _may_be_weight(tensor):
                ends = {value.name for value in graph.output} if ends is None else ends
                if node.output[0] not in ends:
                    yield node.output[0], tensor, node
    if not is_main:
        ends = {value.name for value in (*graph.input, *graph.output)}
        yield from ((t.name, t, None) for t in graph.initializer if _may_be_weight(t) and t.name not in ends)


def _held_by(node: NodeProto) -> TensorProto | None:
    for attribute in node.attribute:
        if attribute.name == "value" and not is_external(attribute.t):
            return attribute.t
        if attribute.name == "value_floats":
            return numpy_helper.from_array(np.array(attribute.floats, np.float32))
    return None


def _may_be_weight(tensor: TensorProto) -> bool:
    return bool(tensor.dims) and tensor.data_type in FLOATS | _QUANTIZED and not is_external(tensor)


def _defined(graph: GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (name for node in graph.node for name in node.output)


def _named(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy
