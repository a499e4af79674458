"""The losses that compare scores with class numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, choices
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.protos.traverse import import_onnx, versions_of
from refgrad.protos.types import FLOATS, Shape, is_unnamed
from refgrad.ranges import RANGES
from refgrad.rewrites.losses import REDUCTIONS, make_room, one_output
from refgrad.rewrites.scores import (
    check_probabilities,
    log_of_probability,
    logs_of_classes,
    makers_of,
    refuse_no_logits,
)
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.training.term import LossTerm

_OPSET = 16  # the losses are written in it, as gradients are


@dataclass(frozen=True)
class _Settings:
    """The settings of the cross entropy, as in torch."""

    class_weights: Sequence[float] | None = None  # one per class: a loss is multiplied by the weight of its label
    ignore_index: int | None = None  # a label that does not count
    label_smoothing: float = 0.0  # the part of each label that is divided among all classes

    @classmethod
    def of(cls, given: Mapping[str, Any], classes: int | str | None) -> Self:
        """The settings by name.

        :raises OptionError: there is no such setting, or it has a wrong value.
        """
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise OptionError(f"The loss 'cross_entropy' has no setting {unknown[0]!r}; it has {choices(known)}.")
        made = cls(**given)
        if isinstance(made.ignore_index, bool) or not isinstance(made.ignore_index, int | np.integer | None):
            raise OptionError(f"ignore_index is an integer, not {made.ignore_index!r}.")
        if due := RANGES["label_smoothing"].why_not(made.label_smoothing):
            raise OptionError(f"label_smoothing is {due}, not {made.label_smoothing!r}.")
        if made.class_weights is not None:
            weights = np.asarray(made.class_weights)
            if (
                weights.dtype.kind not in "biuf"
                or weights.ndim != 1
                or not (np.isfinite(weights) & (weights >= 0)).all()
            ):
                raise OptionError(
                    f"class_weights are finite numbers from 0 on, one per class, not {made.class_weights!r}."
                )
            if isinstance(classes, int) and len(weights) != classes:
                raise OptionError(f"class_weights has {len(weights)} numbers, and the output {classes} classes.")
        return made


def count_of_classes(model: ModelProto | str | os.PathLike[str], output: str | None) -> int | None:
    """How many classes the logits or probabilities [N, C, ...] have; None where only the run tells."""
    graph = normalise(read(model))
    shape = graph.shapes.get(one_output(graph, output)) or ()
    return max(shape[1], 2) if len(shape) > 1 and isinstance(shape[1], int) else None  # one column is of two classes


def with_loss_of_classes(source: ModelProto, term: LossTerm) -> tuple[ModelProto, str]:
    """The model that returns the loss of classes in int64: of logits ("cross_entropy"), or of probabilities ("log_loss").

    Probabilities in columns that Sigmoid makes are each of one class against all others, and count so.

    :param term: its settings belong to the cross entropy.
    :raises OptionError: the loss does not fit the output, or a setting is wrong.
    """
    loss, label, sample_weight = term.loss, term.label, term.sample_weight
    made = ModelProto()
    made.CopyFrom(source)
    if import_onnx(made) < _OPSET:
        made.CopyFrom(upgrade(made, _OPSET))
    graph = normalise(made)
    compared = one_output(graph, term.output)
    shape, kind = graph.shapes.get(compared), graph.types.get(compared)
    if shape is None or kind not in FLOATS or not shape:
        what = "logits" if loss == "cross_entropy" else "probabilities"
        raise OptionError(f"{loss} compares {what} [N, C, ...]; output {compared!r} has not been declared as such.")
    maker = next((node.op_type for node in reversed(makers_of(made, compared))), "")
    if loss == "cross_entropy":
        refuse_no_logits(source, compared, shape, loss)  # `made` may have other names
    else:
        check_probabilities(made, compared, loss)
    taken = make_room(made, term.added, compared)
    op = FunctionEmitter.into_graph(versions_of(made)[""], "loss", taken | {node.name for node in made.graph.node})
    op.types |= {compared: (kind, len(shape)), label: (TensorProto.INT64, max(len(shape) - 1, 1))}
    scores = op.wide(compared)
    share = None  # of each label in the mean; None where all are 1
    if loss == "cross_entropy":
        each, share = _cross_entropy(op, scores, label, shape, _Settings.of(term.settings, shape[1]))
    elif maker == "Sigmoid" and len(shape) > 1 and shape[1] != 1 and not _is_of_one_score(made, compared):
        each = _of_columns(op, scores, label, kind, shape[1], len(shape))
    else:
        logarithms = logs_of_classes(op, scores, kind, shape)
        each = op.emit("NegativeLogLikelihoodLoss", "", (logarithms, label), 1, {"reduction": "none"})
    op.types[each] = (op.type(scores), max(len(shape) - 1, 1))
    if sample_weight is not None:
        op.types[sample_weight] = (kind, 1)
        weights, more = op.wide(sample_weight), max(len(shape) - 2, 0)
        each = op.Mul(each, op.Reshape(weights, [-1] + [1] * more) if more else weights)
    total: str = op.emit("ReduceSum" if share else REDUCTIONS[term.reduction], "", (each,), 1, {"keepdims": 0})
    if share and term.reduction == "mean":
        count = op.emit("ReduceSum", "", (share,), 1, {"keepdims": 0})
        nothing = op.Equal(count, op.const(0.0, like=count))  # if no label of a batch counts, the loss is 0
        total = op.Div(total, op.Where(nothing, op.const(1.0, like=count), count))
    op.builder.put_into(made.graph)
    dims = [shape[0], *shape[2:]]
    made.graph.input.append(helper.make_tensor_value_info(label, TensorProto.INT64, [_dim(dim) for dim in dims]))
    if sample_weight is not None:
        made.graph.input.append(helper.make_tensor_value_info(sample_weight, kind, [_dim(shape[0])]))
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info(total, op.type(scores), []))
    return select_model_inputs_outputs(made, inputs=[value.name for value in made.graph.input]), total


def _is_of_one_score(model: ModelProto, name: str) -> bool:
    """True if Sigmoid makes the value of −s and s side by side, which adds up to 1."""
    makers = {made: node for node in model.graph.node for made in node.output}
    side_by_side = makers.get(makers_of(model, name)[-1].input[0])
    if side_by_side is None or side_by_side.op_type != "Concat" or len(side_by_side.input) != 2:
        return False
    first, second = side_by_side.input
    negated = makers.get(first)
    return negated is not None and negated.op_type == "Neg" and negated.input[0] == second


def _of_columns(op: FunctionEmitter, p: str, label: str, kind: int, count: int | str | None, rank: int) -> str:
    """−log p of the column of the label, and −log(1 − p) of the others: each column is a yes or no for itself."""
    size = (
        op.const(np.int64(count)) if isinstance(count, int) else op.Gather(op.Shape(p), op.const(np.int64(1)), axis=0)
    )
    column = op.Reshape(op.Range(op.const(np.int64(0)), size, op.const(np.int64(1))), [1, -1, *[1] * (rank - 2)])
    is_label = op.Equal(op.Unsqueeze(label, [1]), column)
    other = op.Sub(op.const(1.0, like=p), p)
    parts = op.Where(is_label, log_of_probability(op, p, kind), log_of_probability(op, other, kind))
    return op.Neg(op.ReduceSum(parts, [1], keepdims=0))


def _cross_entropy(
    op: FunctionEmitter, logits: str, label: str, shape: Shape, settings: _Settings
) -> tuple[str, str | None]:
    """The loss of each label, and its share in the mean; None where each label counts 1.

    With logarithms of probabilities l, weights w and smoothing ε: −(1 − ε)·w_label·l_label − ε/C·Σ_c w_c·l_c. A label that is
    ignored has the loss 0 and the share 0, any other one the share w_label. (torch.nn.CrossEntropyLoss)
    """
    weights = ignored = share = None
    inputs: tuple[str, ...] = (logits, label)
    attributes: dict[str, Any] = {"reduction": "none"}
    if settings.class_weights is not None:
        dtype = helper.tensor_dtype_to_np_dtype(op.type(logits))
        weights = op.const(np.asarray(settings.class_weights).astype(dtype))
        inputs = (*inputs, weights)
    if settings.ignore_index is not None:
        attributes["ignore_index"] = int(settings.ignore_index)
        ignored = op.Equal(label, op.const(np.int64(settings.ignore_index)))
        share = op.Cast(op.Not(ignored), to=op.type(logits))
    if weights is not None:
        known = label if ignored is None else op.Where(ignored, op.const(np.int64(0)), label)
        of_label = op.Gather(weights, known)
        share = of_label if share is None else op.Mul(share, of_label)
    if not settings.label_smoothing:
        return op.emit("SoftmaxCrossEntropyLoss", "", inputs, 1, attributes), share
    logs = op.LogSoftmax(logits, axis=1)
    own = op.emit("NegativeLogLikelihoodLoss", "", (logs, *inputs[1:]), 1, attributes)
    if weights is not None:
        logs = op.Mul(logs, op.Reshape(weights, [-1] + [1] * (len(shape) - 2)))
    even = op.Neg(op.Squeeze(op.reduce("ReduceMean", logs, [1]), [1]))
    if ignored is not None:
        even = op.Where(ignored, op.const(0.0, like=even), even)
    part = float(settings.label_smoothing)
    return op.Add(op.Mul(own, op.const(1 - part, like=own)), op.Mul(even, op.const(part, like=even))), share


def _dim(dim: int | str | None) -> int | str | None:
    return None if is_unnamed(dim) else dim
