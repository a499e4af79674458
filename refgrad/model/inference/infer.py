"""Shape inference: what onnx infers, where it has to be helped."""

from __future__ import annotations

from collections.abc import Collection, Set
from contextlib import suppress
from typing import NamedTuple

from onnx import GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from refgrad.errors import InvalidModelError
from refgrad.model import native
from refgrad.model.inference.propagation import SHAPED, ContradictionError, infer_shapes
from refgrad.model.inlining.defined import WRITTEN_WITH, call_functions
from refgrad.notices import notice
from refgrad.protos.traverse import every_node, graphs, import_onnx, op_types, subgraphs
from refgrad.protos.types import UNNAMED, Shape, Type, dimension, held_by, is_container, type_of, unname
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.signatures import SIGNATURES

_CUT = "/made"  # what is added to the name of a sequence where a node makes it, for inference
_RANKLESS = "refgrad.rankless"  # the name of a shape of unknown size, for inference


class CorrectedType(NamedTuple):
    """The type of a result that a model declares with another shape than inference finds."""

    declared: TypeProto
    inferred: TypeProto


def infer(model: ModelProto, corrections: dict[str, CorrectedType] | None = None) -> GraphProto:
    """The graph with inferred types and shapes. If the model declares another shape of a result, the inferred shape is used.

    :param corrections: these results are added to it, by name, also the results in bodies.
    """
    try:
        return _infer(model, trusting=False)
    except ContradictionError:
        bare, true = ModelProto(), ModelProto()
        bare.CopyFrom(model)
        true.CopyFrom(model)
        for value in (v for graph in graphs(bare.graph) for v in (*graph.value_info, *graph.output)):
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
        try:
            found = _infer(bare, trusting=False)
        except ContradictionError:  # it is not in what is declared
            return _infer(model, trusting=True)
        _take(true.graph, found, {} if corrections is None else corrections)
        with suppress(ContradictionError):
            return _infer(true, trusting=False)
        notice(  # no inference says which of them is wrong
            "The shapes that the model declares of its results contradict each other: none of them is used. Correct them, or "
            "leave them out."
        )
        return _infer(bare, trusting=True)


def _take(graph: GraphProto, inferred: GraphProto, corrections: dict[str, CorrectedType]) -> None:
    """Replace the declared shapes of results, in `graph` and its bodies, that contradict the inferred ones."""
    known = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    for node in graph.node:
        if node.op_type == "Attention":  # onnx is wrong about its scores
            for name in node.output:
                known.pop(name, None)
    for value in (*graph.value_info, *graph.output):
        (_, declared), (_, found) = type_of(value), type_of(known.get(value.name, value))
        if declared is None or found is None or _agree(declared, found):
            continue
        before = TypeProto()
        before.CopyFrom(value.type)
        value.type.tensor_type.shape.CopyFrom(known[value.name].type.tensor_type.shape)
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(UNNAMED):
                dim.Clear()
        corrections[value.name] = CorrectedType(before, value.type)
    twins = {name: node for node in inferred.node for name in node.output}
    for node in graph.node:
        for attribute in node.attribute:
            twin = twins.get(node.output[0]) if attribute.type == attribute.GRAPH and node.output else None
            for other in twin.attribute if twin is not None else ():
                if other.name == attribute.name:
                    _take(attribute.g, other.g, corrections)


def _agree(declared: Shape, found: Shape) -> bool:
    """True if one tensor may have both shapes."""
    if len(declared) != len(found):
        return False
    return all(a == b for a, b in zip(declared, found, strict=True) if isinstance(a, int) and isinstance(b, int))


def _infer(model: ModelProto, trusting: bool) -> GraphProto:
    """The types and shapes that onnx infers, with help where it fails; `trusting` is as for `infer_shapes`.

    An input's dimension without a name gets one first: two values whose shapes were inferred from it are then known to agree.
    """
    anonymous = ModelProto()
    anonymous.CopyFrom(model)
    for value in anonymous.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dimension(dim) is None:
                dim.dim_param = f"{UNNAMED}{value.name}_{axis}"
    for value in (*anonymous.graph.input, *anonymous.graph.output, *anonymous.graph.value_info):
        if is_container(value.type):
            value.type.CopyFrom(unname(value.type))  # the elements may differ in the size
    used, _ = op_types(anonymous.graph)
    for graph in graphs(anonymous.graph) if "STFT" in used else ():
        for node in graph.node:  # where the attribute is absent onnx infers the shape of the two-sided transform
            if (node.domain, node.op_type) == ("", "STFT") and all(a.name != "onesided" for a in node.attribute):
                node.attribute.append(helper.make_attribute("onesided", 1))
    for graph in graphs(anonymous.graph) if "GroupNormalization" in used else ():
        for node in graph.node:  # its body depends on types, and onnx infers nothing through such a body
            if node.op_type == "GroupNormalization" and node.domain in ("", "ai.onnx"):
                node.op_type = "Identity"
                del node.input[1:], node.attribute[:]
    typed = not used.isdisjoint(op_type for _, op_type in SIGNATURES) and _type_by_signatures(anonymous)
    shaped = typed or not used.isdisjoint(SHAPED)
    try:
        inferred = _infer_through_bodies(anonymous, shaped, trusting)
        if typed:
            _forget_inputs(inferred, (_RANKLESS,))
        cut = _cut_scores(anonymous.graph, inferred) if "Attention" in used else set()
        if cut:
            inferred = _infer_through_bodies(anonymous, shaped, trusting)
        for looped in (
            (True, False) if _containers(inferred) else ()
        ):  # what a Loop makes first: the others follow from it
            if found := _cut_sequences(anonymous.graph, inferred, looped):
                inferred = _infer_through_bodies(anonymous, shaped, trusting)
                cut |= found
        return _joined_again(inferred, cut) if cut else inferred
    except native.InferenceError as error:
        raise InvalidModelError(f"Shape inference refuses the model: {error}") from error


def _joined_again(graph: GraphProto, cut: Set[str]) -> GraphProto:
    """The graph with the sequences in `cut` where nodes make them."""
    for node in graph.node:
        node.output[:] = [name.removesuffix(_CUT) for name in node.output]
    values = [value for value in graph.value_info if not value.name.endswith(_CUT)]
    values += [value for value in graph.input if value.name in cut]
    del graph.value_info[:]
    graph.value_info.extend(values)
    _forget_inputs(graph, cut)
    return graph


def _forget_inputs(graph: GraphProto, names: Collection[str]) -> None:
    inputs = [value for value in graph.input if value.name not in names]
    del graph.input[:]
    graph.input.extend(inputs)


def _type_by_signatures(model: ModelProto) -> bool:
    """Make what operators without a schema give a Reshape of the input that has its type, in place; whether there are some.

    The shape to which it is reshaped has an unknown size, so onnx infers the element type and nothing more.
    """
    if not any((node.domain, node.op_type) in SIGNATURES for node in every_node(model)):
        return False
    for graph in graphs(model.graph):
        declared = {v.name for v in (*graph.value_info, *graph.output) if v.type.WhichOneof("value")}
        nodes = []
        for node in graph.node:
            nodes.append(node)
            signature = SIGNATURES.get((node.domain, node.op_type))
            if signature is None:
                continue
            like = next((node.input[k] for k in signature.floats if k < len(node.input) and node.input[k]), "")
            for kind, name in zip(signature.types, node.output, strict=False):
                if like and name and name not in declared:
                    made = f"{name}{_CUT}" if kind else name
                    nodes.append(helper.make_node("Reshape", [like, _RANKLESS], [made]))
                    if kind:
                        nodes.append(helper.make_node("Cast", [made], [name], to=kind))
            node.output[:] = [name if name in declared else "" for name in node.output]
        nodes = [node for node in nodes if any(node.output)]
        del graph.node[:]
        graph.node.extend(nodes)
    import_onnx(model)
    model.graph.input.append(helper.make_tensor_value_info(_RANKLESS, TensorProto.INT64, [None]))
    return True


def _containers(graph: GraphProto) -> dict[str, TypeProto]:
    return {v.name: v.type for v in (*graph.value_info, *graph.output) if is_container(v.type)}


def _cut_scores(graph: GraphProto, inferred: GraphProto) -> set[str]:
    """Make inputs of the scores that an Attention returns where onnx takes them for scalars; their names.

    It does so where it does not know the rank of the queries. Their true rank, 4, would contradict its checker.
    """
    known = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    found = set()
    for node in graph.node:
        name = node.output[3] if node.op_type == "Attention" and len(node.output) > 3 else ""
        kind, shape = type_of(known.get(name, ValueInfoProto()))
        if name and shape == () and node.domain in ("", "ai.onnx"):
            found.add(name)
            node.output[3] = f"{name}{_CUT}"
            graph.input.append(helper.make_tensor_value_info(name, kind, None))
    return found


def _cut_sequences(graph: GraphProto, inferred: GraphProto, looped: bool) -> set[str]:
    """Make inputs of the sequences that nodes make, with what is known of all elements; their names.

    onnx gives all elements one name for a size that it does not know, and those that Loop adds the shape of the first ones.
    """
    kinds = _containers(inferred)
    found = set()
    for node in graph.node if kinds else ():
        inner = (g for attribute in node.attribute for sub in subgraphs(attribute) for g in graphs(sub))
        if looped and node.op_type != "Loop" and all(n.op_type != "Loop" for g in inner for n in g.node):
            continue
        for position, name in enumerate(node.output):
            if name not in kinds or name.endswith(_CUT):
                continue
            found.add(name)
            node.output[position] = f"{name}{_CUT}"
            value = graph.input.add(name=name, type=unname(kinds[name]))
            if looped:
                held_by(value.type).tensor_type.ClearField("shape")
    return found


def _infer_through_bodies(model: ModelProto, shaped: bool, trusting: bool) -> GraphProto:
    """Operators that only we know are inferred through their bodies, some of which need to know what the others give."""
    ours = {domain for domain, _ in DEFINITIONS}.intersection(o.domain for o in model.opset_import)
    waiting = ours and any((node.domain, node.op_type) in DEFINITIONS for node in model.graph.node)
    known, before = ranks(model.graph) if waiting else {}, -1
    while True:
        called, left = model, 0
        if waiting:
            called = ModelProto()
            called.CopyFrom(model)
            left = call_functions(called, known, WRITTEN_WITH)
        inferred = infer_shapes(called, shaped, trusting)
        if left in (0, before):
            return inferred
        before, known = left, ranks(inferred)


def ranks(graph: GraphProto) -> dict[str, Type]:
    """The element types and ranks of the values that a graph declares, and of its initializers."""
    found: dict[str, Type] = {tensor.name: (tensor.data_type, len(tensor.dims)) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind, shape = type_of(value)
        found[value.name] = kind, None if shape is None else len(shape)
    return found
