"""The learning rates of the onnxcustom notebooks: how the rate falls from epoch to epoch, and what momentum there is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from onnx import ModelProto

from refgrad.compat.training.naming import made_of
from refgrad.compat.utils.onnx_function import function_onnx_graph
from refgrad.errors import OptionError, choices
from refgrad.training.optimizers import SGD
from refgrad.training.schedules import Constant, InverseScaling, Optimal, Schedule

LEARNING_RATES = ("constant", "optimal", "invscaling")


def of_vectors(name: str) -> ModelProto:
    """An update as a graph: the weight, the gradient and the velocity are vectors, as in a step."""
    made = function_onnx_graph(name)
    for value in (*made.graph.input, *made.graph.output):
        if not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.dim.add()
    return made


class BaseLearningRate(ABC):
    """A learning rate. `value` is the rate of the last epoch, or of the first where there was none."""

    def __init__(self, eta0: float, alpha: float, power_t: float, learning_rate: str) -> None:
        if learning_rate not in LEARNING_RATES:
            raise OptionError(f"learning_rate={learning_rate!r}; there are {choices(LEARNING_RATES)}.")
        self.eta0, self.alpha, self.power_t, self.learning_rate = eta0, alpha, power_t, learning_rate
        self.schedule = self._schedule()
        self.value = self.schedule.value(0)

    def _schedule(self) -> Schedule:
        if self.learning_rate == "constant":
            return Constant(self.eta0)
        if self.learning_rate == "optimal":
            return Optimal(self.eta0, alpha=self.alpha)
        return InverseScaling(self.eta0, self.power_t)

    def init_learning_rate(self) -> BaseLearningRate:
        """Begin with the rate of the first epoch."""
        return self.update_learning_rate(0)

    def update_learning_rate(self, t: int) -> BaseLearningRate:
        """Take the rate for when `t` epochs are done: η₀ / (t + 1)^power_t for "invscaling"."""
        self.value = self.schedule.value(t)
        return self

    def loop(self, n: int = 1000) -> Iterator[float]:
        """The rates of the first `n` epochs. `value` follows."""
        for t in range(n):
            yield self.update_learning_rate(t).value

    @staticmethod
    def select(class_name: BaseLearningRate | float | str, **kwargs: Any) -> BaseLearningRate:
        """The learning rate of a name or of η₀, with these arguments; a learning rate is returned as it is.

        :raises OptionError: there is no such learning rate, or it does not take these arguments.
        """
        return learning_rate_of(class_name, **kwargs)

    @property
    @abstractmethod
    def optimizer(self) -> SGD:
        """The optimizer that updates a weight."""

    @abstractmethod
    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The graphs of the update, by their names."""

    def __repr__(self) -> str:
        """The arguments."""
        names = ("eta0", "alpha", "power_t", "learning_rate", "momentum", "nesterov")
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names if hasattr(self, n))})"


class LearningRateSGD(BaseLearningRate):
    """w ← w − η·g, where η is η₀ ("constant"), 1 / (α·(t₀ + t)) ("optimal") or η₀ / (t + 1)^power_t ("invscaling").

    t are the epochs that are done, and t₀ = 1 / (α·η₀), as for scikit-learn's SGDRegressor.

    >>> from refgrad.compat.training.sgd_learning_rate import LearningRateSGD
    >>> rate = LearningRateSGD(0.1)
    >>> rate.update_learning_rate(99).value
    0.03162277660168379
    >>> rate
    LearningRateSGD(eta0=0.1, alpha=0.0001, power_t=0.25, learning_rate='invscaling')
    """

    def __init__(
        self, eta0: float = 0.01, alpha: float = 0.0001, power_t: float = 0.25, learning_rate: str = "invscaling"
    ) -> None:
        super().__init__(eta0, alpha, power_t, learning_rate)

    @property
    def optimizer(self) -> SGD:
        """Gradient descent."""
        return SGD()

    @property
    def axpy_onnx_(self) -> ModelProto:
        """Y = X1·alpha + X2: X1 is the gradient, X2 the weight, alpha is −η."""
        return of_vectors("axpy")

    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The update."""
        return {"axpy_onnx_": self.axpy_onnx_}


class LearningRateSGDNesterov(BaseLearningRate):
    """v ← μ·v − η·g and w ← w + v; with `nesterov` w ← w + μ·v − η·g. η falls as for `LearningRateSGD`.

    >>> from refgrad.compat.training.sgd_learning_rate import LearningRateSGDNesterov
    >>> LearningRateSGDNesterov(1e-5, nesterov=True, momentum=0.9)
    LearningRateSGDNesterov(eta0=1e-05, alpha=0.0001, power_t=0.25, learning_rate='invscaling', momentum=0.9, nesterov=True)
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        super().__init__(eta0, alpha, power_t, learning_rate)
        self.momentum, self.nesterov = momentum, nesterov

    @property
    def optimizer(self) -> SGD:
        """Gradient descent with momentum."""
        return SGD(momentum=self.momentum, nesterov=self.nesterov, rate_in_velocity=True)

    @property
    def axpyw_onnx_(self) -> ModelProto:
        """Z = X1·alpha + G·beta and Y = X2 + Z, or X2 + X1·alpha + Z·beta.

        X1 is the gradient, X2 the weight, G the velocity, alpha is −η, beta is μ.
        """
        return of_vectors("axpyw2" if self.nesterov else "axpyw")

    def onnx_graphs(self) -> dict[str, ModelProto]:
        """The update."""
        return {"axpyw_onnx_": self.axpyw_onnx_}


_NAMES: dict[str, Callable[..., BaseLearningRate]] = {
    "SGD": LearningRateSGD,
    "Nesterov": LearningRateSGDNesterov,
    "SGDNesterov": LearningRateSGDNesterov,
    "LearningRateSGD": LearningRateSGD,
    "LearningRateSGDNesterov": LearningRateSGDNesterov,
}


def learning_rate_of(given: BaseLearningRate | float | str, **arguments: Any) -> BaseLearningRate:
    """The learning rate that an argument means: an object, η₀ of `LearningRateSGD`, or "SGD" or "Nesterov".

    :raises OptionError: it is something else, or it does not take these arguments.
    """
    if isinstance(given, BaseLearningRate):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        given, arguments = "SGD", {"eta0": float(given), **arguments}
    if not isinstance(given, str) or given not in _NAMES:
        raise OptionError(f"learning_rate is a number, LearningRateSGD(…), or one of {choices(_NAMES)}; not {given!r}.")
    return made_of(_NAMES[given], arguments)
