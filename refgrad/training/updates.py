"""The updates of a weight from its gradient, in ONNX operators.

Every choice in which libraries differ is an argument (docs/training.md). In the formulas w is the weight, g its gradient, η the
learning rate and t the number of the step, from 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from refgrad.errors import OptionError, choices
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.ranges import FINITE, checked
from refgrad.tables import plugins

States = Mapping[str, str]
EPSILONS = ("corrected", "uncorrected")
_RANGED = ("beta1", "beta2", "dampening", "momentum", "weight_decay")  # rows of refgrad.ranges


OPTIMIZERS: dict[str, type[Optimizer]] = {}


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update of weights. Its fields are its settings.

    A subclass with a `name` is an optimizer of `refgrad train` and of the estimators, which take `rate` as the learning rate
    unless the caller gives another one. `elementwise` says that each element of a weight is updated without the others: then
    `step_model` may put all weights into one vector, and `update` sees this vector.
    """

    name: ClassVar[str] = ""
    rate: ClassVar[float] = 1e-3
    elementwise: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Add the class to `OPTIMIZERS`.

        :raises OptionError: another class has its name.
        """
        super().__init_subclass__(**options)
        if "update" in cls.__dict__ and "elementwise" not in cls.__dict__:
            cls.elementwise = False  # the update of its base class may have been
        if name := cls.__dict__.get("name", ""):
            known = OPTIMIZERS.setdefault(name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):  # no reload
                raise OptionError(f"{known.__qualname__} is the optimizer {name!r}: choose another name.")
            OPTIMIZERS[name] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _RANGED:
                checked(field.name, value, f"{field.name} of {type(self).__name__}")
            elif isinstance(field.default, bool | str):
                continue
            elif FINITE.why_not(value) or value < 0:
                raise OptionError(
                    f"{field.name} of {type(self).__name__} is a number that is not negative, not {value!r}."
                )

    @property
    @abstractmethod
    def states(self) -> Mapping[str, float]:
        """The names of the tensors kept per weight from step to step, in its shape and type, with their initial numbers."""

    @abstractmethod
    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """Emit the update of a weight: the new weight, and the new states.

        :param rate: η, a scalar of the type of the weight.
        :param t: the number of the step, a scalar in double.
        :param decay: λ: a number, `weight_decay` if nothing else was asked for, or a value of the shape of the weight.
        """


def _decayed(op: FunctionEmitter, w: str, g: str, decay: float | str) -> str:
    """g + λ·w"""
    return op.Add(g, op.Mul(w, decay)) if decay else g


def _in_type_of(op: FunctionEmitter, number: str, w: str) -> str:
    """A scalar in the type of the weight."""
    return op.Cast(number, to=op.type(w))


def _power_left(op: FunctionEmitter, beta: float, t: str) -> str:
    """1 − βᵗ in double: in float32 half of the digits of 1 − 0.999 are lost."""
    return op.Sub(1.0, op.Pow(op.const(beta, like=t), t))


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum μ and dampening δ.

    v ← μ·v + (1 − δ)·g, where v = g in the first step, and w ← w − η·v; with `nesterov` w ← w − η·(g + μ·v). With
    `rate_in_velocity` each gradient keeps the learning rate of the step that computed it, as in scikit-learn:
    v ← μ·v − η·g, and w ← w + v; with `nesterov` w ← w + μ·v − η·g. A learning rate that does not change makes these the same.
    `weight_decay` λ adds λ·w to g.

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).
    """

    name = "sgd"
    rate = 0.01
    elementwise = True

    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    weight_decay: float = 0.0
    rate_in_velocity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dampening and (self.rate_in_velocity or self.nesterov or not self.momentum):
            raise OptionError("dampening needs momentum, and neither nesterov nor rate_in_velocity. Leave it at 0.")
        if self.nesterov and not self.momentum:
            raise OptionError("nesterov needs a momentum above 0.")

    @property
    def states(self) -> Mapping[str, float]:
        """The velocity."""
        return {"velocity": 0.0} if self.momentum else {}

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """See the class."""
        g = _decayed(op, w, g, decay)
        if not self.momentum:
            return op.Sub(w, op.Mul(rate, g)), {}
        kept = op.Mul(states["velocity"], self.momentum)
        if self.rate_in_velocity:
            step = op.Mul(rate, g)
            v = op.Sub(kept, step)
            moved = op.Sub(op.Mul(v, self.momentum), step) if self.nesterov else v
            return op.Add(w, moved), {"velocity": v}
        new = g
        if self.dampening:
            damped = op.Sub(1.0, op.Mul(_in_type_of(op, op.Min(op.Sub(t, 1.0), 1.0), w), self.dampening))
            new = op.Mul(g, damped)
        v = op.Add(kept, new)
        direction = op.Add(g, op.Mul(v, self.momentum)) if self.nesterov else v
        return op.Sub(w, op.Mul(rate, direction)), {"velocity": v}


@dataclass(frozen=True)
class Nesterov(SGD):
    """`SGD` with Nesterov's momentum."""

    name = "nesterov"

    momentum: float = 0.9
    nesterov: bool = True


@dataclass(frozen=True)
class Adam(Optimizer):
    """m ← β₁·m + (1 − β₁)·g and s ← β₂·s + (1 − β₂)·g²; w ← w − η/(1 − β₁ᵗ) · m / (√(s/(1 − β₂ᵗ)) + ε).

    With epsilon="uncorrected" ε is added to √s before that is corrected, as in scikit-learn:
    w ← w − η·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m / (√s + ε). `weight_decay` λ adds λ·w to g.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1 and section 2.
    """

    name = "adam"
    elementwise = True

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    epsilon: str = "corrected"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon not in EPSILONS:
            raise OptionError(f"epsilon={self.epsilon!r}; there are {choices(EPSILONS)}.")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise OptionError(f"{name} lies between 0 and 1, unlike {getattr(self, name)}.")

    @property
    def states(self) -> Mapping[str, float]:
        """The moments."""
        return {"first_moment": 0.0, "second_moment": 0.0}

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """See the class."""
        return self._moved(op, w, _decayed(op, w, g, decay), rate, t, states)

    def _moved(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States
    ) -> tuple[str, dict[str, str]]:
        m = op.Add(op.Mul(states["first_moment"], self.beta1), op.Mul(g, 1 - self.beta1))
        s = op.Add(op.Mul(states["second_moment"], self.beta2), op.Mul(op.Mul(g, g), 1 - self.beta2))
        first = _in_type_of(op, _power_left(op, self.beta1, t), w)
        second = _in_type_of(op, op.Sqrt(_power_left(op, self.beta2, t)), w)
        if self.epsilon == "corrected":
            direction = op.Div(m, op.Add(op.Div(op.Sqrt(s), second), self.eps))
            moved = op.Mul(op.Div(rate, first), direction)
        else:
            direction = op.Div(m, op.Add(op.Sqrt(s), self.eps))
            moved = op.Mul(op.Div(op.Mul(rate, second), first), direction)
        return op.Sub(w, moved), {"first_moment": m, "second_moment": s}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam after the step w ← w − η·λ·w. The decay is not part of the gradient.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
    """

    name = "adamw"
    elementwise = True

    weight_decay: float = 0.01

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """See the class."""
        left = op.Sub(1.0, op.Mul(rate, decay)) if decay else None
        return self._moved(op, w if left is None else op.Mul(w, left), g, rate, t, states)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s ← s + g² and w ← w − η/(1 + (t − 1)·δ) · g / (√s + ε), where s begins with `initial` and δ is `rate_decay`.

    `weight_decay` λ adds λ·w to g. Duchi et al., "Adaptive Subgradient Methods" (2011).
    """

    name = "adagrad"
    rate = 0.01
    elementwise = True

    eps: float = 1e-10
    initial: float = 0.0
    rate_decay: float = 0.0
    weight_decay: float = 0.0

    @property
    def states(self) -> Mapping[str, float]:
        """The sum of squares."""
        return {"sum_of_squares": self.initial}

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """See the class."""
        g = _decayed(op, w, g, decay)
        s = op.Add(states["sum_of_squares"], op.Mul(g, g))
        if self.rate_decay:
            fallen = op.Add(op.Mul(op.Sub(t, 1.0), self.rate_decay), 1.0)
            rate = op.Div(rate, _in_type_of(op, fallen, w))
        return op.Sub(w, op.Mul(rate, op.Div(g, op.Add(op.Sqrt(s), self.eps)))), {"sum_of_squares": s}


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """s ← α·s + (1 − α)·g² and w ← w − η·g / (√s + ε); with momentum μ v ← μ·v + g / (√s + ε) and w ← w − η·v.

    With `centered` √(s − a²) takes the place of √s, where a ← α·a + (1 − α)·g. `weight_decay` λ adds λ·w to g.
    Tieleman and Hinton, "Lecture 6.5: rmsprop" (2012); Graves, "Generating Sequences with Recurrent Neural Networks" (2013).
    """

    name = "rmsprop"
    elementwise = True

    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0

    @property
    def states(self) -> Mapping[str, float]:
        """The mean of squares, the mean where it is centered, and the velocity where there is momentum."""
        kept = {"mean_of_squares": 0.0}
        if self.centered:
            kept["mean"] = 0.0
        if self.momentum:
            kept["velocity"] = 0.0
        return kept

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """See the class."""
        g = _decayed(op, w, g, decay)
        s = op.Add(op.Mul(states["mean_of_squares"], self.alpha), op.Mul(op.Mul(g, g), 1 - self.alpha))
        new, spread = {"mean_of_squares": s}, s
        if self.centered:
            new["mean"] = op.Add(op.Mul(states["mean"], self.alpha), op.Mul(g, 1 - self.alpha))
            spread = op.Sub(s, op.Mul(new["mean"], new["mean"]))
        direction = op.Div(g, op.Add(op.Sqrt(spread), self.eps))
        if self.momentum:
            direction = new["velocity"] = op.Add(op.Mul(states["velocity"], self.momentum), direction)
        return op.Sub(w, op.Mul(rate, direction)), new


def optimizer_class(name: str) -> type[Optimizer]:
    """The class of the optimizer with this name.

    :raises OptionError: there is none.
    """
    if name not in OPTIMIZERS:
        plugins.load()  # one of them may have it
    if name not in OPTIMIZERS:
        raise OptionError(f"There is no optimizer {name!r}; there are {choices(OPTIMIZERS)}.")
    return OPTIMIZERS[name]
