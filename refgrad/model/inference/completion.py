"""Element types where onnx infers none: those that follow from the schemas of operators, in a graph and in its bodies.

onnx's inference stops at an operator that it cannot infer. It is told the element types that follow and asked again.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from refgrad import traits
from refgrad.errors import InvalidModelError
from refgrad.model.inference.infer import infer
from refgrad.protos.traverse import attribute_value, op_types, versions_of
from refgrad.protos.types import element_type, held_by, is_container, unwrapped
from refgrad.tables.element_types import element_types

Types = MutableMapping[str, TypeProto]


def infer_completely(model: ModelProto, inferred: GraphProto | None = None) -> GraphProto:
    """The graph with inferred types and shapes, and with the element types that onnx does not find but schemas give.

    :param inferred: what onnx infers, where it was asked already. Bodies are not looked at again for their own sake then.
    """
    within = inferred is None and op_types(model.graph)[1]
    inferred = infer(model) if inferred is None else inferred
    while True:
        completed = ModelProto()
        completed.CopyFrom(model)
        known = {
            v.name: v.type for v in (*inferred.value_info, *inferred.output, *inferred.input) if element_type(v.type)
        }
        if not _add(completed.graph, versions_of(model), known, within):
            return inferred
        try:
            inferred = infer(completed)
        except InvalidModelError:  # where the model contradicts itself, onnx's inference alone has the word
            return inferred
        model, within = completed, False


def _add(graph: GraphProto, opsets: Mapping[str, int], known: Types, within: bool) -> bool:
    """Declare the element types of results that are not in `known`, to which they are added; whether there are some.

    :param within: look for them in all bodies too, and not only where the result of a node with bodies is unknown.
    """
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        known.setdefault(tensor.name, helper.make_tensor_type_proto(tensor.data_type, None))
    known.update((v.name, v.type) for v in (*graph.input, *graph.value_info, *graph.output) if element_type(v.type))
    outputs = {value.name: value for value in graph.output}
    found = False
    for node in graph.node:
        bodies = {a.name: a.g for a in node.attribute if a.type == a.GRAPH}
        if all(not name or name in known for name in node.output) and not (within and bodies):
            continue
        types: Sequence[TypeProto | None]
        if bodies:
            types, more = _of_bodies(node, bodies, opsets, known, within)
            found |= more
        else:
            types = _of_node(node, opsets, known)
        for name, kind in zip(node.output, types, strict=False):
            if not name or kind is None or name in known:
                continue
            known[name], found = kind, True
            value = outputs.get(name) or graph.value_info.add(name=name)
            if value.type.HasField("tensor_type") and kind.HasField("tensor_type"):
                value.type.tensor_type.elem_type = kind.tensor_type.elem_type  # its shape may be declared
            else:
                value.type.CopyFrom(kind)
    return found


def _of_node(node: NodeProto, opsets: Mapping[str, int], known: Mapping[str, TypeProto]) -> list[TypeProto | None]:
    """The types of the results of a node without bodies, None where one does not follow."""
    given = [known.get(name) for name in node.input]
    domain = "" if node.domain == "ai.onnx" else node.domain
    kinds = element_types(
        node.op_type,
        domain,
        opsets.get(domain),
        [0 if kind is None else element_type(kind) for kind in given],
        {a.name: attribute_value(a) for a in node.attribute if not a.ref_attr_name},
        len(node.output),
    )
    return [_boxed(node.op_type, kind, given[0] if given else None) if kind else None for kind in kinds]


def _boxed(op_type: str, kind: int, first: TypeProto | None) -> TypeProto:
    """The type of a result with elements of type `kind`: a tensor, or a container."""
    tensor = helper.make_tensor_type_proto(kind, None)
    if op_type in traits.SEQUENCES:
        return helper.make_sequence_type_proto(tensor)
    if first is None:
        return tensor
    if op_type == "Optional":
        return helper.make_optional_type_proto(_shapeless(first))
    if op_type == "OptionalGetElement":
        return _shapeless(unwrapped(first))
    return _shapeless(first) if is_container(first) and op_type not in traits.CONTAINERS else tensor


def _of_bodies(
    node: NodeProto, bodies: Mapping[str, GraphProto], opsets: Mapping[str, int], known: Types, within: bool
) -> tuple[list[TypeProto | None], bool]:
    """The types of the results of If, Loop, Scan or SequenceMap; whether something was found in their bodies."""
    given = [known.get(name) for name in node.input]
    states: Sequence[TypeProto | None] = ()
    if node.op_type == "Loop":
        states = given[2:]
        given = [_tensor(TensorProto.INT64), _tensor(TensorProto.BOOL), *states]
    elif node.op_type == "Scan":
        count = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        states = given[: len(given) - count]
    elif node.op_type == "SequenceMap":
        given = [None if kind is None else held_by(kind) for kind in given]
    found, results = False, []
    for body in bodies.values():
        inner: Types = ChainMap({}, known)
        for formal, kind in zip(body.input, given, strict=False):
            if kind is not None and element_type(kind):
                inner[formal.name] = _shapeless(kind)
        found |= _add(body, opsets, inner, within)
        results.append([inner.get(value.name) for value in body.output])
    if node.op_type == "Loop":
        results = [one[1:] for one in results]
    types = [None if kind is None else _shapeless(kind) for kind in map(_first, zip(*results, strict=False))]
    for k, state in enumerate(states):
        if k < len(types) and types[k] is None and state is not None:
            types[k] = _shapeless(state)
    if node.op_type == "SequenceMap":
        return [None if kind is None else helper.make_sequence_type_proto(kind) for kind in types], found
    return types, found


def _first(kinds: Iterable[TypeProto | None]) -> TypeProto | None:
    return next((kind for kind in kinds if kind is not None), None)


def _tensor(kind: int) -> TypeProto:
    return helper.make_tensor_type_proto(kind, None)


def _shapeless(kind: TypeProto) -> TypeProto:
    """The type without the shape of the tensor, or of the tensors in the container."""
    made = TypeProto()
    made.CopyFrom(kind)
    held_by(made).tensor_type.ClearField("shape")
    return made
