"""The penalties of the onnxcustom notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from onnx import ModelProto

from refgrad.compat.training.naming import made_of
from refgrad.compat.utils.onnx_function import value_and_gradient
from refgrad.errors import OptionError
from refgrad.model import native

_ELASTIC = """
<ir_version: 8, opset_import: ["" : 15]>
penalty (float[N] X) => (float[1] Y) <float[1] l1 = {%r}, float[1] l2 = {%r}>
{
    size = Abs(X) square = Mul(X, X) first = Mul(size, l1) second = Mul(square, l2)
    both = Add(first, second) Y = ReduceSum <keepdims = 1> (both)
}
"""


class BaseLearningPenalty(ABC):
    """A penalty for large weights, which is added to the loss of a batch."""

    @staticmethod
    def select(class_name: BaseLearningPenalty | str | None, **kwargs: float) -> BaseLearningPenalty:
        """The penalty "elastic" with these arguments, or none for None; a penalty is returned as it is.

        :raises OptionError: there is no such penalty, or it does not take these arguments.
        """
        return made_of(ElasticLearningPenalty, kwargs) if class_name == "elastic" else penalty_of(class_name)

    @property
    @abstractmethod
    def amounts(self) -> tuple[float, float] | None:
        """l1 and l2 of every weight; None without a penalty."""

    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The graphs of the penalty; none without a penalty."""
        return {}


class NoLearningPenalty(BaseLearningPenalty):
    """Nothing."""

    @property
    def amounts(self) -> tuple[float, float] | None:
        """None."""
        return None

    def __repr__(self) -> str:
        """The class."""
        return "NoLearningPenalty()"


class ElasticLearningPenalty(BaseLearningPenalty):
    """l1·Σ|w| + l2·Σw²"""

    def __init__(self, l1: float = 0.5, l2: float = 0.5) -> None:
        self.l1, self.l2 = l1, l2

    @property
    def amounts(self) -> tuple[float, float] | None:
        """l1 and l2."""
        return self.l1, self.l2

    @property
    def penalty_onnx_(self) -> ModelProto:
        """The penalty of a weight X, [N], whatever axes it has otherwise: Y [1]."""
        return native.parse_model(_ELASTIC % (float(self.l1), float(self.l2)))

    @property
    def penalty_grad_onnx_(self) -> ModelProto:
        """The penalty of a weight and its derivative: Y [1] and X_grad [N]."""
        return value_and_gradient(self.penalty_onnx_, "Y", "X")

    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The penalty, and its derivative."""
        return {"penalty_grad_onnx_": self.penalty_grad_onnx_, "penalty_onnx_": self.penalty_onnx_}

    def __repr__(self) -> str:
        """The arguments."""
        return f"ElasticLearningPenalty(l1={self.l1!r}, l2={self.l2!r})"


def penalty_of(given: BaseLearningPenalty | str | None) -> BaseLearningPenalty:
    """The penalty that an argument means.

    :raises OptionError: it is none.
    """
    if given is None:
        return NoLearningPenalty()
    if not isinstance(given, BaseLearningPenalty):
        raise OptionError(f"learning_penalty is ElasticLearningPenalty(…), or None; not {given!r}.")
    return given
