"""A step of training: its model, what it begins with, and what it is fed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad import traits
from refgrad.backends import Backend, Prepared, get_backend
from refgrad.backends.base import graph_inputs
from refgrad.errors import FeedError
from refgrad.markup import html_table, shape_text
from refgrad.model.external import ExternalData, Opened, external_tensors
from refgrad.protos.traverse import attribute_value
from refgrad.training.labels import first_of, labels_of
from refgrad.training.precision import master

RATE, STEP, VECTOR = "learning_rate", "step", "weights"


@dataclass(frozen=True)
class Cut:
    """The values between the gradient and the update in the model of a step.

    :param gradients: the gradient of each state that holds weights, by the name of the state.
    :param loss: the loss without penalties.
    :param count: the number of samples, "" if the update does not read it.
    """

    gradients: Mapping[str, str]
    loss: str
    count: str = ""


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
    ignored: int | None = None  # a label that is no class, and does not count
    label_range: tuple[float, float] | None = None  # the least and the largest label; None where any number is right
    class_loss: str = ""  # the loss to take for class numbers; "" where the step has one
    statistics: tuple[str, ...] = ()  # the running means and variances among the state
    evaluation: ModelProto | None = (
        None  # the loss with them, by the weights and statistics; None where the step tells it
    )
    accumulate: int = 1  # the number of steps per update
    settings: Mapping[str, str] = field(default_factory=dict)  # how it was made, in words, as `settings_of` writes them
    masters: Mapping[str, str] = field(
        default_factory=dict
    )  # the float32 states that hold weights and statistics of 16 bits
    vector: str = VECTOR  # the state that holds all weights, if `flat`
    finite: str = ""  # the output that is false if the step updates nothing, since a gradient is not finite
    data_beside: Path | None = None  # the path beside which the external data of both models lies, if they have any
    cut: Cut | None = None  # where the gradient ends and the update begins
    mean_over: str = (
        "samples"  # what the loss is the mean of: "samples", elements of the "label", "mixed"; "": it is a sum
    )
    class_weights: tuple[float, ...] | None = None  # how much each class counts in this mean

    def _repr_html_(self) -> str:
        """The inputs of the step, and what each is fed, for a notebook."""
        kinds = dict.fromkeys(self.data, "data") | {self.label: "the expected values"}
        kinds |= {name: f"state; next: {following}" for name, following in self.next.items()}
        rows = [
            {
                "input": value.name,
                "type": "-" if value.dtype is None else value.dtype.name,
                "shape": shape_text(value.shape),
                "is fed": kinds.get(value.name, "every step"),
            }
            for value in graph_inputs(self.model.graph)
        ]
        count = sum(value.size for value in self.weights.values())
        title = f"A step of training, weights: {len(self.weights)}, of {count} numbers"
        return html_table(rows, title, [f"It returns the loss {self.loss!r} and the next states."])

    @cached_property
    def inputs(self) -> dict[str, tuple[np.dtype, tuple[int | None, ...] | None]]:
        """The types and sizes of the data and the label, by name; None is any size."""
        return {
            value.name: (value.dtype, None if value.shape is None else tuple(map(_known, value.shape)))
            for value in graph_inputs(self.model.graph)
            if value.name in (*self.data, self.label) and value.dtype is not None
        }

    @cached_property
    def sample_axes(self) -> dict[str, int | None]:
        """The axis that counts the samples, of each of the data and of the label; None where an input has none.

        It is the first axis. Of a model that takes batches of any size, an input whose first axis has a fixed size may have it
        elsewhere, as a recurrent state [layers, N, hidden], or nowhere, as a sample rate.
        """
        axes: dict[str, int | None] = dict.fromkeys(self.inputs, 0)
        shapes = {v.name: v.shape for v in graph_inputs(self.model.graph) if v.name in self.data}
        counting = [None if dims is None else dims[0] for dims in shapes.values() if dims is None or _is_free(dims[:1])]
        if not counting:
            return axes
        names = {size for size in counting if size is not None}
        for name, dims in shapes.items():
            if dims is not None and not _is_free(dims[:1]):
                free = [axis for axis, size in enumerate(dims) if _is_free((size,))]
                of_samples = [axis for axis in free if dims[axis] is None or not names or dims[axis] in names]
                axes[name] = of_samples[0] if len(free) == len(of_samples) == 1 else None
        return axes

    @property
    def fixed_size(self) -> int | None:
        """The number of samples of a batch if the model takes no other one, else None."""
        counting = (dims[0] for name, (_, dims) in self.inputs.items() if dims and self.sample_axes[name] == 0)
        return next((size for size in counting if size is not None), None)

    def samples_in(self, batch: Mapping[str, np.ndarray]) -> int:
        """The number of samples of a batch."""
        counting = next(((name, axis) for name, axis in self.sample_axes.items() if axis is not None), None)
        return 1 if counting is None else np.shape(batch[counting[0]])[counting[1]]

    def read_by(self, model: Prepared, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch without data that a part of the step, such as its gradient, does not read."""
        unread = {*self.data, self.label} - {value.name for value in model.inputs}
        return {name: array for name, array in batch.items() if name not in unread}

    @cached_property
    def rate_type(self) -> np.dtype:
        """The type that the learning rate is fed in."""
        [rate] = [value for value in self.model.graph.input if value.name == RATE]
        return helper.tensor_dtype_to_np_dtype(rate.type.tensor_type.elem_type)

    def opened(self, model: ModelProto) -> ModelProto | Opened:
        """The model of the step, or another one of the same weights, with the place of its external data."""
        return model if self.data_beside is None else Opened(model, self.data_beside)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 that tells the step from others: of its model, the first weights, and the names that are fed back.

        :raises InvalidModelError: the external data of the model cannot be read.
        """
        model = self.model
        if self.data_beside is not None:
            model = ModelProto()
            model.CopyFrom(self.model)
            _put_digests(model, self.data_beside)
        digest = hashlib.sha256(model.SerializeToString(deterministic=True))
        digest.update(json.dumps(sorted(self.next.items())).encode())
        for name, value in sorted(self.weights.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()

    def weights_in(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weights by name in a state, in their own types."""
        if self.flat:
            row = np.asarray(state[self.vector])
            held = {n: row[start : start + math.prod(dims)].reshape(dims) for n, (start, dims) in self.layout.items()}
        else:
            held = {name: np.asarray(state[self.masters.get(name, name)]) for name in self.weights}
        return {name: value.astype(self.weights[name].dtype, copy=False) for name, value in held.items()}

    def statistics_in(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The running statistics by name in a state, in their own types."""
        held = {name: np.asarray(state[self.masters.get(name, name)]) for name in self.statistics}
        types = {} if self.evaluation is None else {v.name: v.dtype for v in graph_inputs(self.evaluation.graph)}
        return {name: value.astype(types.get(name, value.dtype), copy=False) for name, value in held.items()}

    def labels(self, y: Any, classes: Sequence[Any] | None = None) -> np.ndarray:
        """`y` as the step wants its label: its type, and one or two axes.

        Where the label is int64, `y` has classes, which become their positions in `classes`; by default in `class_names`, or,
        where the model does not say its classes, `y` has the positions.

        :param y: numbers or classes, [N], [N, 1] or of the shape of the label.
        :raises FeedError: `y` does not fit the label, or has a class that is not among `classes`.
        """
        value = next(value for value in self.model.graph.input if value.name == self.label)
        classes = self.class_names if classes is None else classes
        if self.ignored is None or classes is None:
            return self.in_range(labels_of(y, value, classes))
        given = np.asarray(y)
        ignored = given == self.ignored
        made = labels_of(np.where(ignored, np.asarray(classes)[0], given), value, classes)
        made[ignored.reshape(made.shape)] = self.ignored
        return made

    def in_classes(self, label: np.ndarray) -> np.ndarray:
        """The label, after a check that its numbers are classes, if the step counts them.

        :raises FeedError: one is not.
        """
        if self.classes is None:
            return label
        wrong = (label < 0) | (label >= self.classes)
        if self.ignored is not None:
            wrong &= label != self.ignored
        if wrong.any():
            unset = (
                self.ignored is None and (label[wrong] < 0).any() and "cross_entropy" in self.settings.get("loss", "")
            )
            hint = " If a negative number means that a label does not count, give it as ignore_index." if unset else ""
            raise FeedError(
                f"{self.label!r} has the class {first_of(wrong, label)}, but the classes of the model are 0 to "
                f"{self.classes - 1}.{hint}"
            )
        return label

    def refuse_labels(self, batch: Mapping[str, np.ndarray]) -> None:
        """Refuse labels that the loss does not take. ONNX Runtime would count a negative class from the last one.

        :raises FeedError: a number is no class, or out of range.
        """
        if self.classes is None and self.label_range is None and not self._class_inputs:
            return
        read = {*self._class_inputs, self.label} & batch.keys()
        numbers = {name: array for name in read if (array := np.asarray(batch[name])).dtype.kind in "iuf"}
        if (label := numbers.get(self.label)) is not None:
            self.in_range(label if self.classes is None or label.dtype.kind == "f" else self.in_classes(label))
        for name, ignored in self._class_inputs.items():
            if name in numbers and (wrong := (numbers[name] < 0) & ~np.isin(numbers[name], ignored)).any():
                raise FeedError(f"{name!r} has the class {first_of(wrong, numbers[name])}, and classes begin at 0.")

    @cached_property
    def _class_inputs(self) -> dict[str, list[int]]:
        """The inputs that losses of classes read, in a sum of losses too, with the numbers that are ignored there."""
        found: dict[str, list[int]] = {}
        fed = {value.name for value in self.model.graph.input}
        for node in self.model.graph.node:
            if node.op_type in traits.LOSSES and node.input[1] in fed:
                ignored = [attribute_value(one) for one in node.attribute if one.name == "ignore_index"]
                found.setdefault(node.input[1], []).extend(ignored)
        return found

    def in_range(self, label: np.ndarray) -> np.ndarray:
        """The label, after a check that its numbers are in the range that the loss takes.

        :raises FeedError: one is not.
        """
        if self.label_range is None:
            return label
        low, high = self.label_range
        wrong = ~((label >= low) & (label <= high))
        if wrong.any():
            raise FeedError(
                f"{self.label!r} has {first_of(wrong, label)}, but {self.settings.get('loss', 'the loss')} takes labels from "
                f"{low:g} to {high:g}: 0 and 1 for two classes."
            )
        return label

    def state_with(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The state that a training begins with, with these weights in place of the model's."""
        if self.flat:
            return {
                **self.state,
                self.vector: np.concatenate([np.ravel(master(weights[name])) for name in self.layout]),
            }
        return {
            **self.state,
            **{self.masters.get(name, name): master(np.asarray(weights[name])) for name in self.weights},
        }

    def beginning_with(self, state: Mapping[str, np.ndarray]) -> StepModel:
        """The step that begins with a state."""
        return replace(self, state=dict(state))


def prepared(step: StepModel, model: ModelProto, backend: str | Backend, options: Mapping[str, Any]) -> Prepared:
    """A model of the frozen weights of a step, such as its own, ready to run.

    :raises BackendError: the executor cannot run it.
    """
    executor = get_backend(backend) if isinstance(backend, str) else backend
    source = step.opened(model)
    if isinstance(source, Opened):
        return executor.prepare_opened(source, **options)
    return executor.prepare(source, **options)


def _is_free(size: tuple[int | str | None, ...]) -> bool:
    """True if the size of an axis is not fixed. A scalar has no axis."""
    return bool(size) and not isinstance(size[0], int)


def _put_digests(model: ModelProto, place: Path) -> None:
    """Put the SHA-256 of external data in the place of it, so that its name and its place in the file do not matter."""
    with ExternalData(place) as data:
        for tensor in external_tensors(model):
            digest = hashlib.sha256()
            for chunk in data.chunks(tensor):
                digest.update(chunk)
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
            tensor.raw_data = digest.digest()


def _known(size: int | str | None) -> int | None:
    return size if isinstance(size, int) else None
