"""The optimizer of the onnxcustom notebooks whose model returns its loss."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from onnx import ModelProto

from refgrad.backends import Prepared, get_backend
from refgrad.compat.training.arrays import Coefficients
from refgrad.compat.training.notebook import BaseOptimizer, checked_array
from refgrad.compat.training.sgd_learning_rate import BaseLearningRate
from refgrad.errors import OptionError, UnknownNameError, choices
from refgrad.model.writing import replacing
from refgrad.tables.conventions import ConventionOptions
from refgrad.training.step import step_model
from refgrad.training.steps import StepModel

__all__ = ["OrtGradientOptimizer"]


class OrtGradientOptimizer(BaseOptimizer):
    """Trains a model that has the expected values as an input and returns its loss, as `refgrad.add_loss_output` makes it.

    Each step is w ← w − η/n·∂loss/∂w with the loss of a batch of n samples; η falls from epoch to epoch (`LearningRateSGD`).
    One graph does the whole step, on stock ONNX Runtime or the interpreter.

    :param model_onnx: a model, or the path of one.
    :param weights_to_train: names of float initializers, or patterns; None: the parameters that `refgrad.weights` finds.
    :param learning_rate: η₀, or `LearningRateSGD(…)` or `LearningRateSGDNesterov(…)`.
    :param device: "cpu" or "cuda".
    :param warm_start: `fit` goes on with the weights of the last `fit`, or at first with the weights of the model.
    :param validation_every: epochs, or a part of `max_iter`.
    :param saved_gradient: the file to write the model of a step to.
    :param sample_weight_name: the input that weighs samples, where the model has it.
    :param backend: what runs the step; by default ONNX Runtime, or the interpreter where that is not installed.
    :param start: what `fit` begins with: "normal", numbers from N(0, 1), as in the notebooks, or "model".
    :param random_state: the seed of these numbers and of the order of the samples.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises OptionError: an argument does not fit. If it does not fit the model, `fit` raises this, or UnknownNameError.

    >>> import numpy as np, onnx.parser, refgrad
    >>> from refgrad.compat.training.optimizers import OrtGradientOptimizer
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {0, 0}> { y = MatMul(x, a) }'
    ... )
    >>> x = np.random.default_rng(0).standard_normal((100, 2))
    >>> session = OrtGradientOptimizer(refgrad.add_loss_output(line), ["a"], learning_rate=0.1, random_state=0)
    >>> session.fit(x, x @ [1, 2]).trained_coef_["a"].numpy().round(3)
    array([[1.],
           [2.]], dtype=float32)
    """

    _shown = (
        "model_onnx", "weights_to_train", "loss_output_name", "max_iter", "training_optimizer_name", "batch_size",
        "learning_rate", "value", "device", "warm_start", "verbose", "validation_every", "saved_gradient",
        "sample_weight_name",
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
        saved_gradient: str | os.PathLike[str] | None = None,
        sample_weight_name: str = "weight",
        *,
        backend: str | None = None,
        start: str = "normal",
        random_state: int | None = None,
        **conventions: Unpack[ConventionOptions],
    ) -> None:
        self.saved_gradient, self.sample_weight_name = saved_gradient, sample_weight_name
        super().__init__(
            model_onnx, weights_to_train, loss_output_name, max_iter, training_optimizer_name, batch_size, learning_rate,
            device, warm_start, verbose, validation_every, backend, start, random_state, conventions,
        )  # fmt: skip
        if saved_gradient is not None:
            with replacing(saved_gradient) as temporary:
                temporary.write_bytes(self._step.model.SerializeToString())

    def _step_model(self, weights: Sequence[str] | None) -> StepModel:
        outputs = [value.name for value in self.model_onnx.graph.output]
        if self.loss_output_name not in outputs:
            raise UnknownNameError(
                f"The model has no output {self.loss_output_name!r}, the loss; it has {choices(outputs)}. "
                "refgrad.add_loss_output adds one."
            )
        [_, label] = self._compared
        return step_model(
            self.model_onnx,
            None,
            self.learning_rate.optimizer,
            trainable=weights,
            output=self.loss_output_name,
            label=label,
            **self._conventions,
        )

    @property
    def _inputs(self) -> list[str]:
        initialized = {tensor.name for tensor in self.model_onnx.graph.initializer}
        return [value.name for value in self.model_onnx.graph.input if value.name not in initialized]

    @property
    def _compared(self) -> list[str]:
        """The input of the model, and the expected values."""
        names = [name for name in self._inputs if name != self.sample_weight_name]
        if len(names) != 2:
            raise OptionError(f"The model has an input and the expected values; this one has {choices(names)}.")
        return names

    def _data(self, X: Any, y: Any, sample_weight: Any) -> dict[str, np.ndarray]:
        data = dict(zip(self._compared, (X, y), strict=True))
        if self.sample_weight_name in self._inputs:
            data[self.sample_weight_name] = np.ones(len(X)) if sample_weight is None else sample_weight
        elif sample_weight is not None:
            raise OptionError(f"The model has no input {self.sample_weight_name!r}: it takes no sample_weight.")
        return {name: checked_array(name, given, self.model_onnx) for name, given in data.items()}

    def _mean_loss(self, data: Mapping[str, np.ndarray]) -> float:
        loss = self._prepared().run(data, [self.loss_output_name])[self.loss_output_name]
        return float(np.sum(loss)) / len(data[self._compared[0]])

    def _prepared(self) -> Prepared:
        return get_backend(self._executor).prepare(self.model_onnx if self._state is None else self.get_trained_onnx())

    def get_state(self) -> dict[str, Coefficients]:
        """The trained weights by name."""
        return self.trained_coef_

    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> np.ndarray:
        """The loss of each sample, [N]."""
        data = self._data(X, y, sample_weight)
        prepared = self._prepared()
        rows = [{name: array[k : k + 1] for name, array in data.items()} for k in range(len(X))]
        return np.array([prepared.run(row, [self.loss_output_name])[self.loss_output_name].item() for row in rows])
