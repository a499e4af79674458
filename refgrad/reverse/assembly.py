"""The result of a sweep as a model: pruned, named, with the edits of forward nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from onnx import GraphProto, ModelProto, TypeProto, ValueInfoProto, helper

from refgrad.builder.nodes import COTANGENT_OF, NodeWriter, needed_emitted
from refgrad.errors import InvalidModelError
from refgrad.model.graph import Graph, needed_nodes
from refgrad.model.implied_sizes import put_way
from refgrad.model.reading import is_large
from refgrad.protos.documents import parse_json, typed
from refgrad.protos.traverse import every_node, import_domain, refill, rename_repeats
from refgrad.protos.types import Shape, adjoint_of, is_container, type_of, unname
from refgrad.reverse.edits import edited
from refgrad.reverse.namespaces import Namespaces
from refgrad.reverse.recompute import Repetition
from refgrad.reverse.sweep import SweepResults

IR_VERSION = 10  # the first with metadata_props on nodes, and the last that onnxruntime-training 1.19.2 reads


def assemble(
    swept: SweepResults, chosen: Sequence[frozenset[str]], keep_outputs: bool, weights: str = "overridable"
) -> ModelProto:
    """The gradient model: the nodes that an output needs, and nothing else; those in `chosen` are computed again.

    :param weights: whether the initializers that are differentiated are "overridable" inputs, "constants" or "inputs".
    """
    graph, op, sweep = swept.path.graph, swept.op, swept.sweep
    live = set(swept.adjoints.values())
    kept = list(graph.outputs.values()) if keep_outputs else []
    live.update(value.name for value in kept)
    results = set(live)
    backward = needed_emitted(op.emission.nodes, live)
    nodes = edited(graph.nodes, op.edits, live)
    for value, name in op.adjoint_of.items():
        sweep.name_value(value, f"{name}_grad", name)
    spaces = Namespaces(graph.nodes)
    again = Repetition(nodes, op, chosen, backward, live, results, sweep.names, spaces.of_backward)
    final = ModelProto(
        ir_version=max(graph.source.ir_version, IR_VERSION), producer_name="refgrad", producer_version=_version()
    )
    final.opset_import.extend(graph.model.opset_import)
    if "" not in graph.opsets:
        final.opset_import.append(helper.make_opsetid("", graph.opset))
    target = final.graph
    target.name = f"{graph.model.graph.name}_grad"
    forward = [node.proto for node in needed_nodes(nodes, live)]
    target.node.extend(forward)
    spaces.put_forward(target.node)
    names = {**sweep.names, **again.names} if again.names else sweep.names
    primals = _primals(swept)
    writer = NodeWriter(target, names, spaces.of_backward)
    for position, emitted in enumerate(backward):
        if chosen:
            target.node.extend(again.before(position))
        writer.add(emitted)
    _declare_adjoints(writer, swept, live, primals)
    final.functions.extend(graph.functions.called_by(target.node))
    if chosen or swept.path.routes:
        domains = {node.domain for node in every_node(final)}
    else:
        domains = {node.domain for node in forward} | {emitted.domain for emitted in backward if emitted.domain}
    for domain in sorted(domains - {"", *(one.domain for one in final.opset_import)}):
        import_domain(final, domain)
    _add_values(final, swept, live, kept, again, weights, primals)
    if any(
        node.key in graph.control_flow for node in graph.nodes
    ):  # bodies may share names: of the model, or of both passes
        rename_repeats(target)
        for function in final.functions:
            body = GraphProto(node=function.node)
            rename_repeats(body, function.input)
            refill(function.node, body.node)
    gradients = {name: sweep.names[value] for name, value in swept.adjoints.items()}
    note(final, graph.source, gradients=gradients, cotangents=swept.cotangents)
    put_way(final, _way_to_outputs(graph, swept.cotangents, target))
    return final


def _way_to_outputs(graph: Graph, outputs: Iterable[str], target: GraphProto) -> GraphProto:
    """The forward nodes that the gradient does not need, and that tell the sizes of outputs; see `model/implied_sizes.py`.

    Empty if the outputs have the symbols of inputs alone.
    """
    symbols = {size for value in graph.inputs.values() for size in type_of(value)[1] or ()}
    open_ones = [
        n for n in outputs if any(not isinstance(d, int) and d not in symbols for d in graph.shapes.get(n, ()))
    ]
    way = GraphProto(name="sizes")
    known = {
        *graph.inputs,
        *(t.name for t in target.initializer),
        *(name for node in target.node for name in node.output),
    }
    wanted = {*open_ones} - known
    nodes = []
    for node in reversed(graph.nodes) if wanted else ():
        if not wanted.isdisjoint(node.outputs):
            nodes.append(node.proto)
            wanted.difference_update(node.outputs)
            wanted.update(name for name in node.reads if name and name not in known)
    way.node.extend(reversed(nodes))
    for name in sorted(wanted):
        if name not in graph.initializers:
            return GraphProto()
        tensor = graph.initializers[name]
        if is_large(tensor):
            way.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
        else:
            way.initializer.append(tensor)
    return way


def _add_values(
    final: ModelProto,
    swept: SweepResults,
    live: set[str],
    kept: Sequence[Any],
    again: Repetition,
    weights: str,
    primals: Mapping[str, Sequence[str]],
) -> None:
    """Add inputs, outputs, initializers, and the types of values within."""
    graph, op, names, target = swept.path.graph, swept.op, swept.sweep.names, final.graph
    typed_as = _Types(graph)
    constants = graph.initializers if weights == "constants" else ()
    fed = swept.adjoints.keys() if weights == "inputs" else ()
    target.input.extend([value for name, value in graph.inputs.items() if name not in constants])
    for name in swept.adjoints:
        if name not in graph.inputs and name not in constants:
            target.input.add(name=name, type=typed_as(name))
    for output, name in swept.cotangents.items():
        _say_primals(target.input.add(name=name, type=typed_as(output)), primals.get(name, (output,)))
    for name, value in swept.adjoints.items():
        _say_primals(target.output.add(name=names[value], type=typed_as(name)), primals[value])
    target.output.extend(kept)
    live.update(swept.adjoints)
    live.update(graph.inputs)
    target.initializer.extend([t for name, t in graph.initializers.items() if name in live and name not in fed])
    target.initializer.extend([tensor for name, tensor in op.emission.constants.items() if name in live])
    target.sparse_initializer.extend(graph.model.graph.sparse_initializer)
    target.value_info.extend([value for name, value in graph.node_results.items() if name in live])
    target.value_info.extend(again.types)
    elsewhere = {*graph.inputs, *graph.initializers, *(value.name for value in kept)}
    target.value_info.extend(v for name, v in graph.outputs.items() if name in live and name not in elsewhere)
    read = live.difference(swept.adjoints.values())
    of = {names.get(value, value): primals[value] for value in op.declared if value in primals}
    for declared in op.declarations(read, names):
        if declared.name in of:
            _say_primals(declared, of[declared.name])
        target.value_info.append(declared)
    if op.values.containers:
        for declared in (*target.input, *target.output, *target.value_info):
            if is_container(declared.type):  # ONNX Runtime takes elements of one name for equally large
                declared.type.CopyFrom(unname(declared.type))


def _declare_adjoints(
    writer: NodeWriter, swept: SweepResults, live: set[str], primals: Mapping[str, Sequence[str]]
) -> None:
    """Declare the cotangents of values within, where they are read: each once, as the last of its primals is declared."""
    op, names, graph = swept.op, swept.sweep.names, swept.path.graph
    elsewhere = live.difference(swept.adjoints.values(), op.declared, swept.cotangents.values())
    others = op.values.adjoint_types.keys() | graph.containers.keys()
    for primal, adjoint in swept.sweep.totals.items():
        declared = graph.node_results.get(primal)
        if declared is not None and adjoint in elsewhere and primal not in others:
            writer.declare(names.get(adjoint, adjoint), declared, primals[adjoint])
            elsewhere.discard(adjoint)


def _primals(swept: SweepResults) -> dict[str, list[str]]:
    """The primals that each cotangent is the cotangent of: several where an operator passes it on unchanged, such as Add."""
    totals = swept.sweep.totals
    primals = {adjoint: [primal] for primal, adjoint in totals.items()}
    if len(primals) < len(totals):
        primals = {adjoint: [] for adjoint in primals}
        for primal, adjoint in totals.items():
            primals[adjoint].append(primal)
    for primal, adjoint in swept.adjoints.items():
        if primal not in primals.setdefault(adjoint, []):
            primals[adjoint].append(primal)
    return primals


@cache
def _version() -> str:
    """The version of refgrad, "" where it is not installed."""
    try:
        return metadata.version("refgrad")
    except metadata.PackageNotFoundError:
        return ""


class _Types:
    """The types and declared shapes of inputs, outputs and initializers; of an optional, what it holds."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[int, Shape], TypeProto] = {}

    def __call__(self, name: str) -> TypeProto:
        declared = self._graph.inputs.get(name) or self._graph.outputs.get(name)
        if declared is not None:
            adjoint = adjoint_of(declared.type)
            unknown = adjoint.HasField("tensor_type") and not adjoint.tensor_type.HasField("shape")
            return adjoint_of(self._graph.containers.get(name, declared.type)) if unknown else adjoint
        kind = self._graph.types[name], self._graph.shapes[name]
        if kind not in self._made:
            self._made[kind] = helper.make_tensor_type_proto(*kind)
        return self._made[kind]


def names_in(gradient: ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """The cotangent of each output and the gradient of each input, as `gradient` wrote them down; of another model none."""
    return noted(gradient, "cotangents", dict[str, str]), noted(gradient, "gradients", dict[str, str])


def note(model: ModelProto, source: ModelProto, **entries: Mapping[str, Any] | Sequence[str]) -> None:
    """Give `model` the metadata of `source`, but `entries`, as JSON, in the place of what refgrad wrote there."""
    kept = [entry for entry in source.metadata_props if not entry.key.startswith("refgrad.")]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, names in entries.items():
        model.metadata_props.add(key=f"refgrad.{key}", value=json.dumps(names))


def _say_primals(value: ValueInfoProto, primals: Sequence[str]) -> None:
    """Write into the metadata of a value that it is the cotangent of these."""
    value.metadata_props.add(key=COTANGENT_OF, value=json.dumps(primals))


def noted(model: ModelProto, key: str, kind: Any = dict[str, Any]) -> Any:
    """The entry of type `kind` that `note` wrote down under `key`; an empty object for another model.

    :raises InvalidModelError: the metadata of the model have another kind of entry there.
    """
    known = {entry.key: entry.value for entry in model.metadata_props}
    try:
        return typed(parse_json(known.get(f"refgrad.{key}", "{}")), kind, "it")
    except ValueError as error:
        raise InvalidModelError(
            f"The metadata refgrad.{key} of the model cannot be read: {error}. Remove it, or make the model again."
        ) from error


def primals_in(value: ValueInfoProto) -> list[str]:
    """The values that a declared value is the cotangent of, as `gradient` wrote them down; of another value none."""
    for entry in value.metadata_props:
        if entry.key == COTANGENT_OF:
            try:
                return list(typed(parse_json(entry.value), tuple[str, ...], "it"))
            except ValueError:
                return []
    return []
