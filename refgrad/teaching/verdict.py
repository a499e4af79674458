"""The verdict of `refgrad teach` on an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Example:
    """An input that shows a mistake: `given` has inputs, attributes and the cotangent by name.

    `of` is the input by which the derivative is wrong, `answered` the derivative of the answer, `expected` the right one.
    """

    given: dict[str, Any]
    of: str
    answered: np.ndarray
    expected: np.ndarray

    def lines(self) -> list[str]:
        """One entry per line: a name and an array, aligned."""
        rows = {**self.given, f"your d{self.of}": self.answered, f"right d{self.of}": self.expected}
        width = max(map(len, rows))
        return [f"{name:{width}} = {_shown(value, width + 3)}" for name, value in rows.items()]


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer: whether it is `right`, and if not, why.

    `hints` are sentences, the likeliest mistake first. `example` is the smallest input that shows it, None where the answer
    did not get as far as numbers. `printed` is what the answer printed. `trials` counts the points at which it was judged, and
    `witnesses` names the oracles that confirmed it.
    """

    chapter: int
    right: bool
    hints: tuple[str, ...] = ()
    example: Example | None = None
    printed: str = ""
    trials: int = 0
    witnesses: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """The verdict as data for JSON."""
        example = None
        if self.example is not None:
            given = {name: np.asarray(value).tolist() for name, value in self.example.given.items()}
            example = {
                "given": given,
                "of": self.example.of,
                "answered": self.example.answered.tolist(),
                "expected": self.example.expected.tolist(),
            }
        return {
            "chapter": self.chapter,
            "right": self.right,
            "hints": list(self.hints),
            "example": example,
            "printed": self.printed,
            "trials": self.trials,
            "witnesses": list(self.witnesses),
        }


def _shown(value: Any, indent: int) -> str:
    array = np.asarray(value)
    if not array.size:
        return f"[] of shape {array.shape}"
    if array.dtype.kind == "f":
        array = array.astype(np.float64) + 0.0  # no -0.
    return np.array2string(array, precision=4, separator=", ", prefix=" " * indent, suppress_small=True, threshold=64)
