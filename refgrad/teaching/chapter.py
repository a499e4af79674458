"""A chapter of the course: an operator without a derivative, the points at which an answer is tried, known mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

DOMAIN = "course"
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ExercisePoint:
    """Inputs of the operator by name, the cotangent of its output, and its attributes.

    At a tie the derivative by one input alone does not exist. `together` names the inputs, and the direction in which they
    move at once: along it the operator has a derivative.
    """

    inputs: Arrays
    cotangent: np.ndarray
    attributes: Mapping[str, Any] = field(default_factory=dict)
    together: Arrays = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many numbers a reader has to look at."""
        return sum(array.size for array in self.inputs.values()) + self.cotangent.size

    @property
    def is_empty(self) -> bool:
        """True if an input has no elements."""
        return any(not array.size for array in self.inputs.values())

    def named(self, output: str) -> SimpleNamespace:
        """Everything by name, in float64, as a planted mistake reads it: `p.d_Y`, `p.X`, `p.stride`."""
        wide = {name: array.astype(np.float64) for name, array in self.inputs.items()}
        return SimpleNamespace(**wide, **{f"d_{output}": self.cotangent.astype(np.float64)}, **self.attributes)


@dataclass(frozen=True)
class Mistake:
    """A wrong derivative by the input `of`, planted on purpose: an answer that equals it everywhere has made it.

    `wrong` is the derivative in NumPy. `hint` explains the mistake in words.
    """

    of: str
    hint: str
    wrong: Callable[[SimpleNamespace], Any]


@dataclass(frozen=True)
class Chapter:
    """A chapter: the exercise, the beginning of an answer, and the data to judge it by.

    `derivative` is the formula that an answer computes. `inputs` has the rank of each input by name, and `floats` those that
    have a derivative: the others are bool. `kernel` is the operator in NumPy, `forward` the same in complex numbers, written
    in another way. `solution` is a right rule; it is never compared with an answer, and only broken on purpose to recognise
    further mistakes. `points` come smallest first. `second`: the gradient of the gradient is judged, too.
    """

    number: int
    title: str
    page: str
    operator: str
    formula: str
    derivative: str
    inputs: Mapping[str, int]
    floats: tuple[str, ...]
    output: str
    rank: int
    attributes: Mapping[str, Any]
    skeleton: str
    kernel: Callable[..., Any]
    forward: Callable[..., Any]
    solution: Callable[..., Any]
    points: Sequence[ExercisePoint]
    mistakes: Sequence[Mistake]
    second: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The operator's domain and name, as the tables of refgrad have it."""
        return DOMAIN, self.operator


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of ½ from -3 to 3 in float32, and no 0: numbers to follow with a pencil."""
    drawn = rng.integers(1, 7, shape) * rng.choice([-0.5, 0.5], shape)
    return np.asarray(drawn, np.float32)
