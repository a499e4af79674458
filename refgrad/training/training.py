"""Steps, one after the other: epochs, the learning rate, and the trained model in the end."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend, Prepared
from refgrad.backends.base import Recurrence
from refgrad.errors import FeedError, OptionError, TrainingError, of_type
from refgrad.model.reading import read
from refgrad.parameters.weights import write_back
from refgrad.ranges import RANGES, checked
from refgrad.rewrites.lifting import lower_weights
from refgrad.training.causes import first_not_finite
from refgrad.training.many_processes import AllReduce, PartGradient, ReducedSteps, SumsOf, check_place
from refgrad.training.normalization import set_inference_mode
from refgrad.training.precision import LEAST, SCALE
from refgrad.training.schedules import Constant, Progress, Schedule
from refgrad.training.steps import RATE, StepModel, prepared
from refgrad.training.workers import Workers, sharing

Batch = Mapping[str, np.ndarray]


@dataclass
class Training:
    """A training in progress: the step model, prepared on an executor, with the weights that it has reached.

    `options` are options of the executor: with {"threads": 1} onnxruntime takes small steps faster than with its own choice.

    With `all_reduce` many processes train together, each on its part of every batch (docs/many_processes.md). It takes a dict
    of arrays, and returns their sums, or means, over all processes. `place` is the number of this process and of all. With
    `sums` this process alone trains, and the gradient comes from elsewhere: `sums(batch, state)` returns the sums of
    `PartGradient.sums` over the parts of the batch. `processes=N` starts processes on this machine that do
    so; `close` ends them.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.training import SGD, Constant, Training, batches, step_model
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {0, 0}> { y = MatMul(x, a) }'
    ... )
    >>> x = np.random.default_rng(0).standard_normal((100, 2)).astype(np.float32)
    >>> data = {"x": x, "label": x @ np.float32([[1], [2]])}
    >>> training = Training(step_model(line, optimizer=SGD(momentum=0.9)), Constant(0.05))
    >>> for epoch in range(20):
    ...     loss = training.epoch(batches(data, 10, np.random.default_rng(epoch)))
    >>> training.weights["a"].ravel().round(3)
    array([1., 2.], dtype=float32)
    """

    step: StepModel
    schedule: Schedule | float = 1e-3
    backend: str | Backend = "numpy"
    progress: Progress = field(default_factory=Progress)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    all_reduce: AllReduce | None = field(default=None, kw_only=True)
    place: tuple[int, int] = field(default=(0, 1), kw_only=True)
    sums: SumsOf | None = field(default=None, kw_only=True)
    processes: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            self.schedule = Constant(self.schedule)
        check_place(self.place)
        self._rate_type = self.step.rate_type
        checked("processes", self.processes)
        if [self.all_reduce is not None, self.sums is not None, self.processes > 1].count(True) > 1:
            raise OptionError("Give only one of all_reduce, sums and processes: each says where sums come from.")
        for name in ("all_reduce", "sums"):
            if not callable(given := getattr(self, name)) and given is not None:
                raise OptionError(f"{name} is a function of arrays by name, not {of_type(given)}.")
        if self.processes > 1 and self.place != (0, 1):
            raise OptionError("place is for all_reduce. With processes the training numbers them itself: leave it out.")
        self.options = sharing(self.backend, self.options, self.processes)
        self._workers: Workers | None = None
        if self.all_reduce is None and self.sums is None and self.processes == 1:
            self._part, self._prepared = None, self.prepared(self.step.model)
        else:
            place = self.place if self.processes == 1 else (0, self.processes)
            self._part = PartGradient(self.step, self.backend, place, **self.options)
            self._prepared = self._part.prepared
            if self.processes > 1:
                self._workers = Workers(self.step, self._part, self.backend, self.options, self.processes)
        self._evaluation: Prepared | None = None  # prepared where it is asked for
        self._run = self._begun(self.step.state)

    def _begun(self, state: Mapping[str, np.ndarray]) -> Recurrence | ReducedSteps:
        """The steps from a state on."""
        if self._part is None:
            return self._prepared.recurrence(self.step.next, state)
        if (added := self.sums if self._workers is None else self._workers.sums) is not None:
            return ReducedSteps(self.step, self.prepared, state, added)
        part, all_reduce = self._part, self.all_reduce
        assert all_reduce is not None

        def sums(batch: Batch, now: Batch) -> Mapping[str, np.ndarray]:
            return all_reduce(part.sums(batch, now))

        return ReducedSteps(self.step, self.prepared, state, sums, self.place)

    def prepared(self, model: ModelProto) -> Prepared:
        """A model of the same frozen weights, ready to run on the executor of the training.

        :raises BackendError: the executor cannot run it.
        """
        return prepared(self.step, model, self.backend, self.options)

    def epoch(self, batches: Iterable[Batch], after: Callable[[], None] | None = None) -> float:
        """One step for each batch. An epoch that was interrupted goes on.

        It returns the mean of the losses of the steps, weighted by samples: the mean of the losses of the samples, except with
        reduction="sum", or if a loss leaves labels out or weighs classes.

        :param after: called after each step.
        :raises FeedError: a batch does not fit the model, or there is none.
        :raises TrainingError: a loss is not finite.
        """
        assert isinstance(self.schedule, Schedule)
        schedule = self.schedule
        for batch in batches:
            done = self.progress
            loss = self.train_on(batch, schedule(done))
            size = self._run.samples if isinstance(self._run, ReducedSteps) else self.step.samples_in(batch)
            self.progress = Progress(
                done.epoch,
                done.step + 1,
                done.sample + size,
                done.epoch_step,
                done.epoch_sample,
                done.losses,
                done.total + loss * size,
            )
            if after is not None:
                after()
        done = self.progress
        count = done.sample - done.epoch_sample
        if not count:
            raise FeedError("An epoch has no batch. Give at least one sample.")
        mean = done.total / count
        self.progress = done._replace(
            epoch=done.epoch + 1,
            losses=(*done.losses, mean),
            epoch_step=done.step,
            epoch_sample=done.sample,
            total=0.0,
        )
        return mean

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean of the losses of samples that are not trained on, as `epoch` returns it.

        :raises FeedError: a batch does not fit the model, or there is none.
        """
        total, count = 0.0, 0
        prepared, state, name = self._prepared, self.state | {RATE: np.array(0, self.step.rate_type)}, self.step.loss
        if self.step.evaluation is not None:
            prepared = self._evaluation = self._evaluation or self.prepared(self.step.evaluation)
            name = self.step.evaluation.graph.output[0].name
            state = self.weights | self.step.statistics_in(state)
        state = {value.name: state[value.name] for value in prepared.inputs if value.name in state}
        for batch in batches:
            self._refuse(batch)
            results = prepared.run(self.step.read_by(prepared, batch) | state, [name])
            size = self.step.samples_in(batch)
            total, count = total + float(results[name].item()) * size, count + size
        if not count:
            raise FeedError("There is no sample to evaluate on. Give at least one.")
        return total / count

    def train_on(self, batch: Batch, rate: float, where: str = "") -> float:
        """One step with a learning rate: the loss before it.

        :param where: what an error calls the step; by default its number.
        :raises FeedError: the batch does not fit the model.
        :raises TrainingError: the loss is not finite, or a gradient is not, and no smaller loss scale helps. The weights are
            those from before the step.
        """
        self._refuse(batch)
        feeds = {**batch, RATE: np.array(rate, self._rate_type)}
        results = self._run.step(feeds)
        loss = float(results[self.step.loss].item())
        where = where or f"step {self.progress.step} (epoch {self.progress.epoch})"
        if not math.isfinite(loss):
            self._run.undo()
            cause = first_not_finite(self.step, feeds, self.state)
            usual = (
                f"Take a smaller learning rate than {rate:g}, clip the gradient, or look for values in the data that are not "
                "finite."
            )
            advice = cause.advice or usual
            if cause.overflows and self.progress.step:
                rest = f"{advice[:1].lower()}{advice[1:]}"
                advice = f"Take a smaller learning rate than {rate:g}. If that does not help, {rest}"
            raise TrainingError(f"The loss is {loss} in {where}{cause.found}. {advice}")
        if self.step.finite and not results[self.step.finite].item():
            self._refuse_overflow(feeds, where)
        return loss

    def _refuse(self, batch: Batch) -> None:
        """Refuse what an executor might take for something else.

        :raises FeedError: the batch is no dict, or has labels that the loss does not take.
        """
        if not isinstance(batch, Mapping):
            raise FeedError(
                f"A batch is a dict of arrays by the names of the inputs, not {of_type(batch)}. open_data(step, batches) takes "
                "tuples too."
            )
        self.step.refuse_labels(batch)

    def _refuse_overflow(self, feeds: Batch, where: str) -> None:
        """Accept a step that has updated nothing if its loss scale is dynamic and was larger than 1.

        :raises TrainingError: it was not.
        """
        is_dynamic = SCALE in self.step.state
        if is_dynamic and self.state[SCALE] >= LEAST:
            return
        self._run.undo()
        cause = first_not_finite(self.step, feeds, self.state)
        is_smaller_better = cause.overflows or not cause.found
        if is_dynamic:
            scale = f"at a loss scale of {float(self.state[SCALE]):g}"
            advice = cause.advice
        else:
            scale = f"with {self.step.settings.get(SCALE, SCALE)}"
            advice = "Give a smaller loss_scale, or loss_scale='dynamic'." if is_smaller_better else cause.advice
        found = cause.found or ", and finite on the interpreter"
        raise TrainingError(
            f"A gradient is not finite in {where}, {scale}{found}. "
            f"{advice or 'It is no overflow, so a smaller loss scale does not help.'}"
        )

    def close(self) -> None:
        """End the other processes, if there are any. The weights stay."""
        if self._workers is not None:
            self._workers.close()

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The values that the next step is fed: the weights, the optimizer's states of each, and the number of steps."""
        return dict(self._run.values)

    def go_on(self, state: Mapping[str, np.ndarray], progress: Progress) -> None:
        """Take up a training where it was: its state and its progress.

        :raises FeedError: the state is not one of this step.
        """
        first = self.step.state
        shapes = {name: list(np.shape(value)) for name, value in state.items()}
        if wrong := [name for name, value in first.items() if shapes.get(name) != list(np.shape(value))]:
            raise FeedError(
                f"The state is of another step: {wrong[0]!r} has the shape {list(np.shape(first[wrong[0]]))} here, and "
                f"{f'{shapes[wrong[0]]} there' if wrong[0] in shapes else 'is not there'}."
            )
        self._run = self._begun({name: state[name] for name in first})
        self.progress = progress

    @property
    def losses(self) -> list[float]:
        """The mean loss of each epoch."""
        return list(self.progress.losses)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        return self.step.weights_in(self._run.values)

    def write_to(self, model: ModelProto | str | os.PathLike[str]) -> ModelProto:
        """A copy of `model` with the weights, and the running statistics, that the training has reached.

        BatchNormalization and Dropout that are in training mode are not any more: it is a model for inference. Weights that
        were lifted out of attributes (`refgrad.lift_weights`) are written into the attributes of the original, or into the
        initializers of the lifted model, whichever is given.

        External data is referenced, not read: save the result in the folder of the model.

        :param model: a model, which is not modified, or the path of one.
        :raises RefgradError: as `refgrad.write_back`; the model has no initializer of a name, or one of another type or shape.
        """
        return written_back(model, self.weights, self.step.statistics_in(self._run.values))


def written_back(
    model: ModelProto | str | os.PathLike[str], weights: Mapping[str, np.ndarray], statistics: Mapping[str, np.ndarray]
) -> ModelProto:
    """A copy of `model` with these weights and running statistics, for inference: as `Training.write_to`."""
    made, left = lower_weights(model if isinstance(model, ModelProto) else read(model, lift=False), weights)
    set_inference_mode(made)
    left = {**left, **statistics}
    return write_back(made, left) if left else made


def refuse_lengths(lengths: Mapping[str, int]) -> None:
    """Refuse arrays with different numbers of samples; −1 is a scalar.

    :raises FeedError: the numbers differ, or there is no array.
    """
    if len(set(lengths.values())) != 1 or min(lengths.values()) < 0:
        said = ", ".join(f"{name!r} {length if length >= 0 else 'is a scalar'}" for name, length in lengths.items())
        raise FeedError(f"All arrays need the same number of samples, and there are: {said}.")


def batches(data: Mapping[str, Any], size: Any, rng: Any = None) -> Iterator[dict[str, np.ndarray]]:
    """Batches of `size` samples, the last one with the rest. With `rng` the samples are shuffled first.

    :param data: arrays by the names of the inputs; the first axis counts the samples.
    :param rng: a generator of NumPy, whose `shuffle` is called once.
    :raises FeedError: arrays of other lengths, or without samples.
    :raises OptionError: `size` is below 1, or `rng` is no generator.
    """
    arrays = {name: np.asarray(array) for name, array in data.items()}
    lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
    refuse_lengths(lengths)
    if due := RANGES["batch_size"].why_not(size):
        raise OptionError(f"A batch has at least one sample: size is {reprlib.repr(size)}. Give {due}.")
    count = next(iter(lengths.values()))
    order = np.arange(count)
    if rng is not None:
        if not callable(getattr(rng, "shuffle", None)):
            raise OptionError(
                f"rng is a generator of NumPy, such as np.random.default_rng(0), not {reprlib.repr(rng)}."
            )
        rng.shuffle(order)
    for start in range(0, count, size):
        end = start + size
        if rng is None:
            yield {name: array[start:end] for name, array in arrays.items()}
        else:
            chosen = order[start:end]
            yield {name: array.take(chosen, axis=0) for name, array in arrays.items()}
