"""The common part of both optimizers of the onnxcustom notebooks: the arguments, the epochs, and the results."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from onnx import ModelProto, helper
from rich.progress import track

from refgrad.backends import available, get_backend
from refgrad.errors import ConvergenceError, FeedError, OptionError, TrainingError, choices
from refgrad.protos.files import replacing
from refgrad.protos.reading import read
from refgrad.tables.conventions import ConventionOptions
from refgrad.training.sgd_learning_rate import BaseLearningRate, learning_rate_of
from refgrad.training.steps import StepModel
from refgrad.training.training import Training, batches
from refgrad.transforms.weights import write_back

_DEVICES = {"cpu": ("ort-cpu", "numpy"), "cuda": ("ort-cuda",)}
_STARTS = ("normal", "model")
_LONG = 50  # characters of an argument that are shown


class Coefficients(np.ndarray):
    """An array with the method `numpy()`, which what ONNX Runtime keeps on a device has."""

    def numpy(self) -> np.ndarray:
        """The array."""
        return np.asarray(self)


class BaseOptimizer(ABC):
    """A training by gradient descent, in the manner of an estimator of scikit-learn."""

    _shown: tuple[str, ...]

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
        self.backend, self.start, self.random_state = _executor(device, backend), start, random_state
        self._conventions = conventions
        self._step = self._step_model(weights_to_train)
        self.weights_to_train = list(self._step.weights if weights_to_train is None else weights_to_train)
        self._state: dict[str, np.ndarray] | None = None

    @property
    def value(self) -> float:
        """The learning rate of the last epoch."""
        return self.learning_rate.value

    def __repr__(self) -> str:
        """Every argument, shortened where it is long."""
        shown = [f"{name}={_short(getattr(self, name))}" for name in self._shown]
        return f"{type(self).__name__}({', '.join(shown)})"

    # Training

    @abstractmethod
    def _step_model(self, weights: Sequence[str] | None) -> StepModel: ...

    @abstractmethod
    def _data(self, X: Any, y: Any, sample_weight: Any) -> dict[str, np.ndarray]: ...

    _part = 1.0  # of the gradient, that an update takes

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        use_numpy: bool = False,
    ) -> Self:
        """Train for `max_iter` epochs. Each shuffles the samples; the rate of a step is divided by the size of its batch.

        :param X: [N, ...], the input of the model.
        :param y: the expected values, [N] or of the shape of the output.
        :param sample_weight: [N]
        :param X_val: with `y_val` what `validation_losses_` are measured on, every `validation_every` epochs.
        :param use_numpy: run on the interpreter.
        :raises FeedError: the arrays do not fit the model, or each other.
        :raises ConvergenceError: the loss is not finite, unless `exc` is False: then it is a warning, and the training ends.
        """
        data = self._data(X, y, sample_weight)
        validation = None if X_val is None else self._data(X_val, y_val, None)
        rng = np.random.default_rng(self.random_state)
        training = Training(self._begun(rng), backend="numpy" if use_numpy else self.backend)
        self.train_losses_: list[float] = []
        self.validation_losses_: list[float] = []
        self.learning_rate.init_learning_rate()
        epochs: Iterable[int] = range(self.max_iter)
        for epoch in track(epochs, "training", transient=True) if self.verbose else epochs:
            self.learning_rate.update_learning_rate(epoch)
            try:
                loss = self._epoch(training, epoch, batches(data, self.batch_size, rng))
            except TrainingError as error:
                if getattr(self, "exc", True):
                    raise ConvergenceError(str(error)) from error
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
                break
            self._state = training.state
            self.train_losses_.append(loss)
            if validation is not None and (epoch + 1) % self.validation_every == 0:
                self.validation_losses_.append(self._mean_loss(validation))
        return self

    def _begun(self, rng: np.random.Generator) -> StepModel:
        """The step model with the weights that it begins with."""
        if self.warm_start and self._state is not None:
            return self._step.beginning_with(self._state)
        weights = self._step.weights
        if self.start == "normal" and not self.warm_start:
            weights = {name: rng.standard_normal(value.shape).astype(value.dtype) for name, value in weights.items()}
        return self._step.beginning_with(self._step.state_with(weights))

    def _epoch(self, training: Training, epoch: int, chosen: Iterator[dict[str, np.ndarray]]) -> float:
        total, count = 0.0, 0
        for k, batch in enumerate(chosen):
            size = len(next(iter(batch.values())))
            rate = self._part * self.learning_rate.value / size
            total += training.train_on(batch, rate, f"step {k} of epoch {epoch}")
            count += size
        return total / count

    # Results of the training

    def _trained(self) -> dict[str, np.ndarray]:
        if self._state is None:
            raise TrainingError("Nothing has been trained yet. Call fit first.")
        return self._step.weights_in(self._state)

    @property
    def trained_coef_(self) -> dict[str, Coefficients]:
        """The trained weights by name."""
        return {name: value.view(Coefficients) for name, value in self._trained().items()}

    def get_state(self) -> list[Coefficients]:
        """The trained weights, in the order of `weights_to_train`."""
        trained = self.trained_coef_
        return [trained[name] for name in self._step.weights]

    def set_state(self, state_tensors: Sequence[Any] | Mapping[str, Any]) -> None:
        """Take weights as the trained ones: in the order of `weights_to_train`, or by name.

        :raises FeedError: there are not as many, or one has another shape.
        """
        known = self._step.weights
        is_named = isinstance(state_tensors, Mapping)
        given = dict(state_tensors if is_named else zip(known, state_tensors, strict=False))
        if len(state_tensors) != len(known) or given.keys() != known.keys():
            raise FeedError(f"A tensor is due for each of {choices(known)}.")
        arrays = {name: np.asarray(given[name]) for name in known}
        for name, value in known.items():
            if arrays[name].shape != value.shape:
                raise FeedError(f"{name!r} has the shape {value.shape}, and a tensor of {arrays[name].shape} is given.")
        self._state = self._step.state_with({n: arrays[n].astype(v.dtype) for n, v in known.items()})

    def get_trained_onnx(self, model: ModelProto | None = None) -> ModelProto:
        """A copy of the model, or of `model`, with the trained weights."""
        return write_back(self.model_onnx if model is None else model, self._trained())

    @abstractmethod
    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> np.ndarray:
        """The loss of each sample, [N]."""

    @abstractmethod
    def _mean_loss(self, data: Mapping[str, np.ndarray]) -> float: ...

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Minus the mean of the losses: the larger the better, as for scikit-learn."""
        return -self._mean_loss(self._data(X, y, sample_weight))

    def _graphs(self) -> dict[str, Any]:
        return {"model_onnx": self.model_onnx, "learning_rate": self.learning_rate.onnx_graphs()}

    def save_onnx_graph(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Write every graph of the training into a folder, which exists: the names of the files.

        :raises OptionError: there is no such folder.
        """
        if not Path(folder).is_dir():
            raise OptionError(f"There is no folder {os.fspath(folder)!r}. Make it first.")

        def written(graphs: Mapping[str, Any], owner: str) -> dict[str, Any]:
            names: dict[str, Any] = {}
            for name, graph in graphs.items():
                if isinstance(graph, ModelProto):
                    names[name] = str(Path(folder) / f"{owner}.{name}.onnx")
                    with replacing(names[name]) as temporary:
                        temporary.write_bytes(graph.SerializeToString())
                else:
                    names[name] = written(graph, f"{owner}.{name}")
            return names

        return written(self._graphs(), type(self).__name__)


def fitting(name: str, given: Any, model: ModelProto) -> np.ndarray:
    """An array in the type of an input, with a second axis where the input has one and the array does not.

    :raises FeedError: it is no array of numbers.
    """
    value = next(v for v in model.graph.input if v.name == name)
    tensor = value.type.tensor_type
    array = np.asarray(given)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if array.dtype.kind not in "biuf":
        raise FeedError(f"{name!r} is an array of {array.dtype}, and {dtype} is due.")
    if array.ndim == 1 and len(tensor.shape.dim) == 2:
        array = array[:, None]
    return np.ascontiguousarray(array, dtype=dtype)


def _executor(device: str, backend: str | None) -> str:
    if device not in _DEVICES:
        raise OptionError(f"device={device!r}; there are {choices(_DEVICES)}.")
    if backend is not None:
        get_backend(backend)
        return backend
    usable = [name for name in _DEVICES[device] if name in available()]
    return usable[0] if usable else get_backend(_DEVICES[device][0]).name


def _short(value: Any) -> str:
    text = str(value)
    if isinstance(value, ModelProto) or (isinstance(value, list) and len(text) > _LONG):
        return repr(f"{text[:10]}...")
    return repr(value)
