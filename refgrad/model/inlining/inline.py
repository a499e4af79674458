"""Inlining: a call of a function becomes the nodes of its body."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, helper

from refgrad.errors import InvalidModelError
from refgrad.model import native
from refgrad.model.checks.arity import refuse_mismatch
from refgrad.model.checks.recursion import refuse_growth, refuse_recursion
from refgrad.protos.traverse import every_node, forget_domain, fresh, names_of, nested, subgraphs, versions_of

INLINED = "refgrad.inlined"  # the domain of function bodies on their way into a graph


def inline_functions(model: ModelProto, only: Sequence[tuple[str, str]] | None = None) -> ModelProto:
    """`model` with the body of each function in place of its calls. The functions and calls of `model` itself are changed, too.

    The inliner forgets the default values of a function's attributes, what a function imports and the model does not, and
    passes over a function of another opset.

    :param only: domain and name of the functions to inline, in the graph and in the bodies of those that stay.
    :raises InvalidModelError: a function that calls itself, a call that does not fit its function, or an operator in the body
        of one that means something else in the opset of the model.
    """
    refuse_recursion(model.functions)
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    for node in every_node(model):
        called = functions.get((node.domain, node.op_type, node.overload))
        if called is not None:
            refuse_mismatch(node, called, functions)
            given = {a.name for a in node.attribute}
            node.attribute.extend(a for a in called.attribute_proto if a.name not in given)
    refuse_growth(model)
    for function in model.functions:
        name_results(function)
    versions = versions_of(model)
    for function in model.functions:
        for imported in function.opset_import:
            domain = "" if imported.domain == "ai.onnx" else imported.domain
            if domain not in versions:
                versions[domain] = imported.version
                model.opset_import.append(imported)
            elif imported.version != versions[domain]:
                _check_opset(function, domain, imported.version, versions[domain])
                imported.version = versions[domain]
        for value in function.value_info:  # a dimension's name holds within one call
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.Clear()
    inlined = native.inline_functions(model, only)
    forget_domain(inlined, INLINED)
    return inlined


def name_results(function: FunctionProto) -> None:
    """Let a node make each output of a function, and of each body in it, under a unique name.

    The inliner renames an output that is an input or an initializer, and one of two outputs with the same value.
    """
    taken: set[str] = set()

    def result(body: FunctionProto | GraphProto, made: set[str], value: str) -> str:
        if value in made:
            made.remove(value)
            return value
        if not taken:
            taken.update(names_of(GraphProto(node=function.node)), function.input, function.output)
        name = fresh(f"{value}_out", taken)
        body.node.append(helper.make_node("Identity", [value], [name], name=name))
        return name

    bodies = [g for node in nested(function.node) for attribute in node.attribute for g in subgraphs(attribute)]
    made = {name for node in function.node for name in node.output}
    known = made | set(function.input)  # an optional output need not be computed
    function.output[:] = [result(function, made, name) if name in known else name for name in function.output]
    for graph in bodies:
        made = {name for node in graph.node for name in node.output}
        for value in graph.output:
            value.name = result(graph, made, value.name)


def _check_opset(function: FunctionProto, domain: str, version: int, others: int) -> None:
    """Refuse a function whose body means something else in the version of a domain that the model imports."""
    for node in nested(function.node):
        if ("" if node.domain == "ai.onnx" else node.domain) != domain:
            continue
        if not all(onnx.defs.has(node.op_type, v, domain) for v in (version, others)):
            continue  # whoever reads the node says so
        written, read = (onnx.defs.get_schema(node.op_type, v, domain) for v in (version, others))
        if any(
            n not in read.attributes or read.attributes[n].default_value != attribute.default_value
            for n, attribute in written.attributes.items()
        ):
            raise InvalidModelError(
                f"Function {function.name!r} is written in opset {version} of {domain or 'ai.onnx'!r}, the model in "
                f"{others}, where {node.op_type} has other attributes. Convert one of them to the opset of the other."
            )
