"""One step of training as one model: forward, loss, gradient and update. Weights and states go in and come out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from refgrad.backends.base import graph_inputs
from refgrad.errors import OptionError, UnknownNameError, choices, did_you_mean
from refgrad.protos.malformed import explained
from refgrad.protos.reading import read
from refgrad.protos.walk import captures_of, fresh, names_of, versions_of
from refgrad.reverse.assembly import names_in, note
from refgrad.reverse.path import matching
from refgrad.training.adapters import adapters_of
from refgrad.training.dropout import with_masks
from refgrad.training.labels import classes_of, labels_of
from refgrad.training.losses import OF_CLASSES, count_of_classes, differentiated
from refgrad.training.normalization import Statistic, in_inference_mode, in_training_mode, refuse_training_mode
from refgrad.training.outputs import compared_output, without_maps
from refgrad.training.slimming import slim, uses
from refgrad.training.updates import SGD, Optimizer
from refgrad.training.writer import Writer
from refgrad.transforms.lifting import holds_weights, lift_weights
from refgrad.transforms.losses import get_train_initializer
from refgrad.transforms.selection import select_model_inputs_outputs
from refgrad.transforms.weights import weights

BATCH_NORMS = ("frozen", "training")
DROPOUTS = ("off", "training")
RATE, STEP, VECTOR = "learning_rate", "step", "weights"
_FLAT = 2**16  # elements of weights, up to which one vector of all of them is faster than a tensor for each
_CLIP_EPSILON = 1e-6
PENALTIES_BY = ("step", "sample")


@dataclass(frozen=True)
class StepModel:
    """A step of training.

    `model` has the inputs of the model that is trained, the label, and what a step changes: each of `state` is an input, and
    the output `next` names is what the next step is fed for it. Besides there are the learning rate, a scalar in the type of
    the weights, or in double where they have several, and the loss, a scalar. Where the update depends on it, the number of
    steps so far is among the states. With `flat` the weights are one vector, as is each kind of state: `layout` says where
    each weight lies.
    """

    model: ModelProto
    weights: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]
    next: Mapping[str, str]
    data: tuple[str, ...]
    label: str
    loss: str
    flat: bool
    layout: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    classes: int | None = None  # how many the label has, where they are counted
    class_names: tuple[Any, ...] | None = None  # those that the model returns, in the order of its scores
    statistics: tuple[str, ...] = ()  # the running means and variances among the state
    evaluation: ModelProto | None = (
        None  # the loss with them, by the weights and statistics; None where the step tells it
    )

    @cached_property
    def inputs(self) -> dict[str, tuple[np.dtype, tuple[int | None, ...] | None]]:
        """The types and sizes of the data and the label, by name; None is any size."""
        return {
            value.name: (value.dtype, None if value.shape is None else tuple(map(_known, value.shape)))
            for value in graph_inputs(self.model.graph)
            if value.name in (*self.data, self.label) and value.dtype is not None
        }

    @cached_property
    def rate_type(self) -> np.dtype:
        """The type that the learning rate is fed in."""
        [rate] = [value for value in self.model.graph.input if value.name == RATE]
        return helper.tensor_dtype_to_np_dtype(rate.type.tensor_type.elem_type)

    def weights_in(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weights by name in a state."""
        if not self.flat:
            return {name: np.asarray(state[name]) for name in self.weights}
        row = np.asarray(state[VECTOR])
        return {
            name: row[start : start + math.prod(shape)].reshape(shape) for name, (start, shape) in self.layout.items()
        }

    def labels(self, y: Any, classes: Sequence[Any] | None = None) -> np.ndarray:
        """`y` as the step wants its label: its type, and one or two axes.

        Where the label is int64, `y` has classes, which become their positions in `classes`; by default in `class_names`, or,
        where the model does not say its classes, `y` has the positions.

        :param y: numbers or classes, [N], [N, 1] or of the shape of the label.
        :raises FeedError: `y` does not fit the label, or has a class that is not among `classes`.
        """
        value = next(value for value in self.model.graph.input if value.name == self.label)
        return labels_of(y, value, self.class_names if classes is None else classes)

    def state_with(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The state that a training begins with, with these weights in place of those of the model."""
        if self.flat:
            return {**self.state, VECTOR: np.concatenate([np.ravel(weights[name]) for name in self.layout])}
        return {**self.state, **{name: np.asarray(weights[name]) for name in self.weights}}

    def beginning_with(self, state: Mapping[str, np.ndarray]) -> StepModel:
        """The step that begins with a state."""
        return replace(self, state=dict(state))


def _known(size: int | str | None) -> int | None:
    return size if isinstance(size, int) else None


@explained
def step_model(
    model: ModelProto | str | os.PathLike[str],
    loss: str | ModelProto | os.PathLike[str] | None = "squared_error",
    optimizer: Optimizer | None = None,
    *,
    trainable: Sequence[str] | None = None,
    output: str | None = None,
    label: str = "label",
    sample_weight: str | None = None,
    reduction: str = "mean",
    penalty: Mapping[str, tuple[float, float]] | None = None,
    penalty_by: str = "step",
    weight_decay: Mapping[str, float] | None = None,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    accumulate: Any = 1,
    flat: bool | None = None,
    loss_settings: Mapping[str, Any] | None = None,
    batch_norm: str = "frozen",
    unbiased: bool = True,
    dropout: str = "off",
    seed: int = 0,
) -> StepModel:
    """The model of one step of training.

    :param model: a model, or the path of one. It is not modified. `refgrad.lift_weights` is applied to it.
    :param loss: what `output` is compared by with the label: "squared_error", "absolute_error", "elastic", "log" as in
        `refgrad.add_loss_output`, "half_squared_error", or "cross_entropy" of logits [N, C, ...] with classes [N, ...] in
        int64, or "log_loss" of probabilities [N, C, ...], or of the second of two classes [N, 1], with such classes. None:
        `output` is the loss already. Or a model of the same opset, or a `pathlib.Path`: its inputs that are called as outputs
        of the model get these (or its first input gets `output`), the others are fed, and it returns a scalar.
    :param optimizer: the update; SGD without momentum by default.
    :param trainable: names of float initializers, or patterns of parameters (`head.*`); by default the
        adapters that `lora` added, or else all that `refgrad.weights` calls parameters.
    :param output: the output that is compared, or the loss; needed where there are several of floats. What ZipMap makes maps
        of counts as the output.
    :param sample_weight: name of an input to add, one weight per sample.
    :param reduction: "mean" or "sum" of the losses of the samples.
    :param penalty: {name or pattern: (l1, l2)}: l1·Σ|w| + l2·Σw² is added to the loss.
    :param penalty_by: "step", or "sample": the penalty is divided by the number of samples of the step, as for the networks of
        scikit-learn.
    :param weight_decay: {name or pattern: λ} in place of the optimizer's; of several patterns that match the last counts.
    :param clip_value: each element of the gradient is clipped to [−c, c].
    :param clip_norm: the gradient is scaled by min(1, c / (‖g‖ + 1e-6)), where ‖g‖ is the norm of all of it.
    :param accumulate: the update is made in every so many steps, with the mean of their gradients, which are kept as a state.
        Clipping comes after; learning rates that count steps count all of them.
    :param flat: keep the weights, and each kind of state, in one vector; by default where they are of one type and few.
    :param loss_settings: what the loss is told besides: l1_weight and l2_weight of "elastic", eps of "log".
    :param batch_norm: "frozen": BatchNormalization is as the model has it, with its running statistics. "training": batches are
        normalised by their own statistics, and the running ones become states that follow them with the node's momentum.
    :param unbiased: the running variance follows the variance of a batch of n numbers that is divided by n − 1, as torch's
        does; ONNX divides by n.
    :param dropout: "off": nothing is dropped. "training": each Dropout draws anew in every step, the same on every executor,
        from `seed` and the number of the step, which is a state then.
    :raises OptionError: an option does not fit.
    :raises UnknownNameError: a name that does not exist, or nothing is trainable.

    >>> import onnx.parser
    >>> from refgrad.training import SGD, step_model
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {1, 2}> { y = MatMul(x, a) }'
    ... )
    >>> step = step_model(line, optimizer=SGD(momentum=0.9))
    >>> [value.name for value in step.model.graph.input]
    ['x', 'label', 'learning_rate', 'weights', 'velocity']
    >>> [value.name for value in step.model.graph.output]
    ['loss', 'weights_next', 'velocity_next']
    """
    optimizer = SGD() if optimizer is None else optimizer
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizer is one of refgrad.training's, such as SGD(), not {optimizer!r}.")
    model, chosen = trained(model, trainable)
    if output is not None or not isinstance(loss, ModelProto | os.PathLike):
        output = compared_output(read(model), output)
    kinds = {helper.np_dtype_to_tensor_dtype(value.dtype) for value in chosen.values()}
    if flat is None:
        flat = len(kinds) == 1 and sum(value.size for value in chosen.values()) <= _FLAT
    if flat and len(kinds) > 1:
        raise OptionError("flat=True needs weights of one type; these have several. Leave flat at False.")
    if batch_norm not in BATCH_NORMS:
        raise OptionError(f"batch_norm={batch_norm!r}; there are {choices(BATCH_NORMS)}.")
    statistics: list[Statistic] = []
    source: ModelProto | str | os.PathLike[str] = model
    still: ModelProto | str | os.PathLike[str] = model
    if batch_norm == "training":
        source, still, statistics = in_training_mode(model)
        chosen = {name: value for name, value in chosen.items() if name not in {s.name for s in statistics}}
    if dropout not in DROPOUTS:
        raise OptionError(f"dropout={dropout!r}; there are {choices(DROPOUTS)}.")
    refuse_training_mode(model, batch_norm != "training", dropout != "training")
    if dropout == "training":
        source, still = with_masks(source, STEP, _checked_seed(seed)), in_inference_mode(still)
    made, loss_name = differentiated(source, list(chosen), loss, output, label, sample_weight, reduction, loss_settings)
    clip = (clip_value, clip_norm)
    if penalty_by not in PENALTIES_BY:
        raise OptionError(f"penalty_by={penalty_by!r}; there are {choices(PENALTIES_BY)}.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"accumulate is an integer above 0, not {accumulate!r}.")
    decays, shared = _decays(penalty, chosen), penalty_by == "sample"
    held = get_train_initializer(model) if statistics else {}
    running = {statistic: held[statistic.name][0] for statistic in statistics}
    assembly = _Assembly(made, chosen, optimizer, loss_name, label, decays, shared, clip, flat, running, unbiased)
    assembly.accumulate, assembly.draws = accumulate, dropout == "training"
    assembly.weight_decay = _weight_decays(weight_decay, chosen, optimizer)
    made_step = assembly.step()
    evaluation = None
    if (
        statistics or decays or dropout == "training"
    ):  # the loss of a step is of other statistics, penalized or of a part
        whole, name = differentiated(still, list(chosen), loss, output, label, sample_weight, reduction, loss_settings)
        evaluation = select_model_inputs_outputs(whole, outputs=[name])
    if loss not in OF_CLASSES:
        return replace(made_step, evaluation=evaluation)
    count, names = count_of_classes(model, output), classes_of(read(model))
    known = names if names is not None and count in (None, len(names)) else None
    return replace(made_step, classes=count, class_names=None if known is None else tuple(known), evaluation=evaluation)


def trained(
    model: ModelProto | str | os.PathLike[str], trainable: Sequence[str] | None
) -> tuple[ModelProto | str | os.PathLike[str], dict[str, np.ndarray]]:
    """The model with its weights as initializers, and those that `trainable` chooses.

    :raises UnknownNameError: a name that does not exist, or nothing is trainable.
    """
    source = read(model)
    if (plain := without_maps(source)) is not source:
        model = plain
    if any(map(holds_weights, read(model).graph.node)):
        model = lift_weights(model)
    held = {name: value for name, (value, _) in get_train_initializer(model).items()}
    return model, {name: held[name] for name in _trained(trainable, model, list(held))}


def _trained(
    trainable: Sequence[str] | None, model: ModelProto | str | os.PathLike[str], floats: Sequence[str]
) -> list[str]:
    """What is trained: initializers that are named, and parameters that a pattern matches; all parameters by default."""
    found = weights(model)
    adapters = adapters_of(read(model))
    parameters = [name for name in adapters or found.trainable if name in floats]
    if trainable is not None:
        return _chosen(trainable, floats, "trainable", parameters)
    if parameters:
        return parameters
    if not floats:
        raise UnknownNameError("Nothing is trainable: the model has no float initializer.")
    held = ", ".join(f"{name!r} ({found[name].kind})" for name in floats[:12])
    raise UnknownNameError(
        f"Nothing is trainable: no initializer of the model is a parameter of a layer. It has {held}"
        f"{', …' if len(floats) > 12 else ''}. Name those to train in trainable."
    )


def _chosen(patterns: Sequence[str], known: Sequence[str], what: str, usual: Sequence[str] | None = None) -> list[str]:
    """The names that are given, and those of `usual` that a pattern matches, in the order of `known`."""
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    found = matching(given, known, known if usual is None else usual, what)
    if unknown := [name for name in found if name not in known]:
        raise UnknownNameError(
            f"{unknown[0]!r} in {what} is no float initializer.{did_you_mean(unknown[0], known)} There are: {choices(known)}."
        )
    return [name for name in known if name in found]


def _checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise OptionError(f"seed is an integer that is not negative, not {seed!r}.")
    return int(seed)


def _decays(penalty: Mapping[str, Any] | None, weights: Mapping[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    found = {}
    for pattern, amounts in (penalty or {}).items():
        if not isinstance(amounts, tuple | list) or len(amounts) != 2:
            raise OptionError(f"The penalty of {pattern!r} is a pair (l1, l2), not {amounts!r}.")
        for name in _chosen([pattern], list(weights), "penalty"):
            found[name] = (float(amounts[0]), float(amounts[1]))
    return found


def _weight_decays(
    given: Mapping[str, Any] | None, weights: Mapping[str, np.ndarray], optimizer: Optimizer
) -> dict[str, float]:
    if given and not hasattr(optimizer, "weight_decay"):
        raise OptionError(f"{optimizer!r} has no weight_decay.")
    found: dict[str, float] = {}
    for pattern, amount in (given or {}).items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not math.isfinite(amount) or amount < 0:
            raise OptionError(f"The weight decay of {pattern!r} is a number that is not negative, not {amount!r}.")
        found |= dict.fromkeys(_chosen([pattern], list(weights), "weight_decay"), float(amount))
    return found


class _Assembly:
    """The step model in the making."""

    def __init__(
        self,
        made: ModelProto,
        weights: Mapping[str, np.ndarray],
        optimizer: Optimizer,
        loss: str,
        label: str,
        decays: Mapping[str, tuple[float, float]],
        shared: bool,
        clip: tuple[float | None, float | None],
        flat: bool,
        running: Mapping[Statistic, np.ndarray],
        unbiased: bool,
    ) -> None:
        self.running, self.unbiased, self.accumulate, self.draws = running, unbiased, 1, False
        self.weight_decay: Mapping[str, float] = {}
        self.shared, self.count = shared, ""  # whether the samples of a step share the penalty, and how many there are
        self.made, self.weights, self.optimizer, self.flat = made, weights, optimizer, flat
        self.loss, self.label, self.decays, self.clip = loss, label, decays, clip
        taken = names_of(made.graph) | {node.name for node in made.graph.node}
        opset = versions_of(made)[""]
        self.first, self.last = Writer(opset, "weights", taken), Writer(opset, "update", taken)
        self.taken = taken
        self.uses = uses(made.graph)
        self.inputs: list[ValueInfoProto] = []
        self.state: dict[str, np.ndarray] = {}

    def step(self) -> StepModel:
        """The step."""
        op = self.last
        _, gradients = names_in(self.made)
        moved = {*self.weights, *(statistic.name for statistic in self.running)}
        if self.draws:
            moved.add(STEP)
        data = [value for value in self.made.graph.input if value.name not in moved]
        if clash := next((v.name for v in data if v.name in (RATE, STEP, VECTOR)), ""):
            raise UnknownNameError(f"The model has an input {clash!r}, a name that the step needs. Rename the input.")
        loss = next(value for value in self.made.graph.output if value.name == self.loss)
        op.types[self.loss] = (loss.type.tensor_type.elem_type, None)
        layout: dict[str, tuple[int, tuple[int, ...]]] = {}
        if self.flat:
            layout = self._unpacked()
            parts = {VECTOR: np.concatenate([value.ravel() for value in self.weights.values()])}
            slopes = {VECTOR: self._packed(gradients)}
        else:
            parts = dict(self.weights)
            slopes = {name: gradients[name] for name in self.weights}
        for name, value in parts.items():
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            op.types[name] = op.types[slopes[name]] = (kind, value.ndim)
        total = self.loss
        if self.shared and self.decays:
            self.count = op.Cast(self._count(data), to=TensorProto.DOUBLE)
        for name in parts:
            slopes[name], total = self._penalized(name, slopes[name], total)
        kinds = {op.type(name) for name in parts}
        one_kind = kinds.pop() if len(kinds) == 1 else int(TensorProto.DOUBLE)
        op.types[RATE], op.types[STEP] = (one_kind, 0), (TensorProto.INT64, 0)
        self.inputs.append(helper.make_tensor_value_info(RATE, one_kind, []))
        self._begin(STEP, np.array(0, np.int64))
        results = {STEP: op.Add(STEP, 1)}
        number, due = results[STEP], ""
        if self.accumulate > 1:
            number, due = op.Div(number, self.accumulate), op.Equal(op.Mod(number, self.accumulate), 0)
            results |= self._accumulated(slopes, due)
        slopes = self._clipped(slopes)
        t = op.Cast(number, to=TensorProto.DOUBLE)
        if due:  # it is 0 before the first update
            t = op.Max(t, 1.0)
        for name, value in parts.items():
            results |= self._update(name, value, slopes[name], t, due)
        if (
            not due and not self.draws and not any(t in node.input for node in op.nodes)
        ):  # no update asks how many there were
            del results[STEP], self.state[STEP]
            self.inputs = [value for value in self.inputs if value.name != STEP]
        for statistic, value in self.running.items():
            op.types[statistic.name] = (helper.np_dtype_to_tensor_dtype(value.dtype), 1)
            self._begin(statistic.name, value)
            results[statistic.name] = statistic.following(op, self.unbiased)
        if not self._is_scalar(self.loss):
            total = op.Reshape(total, np.zeros(0, np.int64))
        return self._assembled(data, results, total, layout)

    def _begin(self, name: str, value: np.ndarray) -> None:
        """An input that the step returns changed, and with what it begins."""
        self.state[name] = value
        self.inputs.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        )

    def _unpacked(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Take the weights out of their vector."""
        op, layout, start = self.first, dict[str, tuple[int, tuple[int, ...]]](), 0
        sizes = [value.size for value in self.weights.values()]
        rows = op.Split(VECTOR, sizes, outputs=len(sizes)) if len(sizes) > 1 else (VECTOR,)
        for row, (name, value) in zip(rows, self.weights.items(), strict=True):
            layout[name] = (start, value.shape)
            start += value.size
            if value.ndim == 1 and len(sizes) > 1:
                split = op.nodes[0]
                split.output[list(split.output).index(row)] = name
                continue
            op.nodes.append(
                helper.make_node("Reshape", [row, op.const(list(value.shape))], [name], name=f"weights/{name}")
            )
        return layout

    def _packed(self, gradients: Mapping[str, str]) -> str:
        flat = {name: self.weights[name].ndim == 1 or self._sums_to_row(name, gradients) for name in self.weights}
        rows = [gradients[name] if flat[name] else self.last.Reshape(gradients[name], [-1]) for name in self.weights]
        packed: str = self.last.Concat(*rows, axis=0) if len(rows) > 1 else rows[0]
        return packed

    def _sums_to_row(self, name: str, gradients: Mapping[str, str]) -> bool:
        """Whether the gradient is a sum that nothing else reads and that is a row without the axes of size 1 it keeps."""
        graph, gradient = self.made.graph, gradients[name]
        node = next((node for node in graph.node if gradient in node.output), None)
        if node is None or node.op_type != "ReduceSum" or len(node.input) != 2 or self.uses[gradient]:
            return False
        axes = next((tensor for tensor in graph.initializer if tensor.name == node.input[1]), None)
        keepdims = next((attribute for attribute in node.attribute if attribute.name == "keepdims"), None)
        if axes is None or keepdims is None or not keepdims.i or list(gradients.values()).count(gradient) > 1:
            return False
        if self.weights[name].ndim - math.prod(axes.dims) != 1:
            return False
        keepdims.i = 0
        return True

    def _is_scalar(self, name: str) -> bool:
        """Whether a value is the sum or the mean of all of a tensor; no inner graph reads it."""
        node = next((node for node in self.made.graph.node if name in node.output), None)
        return (
            node is not None
            and not any(name in captures_of(reader) for reader in self.made.graph.node)
            and node.op_type in ("ReduceMean", "ReduceSum")
            and len(node.input) == 1
            and [(attribute.name, attribute.i) for attribute in node.attribute] == [("keepdims", 0)]
        )

    def _penalized(self, name: str, slope: str, total: str) -> tuple[str, str]:
        """The gradient and the loss with l1·Σ|w| + l2·Σw²."""
        op = self.last
        members = list(self.weights) if self.flat else [name]
        for place in (0, 1):
            amounts = [self.decays.get(member, (0.0, 0.0))[place] for member in members]
            if not any(amounts):
                continue
            amount: Any = amounts[0]
            if len(set(amounts)) > 1:
                rows = [
                    np.full(self.weights[m].size, a, self.weights[m].dtype)
                    for m, a in zip(members, amounts, strict=True)
                ]
                amount = op.const(np.concatenate(rows))
            if self.shared:
                amount = op.Div(amount if isinstance(amount, str) else op.const(amount, like=name), self._in_type(name))
            if place == 0:
                slope = op.Add(slope, op.Mul(op.Sign(name), amount))
                part = op.Mul(op.Abs(name), amount)
            else:
                weighted = op.Mul(name, amount)
                slope = op.Add(slope, op.Add(weighted, weighted))
                part = op.Mul(name, weighted)
            summed = op.ReduceSum(part, keepdims=0)
            total = op.Add(total, summed if op.type(total) == op.type(name) else op.Cast(summed, to=op.type(total)))
        return slope, total

    def _count(self, data: Sequence[ValueInfoProto]) -> str:
        """The number of samples of a step."""
        axes = {value.name: len(value.type.tensor_type.shape.dim) for value in data}
        first = next((name for name in (self.label, *axes) if axes.get(name)), "")
        if not first:
            raise OptionError('penalty_by="sample" needs an input whose first axis counts the samples. Take "step".')
        return str(self.last.Gather(self.last.Shape(first), 0))

    def _in_type(self, name: str) -> str:
        return str(self.last.Cast(self.count, to=self.last.type(name)))

    def _clipped(self, slopes: Mapping[str, str]) -> dict[str, str]:
        op, (value, most) = self.last, self.clip
        clipped = dict(slopes)
        if value is not None:
            clipped = {name: op.Max(op.Min(g, float(value)), -float(value)) for name, g in clipped.items()}
        if most is not None:
            squares = [op.Cast(op.ReduceSum(op.Mul(g, g), keepdims=0), to=TensorProto.DOUBLE) for g in clipped.values()]
            norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
            factor = op.Min(op.Div(op.const(float(most), like=norm), op.Add(norm, _CLIP_EPSILON)), 1.0)
            clipped = {name: op.Mul(g, op.Cast(factor, to=op.type(g))) for name, g in clipped.items()}
        return clipped

    def _accumulated(self, slopes: dict[str, str], due: str) -> dict[str, str]:
        """Add up gradients, and put their mean in place of each: what is kept of them, nothing where the update is `due`."""
        op, kept = self.last, {}
        for name, slope in slopes.items():
            kind, rank = op.types[name]
            state = "gradient" if self.flat else f"{name}.gradient"
            size = sum(v.size for v in self.weights.values()) if self.flat else self.weights[name].shape
            self._begin(state, np.zeros(size, helper.tensor_dtype_to_np_dtype(kind)))
            op.types[state] = (kind, rank)
            total = op.Add(state, slope)
            slopes[name] = op.Mul(total, 1 / self.accumulate)
            kept[state] = op.Where(due, op.const(0.0, like=total), total)
        return kept

    def _update(self, name: str, value: np.ndarray, slope: str, t: str, due: str) -> dict[str, str]:
        op, kind = self.last, helper.np_dtype_to_tensor_dtype(value.dtype)
        self._begin(name, value)
        states = {}
        for state, begin in self.optimizer.states.items():
            states[state] = state if self.flat else f"{name}.{state}"
            self._begin(states[state], np.full(value.shape, begin, value.dtype))
            op.types[states[state]] = (kind, value.ndim)
        rate = RATE if op.type(RATE) == kind else op.Cast(RATE, to=kind)
        moved, new = self.optimizer.update(op, name, slope, rate, t, states, self._decay(name, value))
        if due:
            moved = op.Where(due, moved, name)
            new = {state: op.Where(due, made, states[state]) for state, made in new.items()}
        return {name: moved} | {states[state]: made for state, made in new.items()}

    def _decay(self, name: str, value: np.ndarray) -> float | str:
        """The weight decay of a weight, or of each element of the vector of all; one number where they are the same."""
        usual = float(getattr(self.optimizer, "weight_decay", 0.0))
        amounts = [self.weight_decay.get(member, usual) for member in (self.weights if self.flat else [name])]
        if len(set(amounts)) == 1:
            return amounts[0]
        rows = [np.full(w.size, amount, value.dtype) for w, amount in zip(self.weights.values(), amounts, strict=True)]
        return self.last.const(np.concatenate(rows))

    def _assembled(
        self,
        data: Sequence[ValueInfoProto],
        results: Mapping[str, str],
        total: str,
        layout: Mapping[str, tuple[int, tuple[int, ...]]],
    ) -> StepModel:
        made, source = ModelProto(), self.made.graph
        made.CopyFrom(self.made)
        result = fresh("loss", self.taken)
        final = {total: result} | {name: fresh(f"{state}_next", self.taken) for state, name in results.items()}
        graph = made.graph
        for field_name in ("input", "output", "node", "initializer"):
            graph.ClearField(field_name)
        graph.name = "step"
        graph.input.extend([*data, *self.inputs])
        graph.node.extend([*self.first.nodes, *source.node, *self.last.nodes])
        for node in graph.node:
            node.input[:] = [final.get(name, name) for name in node.input]
            node.output[:] = [final.get(name, name) for name in node.output]
        graph.initializer.extend([*source.initializer, *self.first.constants.values(), *self.last.constants.values()])
        graph.output.append(helper.make_tensor_value_info(result, self.last.type(self.loss), []))
        types = {value.name: value.type for value in graph.input}
        graph.output.extend(helper.make_value_info(final[name], types[state]) for state, name in results.items())
        slim(made)
        following = {state: final[name] for state, name in results.items()}
        rows = {name: [start, list(shape)] for name, (start, shape) in layout.items()}
        note(made, self.made, training={"next": following, "loss": result, "label": self.label, "layout": rows})
        return StepModel(
            made,
            dict(self.weights),
            dict(self.state),
            following,
            tuple(value.name for value in data if value.name != self.label),
            self.label,
            result,
            self.flat,
            dict(layout),
            statistics=tuple(statistic.name for statistic in self.running),
        )
