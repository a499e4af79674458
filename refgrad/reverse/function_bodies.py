"""The graph of a model with the function bodies of operators in the place of nodes that have no rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, helper

from refgrad.model import native
from refgrad.model.graph import Graph, Node, view
from refgrad.model.inlining.defined import factors_in_double, make_function
from refgrad.model.inlining.inline import INLINED, inline_functions
from refgrad.protos.traverse import import_domain
from refgrad.tables.definitions import DEFINITIONS, UnsupportedFormError
from refgrad.tables.registry import NO_DERIVATIVE, RULES
from refgrad.tables.schemas import find_schema


def expanded(graph: Graph, nodes: Iterable[Node]) -> tuple[Graph | None, dict[tuple[str, str], str]]:
    """The graph with the bodies of operators in the place of `nodes`, None where none has one; and why a body does not fit."""
    refusals: dict[tuple[str, str], str] = {}
    bodies: dict[str, FunctionProto] = {}
    for node in nodes:
        try:
            body = _body(graph, node)
        except UnsupportedFormError as error:
            refusals[node.key] = str(error)
            continue
        if body is not None:
            body.domain, body.name = INLINED, f"{node.op_type}_{len(bodies)}"
            bodies[node.name] = body
    if not bodies:
        return None, refusals
    model = ModelProto()
    model.CopyFrom(graph.model)
    for proto in model.graph.node:
        if proto.name in bodies:
            _call(proto, bodies[proto.name], graph.opsets)
    model.functions.extend(bodies.values())
    import_domain(model, INLINED)
    if "" not in graph.opsets:
        model.opset_import.append(helper.make_opsetid("", graph.opset))
    large, functions = graph.large, graph.functions
    return view(graph.source, inline_functions(model), large, functions, graph.outer, graph.captures), refusals


def _call(proto: NodeProto, body: FunctionProto, opsets: Mapping[str, int]) -> None:
    """Make a node a call of the body of its operator, which reads every attribute."""
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    schema = find_schema(proto.op_type, domain, opsets.get(domain, 1))
    attribute_names = {a.name for a in proto.attribute}
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    proto.attribute.extend(value for name, value in defaults.items() if name not in attribute_names)
    proto.domain, proto.op_type = body.domain, body.name


def _body(graph: Graph, node: Node) -> FunctionProto | None:
    """The function body of a node's operator, None where there is none that can be inlined.

    :raises UnsupportedFormError: an operator of ours has a body that does not cover the node.
    """
    opset = graph.opsets.get(node.domain, 1)
    if node.key in DEFINITIONS:
        if node.key in RULES and RULES[node.key].refused:
            return None  # the body would lose the derivative that the rule refuses
        ranks = {name: len(graph.shapes[name]) for name in node.inputs if name in graph.shapes}
        types = {name: (graph.types[name], ranks.get(name)) for name in node.inputs if name in graph.types}
        return make_function(
            node.proto,
            graph.opsets,
            types,
            node.op_type,
            graph.shapes,
            lambda name: None if name in graph.inputs else graph.constant(name),
        )
    if not onnx.defs.has(node.op_type, node.domain) or node.key in NO_DERIVATIVE:
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)  # whose stub lacks the function bodies
    body = FunctionProto()
    written = [version for version in schema.function_opset_versions if version <= graph.opset]
    if written:
        body.ParseFromString(schema.get_function_with_opset_version(max(written)))
    elif schema.has_context_dependent_function:
        declared = [
            helper.make_tensor_type_proto(graph.types[n], graph.shapes.get(n)) if n in graph.types else None
            for n in node.inputs
        ]
        body = native.function_of(schema, node.proto, declared, opset)
    else:
        return None
    versions = {o.domain: o.version for o in body.opset_import}
    if versions.get("", graph.opset) > graph.opset or len(node.inputs) > len(body.input):
        return None  # of a later opset, or for one operand of a variadic input only
    del body.opset_import[:]
    body.opset_import.append(helper.make_opsetid("", graph.opset))  # the inliner leaves another opset's body alone
    factors_in_double(body)
    return body
