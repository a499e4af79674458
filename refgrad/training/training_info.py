"""A step of training inside the model that it trains: training_info of ONNX."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, TrainingInfoProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.errors import InvalidModelError, OptionError, UnknownNameError, choices, did_you_mean
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.model.reading import read
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.protos.traverse import names_of, reads_of, refill, versions_of
from refgrad.protos.types import type_of
from refgrad.training.precision import FINITE
from refgrad.training.steps import RATE, StepModel


@explained
def with_training_info(model: ModelProto | str | os.PathLike[str], step: StepModel) -> ModelProto:
    """The model with a step as its training_info, which takes the place of one that it has.

    The algorithm takes the data, the label and learning_rate; its first output is the loss. It reads the weights of the model,
    has the other states as initializers, and its update_binding says which result becomes which of them.

    :param model: a model, or the path of one. It is not modified.
    :param step: made of it by `step_model`, with flat=False.
    :raises OptionError: the weights of the step are one vector.
    :raises UnknownNameError: the model has no initializer of the name of a weight.
    """
    if step.flat:
        raise OptionError(
            "training_info binds the weights one by one, and this step has them in one vector. Take flat=False."
        )
    versions = versions_of(step.model)
    made = ModelProto()
    made.CopyFrom(upgrade(read(model), versions[""]))
    held = {tensor.name: tensor for tensor in made.graph.initializer}
    if missing := next((name for name in step.weights if name not in held), ""):
        raise UnknownNameError(
            f"The step trains {missing!r}, which is no initializer of the model.{did_you_mean(missing, held)} "
            "Give the model that the step was made of."
        )
    imported = versions_of(made)
    for domain, version in versions.items():
        if imported.get(domain, version) != version:
            raise OptionError(
                f"The model imports {domain or 'ai.onnx'} {imported[domain]}, and the step {version}. Give the model that the "
                "step was made of."
            )
        if domain not in imported:
            made.opset_import.append(helper.make_opsetid(domain, version))
    made.ir_version = max(made.ir_version, step.model.ir_version)
    del made.training_info[:]
    info = made.training_info.add()
    info.algorithm.CopyFrom(step.model.graph)
    graph = info.algorithm
    inputs = [value for value in graph.input if value.name not in step.state]
    states = {name: value for name, value in step.state.items() if name not in (*step.weights, *step.statistics)}
    own = [tensor for tensor in graph.initializer if held.get(tensor.name) != tensor]
    for field, entries in (("input", inputs), ("initializer", own)):
        refill(getattr(graph, field), entries)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in states.items())
    if clash := next((tensor.name for tensor in graph.initializer if tensor.name in held), ""):
        raise OptionError(f"The model and the step both have an initializer {clash!r}. Rename the one in the model.")
    for name, following in step.next.items():
        info.update_binding.add(key=name, value=following)
    _bind_narrow(info, step, held)
    return made


def _bind_narrow(info: TrainingInfoProto, step: StepModel, held: Mapping[str, TensorProto]) -> None:
    """Let the algorithm read the 16-bit weights of the model, and return them beside their masters; in place."""
    graph = info.algorithm
    refill(graph.node, [node for node in graph.node if step.masters.keys().isdisjoint(node.output)])
    builder = NodeBuilder(names_of(graph))
    for name, master in step.masters.items():
        kind = held[name].data_type
        following = builder.add("Cast", [step.next[master]], f"{name}_next", to=kind)
        graph.output.append(helper.make_tensor_value_info(following, kind, held[name].dims))
        info.update_binding.add(key=name, value=following)
    graph.node.extend(builder.take())


@explained
def from_training_info(model: ModelProto | str | os.PathLike[str], label: str = "label") -> StepModel:
    """The step in a model's training_info, which `Training` runs.

    `Training.evaluate` returns the loss that the algorithm computes: with penalties, dropped elements and the statistics of a
    batch, if the step was made so.

    :param model: a model, or the path of one. It is not modified.
    :param label: the input of the algorithm that is the label.
    :raises InvalidModelError: the model has no training_info, or several, or one whose bindings do not fit.
    :raises UnknownNameError: the algorithm has no such input.

    >>> import onnx.parser
    >>> from refgrad.training import from_training_info, step_model, with_training_info
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {1, 2}> { y = MatMul(x, a) }'
    ... )
    >>> step = from_training_info(with_training_info(line, step_model(line, flat=False)))
    >>> list(step.weights), step.data, step.label
    (['a'], ('x',), 'label')
    """
    whole = read(model)
    if len(whole.training_info) != 1:
        raise InvalidModelError(f"Expected one entry of training_info, got {len(whole.training_info)}.")
    info = whole.training_info[0]
    algorithm, bound = info.algorithm, {entry.key: entry.value for entry in info.update_binding}
    own = {tensor.name: tensor for tensor in algorithm.initializer}
    shared = {tensor.name: tensor for tensor in whole.graph.initializer if tensor.name not in own}
    results = [value.name for value in algorithm.output]
    for key, value in bound.items():
        if key not in own and key not in shared:
            raise InvalidModelError(
                f"training_info updates {key!r}, which is no initializer. There are: {choices(shared)}."
            )
        if value not in results:
            raise InvalidModelError(f"training_info updates {key!r} by {value!r}, which is no output of its algorithm.")
    losses = [name for name in results if name not in bound.values()]
    if not losses or not bound:
        raise InvalidModelError("The training_info of the model has no loss among its outputs, or updates nothing.")
    inputs = [value for value in algorithm.input if value.name not in bound]
    if label not in (names := [value.name for value in inputs]):
        raise UnknownNameError(
            f"The algorithm has no input {label!r}.{did_you_mean(label, names)} It has {choices(names)}."
        )
    weights = {key: array_of(shared[key]) for key in bound if key in shared}
    masters = _masters(algorithm, bound, shared)
    narrow = [node for node in algorithm.node if masters.keys() & {k for k, v in bound.items() if v in node.output}]
    bound = {key: value for key, value in bound.items() if key not in masters}
    state: dict[str, np.ndarray] = {key: array_of(own.get(key) or shared[key]) for key in bound}
    made = ModelProto()
    made.ir_version = whole.ir_version
    made.opset_import.extend(whole.opset_import)
    made.functions.extend(whole.functions)
    graph = made.graph
    graph.CopyFrom(algorithm)
    casts = [helper.make_node("Cast", [master], [name], to=shared[name].data_type) for name, master in masters.items()]
    refill(graph.node, [*casts, *(node for node in graph.node if node not in narrow)])
    kept_outputs = {*bound.values(), *losses}
    refill(graph.output, [value for value in graph.output if value.name in kept_outputs])
    read_names = {name for node in algorithm.node for name in reads_of(node)}
    kept = [
        tensor
        for name, tensor in (*own.items(), *shared.items())
        if name not in {*bound, *masters} and name in read_names
    ]
    for field, entries in (("input", _with_rate(graph, inputs)), ("initializer", kept)):
        refill(getattr(graph, field), entries)
    graph.input.extend(
        helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for key, value in state.items()
    )
    data = tuple(name for name in names if name not in (label, RATE))
    finite = FINITE if FINITE in losses else ""
    return StepModel(made, weights, state, bound, data, label, losses[0], flat=False, masters=masters, finite=finite)


def _masters(algorithm: GraphProto, bound: Mapping[str, str], shared: Container[str]) -> dict[str, str]:
    """The masters by weight: the next value of the weight is the cast of the next value of the master."""
    keys = {value: key for key, value in bound.items()}
    return {
        keys[node.output[0]]: keys[node.input[0]]
        for node in algorithm.node
        if node.op_type == "Cast" and node.input[0] in keys and keys.get(node.output[0]) in shared
    }


def _with_rate(graph: GraphProto, inputs: list[ValueInfoProto]) -> list[ValueInfoProto]:
    """The inputs with a learning rate that is a scalar, which is what a training feeds."""
    given = next((value for value in inputs if value.name == RATE), None)
    if given is None:
        return [*inputs, helper.make_tensor_value_info(RATE, TensorProto.DOUBLE, [])]
    kind, shape = type_of(given)
    if not shape:
        return inputs
    builder = NodeBuilder(names_of(graph))
    target = builder.add("Constant", [], f"{RATE}_shape", value_ints=[1] * len(shape))
    row = builder.add("Reshape", [RATE, target], f"{RATE}_row")
    for node in graph.node:  # [1], as the optimizers of ONNX Runtime have it
        node.input[:] = [row if name == RATE else name for name in node.input]
    refill(graph.node, [*builder.take(), *graph.node])
    return [helper.make_tensor_value_info(RATE, kind, []) if value.name == RATE else value for value in inputs]
