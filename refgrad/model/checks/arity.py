"""Refusals of nodes that do not fit their bodies or functions. onnx's checker does not compare the two."""

from __future__ import annotations

from collections.abc import Mapping, Set

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto
from onnx.defs import OpSchema

from refgrad.errors import InvalidModelError
from refgrad.protos.traverse import every_node, nested, versions_of

_SETTINGS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")


def refuse_mismatches(model: ModelProto, used: Set[str]) -> None:
    """Refuse a node with more or fewer inputs or outputs than the body or the function that it runs, or with a gap in a list.

    A function that does not compute one of its outputs is refused, too.

    :param used: the operators of the model's graphs.
    :raises InvalidModelError: a node or a function does not fit.
    """
    for function in model.functions:
        made = {*function.input, *(name for node in function.node for name in node.output)}
        if lost := [name for name in function.output if name not in made]:
            raise InvalidModelError(
                f"Function {function.name!r} of domain {function.domain!r} returns {lost[0]!r}, which no node of it computes. "
                "Export the model again."
            )
    if not model.functions and used.isdisjoint(ARITY_CHECKS):
        return
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    opset = versions_of(model).get("", 1)
    for node in every_node(model):
        called = functions.get((node.domain, node.op_type, node.overload))
        if called is not None:
            refuse_mismatch(node, called, functions)
        else:
            refuse_mismatch_of_body(node, opset)


def refuse_mismatch_of_body(node: NodeProto, opset: int) -> None:
    """Refuse a node with more or fewer inputs or outputs than its body, or with a gap in a list.

    :param opset: the version of ai.onnx that the model imports.
    :raises InvalidModelError: the node is refused.
    """
    if node.domain in ("", "ai.onnx") and node.op_type in ARITY_CHECKS:
        if node.op_type == "Scan" and opset < 9:  # the first version of Scan has one input more
            _scan(node, 1)
        else:
            ARITY_CHECKS[node.op_type](node)


Functions = Mapping[tuple[str, str, str], FunctionProto]  # by domain, name and overload


def refuse_mismatch(node: NodeProto, called: FunctionProto, functions: Functions) -> None:
    """Refuse a call with more inputs or outputs than the function has, or without an input that it needs.

    :param functions: the functions of the model, none of which calls itself.
    :raises InvalidModelError: the call does not fit.
    """
    _check_count(node, "inputs", len(node.input), at_most=len(called.input))
    _check_count(node, "outputs", len(node.output), at_most=len(called.output))
    if node.attribute and (called.attribute or called.attribute_proto):
        _refuse_other_types(node, called)
    for name in _absent(node, called, {""}):
        if reader := _reader(called, name, functions, set()):
            raise _mismatch(node, f"leaves out the input {name!r}, which {reader} within needs. Give it")


def _absent(node: NodeProto, called: FunctionProto, lost: Set[str]) -> set[str]:
    """The inputs of a function that a call gives one of the values in `lost`, or, if these have "", none."""
    given = [*node.input, *[""] * (len(called.input) - len(node.input))]
    return {name for name, value in zip(called.input, given, strict=False) if value in lost}


def _reader(called: FunctionProto, absent: str, functions: Functions, seen: set[tuple[str, str, str, str]]) -> str:
    """The operator in a function, or in a function that it calls, that needs the input `absent`; "" for none."""
    place = called.domain, called.name, called.overload, absent
    if place in seen:
        return ""
    seen.add(place)
    for inner in nested(called.node):
        body = functions.get((inner.domain, inner.op_type, inner.overload))
        if body is not None:
            for name in _absent(inner, body, {absent}):
                if reader := _reader(body, name, functions, seen):
                    return reader
        elif any(name == absent and _needs(inner, k) for k, name in enumerate(inner.input)):
            return str(inner.op_type)
    return ""


def _refuse_other_types(node: NodeProto, called: FunctionProto) -> None:
    """Refuse attributes of another type than the attributes within the function that refer to them."""
    given = {a.name: a.type for a in node.attribute if not a.ref_attr_name}
    for inner in nested(called.node):
        for attribute in inner.attribute:
            kind = given.get(attribute.ref_attr_name)
            if kind is not None and attribute.type and kind != attribute.type:
                was, due = (AttributeProto.AttributeType.Name(k).lower() for k in (kind, attribute.type))
                raise _mismatch(
                    node,
                    f"gives {attribute.ref_attr_name!r} as {was}, and {inner.op_type} within the function takes it as {due}. "
                    "Give it as that",
                )


def _needs(node: NodeProto, position: int) -> bool:
    """True if the schema of the operator requires the input at `position`; False where onnx has no schema."""
    if not onnx.defs.has(node.op_type, node.domain):
        return False
    inputs = onnx.defs.get_schema(node.op_type, node.domain).inputs
    return inputs[min(position, len(inputs) - 1)].option != OpSchema.FormalParameterOption.Optional


def _graph(node: NodeProto, name: str) -> GraphProto:
    for attribute in node.attribute:
        if attribute.name == name and attribute.HasField("g"):
            return attribute.g
    raise _mismatch(node, f"has no graph {name}. Export the model again")


def _if(node: NodeProto) -> None:
    then, other = (len(_graph(node, name).output) for name in ("then_branch", "else_branch"))
    if then != other:
        raise _mismatch(node, f"has branches that return {then} and {other} values. Let both return as many")
    _check_count(node, "outputs", len(node.output), at_most=then)


def _loop(node: NodeProto) -> None:
    _any_number(node, 2)
    body, states = _graph(node, "body"), max(len(node.input) - 2, 0)
    _check_count(node, "inputs of the body", len(body.input), exactly=2 + states)
    _check_count(node, "outputs of the body", len(body.output), at_least=1 + states)
    _check_count(node, "outputs", len(node.output), at_most=len(body.output) - 1)


def _scan(node: NodeProto, first: int = 0) -> None:
    _any_number(node, first)
    body = _graph(node, "body")
    given = [attribute for attribute in node.attribute if not attribute.ref_attr_name]
    if not any(attribute.name == "num_scan_inputs" for attribute in given):
        return  # of a function, whose calls give it
    count = next(attribute.i for attribute in given if attribute.name == "num_scan_inputs")
    _check_count(node, "inputs", len(node.input), at_least=first + max(count, 1))
    _check_count(node, "inputs of the body", len(body.input), exactly=len(node.input) - first)
    states = len(node.input) - first - count
    _check_count(node, "outputs of the body", len(body.output), at_least=states)
    _check_count(node, "outputs", len(node.output), at_most=len(body.output))
    for attribute in given:
        if attribute.name in _SETTINGS and attribute.ints:
            size = count if "input" in attribute.name else len(body.output) - states
            _check_count(node, f"numbers in {attribute.name}", len(attribute.ints), exactly=size)


def _sequence_map(node: NodeProto) -> None:
    body = _graph(node, "body")
    _check_count(node, "inputs of the body", len(body.input), exactly=len(node.input))
    _check_count(node, "outputs", len(node.output), at_most=len(body.output))


def _any_number(node: NodeProto, first: int = 0) -> None:
    """The inputs from `first` on are as many as there are: none of them can be left out."""
    for k, name in enumerate(node.input):
        if k >= first and not name:
            raise _mismatch(node, f"has no name for its input {k}, which cannot be left out. Name it, or take it away")


# The operators that run a body, or take a list, each with the function that refuses a node with a wrong number of inputs or
# outputs, or with a gap in a list.
ARITY_CHECKS = {
    schema.name: _any_number
    for schema in onnx.defs.get_all_schemas()
    if not schema.domain and [formal.option for formal in schema.inputs] == [OpSchema.FormalParameterOption.Variadic]
} | {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}


def _check_count(
    node: NodeProto,
    what: str,
    count: int,
    *,
    exactly: int | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
) -> None:
    for due, wrong, word in (
        (exactly, count != exactly, ""),
        (at_least, at_least is not None and count < at_least, "at least "),
        (at_most, at_most is not None and count > at_most, "at most "),
    ):
        if due is not None and wrong:
            raise _mismatch(node, f"has {count} {what}; expected {word}{due}")


def _mismatch(node: NodeProto, why: str) -> InvalidModelError:
    name = node.name or next(filter(None, node.output), "")
    return InvalidModelError(f"Node {name!r} ({node.op_type}) {why}.")
