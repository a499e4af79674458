"""The learning rate by the progress of a training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from refgrad.errors import OptionError, choices
from refgrad.ranges import FINITE, checked

UNITS = ("epoch", "step", "sample")
_RANGED = ("alpha", "factor", "length", "period", "power", "rate")  # rows of refgrad.ranges


class Progress(NamedTuple):
    """How far a training is: the epochs, steps and samples that are done, and those done when this epoch began.

    `losses` are the mean losses of the epochs so far, and `total` is the sum of the losses of this epoch's samples.
    """

    epoch: int = 0
    step: int = 0
    sample: int = 0
    epoch_step: int = 0
    epoch_sample: int = 0
    losses: tuple[float, ...] = ()
    total: float = 0.0


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate that may depend on the progress.

    `unit` is the counted unit: epochs, steps or samples. With `by_epoch` the count stands still within an epoch, as for the
    networks of scikit-learn, which count samples and change the rate after an epoch.
    """

    rate: float = 1e-3
    unit: str = field(default="epoch", kw_only=True)
    by_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise OptionError(f"{type(self).__name__} has no unit={self.unit!r}. There are {choices(UNITS)}.")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in _RANGED:
                checked(one.name, value, f"{one.name} of {type(self).__name__}")
            elif isinstance(one.default, int | float) and not isinstance(one.default, bool) and FINITE.why_not(value):
                raise OptionError(f"{one.name} of {type(self).__name__} is a finite number, not {value!r}.")

    def __call__(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        return self.value(self.count(progress))

    def count(self, progress: Progress) -> int:
        """How many units are done."""
        if not self.by_epoch or self.unit == "epoch":
            return int(getattr(progress, self.unit))
        return progress.epoch_step if self.unit == "step" else progress.epoch_sample

    @abstractmethod
    def value(self, done: int) -> float:
        """The learning rate when so many units are done."""


@dataclass(frozen=True)
class Constant(Schedule):
    """η₀"""

    def value(self, done: int) -> float:
        """See the class."""
        return self.rate


@dataclass(frozen=True)
class InverseScaling(Schedule):
    """η₀ / (k + 1)^power, where k units are done.

    >>> from refgrad.training import InverseScaling
    >>> round(InverseScaling(0.1, 0.25).value(99), 10)
    0.0316227766
    """

    power: float = 0.25

    def value(self, done: int) -> float:
        """See the class."""
        return float(self.rate / (done + 1) ** self.power)


@dataclass(frozen=True)
class Optimal(Schedule):
    """1 / (α·(t₀ + k)), where k units are done and t₀ = 1 / (α·η₀).

    Bottou, "Stochastic Gradient Descent Tricks" (2012).
    """

    alpha: float = 1e-4

    def value(self, done: int) -> float:
        """See the class."""
        return 1 / (self.alpha * (1 / (self.alpha * self.rate) + done))


@dataclass(frozen=True)
class Cosine(Schedule):
    """minimum + (η₀ − minimum)·(1 + cos(π·k / period)) / 2, where k units are done, and no further than the period.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (2017).
    """

    period: int = 100
    minimum: float = 0.0

    def value(self, done: int) -> float:
        """See the class."""
        turn = math.cos(math.pi * min(done, self.period) / self.period)
        return self.minimum + (self.rate - self.minimum) * (1 + turn) / 2


@dataclass(frozen=True)
class Warmup(Schedule):
    """The learning rate of `after`, times (k + 1) / length in the first `length` units."""

    length: int = 10
    after: Schedule = field(default_factory=Constant)

    def __call__(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        return self.after(progress) * min((self.count(progress) + 1) / self.length, 1.0)

    def value(self, done: int) -> float:
        """See the class."""
        return self.after.value(done) * min((done + 1) / self.length, 1.0)


@dataclass(frozen=True)
class Adaptive(Schedule):
    """η₀, divided by `factor` whenever the loss has not fallen by `tolerance` in more than `patience` epochs in a row."""

    factor: float = 5.0
    patience: int = 10
    tolerance: float = 1e-4

    def __call__(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        best, waited, rate = math.inf, 0, self.rate
        for loss in progress.losses:
            waited = waited + 1 if loss > best - self.tolerance else 0
            best = min(best, loss)
            if waited > self.patience:
                rate, waited = rate / self.factor, 0
        return rate

    def value(self, done: int) -> float:
        """The rate at the beginning: the losses change it."""
        return self.rate
