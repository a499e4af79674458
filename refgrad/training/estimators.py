"""A model as an estimator of scikit-learn, which has to be installed (the extra `sklearn`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from onnx import ModelProto, helper
from rich.progress import Progress as Bar
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted

from refgrad.errors import FeedError, OptionError, choices
from refgrad.model.reading import read
from refgrad.notices import quiet
from refgrad.protos.traverse import fresh, names_of
from refgrad.rewrites.scores import BINARY_OF_LOGITS, OF_CLASSES
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import DEFAULT
from refgrad.training.conventions import Convention, convention
from refgrad.training.labels import classes_of, positions
from refgrad.training.optimizers import Optimizer
from refgrad.training.outputs import compared_output, without_maps
from refgrad.training.schedules import Schedule
from refgrad.training.step import step_model
from refgrad.training.steps import StepModel
from refgrad.training.training import Training


class _OnnxEstimator(BaseEstimator):  # type: ignore[misc]  # skipped by mypy
    """The parts that both estimators share."""

    n_features_in_: int  # where X has two axes

    def __init__(
        self,
        model: ModelProto | str | os.PathLike[str] | None = None,
        *,
        loss: str = "squared_error",
        output: str | None = None,
        trainable: Any = None,
        convention: str | Convention = "sklearn",
        optimizer: str | Optimizer = "adam",
        schedule: str | Schedule = "constant",
        learning_rate_init: float = 1e-3,
        alpha: float = 1e-4,
        batch_size: int | str = "auto",
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        kinks: str = DEFAULT.kinks,
        quantization: str = DEFAULT.quantization,
        strong_zero: bool = DEFAULT.strong_zero,
        backend: str = "numpy",
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.loss = loss
        self.output = output
        self.trainable = trainable
        self.convention = convention
        self.optimizer = optimizer
        self.schedule = schedule
        self.learning_rate_init = learning_rate_init
        self.alpha = alpha
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.kinks = kinks
        self.quantization = quantization
        self.strong_zero = strong_zero
        self.backend = backend
        self.verbose = verbose

    # Training

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for at most `max_iter` epochs, from the weights of the model, or with `warm_start` from those reached so far.

        :param X: [N, ...], the input of the model, in numbers of any type.
        :param y: numbers or classes, [N], [N, 1] or of the shape of the output.
        :param sample_weight: [N]; the loss of a sample is multiplied by its weight.
        :raises RefgradError: the model cannot be trained, an option is wrong, or the labels do not fit.
        :raises ValueError: X has values that are not finite, or another length than y.
        """
        most: Any = self.max_iter
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise OptionError(f"max_iter is an integer above 0, not {most!r}.")
        if not (self.warm_start and hasattr(self, "_training")):
            self._begin(sample_weight is not None)
        return self._epochs(X, y, sample_weight, most)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, classes: Any = None) -> Self:
        """Train for one epoch, from the weights reached so far. `classes` is ignored: the model has them."""
        if not hasattr(self, "_training"):
            self._begin(sample_weight is not None)
        return self._epochs(X, y, sample_weight, 1)

    def _begin(self, weighted: bool) -> None:
        if self.model is None:
            raise OptionError("Give a model: a ModelProto or the path of one.")
        source = without_maps(read(self.model))
        inputs = [v for v in source.graph.input if v.name not in {t.name for t in source.graph.initializer}]
        if len(inputs) != 1:
            raise OptionError(
                f"An estimator trains models of one input, and this one has {len(inputs)}. See step_model."
            )
        self._input, self._output = inputs[0], compared_output(source, self.output)
        taken = names_of(source.graph)
        label = fresh("label", taken)
        self._weight = fresh("sample_weight", taken | {label}) if weighted else None
        library = convention(self.convention)
        optimizer = library.optimizer(self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
        settings: dict[str, Any] = {
            "loss": library.loss(self.loss),
            "optimizer": optimizer,
            "trainable": self.trainable,
            "output": self._output,
            "label": label,
            "sample_weight": self._weight,
            "kinks": self.kinks,
            "quantization": self.quantization,
            "strong_zero": self.strong_zero,
            "data_beside": None if isinstance(self.model, ModelProto) else self.model,
        } | library.settings()
        self._step: StepModel = step_model(source, **settings)
        if penalty := library.penalty(source, list(self._step.weights), self.alpha):
            with quiet():  # it was said of the step without the penalty
                self._step = step_model(source, penalty=penalty, **settings)
        schedule = self.schedule
        if isinstance(schedule, str):
            schedule = library.schedule(schedule, self.learning_rate_init)
        self._source, self._training = source, Training(self._step, schedule, self.backend)
        self._random = check_random_state(self.random_state)
        self._forward: list[Any] = []  # what predicts, prepared where it is asked for
        self._described(source)
        self.n_iter_ = 0
        self.loss_curve_: list[float] = []
        self.validation_scores_: list[float] = []
        self.__dict__.pop("n_features_in_", None)

    def _described(self, source: ModelProto) -> None:
        """Set the attributes that the model decides before the training, such as `classes_`. Here there are none."""

    def _epochs(self, X: Any, y: Any, sample_weight: Any, most: int) -> Self:
        x, target = self._array(X), self._labels(y)
        check_consistent_length(x, target)
        data = {self._input.name: x, self._step.label: target}
        if self._weight:
            kind = next(v for v in self._step.model.graph.input if v.name == self._weight).type.tensor_type.elem_type
            given = np.ones(len(x)) if sample_weight is None else np.asarray(sample_weight)
            data[self._weight] = given.astype(helper.tensor_dtype_to_np_dtype(kind))
            check_consistent_length(x, data[self._weight])
            if given.ndim != 1 or not np.isfinite(data[self._weight]).all() or not given.any():
                raise FeedError(f"sample_weight has one finite number for each sample, not all of them zero: {given}.")
        elif sample_weight is not None:
            raise OptionError("The training began without sample_weight. Give it from the first call on.")
        held: dict[str, np.ndarray] | None = None
        truth = np.asarray(y)
        if self.early_stopping and most > 1:
            chosen, left = train_test_split(
                np.arange(len(x)), test_size=self.validation_fraction, random_state=self._random, **self._split(truth)
            )
            held = {name: value[left] for name, value in data.items()}
            data, truth = {name: value[chosen] for name, value in data.items()}, truth[left]
        best, waited, best_state = math.inf, 0, self._training.state
        order = np.arange(len(data[self._input.name]))
        with Bar(transient=True, disable=not self.verbose) as bar:
            task = bar.add_task("training", total=most)
            for _ in range(most):
                if self.shuffle:
                    turns = np.arange(len(order))
                    self._random.shuffle(turns)  # as sklearn.utils.shuffle does
                    order = order[turns]
                loss = self._training.epoch(self._batches(data, order))
                self.n_iter_ += 1
                self.loss_curve_.append(loss)
                self._forward.clear()
                bar.update(task, advance=1, description=f"loss {loss:.6g}")
                worth = loss
                if held is not None:
                    score = self._score_of(truth, held[self._input.name])
                    self.validation_scores_.append(score)
                    worth = -score
                waited = waited + 1 if worth > best - self.tol else 0
                if worth < best:
                    best, best_state = worth, self._training.state
                if most > 1 and waited > self.n_iter_no_change:
                    break
        if held is not None:
            best_state = {name: np.array(value) for name, value in best_state.items()}
            self._training.go_on(best_state, self._training.progress)
            self._forward.clear()
        return self

    def _batches(self, data: dict[str, np.ndarray], order: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
        size = min(200, len(order)) if self.batch_size == "auto" else self.batch_size
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise OptionError(f'batch_size is "auto" or an integer above 0, not {self.batch_size!r}.')
        for start in range(0, len(order), int(size)):
            chosen = order[start : start + int(size)]
            yield {name: value[chosen] for name, value in data.items()}

    def _array(self, X: Any) -> np.ndarray:
        tensor = self._input.type.tensor_type
        array = check_array(X, dtype="numeric", ensure_2d=False, allow_nd=True, input_name="X")
        if array.ndim != len(tensor.shape.dim):
            raise FeedError(
                f"The input {self._input.name!r} has {len(tensor.shape.dim)} axes, and X {array.ndim}. Reshape your data."
            )
        for dim, given in zip(tensor.shape.dim[1:], array.shape[1:], strict=True):
            if dim.HasField("dim_value") and dim.dim_value != given:
                raise FeedError(
                    f"The input {self._input.name!r} has {dim.dim_value} features, and X has the shape {array.shape}."
                )
        if array.ndim == 2:
            if array.shape[1] != getattr(self, "n_features_in_", array.shape[1]):
                raise FeedError(
                    f"X has {array.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} features "
                    "as input, as many as the training began with."
                )
            self.n_features_in_ = array.shape[1]
        return np.ascontiguousarray(array, helper.tensor_dtype_to_np_dtype(tensor.elem_type))

    def _labels(self, y: Any) -> np.ndarray:
        return self._step.labels(y)

    def _split(self, y: np.ndarray) -> dict[str, Any]:
        return {}

    # Results of the training

    @property
    def onnx_model_(self) -> ModelProto:
        """The model with the trained weights, where they were in the original."""
        check_is_fitted(self, "loss_curve_")
        return self._training.write_to(read(self.model, lift=False))  # type: ignore[arg-type]  # it was given to fit

    @property
    def coefs_(self) -> dict[str, np.ndarray]:
        """The trained weights by name."""
        check_is_fitted(self, "loss_curve_")
        return {name: np.array(value) for name, value in self._training.weights.items()}

    def _run(self, x: np.ndarray) -> np.ndarray:
        if not self._forward:
            trained = self._training.write_to(self._source)
            chosen = select_model_inputs_outputs(trained, outputs=[self._output])
            self._forward.append(self._training.prepared(chosen))
        result: np.ndarray = self._forward[0].run({self._input.name: x})[self._output]
        return result

    def _predicted(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _score_of(self, y: np.ndarray, x: np.ndarray) -> float:
        raise NotImplementedError

    def predict(self, X: Any) -> np.ndarray:
        """The prediction for each sample."""
        check_is_fitted(self, "loss_curve_")
        return self._predicted(self._array(X))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "_training" in state:
            training = state.pop("_training")
            arrays = {name: np.array(value) for name, value in training.state.items()}
            state["_kept"] = (training.schedule, arrays, training.progress)
            state["_forward"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("_kept", None)
        super().__setstate__(state)
        if kept is not None:
            schedule, arrays, progress = kept
            self._training = Training(self._step, schedule, self.backend)
            self._training.go_on(arrays, progress)


class OnnxRegressor(RegressorMixin, _OnnxEstimator):  # type: ignore[misc]  # skipped by mypy
    """A regression: the model's output is compared with y.

    :param model: a model of one input, or the path of one; it is not modified.
    :param loss: as in `step_model`; "squared_error" is what the convention says it is.
    :param output: the output that is trained, where the model has several of floats.
    :param trainable: names and patterns of weights; all parameters by default.
    :param convention: "sklearn", "torch" or "documents" (docs/estimators.md).
    :param optimizer: "sgd", "adam", "adamw", "adagrad", "rmsprop", or an object of `refgrad.training`.
    :param schedule: "constant", "invscaling", "optimal" or "adaptive" from `learning_rate_init` on, or an object.
    :param alpha: the penalty, as the convention means it.
    :param batch_size: "auto" is min(200, N). The last batch has the rest.
    :param tol: the training ends when the loss, or with `early_stopping` the score of `validation_fraction` of the samples, has
        not become better by `tol` in more than `n_iter_no_change` epochs in a row. `early_stopping` keeps the best weights.
    :param kinks: and `quantization`, `strong_zero`: the conventions of `refgrad.gradient`.
    :param backend: the executor: "numpy", "ort-cpu", ...
    :param verbose: show a progress bar.

    After `fit` there are `loss_curve_`, `validation_scores_`, `n_iter_`, `coefs_` and `onnx_model_`.
    """

    def _predicted(self, x: np.ndarray) -> np.ndarray:
        result = self._run(x)
        return result[:, 0] if result.ndim == 2 and result.shape[1] == 1 else result

    def _score_of(self, y: np.ndarray, x: np.ndarray) -> float:
        return float(r2_score(y, self._predicted(x)))


class OnnxClassifier(ClassifierMixin, _OnnxEstimator):  # type: ignore[misc]  # skipped by mypy
    """A classification: the model's output are probabilities [N, C], or the probability of the second of two classes, [N, 1].

    The arguments are the same as for `OnnxRegressor`. With loss="cross_entropy" the output are logits, and with
    loss="binary_cross_entropy_with_logits" the one logit of two classes, [N] or [N, 1]. The classes come from
    the model, as classifiers of skl2onnx have them, or else they are 0, 1, ... ZipMap is left out of the training.
    """

    def __init__(
        self,
        model: ModelProto | str | os.PathLike[str] | None = None,
        *,
        loss: str = "log_loss",
        output: str | None = None,
        trainable: Any = None,
        convention: str | Convention = "sklearn",
        optimizer: str | Optimizer = "adam",
        schedule: str | Schedule = "constant",
        learning_rate_init: float = 1e-3,
        alpha: float = 1e-4,
        batch_size: int | str = "auto",
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        kinks: str = DEFAULT.kinks,
        quantization: str = DEFAULT.quantization,
        strong_zero: bool = DEFAULT.strong_zero,
        backend: str = "numpy",
        verbose: bool = False,
    ) -> None:
        super().__init__(
            model,
            loss=loss,
            output=output,
            trainable=trainable,
            convention=convention,
            optimizer=optimizer,
            schedule=schedule,
            learning_rate_init=learning_rate_init,
            alpha=alpha,
            batch_size=batch_size,
            max_iter=max_iter,
            shuffle=shuffle,
            random_state=random_state,
            tol=tol,
            n_iter_no_change=n_iter_no_change,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            warm_start=warm_start,
            kinks=kinks,
            quantization=quantization,
            strong_zero=strong_zero,
            backend=backend,
            verbose=verbose,
        )

    def _described(self, source: ModelProto) -> None:
        if self.loss not in (*OF_CLASSES, BINARY_OF_LOGITS):
            raise OptionError(
                f"The loss of a classifier is one of {choices((*OF_CLASSES, BINARY_OF_LOGITS))}, not {self.loss!r}."
            )
        found = classes_of(source)
        self._known = found is not None
        self.classes_ = np.array(found if found is not None else [])

    def _labels(self, y: Any) -> np.ndarray:
        y, classes = np.asarray(y), self._classes()
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if self.loss == BINARY_OF_LOGITS:
            return self._step.labels(positions(y, classes))
        labels = self._step.labels(y, classes)
        count = len(self.classes_)
        if len(labels) and count and not 0 <= labels.min() <= labels.max() < count:
            wrong = labels.max() if labels.max() >= count else labels.min()
            raise FeedError(f"The label {wrong} is not one of the model's {count} classes, 0 to {count - 1}.")
        return labels

    def _array(self, X: Any) -> np.ndarray:
        x = super()._array(X)
        if not self.n_iter_:
            columns = self._probabilities(x).shape[1]
            self.classes_ = self.classes_ if self._known else np.arange(columns)
        return x

    def _classes(self) -> list[Any] | None:
        return self.classes_.tolist() if self._known else None

    def _split(self, y: np.ndarray) -> dict[str, Any]:
        return {"stratify": y}

    def _probabilities(self, x: np.ndarray) -> np.ndarray:
        scores = self._run(x)
        if self.loss == "cross_entropy":
            powers = np.exp(scores - scores.max(1, keepdims=True))
            shares: np.ndarray = powers / powers.sum(1, keepdims=True)
            return shares
        if self.loss == BINARY_OF_LOGITS:
            half = scores.reshape(len(scores), -1) / 2  # Sigmoid(z) = (1 + tanh(z/2)) / 2 overflows nowhere
            return np.concatenate([1 - np.tanh(half), 1 + np.tanh(half)], 1) / 2
        if len(scores) and (scores.min() < 0 or scores.max() > 1 + 1e-3):
            raise OptionError(
                f"The output {self._output!r} has no probabilities: {scores.min():g} to {scores.max():g}. "
                f'Take loss="cross_entropy" for logits, loss="{BINARY_OF_LOGITS}" for one, or name another output.'
            )
        if scores.ndim == 1 or scores.shape[1] == 1:
            column = scores.reshape(-1, 1)
            return np.concatenate([1 - column, column], 1)
        return scores

    def _predicted(self, x: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = self.classes_[self._probabilities(x).argmax(1)]
        return chosen

    def _score_of(self, y: np.ndarray, x: np.ndarray) -> float:
        return float(accuracy_score(np.asarray(y).ravel(), self._predicted(x)))

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes, [N, C]."""
        check_is_fitted(self, "loss_curve_")
        return self._probabilities(self._array(X))
