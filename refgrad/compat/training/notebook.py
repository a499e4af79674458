"""The common base of the two optimizers in the notebooks of onnxcustom: arguments, epochs and results."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import util
from pathlib import Path
from typing import Any, Self

import numpy as np
from onnx import ModelProto, helper
from rich.progress import track

from refgrad.compat.training.arrays import Coefficients, array_from, executor
from refgrad.compat.training.excs import ConvergenceWarning
from refgrad.compat.training.sgd_learning_rate import BaseLearningRate, learning_rate_of, of_vectors
from refgrad.compat.utils.onnxruntime_helper import get_ort_device
from refgrad.errors import ConvergenceError, FeedError, NotTrainedError, OptionError, TrainingError, choices
from refgrad.model.reading import read
from refgrad.model.writing import replacing
from refgrad.parameters.weights import write_back
from refgrad.tables.conventions import DEFAULT, ConventionOptions
from refgrad.training.steps import StepModel
from refgrad.training.training import Training, batches

_STARTS = ("normal", "model")  # random weights, or the weights of the model
_LOGGER = logging.getLogger("onnxcustom")  # the name under which programs for onnxcustom set its level
_LONG = 50  # a longer list is shortened in `repr`


class BaseOptimizer(ABC):
    """Gradient descent with the interface of a scikit-learn estimator."""

    _shown: tuple[str, ...]  # the attributes in `repr`

    def __init__(
        self,
        model_onnx: ModelProto | str | os.PathLike[str],
        weights_to_train: Sequence[str] | None,
        loss_output_name: str,
        max_iter: Any,
        training_optimizer_name: str,
        batch_size: Any,
        learning_rate: BaseLearningRate | float | str,
        device: str,
        warm_start: bool,
        verbose: int,
        validation_every: float,
        backend: str | None,
        start: str,
        random_state: int | None,
        conventions: ConventionOptions,
    ) -> None:
        if training_optimizer_name != "SGDOptimizer":
            raise OptionError(
                f"training_optimizer_name={training_optimizer_name!r}; there is 'SGDOptimizer', with or without momentum "
                "(learning_rate). refgrad.training.step_model takes Adam and others."
            )
        if start not in _STARTS:
            raise OptionError(f"start={start!r}; there are {choices(_STARTS)}.")
        for name, value in (("max_iter", max_iter), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} is an integer above 0, not {value!r}.")
        self.model_onnx = read(model_onnx)
        self.loss_output_name, self.max_iter, self.batch_size = loss_output_name, max_iter, batch_size
        self.training_optimizer_name, self.learning_rate = training_optimizer_name, learning_rate_of(learning_rate)
        self.device, self.warm_start, self.verbose = device, warm_start, verbose
        every = validation_every * max_iter if 0 < validation_every < 1 else validation_every
        self.validation_every = max(int(every), 1)
        self.backend, self.start, self.random_state = backend, start, random_state
        self._executor = executor(device, backend)
        self._conventions = conventions
        self.weights_to_train = weights_to_train
        self._state: dict[str, np.ndarray] | None = None

    @property
    def value(self) -> float:
        """The learning rate of the last epoch."""
        return self.learning_rate.value

    @property
    def device(self) -> Any:
        """The OrtDevice, with which programs for onnxcustom make OrtValues. Without onnxruntime, the name of the device."""
        return get_ort_device(self._device) if util.find_spec("onnxruntime") else self._device

    @device.setter
    def device(self, name: str) -> None:
        self._device = name

    def __repr__(self) -> str:
        """The class and its arguments. Models and long lists are shortened."""
        values = {name: getattr(self, name) for name in self._shown} | {"device": self._device}
        arguments = [f"{name}={_short(value)}" for name, value in values.items()]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments by name, with which `sklearn.base.clone` makes an optimizer that is not trained.

        :param deep: has no effect: no argument is an estimator.
        """
        names = inspect.signature(type(self).__init__).parameters
        values = {name: getattr(self, name) for name in names if name not in ("self", "conventions")}
        return values | {"device": self._device} | self._conventions

    def set_params(self, **params: Any) -> Self:
        """Replace arguments. What has been trained is forgotten.

        :raises OptionError: there is no such argument, or it does not fit.
        """
        known = self.get_params() | DEFAULT.options
        if unknown := [name for name in params if name not in known]:
            raise OptionError(f"There is no argument {unknown[0]!r}; there are {choices(known)}.")
        self.__dict__ = type(self)(**self.get_params() | params).__dict__
        return self

    def __sklearn_tags__(self) -> Any:
        """The tags that scikit-learn asks for, in a grid search for example."""
        from sklearn.utils import Tags, TargetTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=True))

    # Training

    @cached_property
    def _step(self) -> StepModel:
        """The model of a step. The first need of it makes it, so that `fit` raises its errors, as scikit-learn expects."""
        step = self._step_model(self.weights_to_train)
        if self.weights_to_train is None:
            self.weights_to_train = list(step.weights)
        return step

    @abstractmethod
    def _step_model(self, weights: Sequence[str] | None) -> StepModel: ...

    @abstractmethod
    def _data(self, X: Any, y: Any, sample_weight: Any) -> dict[str, np.ndarray]: ...

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        use_numpy: bool = False,
    ) -> Self:
        """Train for `max_iter` epochs. Each epoch shuffles the samples. A step divides the learning rate by its batch size.

        :param X: [N, ...]: the input of the model.
        :param y: the expected values, [N] or in the shape of the output.
        :param sample_weight: [N].
        :param X_val: the input for `validation_losses_`, which are measured every `validation_every` epochs.
        :param y_val: the expected values for `validation_losses_`.
        :param use_numpy: run on the interpreter.
        :raises OptionError: an argument of the optimizer does not fit the model.
        :raises UnknownNameError: the model has no such weight.
        :raises FeedError: the arrays do not fit the model, or each other.
        :raises ConvergenceError: the loss is not finite. If `exc` is False, `fit` warns instead, and ends the training.
        """
        rng = np.random.default_rng(self.random_state)
        step = self._initial_step(rng)
        data = self._data(X, y, sample_weight)
        validation = None if X_val is None else self._data(X_val, y_val, None)
        training = Training(step, backend="numpy" if use_numpy else self._executor)
        self.train_losses_: list[float] = []
        self.validation_losses_: list[float] = []
        self.learning_rate.init_learning_rate()
        epochs: Iterable[int] = range(self.max_iter)
        for epoch in track(epochs, "training", transient=True) if self.verbose else epochs:
            self.learning_rate.update_learning_rate(epoch)
            try:
                loss = self._iteration(training, epoch, batches(data, self.batch_size, rng))
            except TrainingError as error:
                if getattr(self, "exc", True):
                    raise ConvergenceError(str(error)) from error
                warnings.warn(str(error), ConvergenceWarning, stacklevel=2)
                break
            self._state = training.state
            self.train_losses_.append(loss)
            if validation is not None and (epoch + 1) % self.validation_every == 0:
                self.validation_losses_.append(self._mean_loss(validation))
        return self

    def _initial_step(self, rng: np.random.Generator) -> StepModel:
        """The step model with the weights that the training begins with."""
        if self.warm_start and self._state is not None:
            return self._step.beginning_with(self._state)
        weights = self._step.weights
        if self.start == "normal" and not self.warm_start:
            weights = {name: rng.standard_normal(value.shape).astype(value.dtype) for name, value in weights.items()}
        return self._step.beginning_with(self._step.state_with(weights))

    def _iteration(self, training: Training, epoch: int, epoch_batches: Iterator[dict[str, np.ndarray]]) -> float:
        """Train for one epoch; the mean loss of its samples."""
        total, count = 0.0, 0
        for k, batch in enumerate(epoch_batches):
            size = len(next(iter(batch.values())))
            total += training.train_on(batch, self.learning_rate.value / size, f"step {k} of epoch {epoch}")
            count += size
        if getattr(self, "enable_logging", False):
            where = f"{type(self).__name__}._iteration"
            _LOGGER.debug("[%s] epoch %d, rate %g: loss %g", where, epoch, self.learning_rate.value, total / count)
        return total / count

    # Results of the training

    def _trained(self) -> dict[str, np.ndarray]:
        if self._state is None:
            raise NotTrainedError("Nothing has been trained yet. Call fit first.")
        return self._step.weights_in(self._state)

    @property
    def trained_coef_(self) -> dict[str, Coefficients]:
        """The trained weights by name, in the order of the model's initializers."""
        return {name: value.view(Coefficients) for name, value in self._trained().items()}

    @abstractmethod
    def get_state(self) -> list[Coefficients] | dict[str, Coefficients]:
        """The trained weights, which `set_state` takes."""

    def set_state(self, state_tensors: Sequence[Any] | Mapping[str, Any]) -> None:
        """Replace the trained weights.

        :param state_tensors: the new weights, by name or in the order of the model's initializers.
        :raises FeedError: the number, the names or the shapes of the tensors do not match the weights.
        """
        weights = self._step.weights
        is_named = isinstance(state_tensors, Mapping)
        by_name = dict(state_tensors if is_named else zip(weights, state_tensors, strict=False))
        if len(state_tensors) != len(weights) or by_name.keys() != weights.keys():
            raise FeedError(f"Expected a tensor for each of {choices(weights)}.")
        arrays = {name: array_from(by_name[name]) for name in weights}
        for name, value in weights.items():
            if arrays[name].shape != value.shape:
                raise FeedError(f"{name!r} has the shape {value.shape}, and the given tensor has {arrays[name].shape}.")
        self._state = self._step.state_with({n: arrays[n].astype(v.dtype) for n, v in weights.items()})

    def get_trained_onnx(self, model: ModelProto | None = None) -> ModelProto:
        """A copy of `model` with the trained weights, by default of the model that was trained."""
        return write_back(self.model_onnx if model is None else model, self._trained())

    @abstractmethod
    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> np.ndarray:
        """The loss of each sample, [N]."""

    @abstractmethod
    def _mean_loss(self, data: Mapping[str, np.ndarray]) -> float: ...

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The negative mean loss: a larger score is better, as in scikit-learn."""
        return -self._mean_loss(self._data(X, y, sample_weight))

    @property
    def zero_onnx_(self) -> ModelProto:
        """Y = 0 in the shape of X: a first velocity for each weight."""
        return of_vectors("zero")

    def _graphs(self) -> dict[str, Any]:
        return {
            "model_onnx": self.model_onnx,
            "learning_rate": self.learning_rate.onnx_graphs(),
            "zero_onnx_": self.zero_onnx_,
        }

    def save_onnx_graph(self, folder: str | os.PathLike[str] | type[bytes]) -> dict[str, Any]:
        """Write every graph of the training into an existing folder; the names of the files.

        :param folder: the folder, or the type `bytes`: then nothing is written, and bytes take the place of the names.
        :raises OptionError: the folder does not exist.
        """
        if folder is bytes:
            return _as_bytes(self._graphs())
        assert not isinstance(folder, type)
        if not Path(folder).is_dir():
            raise OptionError(f"There is no folder {os.fspath(folder)!r}. Make it first.")

        def write(graphs: Mapping[str, Any], owner: str) -> dict[str, Any]:
            names: dict[str, Any] = {}
            for name, graph in graphs.items():
                if isinstance(graph, ModelProto):
                    names[name] = str(Path(folder) / f"{owner}.{name}.onnx")
                    with replacing(names[name]) as temporary:
                        temporary.write_bytes(graph.SerializeToString())
                else:
                    names[name] = write(graph, f"{owner}.{name}")
            return names

        return write(self._graphs(), type(self).__name__)


def _as_bytes(graphs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: graph.SerializeToString() if isinstance(graph, ModelProto) else _as_bytes(graph)
        for name, graph in graphs.items()
    }


def checked_array(name: str, values: Any, model: ModelProto) -> np.ndarray:
    """An array for the input called `name`, in its type and with its axes: [N] becomes [N, 1], and [N, 1] becomes [N].

    :raises FeedError: `values` are not numbers.
    """
    tensor = next(v for v in model.graph.input if v.name == name).type.tensor_type
    array = np.asarray(values)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if array.dtype.kind not in "biuf":
        raise FeedError(f"Expected {dtype}, got {array.dtype} for {name!r}.")
    rank = len(tensor.shape.dim)
    if (array.ndim, rank) == (1, 2):
        array = array[:, None]
    elif rank == 1 and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    return np.ascontiguousarray(array, dtype=dtype)


def _short(value: Any) -> str:
    text = str(value)
    if isinstance(value, ModelProto) or (isinstance(value, list) and len(text) > _LONG):
        return repr(f"{text[:10]}...")
    return repr(value)
