"""The loss of a model, with the label as one more input."""

from __future__ import annotations

import os

from onnx import ModelProto, TensorProto, helper

from refgrad.errors import OptionError, choices
from refgrad.forward.normalise import normalise
from refgrad.protos.reading import read
from refgrad.protos.walk import fresh, names_of
from refgrad.transforms.losses import REDUCTIONS, SCORES, add_loss_output, one_output

LOSSES = (*SCORES, "half_squared_error", "cross_entropy")


def with_loss(
    model: ModelProto | str | os.PathLike[str],
    loss: str | None,
    output: str | None,
    label: str,
    sample_weight: str | None,
    reduction: str,
) -> tuple[ModelProto, str]:
    """The model that returns the loss, and what the loss is called there.

    :raises OptionError: there is no such loss, or it does not fit the output.
    """
    source = read(model)
    if loss is None:
        return source, one_output(normalise(source), output)
    if loss not in LOSSES:
        raise OptionError(
            f"There is no loss {loss!r}; there are {choices(LOSSES)}, and None where the model returns its loss."
        )
    if reduction not in REDUCTIONS:
        raise OptionError(f"There is no reduction {reduction!r}; there are {choices(REDUCTIONS)}.")
    name = fresh("total_loss", names_of(source.graph))
    if loss == "cross_entropy":
        return _cross_entropy(source, name, output, label, sample_weight, reduction), name
    if loss == "half_squared_error":
        halved = {"l1_weight": 0.0, "l2_weight": 0.5}
        return add_loss_output(
            source, "elastic", name, label, sample_weight, None, output, reduction=reduction, **halved
        ), name
    return add_loss_output(source, loss, name, label, sample_weight, None, output, reduction=reduction), name


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
