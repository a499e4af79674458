"""The bodies of a model's functions in the place of their calls."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx.inliner
from onnx import FunctionProto, ModelProto, NodeProto

from refgrad.errors import InvalidModelError
from refgrad.protos import forget_domain, graphs, subgraphs, versions_of

INLINED = "refgrad.inlined"  # the domain of function bodies on their way into a graph


def inline_functions(model: ModelProto) -> ModelProto:
    """`model` with the bodies in the place of their calls; its functions and calls are changed on the way.

    The inliner forgets the default values of a function's attributes, what a function imports and the model does not, and
    passes over a function of another opset.

    :raises InvalidModelError: an operator of a function's body means something else in the opset of the model.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    for node in (*nodes, *(node for function in model.functions for node in _nodes(function))):
        called = functions.get((node.domain, node.op_type, node.overload))
        if called is not None:
            given = {a.name for a in node.attribute}
            node.attribute.extend(a for a in called.attribute_proto if a.name not in given)
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
    inlined: ModelProto = onnx.inliner.inline_local_functions(model)
    forget_domain(inlined, INLINED)
    return inlined


def _nodes(function: FunctionProto) -> Iterator[NodeProto]:
    """The nodes of a function's body and of the subgraphs in it."""
    for node in function.node:
        yield node
        for within in (g for attribute in node.attribute for sub in subgraphs(attribute) for g in graphs(sub)):
            yield from within.node


def _check_opset(function: FunctionProto, domain: str, version: int, others: int) -> None:
    """Refuse a function whose body means something else in the version of a domain that the model imports."""
    for node in _nodes(function):
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
