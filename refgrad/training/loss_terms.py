"""Sums of losses: several outputs of a model, each with a loss, a label and a weight."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, UnknownNameError
from refgrad.model import native
from refgrad.model.checks.malformed import explained
from refgrad.model.reading import read
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.protos.traverse import names_of, versions_of
from refgrad.protos.types import type_of
from refgrad.ranges import FINITE
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.training.losses import with_loss
from refgrad.training.outputs import compared_output
from refgrad.training.term import LossTerm

MIXED = "mixed"  # a `mean_over`: terms are divided by different numbers
_KEY = "refgrad.mean_over"  # metadata of a sum of losses
_COUNTED = {"class_weights", "ignore_index"}  # settings with which a mean is not over all samples


@explained
def sum_of_losses(model: ModelProto | str | os.PathLike[str], terms: Sequence[LossTerm]) -> ModelProto:
    """The model of the loss Σ weight·loss, to be given as the `loss` of `step_model` or of `write_artifacts`.

    Its inputs are the compared outputs of `model` and the labels. Terms with the same label compare with the same input.

    :raises OptionError: there is no term, a weight is no number, or a loss does not fit its output.
    :raises UnknownNameError: no output has that name, or a label has the name of an input.

    >>> import onnx.parser
    >>> from refgrad.training import LossTerm, step_model, sum_of_losses
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x) => (float[N, 2] logits, float[N, 1] size) '
    ...     '<float[2, 2] w = {1, 2, 3, 4}, float[2, 1] v = {1, 2}> { logits = MatMul(x, w)  size = MatMul(x, v) }'
    ... )
    >>> loss = sum_of_losses(
    ...     model, [LossTerm("cross_entropy", "logits", "class"), LossTerm("squared_error", "size", "height", weight=0.5)]
    ... )
    >>> [value.name for value in loss.graph.input]
    ['logits', 'class', 'size', 'height']
    >>> step_model(model, loss).data
    ('x', 'class', 'height')
    """
    source = read(model)
    if not terms:
        raise OptionError("A sum of losses has at least one term.")
    fed = {value.name for value in source.graph.input}
    parts = []
    for k, term in enumerate(terms):
        if not isinstance(term, LossTerm):
            raise OptionError(f"A term is a LossTerm, such as LossTerm('squared_error', weight=0.5), not {term!r}.")
        if FINITE.why_not(term.weight):
            raise OptionError(f"The weight of a loss is a finite number, not {term.weight!r}.")
        if taken := [name for name in term.added if name in fed]:
            raise UnknownNameError(
                f"The label {taken[0]!r} has the name of an input of the model. Choose another name."
            )
        output = compared_output(source, term.output)
        made, name = with_loss(source, replace(term, output=output))
        part = select_model_inputs_outputs(made, [name], [output, *term.added])
        parts.append((native.with_prefix(part, f"term_{k}/"), f"term_{k}/{name}", float(term.weight)))
    newest = max(versions_of(part)[""] for part, *_ in parts)
    total = ModelProto(ir_version=max(part.ir_version for part, *_ in parts), producer_name="refgrad")
    total.graph.name = "loss"
    inputs: dict[str, Any] = {}
    summands = []
    for part, name, weight in parts:
        whole = upgrade(part, newest)
        graph = whole.graph
        for value in graph.input:
            if type_of(inputs.setdefault(value.name, value)) != type_of(value):
                raise OptionError(
                    f"Two losses read {value.name!r} with different types or shapes. Give each its own label."
                )
        total.graph.node.extend(graph.node)
        total.graph.initializer.extend(graph.initializer)
        for entry in whole.opset_import:
            if entry.domain not in versions_of(total):
                total.opset_import.append(entry)
        summands.append((name, type_of(graph.output[0])[0], weight))
    op = FunctionEmitter.into_graph(newest, "total", names_of(total.graph) | set(inputs))
    scalar, kinds = np.zeros(0, np.int64), {kind for _, kind, _ in summands}
    kind = kinds.pop() if len(kinds) == 1 else int(TensorProto.DOUBLE)
    weighted = []
    for name, own, weight in summands:
        op.types[name] = own, None
        one = op.Reshape(name, scalar)
        one = one if own == kind else op.Cast(one, to=kind)
        weighted.append(one if weight == 1 else op.Mul(one, weight))
    result = weighted[0] if len(weighted) == 1 else op.Sum(*weighted)
    op.builder.put_into(total.graph)
    total.graph.input.extend(inputs.values())
    total.graph.output.append(helper.make_tensor_value_info(result, kind, []))
    means = {"" if term.reduction == "sum" else MIXED if _COUNTED & {*term.settings} else "samples" for term in terms}
    total.metadata_props.add(key=_KEY, value=means.pop() if len(means) == 1 else MIXED)
    return total


def mean_over(loss: ModelProto | str | os.PathLike[str] | None, reduction: str) -> str:
    """The `mean_over` of a step with this loss: a model of `sum_of_losses` says it, of another one it is "samples"."""
    if reduction == "sum":
        return ""
    if loss is None or isinstance(loss, str):
        return "samples" if loss is None else "label"
    metadata = read(loss, weights=False).metadata_props
    return next((str(entry.value) for entry in metadata if entry.key == _KEY), "samples")
