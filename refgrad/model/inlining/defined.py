"""Operators that refgrad defines become calls of functions, which onnx knows how to infer and to inline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad import traits
from refgrad.builder.function import FunctionEmitter
from refgrad.builder.nodes import written
from refgrad.errors import BrokenRuleError, RefgradError
from refgrad.model.external import array_of
from refgrad.model.inlining.inline import INLINED
from refgrad.protos.domains import ASSUMED_OPSET, MICROSOFT
from refgrad.protos.traverse import attribute_value, import_domain, versions_of
from refgrad.protos.types import Shape, Type
from refgrad.tables.definitions import DEFINITIONS, UnsupportedFormError
from refgrad.tables.once import raised_at

WRITTEN_WITH = 18  # the version of ai.onnx that every body can be written with


def make_function(
    node: NodeProto,
    opsets: Mapping[str, int],
    types: Mapping[str, Type],
    name: str,
    shapes: Mapping[str, Shape] | None = None,
    constant: Callable[[str], np.ndarray | None] | None = None,
) -> FunctionProto | None:
    """The body of `node` as a function called `name`; None for an operator that refgrad does not define.

    :param opsets: the versions of the domains that the model imports.
    :param types: what is known of the node's inputs.
    :param shapes: their shapes, as far as they are known; the body refuses those that do not fit, and depends on no other.
    :param constant: gives an input that is a constant, else None.
    :raises UnsupportedFormError: the body does not cover the attributes or the inputs of `node`.
    """
    known = DEFINITIONS.get((node.domain, node.op_type))
    if known is None:
        return None
    given = {a.name: attribute_value(a) for a in node.attribute}
    if mismatch := known.mismatch(node):
        raise UnsupportedFormError(mismatch)
    body = FunctionEmitter(opsets.get("", ASSUMED_OPSET), node.op_type, node.name)
    count = len(node.input)
    formal = [f"in_{k}" for k in range(count)]
    actual: list[Any] = []
    for called, value in zip(formal, node.input, strict=True):
        actual.append(called if value else None)
        if value in types:
            body.types[called] = types[value]
        if shapes is not None and value in shapes:
            body.shapes[called] = shapes[value]
        if constant is not None and value and (array := constant(value)) is not None:
            body.arrays[called] = array
    if not known.signature.variadic:
        actual += [None] * (len(known.signature.inputs) - count)
    try:
        known.arguments(body, actual, {**known.rounded, **given})
        results = known.function(body, *actual, **{**known.rounded, **given})
    except (RefgradError, UnsupportedFormError, MemoryError):
        raise
    except Exception as error:
        raise BrokenRuleError(
            f"The body of node {node.name!r} ({node.op_type}) cannot be written, at {raised_at(error, known.function)}: "
            f"{type(error).__name__}: {error}. Look whether its attributes fit each other. If a runtime runs the model, the "
            "body is wrong: report it."
        ) from error
    results = results if isinstance(results, tuple) else (results,)
    outputs = []
    for k, value in enumerate(node.output):
        outputs.append(f"out_{k}")
        if not value:
            continue
        if k >= len(results) or results[k] is None:
            declared = known.schema.outputs[min(k, len(known.schema.outputs) - 1)]  # the last one may stand for several
            raise UnsupportedFormError(f"its output {declared.name} is not computed; leave it out")
        body.builder.append("Identity", [results[k]], [f"out_{k}"])
    nodes = _with_first_named(body, outputs, results[0])
    versions = {"": body.opset, MICROSOFT: 1, node.domain: opsets.get(node.domain, 1)}
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_function(INLINED, name, formal, outputs, nodes, imports)


def _with_first_named(body: FunctionEmitter, outputs: Sequence[str], result: str | None) -> list[NodeProto]:
    """The nodes; the first output, which has the type of the first input, gets its name without an Identity."""
    last = next((k for k, node in enumerate(body.nodes) if node.outputs[0] == outputs[0]), None)
    if last is None or result is None or all(result not in node.outputs for node in body.nodes):
        return written(body.nodes)
    return written(body.nodes[:last] + body.nodes[last + 1 :], {result: outputs[0]})


def call_functions(model: ModelProto, types: Mapping[str, Type], at_least: int = 1) -> int:
    """Make the nodes whose operators refgrad defines calls of their bodies, which `model` gets; how many are left.

    A node whose body does not cover its form, or not before more is known of its inputs, stays as it is.

    :param at_least: the functions import this version of ai.onnx if the model imports an older one.
    """
    opsets = versions_of(model)
    opsets[""] = max(opsets.get("", ASSUMED_OPSET), at_least)
    made = left = 0
    for node in model.graph.node:
        if (node.domain, node.op_type) in DEFINITIONS:
            try:
                function = make_function(node, opsets, types, f"{node.op_type}_{made}")
            except UnsupportedFormError:
                left += 1
                continue
            assert function is not None
            call(model, node, function)
            made += 1
    return left


def call(model: ModelProto, node: NodeProto, function: FunctionProto) -> None:
    """Make `node` a call of `function`, whose body has the node's attributes in it, and give `model` that function."""
    model.functions.append(function)
    import_domain(model, function.domain)
    node.domain, node.op_type = function.domain, function.name
    del node.attribute[:]


_ARITHMETIC = traits.ARITHMETIC | traits.FUNCTIONS | {"Identity"}  # what factors are made with


def factors_in_double(body: FunctionProto) -> None:
    """Compute in double what the body of an operator computes in float and then casts to double, as FlexAttention its scale.

    Only numbers and sizes become double: tensors that the body casts to float on purpose stay float.
    """
    makers = {name: node for node in body.node for name in node.output}
    widening = [node for node in body.node if node.op_type == "Cast" and _target(node) == TensorProto.DOUBLE]
    for cast in widening:
        found = _origins(cast.input[0], makers)
        for node in found or ():
            if node.op_type == "Cast":
                node.attribute[0].i = TensorProto.DOUBLE
            else:
                value = array_of(node.attribute[0].t)
                node.attribute[0].t.CopyFrom(numpy_helper.from_array(value.astype(np.float64)))


def _origins(name: str, makers: Mapping[str, NodeProto]) -> list[NodeProto] | None:
    """The constants in float and the casts of sizes to float that `name` is computed from; None where there are others."""
    node = makers.get(name)
    if node is None:
        return None
    if node.op_type == "Constant" and node.attribute[0].t.data_type == TensorProto.FLOAT:
        return [node]
    if node.op_type == "Cast" and _target(node) == TensorProto.FLOAT:
        return [node] if _is_size(node.input[0], makers) else None
    if node.op_type not in _ARITHMETIC:
        return None
    found = [_origins(read, makers) for read in node.input]
    return None if None in found else [origin for origins in found for origin in origins or ()]


def _is_size(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """True if `name` is a Shape, or gathered from one."""
    node = makers.get(name)
    gathered = node is not None and node.op_type == "Gather"
    return node is not None and (node.op_type == "Shape" or (gathered and _is_size(node.input[0], makers)))


def _target(node: NodeProto) -> int:
    """The element type that a Cast casts to."""
    return next((a.i for a in node.attribute if a.name == "to"), 0)
