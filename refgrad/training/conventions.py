"""The choices in which libraries differ, set together: "sklearn", "torch" and "documents"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from onnx import ModelProto

from refgrad.errors import OptionError, choices
from refgrad.model.places import places
from refgrad.rewrites.lifting import lift_weights
from refgrad.training.optimizers import Optimizer, optimizer_class
from refgrad.training.schedules import Adaptive, Constant, InverseScaling, Optimal, Schedule

_INTERCEPTS = frozenset({"Add:0", "Add:1", "Gemm:2", "Conv:2", "ConvTranspose:2"})  # the inputs that are added
_SCHEDULES = {"constant": Constant, "invscaling": InverseScaling, "optimal": Optimal, "adaptive": Adaptive}


@dataclass(frozen=True)
class Convention:
    """The meaning that a library gives to an optimizer, a learning rate, a loss and a penalty (the table in docs/training.md).

    >>> from refgrad.training import convention
    >>> convention("sklearn").optimizer("sgd", momentum=0.9)
    SGD(momentum=0.9, nesterov=False, dampening=0.0, weight_decay=0.0, rate_in_velocity=True)
    >>> convention("torch").optimizer("adam").epsilon
    'corrected'
    """

    name: str
    squared_error: str
    reduction: str
    rate_in_velocity: bool
    epsilon: str
    unit: str
    by_epoch: bool
    penalty_by: str
    penalizes_intercepts: bool
    half_penalty: bool

    def optimizer(self, name: str, **settings: Any) -> Optimizer:
        """The optimizer "sgd", "adam", "adamw", "adagrad", "rmsprop" or another registered one, with settings of its own.

        :raises OptionError: there is no such optimizer.
        """
        kind = optimizer_class(name)
        chosen = {
            "rate_in_velocity": self.rate_in_velocity and not settings.get("dampening"),
            "epsilon": self.epsilon,
        }
        known = {field.name for field in fields(kind)}
        try:
            made = kind(**{setting: value for setting, value in chosen.items() if setting in known} | settings)
        except TypeError as error:
            raise OptionError(f"The optimizer {name!r} does not take these settings: {error}.") from error
        return made

    def schedule(self, name: str, rate: float, **settings: Any) -> Schedule:
        """The schedule "constant", "invscaling", "optimal" or "adaptive", in the unit of the convention.

        :raises OptionError: there is no such schedule.
        """
        if name not in _SCHEDULES:
            raise OptionError(f"There is no schedule {name!r}; there are {choices(_SCHEDULES)}.")
        try:
            made: Schedule = _SCHEDULES[name](rate, unit=self.unit, by_epoch=self.by_epoch, **settings)
        except TypeError as error:
            raise OptionError(f"The schedule {name!r} does not take these settings: {error}.") from error
        return made

    def loss(self, name: str) -> str:
        """The loss of refgrad for a name that the library uses: "squared_error" is halved by scikit-learn."""
        return self.squared_error if name == "squared_error" else name

    def penalty(self, model: ModelProto, names: Sequence[str], alpha: float) -> dict[str, tuple[float, float]]:
        """The penalty of `step_model` for alpha, of the weights `names`; of intercepts only where the library has one."""
        reads = {one.name: set(map(str, one.reads)) for one in places(lift_weights(model))}
        amount = alpha / 2 if self.half_penalty else alpha
        chosen = [name for name in names if self.penalizes_intercepts or not _INTERCEPTS.issuperset(reads[name])]
        return dict.fromkeys(chosen, (0.0, amount)) if alpha else {}

    def settings(self) -> dict[str, Any]:
        """The arguments of `step_model` that the convention fixes."""
        return {"reduction": self.reduction, "penalty_by": self.penalty_by}


CONVENTIONS = {
    one.name: one
    for one in (
        Convention("sklearn", "half_squared_error", "mean", True, "uncorrected", "sample", True, "sample", False, True),
        Convention("torch", "squared_error", "mean", False, "corrected", "epoch", False, "step", True, True),
        Convention("documents", "squared_error", "mean", True, "corrected", "epoch", False, "sample", True, False),
    )
}


def convention(name: str | Convention) -> Convention:
    """The convention of a name: "sklearn", "torch" or "documents".

    :raises OptionError: there is no such convention.
    """
    if isinstance(name, Convention):
        return name
    if name not in CONVENTIONS:
        raise OptionError(f"There is no convention {name!r}; there are {choices(CONVENTIONS)}.")
    return CONVENTIONS[name]
