"""The observations of an oracle, and the oracle itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto

from refgrad.conformance.problems.problem import Problem
from refgrad.reverse.assembly import names_in

COMPLEX_STEP = "complex-step"  # the oracle that does not apply at a kink


@dataclass(frozen=True)
class Directional:
    """The derivative of Σ <cotangent, output> when the input `name` moves along `direction`: `value`, give or take `error`.

    `scale` is the size of the terms that were added up for it. `step` is how far a difference went, 0 without a difference.
    """

    oracle: str
    name: str
    direction: np.ndarray
    value: float
    error: float
    scale: float
    step: float = 0.0


@dataclass(frozen=True)
class Elementwise:
    """The gradient by the input `name`, in float64, off by no more than `error` times its largest element."""

    oracle: str
    name: str
    gradient: np.ndarray
    error: float


@dataclass(frozen=True)
class NotApplicable:
    """The oracle does not apply to the input `name`, or to the whole problem if `name` is empty."""

    oracle: str
    why: str
    name: str = ""


@dataclass(frozen=True)
class Property:
    """A property that every gradient has, tested on one: off by `error`, where `allowed` is explained (both relative)."""

    oracle: str
    error: float
    allowed: float
    note: str = ""

    @property
    def holds(self) -> bool:
        """True if the gradient has the property."""
        return self.error <= self.allowed


Observation: TypeAlias = Directional | Elementwise | NotApplicable


@dataclass(frozen=True)
class Built:
    """A gradient model, whoever built it: where it takes the cotangent of each output, where it returns each gradient.

    `constants` are further feeds. An input in the problem's `wrt` that `gradients` does not have has the gradient zero.
    """

    model: ModelProto
    cotangents: dict[str, str]
    gradients: dict[str, str]
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelProto) -> Built:
        """A gradient that refgrad made: it has the names in it. The names in another model are not known."""
        return cls(model, *names_in(model))

    def feeds(self, at: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The feeds of the model, as far as it takes them: the point, the cotangents of the outputs, its own constants."""
        named = {self.cotangents[output]: v for output, v in cotangents.items() if output in self.cotangents}
        taken = {value.name for value in self.model.graph.input}
        return {name: value for name, value in {**at, **named, **self.constants}.items() if name in taken}

    def named(self, results: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The gradients in what the model returned, by what they are gradients of."""
        return {name: np.asarray(results[gradient]) for name, gradient in self.gradients.items()}


def elements(oracle: str, problem: Problem, gradients: Mapping[str, Any], error: float) -> list[Observation]:
    """The observations of a whole gradient, by the names in the problem's `wrt`; a missing name has the gradient zero.

    A gradient of another shape than its input gives a `NotApplicable`.
    """
    observations: list[Observation] = []
    for name in problem.wrt:
        shape = np.shape(problem.at[name])
        got = np.asarray(gradients.get(name, np.zeros(shape)), np.float64)
        fits = got.shape == shape
        observations.append(
            Elementwise(oracle, name, got, error)
            if fits
            else NotApplicable(oracle, f"its gradient has shape {got.shape}", name)
        )
    return observations


@dataclass(frozen=True)
class Oracle:
    """An oracle. `trust` says what it knows, and how far it can be trusted: for the reader of a report.

    `observe` answers a problem, `examine` tests a property of a gradient that somebody built; one of them is None. `missing`
    says what has to be installed, "" where it is.
    """

    name: str
    trust: str
    observe: Callable[[Problem], Sequence[Observation]] | None = None
    examine: Callable[[Problem, Built], Sequence[Property | NotApplicable]] | None = None
    missing: Callable[[], str] = lambda: ""
