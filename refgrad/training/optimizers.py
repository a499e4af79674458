"""Optimizers: each updates a weight by its gradient, in ONNX operators.

Libraries differ in details. Each detail is a setting of the optimizer (docs/training.md). In the formulas, w is the weight, g
its gradient, η the learning rate, and t the number of the step, from 1. The number ε is the setting `eps`. The setting
`epsilon` of Adam says where ε is added, not how large it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, choices
from refgrad.ranges import FINITE, checked
from refgrad.tables import plugins

States = Mapping[str, str]  # the values of an optimizer's states, by their names
EPSILONS = ("corrected", "uncorrected")  # where Adam adds ε: to the square root after or before its correction
_RANGED = ("beta1", "beta2", "dampening", "momentum", "weight_decay")  # settings whose range refgrad.ranges has

OPTIMIZERS: dict[str, type[Optimizer]] = {}  # by name


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer. Its fields are its settings.

    `refgrad train` and the estimators accept every subclass with a `name`, by this name, and `rate` is its default learning
    rate. `elementwise` is true if the update of an element does not depend on other elements. Then `step_model` may concatenate
    all weights into one vector, and `update` gets this vector.
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
            cls.elementwise = False  # do not inherit it from a base class whose `update` is replaced
        if name := cls.__dict__.get("name", ""):
            registered = OPTIMIZERS.setdefault(name, cls)
            # A module that is reloaded defines its class again.
            if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
                raise OptionError(f"{registered.__qualname__} is the optimizer {name!r}: choose another name.")
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
    def states(self) -> Mapping[str, float]:
        """The initial number of each state, by its name; by default there is no state.

        A state is a tensor per weight, of the weight's shape and type. A weight of 16 bits is trained in float32
        (docs/training.md).
        """
        return {}

    @abstractmethod
    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """Emit the update of a weight, and return the new weight and the new states.

        :param rate: η, a scalar of the type of the weight.
        :param t: the number of the step, a scalar in double.
        :param decay: λ: a number (by default `weight_decay`), or a value of the shape of the weight. 0 emits nothing.
        """


def _decayed(op: FunctionEmitter, w: str, g: str, decay: float | str) -> str:
    """g + λ·w; g itself if the number λ is 0"""
    return op.Add(g, op.Mul(w, decay)) if decay else g


def _in_type_of(op: FunctionEmitter, number: str, w: str) -> str:
    """The scalar `number`, cast to the type of the weight."""
    return op.Cast(number, to=op.type(w))


def _bias_correction(op: FunctionEmitter, beta: float, t: str) -> str:
    """1 − βᵗ in double. In float32, 1 − 0.999 would lose half of its digits."""
    return op.Sub(1.0, op.Pow(op.const(beta, like=t), t))


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum μ and dampening δ.

    v ← μ·v + (1 − δ)·g and w ← w − η·v, where v = g after the first step. With `nesterov`, w ← w − η·(g + μ·v).

    With `rate_in_velocity`, as in scikit-learn, the learning rate is a factor of the gradient and not of the velocity:
    v ← μ·v − η·g and w ← w + v. With `nesterov`, w ← w + μ·v − η·g. The results differ only if the learning rate changes.

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
            raise OptionError(
                "dampening works only with momentum, and without nesterov and rate_in_velocity. Leave it at 0."
            )
        if self.nesterov and not self.momentum:
            raise OptionError("nesterov needs a momentum above 0.")

    @property
    def states(self) -> Mapping[str, float]:
        """The velocity."""
        return {"velocity": 0.0} if self.momentum else {}

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """Apply the formula of the class."""
        g = _decayed(op, w, g, decay)
        if not self.momentum:
            return op.Sub(w, op.Mul(rate, g)), {}
        previous = op.Mul(states["velocity"], self.momentum)
        if self.rate_in_velocity:
            step = op.Mul(rate, g)
            v = op.Sub(previous, step)
            change = op.Sub(op.Mul(v, self.momentum), step) if self.nesterov else v
            return op.Add(w, change), {"velocity": v}
        dampened = g
        if self.dampening:  # 1 − δ, and 1 in the first step
            factor = op.Sub(1.0, op.Mul(_in_type_of(op, op.Min(op.Sub(t, 1.0), 1.0), w), self.dampening))
            dampened = op.Mul(g, factor)
        v = op.Add(previous, dampened)
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

    With epsilon="uncorrected", as in scikit-learn, ε is added to √s before the correction:
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
        """Apply the formula of the class."""
        return self._updated(op, w, _decayed(op, w, g, decay), rate, t, states)

    def _updated(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States
    ) -> tuple[str, dict[str, str]]:
        m = op.Add(op.Mul(states["first_moment"], self.beta1), op.Mul(g, 1 - self.beta1))
        s = op.Add(op.Mul(states["second_moment"], self.beta2), op.Mul(op.Mul(g, g), 1 - self.beta2))
        correction_m = _in_type_of(op, _bias_correction(op, self.beta1, t), w)
        root_of_correction_s = _in_type_of(op, op.Sqrt(_bias_correction(op, self.beta2, t)), w)
        if self.epsilon == "corrected":
            direction = op.Div(m, op.Add(op.Div(op.Sqrt(s), root_of_correction_s), self.eps))
            step = op.Mul(op.Div(rate, correction_m), direction)
        else:
            direction = op.Div(m, op.Add(op.Sqrt(s), self.eps))
            step = op.Mul(op.Div(op.Mul(rate, root_of_correction_s), correction_m), direction)
        return op.Sub(w, step), {"first_moment": m, "second_moment": s}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam after the step w ← w − η·λ·w. The decay does not enter the moments.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
    """

    name = "adamw"
    elementwise = True

    weight_decay: float = 0.01

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """Apply the formula of the class."""
        shrinkage = op.Sub(1.0, op.Mul(rate, decay)) if decay else None
        return self._updated(op, w if shrinkage is None else op.Mul(w, shrinkage), g, rate, t, states)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s ← s + g² and w ← w − η/(1 + (t − 1)·δ) · g / (√s + ε), where δ is `rate_decay`, and s is `initial` before step 1.

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
        """Apply the formula of the class."""
        g = _decayed(op, w, g, decay)
        s = op.Add(states["sum_of_squares"], op.Mul(g, g))
        if self.rate_decay:
            divisor = op.Add(op.Mul(op.Sub(t, 1.0), self.rate_decay), 1.0)
            rate = op.Div(rate, _in_type_of(op, divisor, w))
        return op.Sub(w, op.Mul(rate, op.Div(g, op.Add(op.Sqrt(s), self.eps)))), {"sum_of_squares": s}


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """s ← α·s + (1 − α)·g² and w ← w − η·g / (√s + ε). With momentum μ, v ← μ·v + g / (√s + ε) and w ← w − η·v.

    With `centered`, √(s − a²) replaces √s, where a ← α·a + (1 − α)·g. `weight_decay` λ adds λ·w to g.
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
        """The mean of squares; with `centered` the mean, and with momentum the velocity."""
        states = {"mean_of_squares": 0.0}
        if self.centered:
            states["mean"] = 0.0
        if self.momentum:
            states["velocity"] = 0.0
        return states

    def update(
        self, op: FunctionEmitter, w: str, g: str, rate: str, t: str, states: States, decay: float | str
    ) -> tuple[str, dict[str, str]]:
        """Apply the formula of the class."""
        g = _decayed(op, w, g, decay)
        s = op.Add(op.Mul(states["mean_of_squares"], self.alpha), op.Mul(op.Mul(g, g), 1 - self.alpha))
        new_states, variance = {"mean_of_squares": s}, s
        if self.centered:
            new_states["mean"] = op.Add(op.Mul(states["mean"], self.alpha), op.Mul(g, 1 - self.alpha))
            variance = op.Sub(s, op.Mul(new_states["mean"], new_states["mean"]))
        direction = op.Div(g, op.Add(op.Sqrt(variance), self.eps))
        if self.momentum:
            direction = new_states["velocity"] = op.Add(op.Mul(states["velocity"], self.momentum), direction)
        return op.Sub(w, op.Mul(rate, direction)), new_states


def optimizer_class(name: str) -> type[Optimizer]:
    """The class of the optimizer called `name`.

    :raises OptionError: no optimizer has this name.
    """
    if name not in OPTIMIZERS:
        plugins.load()  # a plug-in may define it
    if name not in OPTIMIZERS:
        raise OptionError(f"There is no optimizer {name!r}; there are {choices(OPTIMIZERS)}.")
    return OPTIMIZERS[name]
