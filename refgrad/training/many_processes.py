"""Training in many processes: each computes the gradient of a part of every batch, and their sum updates the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend, Prepared
from refgrad.errors import FeedError, OptionError, choices
from refgrad.training.loss_terms import MIXED
from refgrad.training.steps import STEP, StepModel, prepared
from refgrad.training.two_models import between, gradient_model, update_model

COUNTS = "counts"  # the name of the array of the loss, its divisor, the samples and the processes
Sums = dict[str, np.ndarray]
SumsOf = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
AllReduce = Callable[[Sums], Mapping[str, np.ndarray]]
_LOSS, _DIVISOR, _SAMPLES, _PROCESSES = range(4)


def divisor_of(step: StepModel, batch: Mapping[str, np.ndarray]) -> float:
    """The number by which the sum of the losses of a batch is divided: the gradient of a part counts so much."""
    if not step.mean_over:
        return 1.0
    if step.mean_over == "samples" or step.label not in batch:
        return float(step.samples_in(batch))
    label = np.asarray(batch[step.label])
    counted = label if step.ignored is None else label[label != step.ignored]
    if step.class_weights is None:
        return float(counted.size)
    if counted.size and not 0 <= counted.min() <= counted.max() < len(step.class_weights):
        raise FeedError(f"{step.label!r} has a class that is not among 0 to {len(step.class_weights) - 1}.")
    return float(np.take(step.class_weights, counted).sum())


def check_batch(step: StepModel, batch: Mapping[str, np.ndarray]) -> None:
    """Refuse a batch without an input of the step, or without the axis that counts its samples.

    :raises FeedError: it lacks one.
    """
    for name, axis in step.sample_axes.items():
        if name not in batch:
            raise FeedError(f"A batch has the arrays {choices(step.inputs)}, and this one lacks {name!r}.")
        if axis is not None and np.ndim(batch[name]) <= axis:
            raise FeedError(
                f"{name!r} has the shape {list(np.shape(batch[name]))}, and its axis {axis} counts the samples."
            )


def check_place(place: Any) -> None:
    """Refuse what is not the number of a process, from 0, and the number of processes.

    :raises OptionError: it is not.
    """
    fits = isinstance(place, tuple | list) and len(place) == 2 and all(type(one) is int for one in place)
    if not fits or not 0 <= place[0] < place[1]:
        raise OptionError(
            f"place is the number of this process, from 0, and the number of all, as in (0, 2), not {place!r}."
        )


def part_of(
    batch: Mapping[str, Any], place: tuple[int, int], axes: Mapping[str, int | None] | None = None
) -> dict[str, np.ndarray]:
    """The samples of a batch for one of several processes: parts of consecutive samples, as even as possible.

    :param place: the number of the process, from 0, and the number of processes.
    :param axes: the axis that counts the samples, by name, as `StepModel.sample_axes`; None for an array that has none. By
        default the first axis.
    :raises OptionError: `place` is something else.

    >>> import numpy as np
    >>> from refgrad.training import part_of
    >>> [part_of({"x": np.arange(5)}, (rank, 2))["x"].tolist() for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    check_place(place)
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    counting = {name: (axes or {}).get(name, 0) for name, array in arrays.items() if array.ndim}
    return {
        name: array if (axis := counting.get(name)) is None else np.array_split(array, place[1], axis)[place[0]]
        for name, array in arrays.items()
    }


def added(given: Iterable[Mapping[str, np.ndarray]]) -> Sums:
    """The sums of the arrays that have the same name."""
    found: Sums = {}
    for arrays in given:
        for name, array in arrays.items():
            found[name] = found[name] + array if name in found else array
    return found


class PartGradient:
    """The gradient of a step for a part of each batch.

    :param step: as `step_model` returns it.
    :param backend: an executor, or its name.
    :param place: the number of this process, from 0, and the number of processes. Masks of Dropout differ between them.
    :param options: options of the executor.
    :raises OptionError: `place` is something else, or the step comes from elsewhere.
    """

    def __init__(
        self, step: StepModel, backend: str | Backend = "numpy", place: tuple[int, int] = (0, 1), **options: Any
    ) -> None:
        check_place(place)
        if step.mean_over == MIXED:
            raise OptionError(
                "The loss adds up sums and means, or means over labels that count, so the losses of parts do not add up to the "
                "loss of a batch. Train in one process, or give all terms reduction='sum', or all 'mean' without class_weights "
                "and ignore_index."
            )
        self.prepared = prepared(step, gradient_model(step), backend, options)
        self._step, self._place, self._names = step, place, between(step)
        self.reads = {value.name for value in self.prepared.inputs} & set(step.state)

    def sums(self, part: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> Sums:
        """Arrays to add to the arrays of the other parts: gradients, running statistics and counts.

        Gradients are multiplied by the divisor of the loss, and running statistics by the number of samples.
        """
        step, names = self._step, self._names
        of_state = names.gradients | names.statistics
        divisor, samples = divisor_of(step, part), step.samples_in(part)
        counts = np.array([0.0, divisor, samples, 1.0])
        if not samples:
            return {name: np.zeros_like(step.state[held]) for held, name in of_state.items()} | {COUNTS: counts}
        fed = {name: state[name] for name in self.reads}
        if STEP in fed:  # the number that masks of Dropout are drawn by
            rank, processes = self._place
            fed[STEP] = np.array(fed[STEP] * processes + rank, np.int64)
        results = self.prepared.run(step.read_by(self.prepared, part) | fed)
        if step.mean_over and not divisor:  # no label counts: the model has divided by 1
            divisor = 1.0
        counts[_LOSS] = float(results[names.loss].item()) * divisor
        found = {name: _multiplied(results[name], divisor) for name in names.gradients.values()}
        found |= {name: _multiplied(results[name], samples) for name in names.statistics.values()}
        return found | {COUNTS: counts}


def _multiplied(array: np.ndarray, number: float) -> np.ndarray:
    """The array times a number, in its own type and in C order."""
    return np.asarray(np.multiply(array, array.dtype.type(number), order="C"))


class ReducedSteps:
    """Steps of a training by sums over processes, in the place of a `Recurrence`.

    :param prepare: prepares a model on the executor.
    :param state: the first state.
    :param sums: returns what `PartGradient.sums` returns for a batch and a state, added up over all processes.
    :param place: the number of this process and of all, if `sums` may return means; None: it returns sums.
    """

    def __init__(
        self,
        step: StepModel,
        prepare: Callable[[ModelProto], Prepared],
        state: Mapping[str, np.ndarray],
        sums: SumsOf,
        place: tuple[int, int] | None = None,
    ) -> None:
        self._step, self._sums, self._place, self._names = step, sums, place, between(step)
        self._data = {*step.data, step.label}
        prepared = prepare(update_model(step))
        self._loss_type = next((value.dtype for value in prepared.inputs if value.name == self._names.loss), None)
        self._update = prepared.recurrence(step.next, state)
        self.samples = 0  # of the last batch, in all processes

    def step(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One step with this process's part of a batch: the loss of the whole batch, and the other results of the update.

        :raises FeedError: a batch does not fit the model, or no process has a sample.
        :raises OptionError: `sums` returns something else.
        """
        names, step = self._names, self._step
        part = {name: np.asarray(value) for name, value in feeds.items() if name in self._data}
        check_batch(step, part)
        given = {name: value for name, value in feeds.items() if name not in self._data}
        sums = self._checked(self._sums(part, self.values))
        counts = sums.pop(COUNTS)
        factor = self._factor(float(counts[_PROCESSES]))
        counts = counts * factor
        samples, by = round(counts[_SAMPLES]), float(counts[_DIVISOR] or 1.0) if step.mean_over else 1.0
        if not samples:
            raise FeedError("No process has a sample of this batch. Give at least one.")
        self.samples, loss = samples, counts[_LOSS] / by
        for divisor, group in ((by, names.gradients), (samples, names.statistics)):
            for name in group.values():
                sums[name] = _multiplied(sums[name], factor / divisor)
        if names.loss != step.loss:
            sums[names.loss] = np.array(loss, self._loss_type)
        if names.samples:
            sums[names.samples] = np.array(samples)
        return {step.loss: np.array(loss)} | self._update.step({**given, **sums})

    def _checked(self, found: Mapping[str, np.ndarray]) -> Sums:
        """The sums, after a check of their names and shapes.

        :raises OptionError: a name or a shape differs.
        """
        due = {COUNTS: (4,)}
        due |= {name: self._step.state[s].shape for s, name in (self._names.gradients | self._names.statistics).items()}
        if not isinstance(found, Mapping):
            raise OptionError(
                f"The sums are a dict of arrays: {choices(due)}. Expected a dict, got {type(found).__name__}."
            )
        for name, shape in due.items():
            if name not in found or np.shape(found[name]) != shape:
                has = f"{name!r} as {list(np.shape(found[name]))}" if name in found else f"no {name!r}"
                raise OptionError(
                    f"The sums lack an array or have a wrong shape. Expected {name!r} as {list(shape)}, got {has}. Return "
                    "every array of PartGradient.sums, added up."
                )
        return {name: np.asarray(found[name]) for name in due}

    def _factor(self, processes: float) -> float:
        """The factor for the result of `sums`: 1 for sums, the number of processes for means.

        :raises OptionError: it returned neither.
        """
        if not processes > 0:
            raise OptionError("The sums are of no process. Add up the arrays of PartGradient.sums of all parts.")
        count = self._place[1] if self._place else 0  # whoever adds up parts knows how many there are
        if count and round(processes, 3) not in (1, count):
            raise OptionError(
                f"The sums are of {processes:g} processes, and place={self._place} says that there are {count}. Give "
                "place=(rank, number of processes), and return sums or means over all of them."
            )
        return (count or processes) / processes

    def undo(self) -> None:
        """Take the values from before the last step, once."""
        self._update.undo()

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The values that the next step is fed."""
        return self._update.values
