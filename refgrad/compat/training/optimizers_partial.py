"""The optimizer of the onnxcustom notebooks to whose model a loss is given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

import numpy as np
from onnx import ModelProto, helper

from refgrad.backends import get_backend
from refgrad.compat.training.arrays import Coefficients
from refgrad.compat.training.notebook import BaseOptimizer, checked_array
from refgrad.compat.training.ortgradient import OrtGradientForwardBackward, OrtGradientForwardBackwardFunction
from refgrad.compat.training.sgd_learning_loss import BaseLearningLoss, NegLogLearningLoss, loss_of
from refgrad.compat.training.sgd_learning_penalty import BaseLearningPenalty, penalty_of
from refgrad.compat.training.sgd_learning_rate import BaseLearningRate
from refgrad.errors import OptionError, choices
from refgrad.notices import notice, quiet
from refgrad.rewrites.scores import origin_of_probabilities
from refgrad.tables.conventions import ConventionOptions
from refgrad.training.step import step_model
from refgrad.training.steps import StepModel

__all__ = ["OrtGradientForwardBackwardOptimizer"]

_LABEL = "expected"


class OrtGradientForwardBackwardOptimizer(BaseOptimizer):
    """Trains a model by comparing what it returns with expected values.

    Each step is w ← w − η/n·∂loss/∂w with the sum of the losses of a batch of n samples; η falls from epoch to epoch
    (`LearningRateSGD`). One graph does the whole step.

    :param model_onnx: a model with one input and one output, or the path of one.
    :param weights_to_train: names of float initializers, or patterns; None: the parameters that `refgrad.weights` finds.
    :param learning_rate: η₀, or `LearningRateSGD(…)` or `LearningRateSGDNesterov(…)`.
    :param learning_loss: "square_error", "absolute_error", "elastic_error", "log", or an object such as `SquareLearningLoss()`.
    :param learning_penalty: `ElasticLearningPenalty(l1, l2)` or None; it is added to the loss of a batch.
    :param weight_name: the name that the weights of samples get.
    :param exc: raise ConvergenceError where a loss is not finite; False: warn, and end the training.
    :param enable_logging: the logger "onnxcustom" reports the rate and the loss of each epoch, at the level DEBUG.

    The other arguments are the same as for `OrtGradientOptimizer`.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {0, 0}> { y = MatMul(x, a) }'
    ... )
    >>> x = np.random.default_rng(0).standard_normal((100, 2))
    >>> session = OrtGradientForwardBackwardOptimizer(line, learning_rate=0.1, random_state=0)
    >>> session.fit(x, x @ [1, 2]).trained_coef_["a"].numpy().round(3)
    array([[1.],
           [2.]], dtype=float32)
    """

    _shown = (
        "model_onnx", "weights_to_train", "loss_output_name", "max_iter", "training_optimizer_name", "batch_size",
        "learning_rate", "value", "device", "warm_start", "verbose", "validation_every", "learning_loss",
        "enable_logging", "weight_name", "learning_penalty", "exc",
    )  # fmt: skip

    def __init__(
        self,
        model_onnx: ModelProto | str | os.PathLike[str],
        weights_to_train: Sequence[str] | None = None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: BaseLearningRate | float | str = "SGD",
        device: str = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: float = 0.1,
        learning_loss: BaseLearningLoss | str = "square_error",
        enable_logging: bool = False,
        weight_name: str | None = None,
        learning_penalty: BaseLearningPenalty | None = None,
        exc: bool = True,
        *,
        backend: str | None = None,
        start: str = "normal",
        random_state: int | None = None,
        **conventions: Unpack[ConventionOptions],
    ) -> None:
        self.learning_loss, self.learning_penalty = loss_of(learning_loss), penalty_of(learning_penalty)
        self.enable_logging, self.weight_name, self.exc = enable_logging, weight_name, exc
        super().__init__(
            model_onnx, weights_to_train, loss_output_name, max_iter, training_optimizer_name, batch_size, learning_rate,
            device, warm_start, verbose, validation_every, backend, start, random_state, conventions,
        )  # fmt: skip

    @cached_property
    def _loss(self) -> BaseLearningLoss:
        """`learning_loss`, except that the probabilities of a model are taken for what they are.

        :raises OptionError: a loss takes one raw score for each sample, and the model returns several columns.
        """
        loss, output = self.learning_loss, self.model_onnx.graph.output[0]
        if not isinstance(loss, NegLogLearningLoss) or loss.probability_function is None:
            return loss
        if origin := origin_of_probabilities(self.model_onnx, output.name):
            notice(
                f"NegLogLearningLoss() takes a raw score, and {output.name!r} is a probability, made by {origin.operator}. It "
                "is compared as it is. NegLogLearningLoss(probability_function=None) says so."
            )
            return NegLogLearningLoss(loss.eps, None)
        columns = [dim.dim_value for dim in output.type.tensor_type.shape.dim[1:]]
        if any(size > 1 for size in columns):
            raise OptionError(
                f"NegLogLearningLoss() takes one raw score for each sample, and {output.name!r} has {columns[0]} columns. If "
                "these are probabilities, take NegLogLearningLoss(probability_function=None). Otherwise "
                "refgrad.select_model_inputs_outputs cuts the model at the raw score."
            )
        return loss

    def _step_model(self, weights: Sequence[str] | None) -> StepModel:
        graph = self.model_onnx.graph
        initialized = {tensor.name for tensor in graph.initializer}
        inputs = [value.name for value in graph.input if value.name not in initialized]
        if len(inputs) != 1 or len(graph.output) != 1:
            raise OptionError(
                f"The model has one input and one output; this one has {choices(inputs)} and "
                f"{choices([value.name for value in graph.output])}. refgrad.select_model_inputs_outputs selects."
            )
        amounts = self.learning_penalty.amounts
        step = step_model(
            self.model_onnx,
            self._loss.score,
            self.learning_rate.optimizer,
            trainable=weights,
            label=_LABEL,
            sample_weight=self.weight_name,
            reduction="sum",
            penalty=None if amounts is None else {"*": amounts},
            loss_settings=self._loss.settings,
            **self._conventions,
        )
        given = [] if weights is None else list(weights)
        ordered = [name for name in step.weights if name in given]
        if ordered != [name for name in given if name in ordered]:
            raise OptionError(
                "weights_to_train has another order than the initializers of the model. get_state and set_state have the "
                f"order of the initializers: {choices(ordered)}."
            )
        return step

    def _data(self, X: Any, y: Any, sample_weight: Any) -> dict[str, np.ndarray]:
        data = {self._step.data[0]: X, _LABEL: y}
        if self.weight_name is not None:
            data[self.weight_name] = np.ones(len(X)) if sample_weight is None else sample_weight
        elif sample_weight is not None:
            raise OptionError("sample_weight needs weight_name='weight' when the optimizer is made.")
        arrays = {name: checked_array(name, given, self._step.model) for name, given in data.items()}
        return arrays | {_LABEL: self._step.in_range(arrays[_LABEL])}

    def _scores(self, data: Mapping[str, np.ndarray]) -> np.ndarray:
        """The losses of the elements that are compared."""
        model = self.model_onnx if self._state is None else self.get_trained_onnx()
        [predicted] = get_backend(self._executor).prepare(model).run({n: data[n] for n in self._step.data[:1]}).values()
        scorer = get_backend("numpy").prepare(self._loss.score_onnx(helper.np_dtype_to_tensor_dtype(predicted.dtype)))
        rows = zip(data[_LABEL], predicted, strict=True)
        one = [scorer.run({"X1": y.reshape(1, -1), "X2": x.reshape(1, -1)})["loss"].item() for y, x in rows]
        weights = 1.0 if self.weight_name is None else data[self.weight_name]
        return np.array(one) * weights

    def get_state(self) -> list[Coefficients]:
        """The trained weights, in the order of the model's initializers."""
        return list(self.trained_coef_.values())

    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> np.ndarray:
        """The loss of each sample, [N], without the penalty."""
        return self._scores(self._data(X, y, sample_weight))

    def _mean_loss(self, data: Mapping[str, np.ndarray]) -> float:
        return float(np.mean(self._scores(data)))

    @property
    def train_session_(self) -> OrtGradientForwardBackward:
        """The model as a function with `forward` and `backward`."""
        with quiet():  # it was said when the step was made
            return OrtGradientForwardBackward(
                self.model_onnx, list(self._step.weights), backend=self._executor, **self._conventions
            )

    @cached_property
    def train_function_(self) -> OrtGradientForwardBackwardFunction:
        """A function of `train_session_`."""
        return self.train_session_.new_instance()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "train_function_"}

    def _graphs(self) -> dict[str, Any]:
        function = self.train_session_.cls_type_
        return super()._graphs() | {
            "learning_loss": self._loss.onnx_graphs(),
            "learning_penalty": self.learning_penalty.onnx_graphs(),
            "train_function_": {
                "_trained_onnx": function._trained_onnx,
                "_optimized_pre_grad_model": function._optimized_pre_grad_model,
            },
            "step": self._step.model,
        }
