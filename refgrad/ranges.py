"""The range of every numeric option: one row for each name, for the command line and for the library.

A row has the name of the argument, such as `accumulate` of `refgrad.training.step_model`; the option of a command is
`--accumulate`. Upper bounds are no advice. They exclude numbers with which no run ends, or that no type holds.
"""

from __future__ import annotations

import math
import reprlib
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from refgrad.errors import OptionError

_FLOAT32 = float(np.finfo(np.float32).max)  # weights and gradients are at least of this type, or of a narrower one
_LARGE = 1e12  # larger than any useful number, except weights and gradients
_COUNT = 10**9


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; `words` says so. `above` and `below` exclude the bounds. `whole`: integers only.

    `complete` is true if the words name `most`. If not, an error names it for a number that is larger.
    """

    words: str
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    above: bool = False
    below: bool = False
    complete: bool = False

    def why_not(self, value: Any) -> str:
        """The requirement that `value` does not meet, in words; "" if `value` is in the range."""
        kinds = (int, np.integer) if self.whole else (int, float, np.integer, np.floating)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return self.words
        if isinstance(value, float | np.floating) and not math.isfinite(value):
            return self.words
        if value < self.least or (self.above and value == self.least):
            return self.words
        if value > self.most or (self.below and value == self.most):
            most = self.most if self.whole else f"{self.most:g}"
            return self.words if self.below or self.complete else f"{self.words} and at most {most}"
        return ""


def _integer(least: int | None, most: int) -> Range:
    words = {1: "an integer above 0", 0: "an integer that is not negative", None: "an integer"}[least]
    return Range(words, -most if least is None else least, most, whole=True)


FINITE = Range("a finite number", -_FLOAT32, _FLOAT32)
_POSITIVE = Range("a number above 0", 0, _LARGE, above=True)
_NOT_NEGATIVE = Range("a number that is not negative", 0, _LARGE)
_SHARE = Range("a number from 0 to 1", 0, 1, complete=True)
_BELOW_1 = Range("a number from 0 to below 1", 0, 1, below=True)
_SECONDS = Range("a number of seconds above 0", 0, threading.TIMEOUT_MAX, above=True, below=True)

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "accumulate": _integer(1, _COUNT),
        "alpha": _POSITIVE,
        "axis": _integer(None, 1024),
        "batch_size": _integer(1, _COUNT),
        "beta1": _BELOW_1,
        "beta2": _BELOW_1,
        "checkpoint_every": _integer(1, _COUNT),
        "clip": FINITE,
        "clip_norm": _POSITIVE,
        "clip_value": _POSITIVE,
        "dampening": _SHARE,
        "dim": _integer(0, 10**18),
        "directions": _integer(1, 10**6),
        "epochs": _integer(1, _COUNT),
        "eps": FINITE,
        "every": _integer(1, _COUNT),
        "factor": _POSITIVE,
        "label_smoothing": _SHARE,
        "length": _integer(1, 2**53),
        "loss_scale": Range("a number above 0", 0, 2.0**100, above=True),
        "max_memory": Range("a number of bytes above 0", 1, 2**60, whole=True),
        "max_seconds": _SECONDS,
        "memory": _integer(0, sys.maxsize >> 21),
        "momentum": _SHARE,
        "patience": _integer(1, _COUNT),
        "penalty": _NOT_NEGATIVE,
        "period": _integer(1, 2**53),
        "random_weights": _integer(0, 2**63 - 1),
        "processes": _integer(1, 4096),
        "power": Range("a number from -10 to 10", -10, 10, complete=True),
        "rank": _integer(1, 2**16),
        "rate": Range("a number above 0", 0, _FLOAT32, above=True),  # a scheme may begin with any
        "seconds": _SECONDS,
        "seed": _integer(0, 2**63 - 1),
        "steps": _integer(1, 10**6),
        "tolerance": _POSITIVE,
        "validation": Range("a part between 0 and 1", 0, 1, above=True, below=True),
        "warmup": _integer(0, 2**53),
        "weight_decay": _NOT_NEGATIVE,
        "workers": _integer(1, 4096),
    }
)


def checked(name: str, value: Any, shown: str = "") -> Any:
    """Return `value` if it is in the range of `name`.

    :param shown: the name of the option in an error; by default `name`. An option of a command begins with a dash.
    :raises OptionError: it is not in the range.

    >>> from refgrad.ranges import checked
    >>> checked("epochs", 10)
    10
    >>> checked("epochs", 0)
    Traceback (most recent call last):
        ...
    refgrad.errors.OptionError: epochs is an integer above 0, not 0.
    """
    if due := RANGES[name].why_not(value):
        if shown.startswith("-"):
            number = f"{value:g}" if isinstance(value, float) else reprlib.repr(value)
            raise OptionError(f"{shown} must be {due}, not {number}.")
        raise OptionError(f"{shown or name} is {due}, not {reprlib.repr(value)}.")
    return value
