"""Names of `onnxcustom.utils.onnx_rewriter`: another graph for an operator, and a loss before its sum."""

from __future__ import annotations

from onnx import FunctionProto, ModelProto, helper

from refgrad.errors import InvalidModelError, OptionError
from refgrad.model.inlining.inline import inline_functions
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.protos.traverse import fresh, import_domain, import_onnx, nested, refill, rename_values, versions_of
from refgrad.rewrites.selection import select_model_inputs_outputs

__all__ = ["onnx_rewrite_operator", "unreduced_onnx_loss"]

_DOMAIN, _NAME = "refgrad.rewritten", "rewritten"
_ONNX = ("", "ai.onnx")


def onnx_rewrite_operator(onx: ModelProto, op_type: str, sub_onx: ModelProto, recursive: bool = True) -> ModelProto:
    """A copy of a model that computes an operator of ai.onnx by another graph, wherever it occurs.

    The inputs and outputs of the operator are the inputs and outputs of `sub_onx`, in this order. The attributes of the
    operator are dropped. Local functions stay as they are, unless the model is converted.

    :param sub_onx: a model of the graph. If the two have different opsets, the older one is converted.
    :param recursive: replace the operator in subgraphs too.
    :raises OptionError: the graph contains the operator.
    :raises InvalidModelError: a node has another number of inputs or outputs than the graph.
    :raises ConvertError: onnx cannot convert a model.
    """
    newest = max(map(import_onnx, (made := _copy(onx), sub := _copy(sub_onx))))
    made, sub = (model if versions_of(model)[""] == newest else upgrade(model, newest) for model in (made, sub))
    if any(node.op_type == op_type and node.domain in _ONNX for node in nested(sub.graph.node)):
        raise OptionError(f"sub_onx contains {op_type} itself.")
    function = _function(sub)
    replaced = False
    for node in nested(made.graph.node) if recursive else made.graph.node:
        if node.op_type != op_type or node.domain not in _ONNX:
            continue
        for what, names, expected in (
            ("inputs", node.input, function.input),
            ("outputs", node.output, function.output),
        ):
            if len(names) != len(expected):
                raise InvalidModelError(
                    f"{op_type} {node.name!r} has {len(names)} {what}, and sub_onx has {len(expected)}."
                )
        node.domain, node.op_type = _DOMAIN, _NAME
        refill(node.attribute, [])
        replaced = True
    if not replaced:
        return made
    made.functions.append(function)
    import_domain(made, _DOMAIN)
    return inline_functions(made, [(_DOMAIN, _NAME)])


def _copy(model: ModelProto) -> ModelProto:
    copied = ModelProto()
    copied.CopyFrom(model)
    return copied


def _function(model: ModelProto) -> FunctionProto:
    """A model as a function. Its initializers become constants."""
    graph = model.graph
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    held = {tensor.name for tensor in graph.initializer}
    return helper.make_function(
        _DOMAIN,
        _NAME,
        [value.name for value in graph.input if value.name not in held],
        [value.name for value in graph.output],
        [*constants, *graph.node],
        list(model.opset_import),
    )


def unreduced_onnx_loss(onx: ModelProto, output_name: str = "score") -> ModelProto:
    """The loss of each sample: a model whose first output is a sum (ReduceSum), cut before the sum.

    :param output_name: the name of the output.
    :raises OptionError: the first output is not a sum.
    """
    output = onx.graph.output[0].name
    producer = next((node for node in onx.graph.node if output in node.output), None)
    if producer is None or producer.op_type != "ReduceSum":
        made_by = "an input" if producer is None else f"made by {producer.op_type}"
        raise OptionError(f"The first output, {output!r}, is not a sum: it is {made_by}.")
    made = select_model_inputs_outputs(onx, [producer.input[0]])
    for node in made.graph.node:
        rename_values(node, {producer.input[0]: output_name})
    made.graph.output[0].name = output_name
    return made


def _unique_name(existing_names: set[str], name: str) -> str:
    """`name`, or the next free one: `name_2`, `name_3`, ... It is taken from now on."""
    return fresh(name, existing_names, start=2)
