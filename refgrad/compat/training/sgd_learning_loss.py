"""The losses of the onnxcustom notebooks, each with the graph of its derivative by the prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from refgrad.backends import get_backend
from refgrad.compat.training.arrays import Coefficients, array_from
from refgrad.compat.training.naming import made_of
from refgrad.compat.utils.onnx_function import value_and_gradient
from refgrad.errors import OptionError, choices
from refgrad.model import native
from refgrad.protos.traverse import refill
from refgrad.rewrites.losses import add_loss_output
from refgrad.rewrites.scores import BINARY_OF_LOGITS

_PREDICTION = """
<ir_version: 8, opset_import: ["" : 15]>
prediction (float[N, C] X2) => (float[N, C] Y2) { Y2 = Identity(X2) }
"""


class BaseLearningLoss(ABC):
    """A loss, which compares a prediction with the expected values. It is summed over the samples."""

    @property
    @abstractmethod
    def score(self) -> str:
        """The name of the loss in `add_loss_output`."""

    @property
    def settings(self) -> dict[str, Any]:
        """Further arguments of the loss in `add_loss_output`, by name."""
        return {}

    @property
    def loss_score_onnx_(self) -> ModelProto:
        """The sum of the losses, of the expected values X1 [N, C] and the prediction X2 [N, C]: loss [1, 1]."""
        return self.score_onnx(TensorProto.FLOAT)

    def score_onnx(self, kind: int) -> ModelProto:
        """`loss_score_onnx_` for predictions of an element type."""
        prediction = native.parse_model(_PREDICTION)
        for value in (prediction.graph.input[0], prediction.graph.output[0]):
            value.type.tensor_type.elem_type = kind
        made = add_loss_output(prediction, self.score, label_name="X1", **self.settings)
        refill(made.graph.output, [made.graph.output[0]])
        return made

    @property
    def loss_grad_onnx_(self) -> ModelProto:
        """The sum of the losses and its derivative by the prediction: loss [1, 1] and X2_grad [N, C]."""
        return value_and_gradient(self.loss_score_onnx_, "loss", "X2")

    def loss_gradient(self, device: Any, expected: Any, predicted: Any) -> tuple[Coefficients, Coefficients]:
        """The sum of the losses, [1, 1], and its derivative by the prediction, [N, C].

        :param device: has no effect: the interpreter computes them.
        :param expected: X1, an array or an OrtValue, [N, C].
        :param predicted: X2, an array or an OrtValue, float32 [N, C].
        """
        feeds = {"X1": array_from(expected).astype(np.float32), "X2": array_from(predicted)}
        results = get_backend("numpy").prepare(self.loss_grad_onnx_).run(feeds)
        return results["loss"].view(Coefficients), results["X2_grad"].view(Coefficients)

    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The graphs of the loss."""
        return {"loss_grad_onnx_": self.loss_grad_onnx_, "loss_score_onnx_": self.loss_score_onnx_}

    @staticmethod
    def select(class_name: BaseLearningLoss | str, **kwargs: Any) -> BaseLearningLoss:
        """The loss of a name, such as "square_error", with these arguments; a loss itself is returned as it is.

        :raises OptionError: there is no such loss, or it does not take these arguments.
        """
        return loss_of(class_name, **kwargs)

    def __repr__(self) -> str:
        """The arguments."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class SquareLearningLoss(BaseLearningLoss):
    """½·(X1 − X2)². Its derivative by the prediction is X2 − X1, with which the notebooks update."""

    score = "half_squared_error"


class AbsoluteLearningLoss(BaseLearningLoss):
    """|X1 − X2|"""

    score = "absolute_error"


class ElasticLearningLoss(BaseLearningLoss):
    """l1_weight·|X1 − X2| + l2_weight·(X1 − X2)²"""

    score = "elastic"

    def __init__(self, l1_weight: float = 0.5, l2_weight: float = 0.5) -> None:
        self.l1_weight, self.l2_weight = l1_weight, l2_weight

    @property
    def settings(self) -> dict[str, Any]:
        """The weights."""
        return {"l1_weight": self.l1_weight, "l2_weight": self.l2_weight}


class NegLogLearningLoss(BaseLearningLoss):
    """−log of the probability of the class X1 [N, 1], 0 or 1.

    :param eps: probabilities are clipped to [eps, 1 − eps]. A raw score is not clipped: its loss is finite anyway.
    :param probability_function: "sigmoid": X2 [N, 1] is a raw score, and its sigmoid is the probability of the class 1. None:
        X2 has that probability, [N, 1], or the probabilities of both classes, [N, 2].
    """

    def __init__(self, eps: float = 1e-5, probability_function: str | None = "sigmoid") -> None:
        if probability_function not in ("sigmoid", None):
            raise OptionError(
                f"probability_function is 'sigmoid' for a raw score, or None for probabilities, not {probability_function!r}."
            )
        self.eps, self.probability_function = eps, probability_function

    @property
    def score(self) -> str:
        """The loss of raw scores, or of probabilities."""
        return "log" if self.probability_function is None else BINARY_OF_LOGITS

    @property
    def settings(self) -> dict[str, Any]:
        """The `eps` of probabilities."""
        return {"eps": self.eps} if self.probability_function is None else {}


_NAMES: dict[type[BaseLearningLoss], tuple[str, ...]] = {
    SquareLearningLoss: ("square_error", "square"),
    AbsoluteLearningLoss: ("absolute_error", "absolute"),
    ElasticLearningLoss: ("elastic_error", "elastic"),
    NegLogLearningLoss: ("log", "neglog", "logloss"),
}
_LOSSES = {name: loss for loss, names in _NAMES.items() for name in (*names, loss.__name__)}


def loss_of(given: Any, **arguments: Any) -> BaseLearningLoss:
    """The loss that an argument means.

    :raises OptionError: there is no such loss, or it does not take these arguments.
    """
    if isinstance(given, BaseLearningLoss):
        return given
    if not isinstance(given, str) or given not in _LOSSES:
        names = choices([names[0] for names in _NAMES.values()])
        raise OptionError(f"learning_loss is SquareLearningLoss() or another one, or one of {names}; not {given!r}.")
    return made_of(_LOSSES[given], arguments)
