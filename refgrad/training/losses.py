"""The loss of a model, with the label as one more input, and its derivatives by the weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx.compose
from onnx import ModelProto, NodeProto, TensorProto, helper

from refgrad.errors import OptionError, UnknownNameError, choices
from refgrad.forward.normalise import normalise
from refgrad.protos.reading import read
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import fresh, names_of, refill, versions_of
from refgrad.reverse.assembly import names_in, note
from refgrad.reverse.gradient import gradient
from refgrad.training.writer import Writer
from refgrad.transforms.losses import REDUCTIONS, SCORES, add_loss_output, one_output

# The losses of an element whose derivative is written at once: of the difference d, the loss and what it is by d.
_DIRECT: dict[str, Callable[[Writer, str], tuple[str, str]]] = {
    "squared_error": lambda op, d: (op.Mul(d, d), op.Add(d, d)),
    "half_squared_error": lambda op, d: (op.Mul(op.Mul(d, d), 0.5), d),
    "absolute_error": lambda op, d: (op.Abs(d), op.Sign(d)),
}
_DIRECT |= {"l2": _DIRECT["squared_error"], "l1": _DIRECT["absolute_error"]}
LOSSES = tuple(dict.fromkeys((*SCORES, "half_squared_error", "cross_entropy")))


def differentiated(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str],
    loss: str | ModelProto | os.PathLike[str] | None,
    output: str | None,
    label: str,
    sample_weight: str | None,
    reduction: str,
    settings: Mapping[str, Any] | None = None,
) -> tuple[ModelProto, str]:
    """The model that returns the gradients by `wrt`, which are inputs, and the loss; and what the loss is called there.

    :raises OptionError: there is no such loss, or it does not fit the output.
    :raises UnknownNameError: a new name that the model has.
    """
    source = read(model)
    settings = dict(settings or {})
    if settings and loss not in SCORES:
        raise OptionError(f"The loss {loss!r} has no settings, such as {next(iter(settings))!r}.")
    if loss is None:
        name = one_output(normalise(source), output)
    elif isinstance(loss, ModelProto | os.PathLike):
        if sample_weight is not None or reduction != "mean":
            raise OptionError(
                "A loss that is a model reduces and weighs by itself: leave out reduction and sample_weight."
            )
        source, name = _composed(source, read(loss), output)
    elif loss not in LOSSES:
        raise OptionError(
            f"There is no loss {loss!r}; there are {choices(LOSSES)}, and None where the model returns its loss."
        )
    elif reduction not in REDUCTIONS:
        raise OptionError(f"There is no reduction {reduction!r}; there are {choices(REDUCTIONS)}.")
    elif loss in _DIRECT and not settings:
        return _direct(source, wrt, loss, output, label, sample_weight, reduction)
    else:
        name = fresh("total_loss", names_of(source.graph))
        if loss == "cross_entropy":
            source = _cross_entropy(source, name, output, label, sample_weight, reduction)
        else:
            source = add_loss_output(
                source, loss, name, label, sample_weight, None, output, reduction=reduction, **settings
            )
    return gradient(source, wrt, [name], cotangent="ones", keep_outputs=True, weights="inputs"), name


def classes_of(model: ModelProto | str | os.PathLike[str], output: str | None) -> int | None:
    """How many classes the logits [N, C, ...] have; None where only the run tells."""
    graph = normalise(read(model))
    shape = graph.shapes.get(one_output(graph, output)) or ()
    return shape[1] if len(shape) > 1 and isinstance(shape[1], int) else None


def _direct(
    source: ModelProto,
    wrt: Sequence[str],
    loss: str,
    output: str | None,
    label: str,
    sample_weight: str | None,
    reduction: str,
) -> tuple[ModelProto, str]:
    """With the derivative of the loss in the place of the cotangent: no node finds out which shapes it has."""
    graph = normalise(source)
    compared = one_output(graph, output)
    kind, shape = graph.types.get(compared), graph.shapes.get(compared)
    if kind not in FLOATS or shape is None:
        raise OptionError(f"A loss compares a float tensor of known rank; output {compared!r} is not declared as one.")
    made = gradient(source, wrt, [compared], keep_outputs=True, weights="inputs")
    seed = names_in(made)[0][compared]
    taken = names_of(made.graph) | {node.name for node in made.graph.node}
    for name in filter(None, (label, sample_weight)):
        if name in taken:
            raise UnknownNameError(f"The name {name!r} is taken: the label and the weights have names of their own.")
        taken.add(name)
    op = Writer(versions_of(made)[""], "loss", taken)
    op.types |= {compared: (kind, len(shape)), label: (kind, len(shape))}
    score, slope = _DIRECT[loss](op, op.Sub(compared, label))
    inputs = [helper.make_tensor_value_info(label, kind, shape)]
    if sample_weight is not None:
        inputs.append(helper.make_tensor_value_info(sample_weight, kind, shape[:1]))
        op.types[sample_weight] = (kind, 1)
        weights = op.Reshape(sample_weight, [-1] + [1] * (len(shape) - 1)) if len(shape) > 1 else sample_weight
        score, slope = op.Mul(score, weights), op.Mul(slope, weights)
    total: str = op.emit(REDUCTIONS[reduction], "", (score,), 1, {"keepdims": 0})
    if reduction == "mean":
        slope = op.Div(slope, op.Cast(op.Size(score), to=kind))
    nodes = list(made.graph.node)
    place = next((k + 1 for k, node in enumerate(nodes) if compared in node.output), 0)
    nodes[place:place] = [*op.nodes, NodeProto(op_type="Identity", name=seed, input=[slope], output=[seed])]
    refill(made.graph.node, nodes)
    refill(made.graph.input, [*(value for value in made.graph.input if value.name != seed), *inputs])
    refill(made.graph.output, [value for value in made.graph.output if value.name != compared])
    made.graph.output.append(helper.make_tensor_value_info(total, kind, []))
    made.graph.initializer.extend(op.constants.values())
    gradients = names_in(made)[1]
    note(made, made, gradients=gradients, cotangents={})
    return made, total


def _composed(source: ModelProto, loss: ModelProto, output: str | None) -> tuple[ModelProto, str]:
    """The model followed by the loss: the inputs of the loss that are called as outputs are these, or else the first one."""
    if len(loss.graph.output) != 1 or not loss.graph.input:
        raise OptionError("A loss that is a model has one output, the loss, and the prediction as an input.")
    known = {value.name for value in source.graph.output}
    inputs = [value.name for value in loss.graph.input]
    joined = [(name, name) for name in inputs if name in known]
    if not joined or output is not None:
        joined = [(one_output(normalise(source), output), inputs[0])]
    first, second = ModelProto(), onnx.compose.add_prefix(loss, "loss/", rename_inputs=False)
    first.CopyFrom(source)
    second.ir_version = first.ir_version = max(source.ir_version, loss.ir_version)
    name = second.graph.output[0].name
    try:
        made = onnx.compose.merge_models(first, second, io_map=joined, outputs=[name])
    except (ValueError, onnx.checker.ValidationError) as error:
        raise OptionError(f"The loss does not fit the model: {str(error).strip()}.") from error
    return made, name


def _cross_entropy(
    source: ModelProto, name: str, output: str | None, label: str, sample_weight: str | None, reduction: str
) -> ModelProto:
    if sample_weight is not None:
        raise OptionError("cross_entropy takes no sample_weight.")
    graph = normalise(source)
    logits = one_output(graph, output)
    shape = graph.shapes.get(logits)
    if shape is None or len(shape) < 2:
        raise OptionError(
            f"cross_entropy compares logits [N, C, ...]; output {logits!r} has not been declared as such."
        )
    made = ModelProto()
    made.CopyFrom(source)
    made.graph.node.append(
        helper.make_node("SoftmaxCrossEntropyLoss", [logits, label], [name], name=name, reduction=reduction)
    )
    made.graph.input.append(helper.make_tensor_value_info(label, TensorProto.INT64, [shape[0], *shape[2:]]))
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info(name, graph.types[logits], []))
    return made
