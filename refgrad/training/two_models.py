"""A step of training as two models: one computes the gradient, the other updates the weights by it.

Between them, programs that train in many processes add up the gradients of all processes (docs/many_processes.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from refgrad.errors import OptionError
from refgrad.protos.traverse import fresh, names_of, positions_needed, signatures
from refgrad.reverse.assembly import note
from refgrad.training.steps import RATE, Cut, StepModel


class Between(NamedTuple):
    """The names of the values that go from the gradient model to the update model.

    :param gradients: by the state that holds the weights.
    :param statistics: the next running statistics, by the state that holds them.
    :param loss: the loss without penalties; the name of the step's loss if there are no penalties.
    :param samples: the number of samples, "" if the update does not read it.
    """

    gradients: dict[str, str]
    statistics: dict[str, str]
    loss: str
    samples: str


def gradient_model(step: StepModel) -> ModelProto:
    """The model that computes the loss and the gradient of a step, without penalties, clipping and update.

    It takes the data, the label and the weights, and the states `step` and `loss_scale` if there are any. It returns the
    loss, `w_grad` for each weight w (`weights_grad` if they are one vector), and `s_batch` for each running statistic s: the
    statistic after this batch. With a loss scale the gradients are multiplied by it.

    :param step: as `step_model` returns it.
    :raises OptionError: it comes from elsewhere.

    >>> import onnx.parser
    >>> from refgrad.training import SGD, gradient_model, step_model, update_model
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {1, 2}> { y = MatMul(x, a) }'
    ... )
    >>> step = step_model(line, optimizer=SGD(momentum=0.9))
    >>> for model in (gradient_model(step), update_model(step)):
    ...     print([value.name for value in model.graph.input], [value.name for value in model.graph.output])
    ['x', 'label', 'weights'] ['loss', 'weights_grad']
    ['weights_grad', 'learning_rate', 'weights', 'velocity'] ['weights_next', 'velocity_next']
    """
    cut, names, graph = _cut(step), between(step), step.model.graph
    ends: dict[str, list[str]] = {}
    for state, name in names.gradients.items():
        ends.setdefault(cut.gradients[state], []).append(name)
    for state, name in names.statistics.items():
        ends.setdefault(step.next[state], []).append(name)
    nodes = [graph.node[k] for k in positions_needed(signatures(graph.node), [cut.loss, *ends])]
    nodes += [_copy(value, name) for value, given in ends.items() for name in given if name != value]
    if names.loss != cut.loss:
        nodes.append(helper.make_node("Squeeze", [cut.loss], [names.loss], name=names.loss))
    outputs = [_scalar(names.loss, _type_of_loss(step))]
    outputs += [_declared(name, step.state[state]) for state, name in (names.gradients | names.statistics).items()]
    read = {name for node in nodes for name in signatures([node])[0][0]}
    inputs = [value for value in graph.input if value.name in read]
    made = _model(step.model, nodes, inputs, outputs)
    note(made, made, training={"loss": names.loss, "label": step.label, "gradients": names.gradients})
    return made


def update_model(step: StepModel) -> ModelProto:
    """The model that penalizes and clips the gradient of a step, and updates the weights.

    It takes what `gradient_model` returns, or sums or means of that over processes, `learning_rate` and the states. It returns
    the next states. If there are penalties, it also takes the loss without them, as `data_loss`, and returns the loss. With
    penalty_by="sample" it also takes the number of samples, `samples`, as int64.

    :param step: as `step_model` returns it.
    :raises OptionError: it comes from elsewhere.
    """
    cut, names, graph = _cut(step), between(step), step.model.graph
    given = {name: cut.gradients[state] for state, name in names.gradients.items()}
    if has_penalty := names.loss != step.loss:
        given[names.loss] = cut.loss
    if names.samples:
        given[names.samples] = cut.count
    copies = [_copy(name, value) for name, value in given.items() if name != value]
    made_there = {*given.values(), *(step.next[state] for state in names.statistics)}
    rest = [node for node in graph.node if made_there.isdisjoint(node.output)]
    results = [value for value in graph.output if value.name != step.loss or has_penalty]
    wanted = [value.name for value in results]
    nodes = [*copies, *(rest[k] for k in positions_needed(signatures(rest), wanted))]
    nodes += [_copy(name, step.next[state]) for state, name in names.statistics.items()]
    inputs = [_declared(name, step.state[state]) for state, name in (names.gradients | names.statistics).items()]
    if has_penalty:
        inputs.append(_scalar(names.loss, _type_of_loss(step)))
    if names.samples:
        inputs.append(_scalar(names.samples, TensorProto.INT64))
    inputs += [value for value in graph.input if value.name in step.state or value.name == RATE]
    made = _model(step.model, nodes, inputs, results)
    note(made, made, training={"next": dict(step.next), "gradients": names.gradients})
    return made


def between(step: StepModel) -> Between:
    """The names of the values that go from the gradient model of a step to its update model."""
    cut = _cut(step)
    taken = names_of(step.model.graph)
    ends = {*cut.gradients.values(), cut.loss, cut.count}

    def named(wanted: str, value: str) -> str:
        return wanted if wanted == value and wanted in ends else fresh(wanted, taken)

    gradients = {state: named(f"{state}_grad", value) for state, value in cut.gradients.items()}
    running = [state for state in step.state if state in step.next and state in _statistics(step)]
    statistics = {state: fresh(f"{state}_batch", taken) for state in running}
    loss = fresh("data_loss", taken) if _is_penalized(step) else step.loss
    return Between(gradients, statistics, loss, fresh("samples", taken) if cut.count else "")


def _cut(step: StepModel) -> Cut:
    if step.cut is None:
        raise OptionError("This step does not say where its gradient ends. Make it with refgrad.training.step_model.")
    return step.cut


def _is_penalized(step: StepModel) -> bool:
    """True if the loss of the step is more than the loss of the data, in another shape."""
    name, makers = step.loss, {name: node for node in step.model.graph.node for name in node.output}
    while name != _cut(step).loss:
        node = makers[name]
        if node.op_type not in ("Reshape", "Identity"):
            return True
        name = node.input[0]
    return False


def _statistics(step: StepModel) -> set[str]:
    """The states that hold running statistics."""
    return {step.masters.get(name, name) for name in step.statistics}


def _copy(value: str, name: str) -> NodeProto:
    return helper.make_node("Identity", [value], [name], name=f"copy/{name}")


def _type_of_loss(step: StepModel) -> int:
    [loss] = [value for value in step.model.graph.output if value.name == step.loss]
    return int(loss.type.tensor_type.elem_type)


def _scalar(name: str, kind: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [])


def _declared(name: str, value: np.ndarray) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _model(
    source: ModelProto,
    nodes: Iterable[NodeProto],
    inputs: Iterable[ValueInfoProto],
    outputs: Iterable[ValueInfoProto],
) -> ModelProto:
    """A model of nodes of `source`, with the initializers that they read."""
    made = ModelProto(
        ir_version=source.ir_version,
        producer_name=source.producer_name,
        producer_version=source.producer_version,
        opset_import=source.opset_import,
        functions=source.functions,
        metadata_props=source.metadata_props,
    )
    graph = made.graph
    graph.name = source.graph.name
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    read = {name for names, _ in signatures(graph.node) for name in names} | {value.name for value in graph.output}
    read.update(value.name for value in graph.input)  # which may have defaults
    graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in read)
    return made


__all__ = ["Between", "between", "gradient_model", "update_model"]
