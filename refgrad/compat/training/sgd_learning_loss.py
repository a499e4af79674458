"""The losses of the onnxcustom notebooks, each with the graph of its derivative by the prediction."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from onnx import ModelProto

from refgrad.errors import OptionError, choices
from refgrad.model import native
from refgrad.protos.traverse import refill
from refgrad.reverse.gradient import gradient
from refgrad.rewrites.losses import add_loss_output

_PREDICTION = """
<ir_version: 8, opset_import: ["" : 15]>
prediction (float[N, {columns}] X2) => (float[N, {columns}] Y2) {{ Y2 = Identity(X2) }}
"""


class BaseLearningLoss(ABC):
    """A loss: what a prediction is compared by with the expected values. It is summed over the samples."""

    score: ClassVar[str]
    columns: ClassVar[str] = "C"
    step: ClassVar[float] = 1.0  # the part of the gradient that an update takes

    @property
    def settings(self) -> dict[str, Any]:
        """Further arguments of the loss in `add_loss_output`, by name."""
        return {}

    @property
    def loss_score_onnx_(self) -> ModelProto:
        """The sum of the losses, of the expected values X1 [N, C] and the prediction X2 [N, C]: loss [1, 1]."""
        model = native.parse_model(_PREDICTION.format(columns=self.columns))
        made = add_loss_output(model, self.score, label_name="X1", **self.settings)
        refill(made.graph.output, [made.graph.output[0]])
        return made

    @property
    def loss_grad_onnx_(self) -> ModelProto:
        """The sum of the losses and its derivative by the prediction: loss [1, 1] and X2_grad [N, C]."""
        made = gradient(self.loss_score_onnx_, ["X2"], ["loss"], cotangent="ones", keep_outputs=True)
        outputs = {value.name: value for value in made.graph.output}
        refill(made.graph.output, [outputs["loss"], outputs["X2_grad"]])
        return made

    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The graphs of the loss."""
        return {"loss_grad_onnx_": self.loss_grad_onnx_, "loss_score_onnx_": self.loss_score_onnx_}

    def __repr__(self) -> str:
        """The arguments."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


class SquareLearningLoss(BaseLearningLoss):
    """(X1 − X2)². An update takes half of its gradient, X2 − X1, as the numbers that the notebooks print do."""

    score = "squared_error"
    step = 0.5


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
    """−log of the probability of the class, 0 or 1, of which X2 [N, 2] has both; X1 is [N, 1]."""

    score = "log"
    columns = "2"

    def __init__(self, eps: float = 1e-5) -> None:
        self.eps = eps

    @property
    def settings(self) -> dict[str, Any]:
        """The `eps` that probabilities are clipped with, to [eps, 1 − eps]."""
        return {"eps": self.eps}


LOSSES: dict[str, type[BaseLearningLoss]] = {
    "square_error": SquareLearningLoss,
    "absolute_error": AbsoluteLearningLoss,
    "elastic_error": ElasticLearningLoss,
    "log": NegLogLearningLoss,
}


def loss_of(given: Any) -> BaseLearningLoss:
    """The loss that an argument means.

    :raises OptionError: there is no such loss.
    """
    if isinstance(given, BaseLearningLoss):
        return given
    if isinstance(given, str) and given in LOSSES:
        return LOSSES[given]()
    raise OptionError(
        f"learning_loss is SquareLearningLoss() or another one, or one of {choices(LOSSES)}; not {given!r}."
    )
