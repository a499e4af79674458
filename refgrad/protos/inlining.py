"""Inlining: a call of a function becomes the nodes of its body."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnx.inliner
from onnx import FunctionProto, GraphProto, ModelProto, helper

from refgrad.errors import InvalidModelError, OptionError
from refgrad.protos.fitting import refuse_misfit
from refgrad.protos.walk import every_node, forget_domain, fresh, names_of, nested, subgraphs, versions_of

LIMIT = "REFGRAD_MAX_NODES"  # the environment variable that says how many nodes calls may become
_MOST = 250_000
_BYTES = 16 << 20  # that calls may become in any case
_GROWTH = 32  # times the size of the model that they may become
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
            refuse_misfit(node, called)
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
    inlined: ModelProto = (
        onnx.inliner.inline_local_functions(model)
        if only is None
        else onnx.inliner.inline_selected_functions(model, list(only))
    )
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


def refuse_growth(model: ModelProto) -> None:
    """Refuse a model whose calls, written out, would be more nodes than the limit, or much longer: each level may double them.

    :raises InvalidModelError: naming the function whose body is the largest, and the number of nodes.
    :raises OptionError: the environment variable is no number.
    """
    if not model.functions:
        return
    given = os.environ.get(LIMIT, str(_MOST))
    if not given.isdecimal():
        raise OptionError(f"The environment variable {LIMIT} is {given!r}, which is no number of nodes.")
    limit = int(given)
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    lengths: dict[tuple[str, str, str], int] = {}  # in bytes: names and texts become as many as the nodes
    for first in functions:
        pending = [first]
        while pending:
            called = list(_calls(functions[pending[-1]]))
            if left := [key for key in dict.fromkeys(called) if key in functions and key not in sizes]:
                pending += left
            else:
                key = pending.pop()
                sizes[key] = sum(sizes.get(one, 1) for one in called)
                lengths[key] = functions[key].ByteSize() + sum(lengths.get(one, 0) for one in called)
    calls = [(node.domain, node.op_type, node.overload) for node in nested(model.graph.node)]
    count, length = sum(sizes.get(key, 1) for key in calls), sum(lengths.get(key, 0) for key in calls)
    if count > limit:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidModelError(
            f"Written out, the calls of functions would be {count} nodes, {sizes[largest]} for each call of function "
            f"{'.'.join(filter(None, largest))!r}; at most {limit} are made. Call fewer, or set the environment variable "
            f"{LIMIT} to a larger number."
        )
    if length > _BYTES and length > _GROWTH * model.ByteSize():
        raise InvalidModelError(
            f"Written out, the calls of functions would be {length >> 20} MiB of nodes, {length // model.ByteSize()} times "
            "the model: it has long names or texts in functions that are called often. Shorten them."
        )


def refuse_recursion(functions: Iterable[FunctionProto]) -> None:
    """Refuse functions that call themselves, directly or through others.

    :raises InvalidModelError: naming the functions of the cycle in the order of their calls.
    """
    known = {(f.domain, f.name, f.overload): f for f in functions}
    left: set[tuple[str, str, str]] = set()
    for first in known:
        path = {first: _calls(known[first])}  # the functions that are being read, each called by the one before it
        while path and first not in left:
            last = next(reversed(path))
            called = next((key for key in path[last] if key in known and key not in left), None)
            if called is None:
                left.add(last)
                del path[last]
            elif called in path:
                keys = list(path)
                cycle = " -> ".join(".".join(filter(None, key)) for key in [*keys[keys.index(called) :], called])
                raise InvalidModelError(
                    f"A function of the model calls itself: {cycle}. ONNX has no recursion: write a Loop, or the calls "
                    "out."
                )
            else:
                path[called] = _calls(known[called])


def _calls(function: FunctionProto) -> Iterator[tuple[str, str, str]]:
    return ((node.domain, node.op_type, node.overload) for node in nested(function.node))


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
