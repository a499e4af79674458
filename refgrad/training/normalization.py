"""BatchNormalization in a training: batches are normalised by their own statistics, and the running ones follow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.builder.nodes import NodeBuilder
from refgrad.errors import OptionError
from refgrad.model.reading import read
from refgrad.protos.traverse import attribute_value, every_node, fresh, names_of, reads_of, refill, versions_of
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.training.dropout import Constants

_OPSET = 14  # since which training_mode is an attribute


@dataclass(frozen=True)
class Statistic:
    """A running mean or variance: the initializer, what the node returns where it is 0, and where the node reads."""

    name: str
    made: str
    x: str
    momentum: float
    is_variance: bool

    def following(self, op: FunctionEmitter, unbiased: bool, held: str = "") -> str:
        """The value of the next step. The node's variance of a batch divides by n, torch's running one by n − 1.

        The attribute is a float32, 0.9 about 0.89999998: the number that was meant is the shortest that it stands for.

        :param held: the value that holds the statistic, where it has another type than the node reads.
        """
        held = held or self.name
        kind, made = op.type(held), self.made
        if held != self.name:
            made = op.Cast(made, to=kind)
        op.types[held] = op.types[made] = (kind, 1)
        meant = float(str(np.float32(self.momentum)))
        if meant >= 1:
            return op.Identity(held)
        batch = op.Mul(made, 1 / (1 - self.momentum))
        if unbiased and self.is_variance:
            wide = TensorProto.FLOAT if kind in SIXTEEN_BIT else kind  # float16 does not hold large sizes
            size = op.Cast(op.Div(op.Size(self.x), op.Size(held)), to=wide)
            factor = op.Div(size, op.Max(op.Sub(size, 1.0), 1.0))
            batch = op.Mul(batch, factor if wide == kind else op.Cast(factor, to=kind))
        return op.Add(op.Mul(held, meant), op.Mul(batch, 1 - meant))


def holds_batch_norm(model: ModelProto) -> bool:
    """True if a BatchNormalization of ai.onnx is in a model, in its graph, a body or a function."""
    return any(node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx") for node in every_node(model))


def with_following(model: ModelProto, statistics: Sequence[Statistic], unbiased: bool) -> dict[str, str]:
    """Let a model in training mode return the statistics of the next step too, in place; the output of each by its name."""
    graph = model.graph
    taken = names_of(graph) | {node.name for node in graph.node}
    op = FunctionEmitter.into_graph(versions_of(model)[""], "statistics", taken)
    declared = {value.name: value for value in graph.input}
    found = {}
    for statistic in statistics:
        value = declared[statistic.name]
        op.types[statistic.name] = (value.type.tensor_type.elem_type, 1)
        found[statistic.name] = statistic.following(op, unbiased)
        graph.output.add(name=found[statistic.name], type=value.type)
    op.builder.put_into(graph)
    return found


def refuse_training_mode(
    model: ModelProto | str | os.PathLike[str], batch_norm: bool = True, dropout: bool = True
) -> None:
    """Refuse nodes in training mode, which a step does not run as the model says: of either operator, or of one of them.

    :raises OptionError: a BatchNormalization whose statistics would not move, or a Dropout, which would drop the same elements
        in each step on the interpreter.
    """
    source = read(model)
    constants = Constants(source)
    for node in every_node(source):
        if node.domain not in ("", "ai.onnx"):
            continue
        name = node.name or next(iter(node.output), "")
        if batch_norm and node.op_type == "BatchNormalization" and _setting(node, "training_mode", 0):
            raise OptionError(
                f"BatchNormalization node {name!r} is in training mode. Take batch_norm='training', or export the model for "
                "inference."
            )
        if dropout and node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            mode = constants.value(node.input[2])
            if mode is None or mode.any():
                raise OptionError(
                    f"Dropout node {name!r} may be in training mode. Take dropout='training', which draws anew in each step, "
                    "or export the model for inference."
                )


def in_training_mode(
    model: ModelProto | str | os.PathLike[str],
) -> tuple[ModelProto, ModelProto, list[Statistic]]:
    """Two copies of the model whose running statistics are inputs: with BatchNormalization in training mode, and without.

    :raises OptionError: there is none, or one whose statistics are not initializers of its own, or that is in a body, or an
        opset below 14.
    """
    source = read(model)
    made = ModelProto()
    made.CopyFrom(source)
    taken = names_of(made.graph) | {node.name for node in made.graph.node}
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    found: list[Statistic] = []
    returned = {value.name for value in made.graph.output} | {
        name for node in made.graph.node for name in reads_of(node)
    }
    inner = [node for node in every_node(made) if node.op_type == "BatchNormalization"]
    if len(inner) > sum(node.op_type == "BatchNormalization" for node in made.graph.node):
        raise OptionError("A body or a function has a BatchNormalization. Take batch_norm='frozen', the default.")
    for node in made.graph.node:
        if node.op_type != "BatchNormalization" or node.domain not in ("", "ai.onnx"):
            continue
        if versions_of(made)[""] < _OPSET:
            raise OptionError(
                f"BatchNormalization has a training mode from opset {_OPSET} on, and the model has {versions_of(made)['']}. "
                "Convert it with onnx.version_converter, or leave batch_norm at 'frozen'."
            )
        _one(node, found, taken, set(tensors), returned)
    if not found:
        raise OptionError("The model has no BatchNormalization. Take batch_norm='frozen', the default.")
    names = dict.fromkeys(statistic.name for statistic in found)
    used = in_inference_mode(source)
    for model_of_mode in (made, used):
        graph = model_of_mode.graph
        declared = {value.name for value in graph.input}
        graph.input.extend(
            helper.make_tensor_value_info(name, tensors[name].data_type, list(tensors[name].dims))
            for name in names
            if name not in declared
        )
        refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])
    _feed_zeros(made, found, taken)
    return made, used, found


def _feed_zeros(model: ModelProto, found: Sequence[Statistic], taken: set[str]) -> None:
    """Let the nodes read zeros in place of the running statistics, which the batch is not normalised by; in place.

    ONNX Runtime's kernel writes over what it reads there, before or after others read it. The zeros are computed: it writes
    over constants too.
    """
    builder = NodeBuilder(taken)
    zeros = {statistic.name: builder.fresh(f"{statistic.name}.zero") for statistic in found}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx"):
            for k in (3, 4):
                name = node.input[k]
                node.input[k] = builder.add_as("Sub", [name, name], zeros[name])
                nodes += builder.take()
        nodes.append(node)
    refill(model.graph.node, nodes)


def in_inference_mode(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """A copy of which no BatchNormalization and no Dropout in the main graph is in training mode."""
    made = ModelProto()
    made.CopyFrom(read(model))
    set_inference_mode(made)
    return made


def set_inference_mode(model: ModelProto) -> None:
    """Take BatchNormalization and Dropout of the main graph out of training mode; in place."""
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "BatchNormalization" and _setting(node, "training_mode", 0):
            refill(node.attribute, [a for a in node.attribute if a.name != "training_mode"])
            del node.output[1:]
        if node.op_type == "Dropout":
            del node.input[2:]


def _setting(node: NodeProto, name: str, default: Any) -> Any:
    return next((attribute_value(a) for a in node.attribute if a.name == name), default)


def _one(node: NodeProto, found: list[Statistic], taken: set[str], tensors: set[str], read: set[str]) -> None:
    known = [statistic.name for statistic in found]
    for name in node.input[3:5]:
        known.append(name)
        if name not in tensors or known.count(name) > 1:
            what = "has no initializer of its own" if name not in tensors else "shares one"
            raise OptionError(
                f"BatchNormalization node {node.name or node.output[0]!r} {what} for a running statistic ({name!r}). "
                "Take batch_norm='frozen', or export the model without merging and folding of constants: docs/fine_tuning.md, "
                "Exporting from torch."
            )
    if moved := [name for name in node.output[1:3] if name in read]:
        raise OptionError(
            f"The model reads the running statistics that BatchNormalization node {node.name or node.output[0]!r} returns "
            f"({moved[0]!r}). Take batch_norm='frozen', or export the model for inference."
        )
    momentum = float(_setting(node, "momentum", 0.9))
    refill(node.attribute, [a for a in node.attribute if a.name != "training_mode"])
    node.attribute.append(helper.make_attribute("training_mode", 1))
    outputs = [node.output[0], *(fresh(f"{node.input[k]}.moved", taken) for k in (3, 4))]
    node.output[:] = outputs
    for k in (0, 1):
        found.append(Statistic(node.input[3 + k], outputs[1 + k], node.input[0], momentum, k == 1))
