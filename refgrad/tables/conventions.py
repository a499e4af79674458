"""The conventions of a derivative: what counts as the derivative where calculus gives none, or one of no use.

`refgrad.gradient` takes each by name. Every other function that differentiates takes all of them as `**conventions`, and
passes them on as one record. A new convention needs a field in both classes: as an option, and as a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

from refgrad.errors import OptionError, OptionTypeError, choices, did_you_mean
from refgrad.tables.kinks import CONVENTIONS as KINKS

QUANTIZATION = ("zero", "straight-through", "clipped")


class ConventionOptions(TypedDict, total=False):
    """The conventions as keyword arguments of a function, described at `refgrad.gradient`."""

    kinks: str
    quantization: str
    strong_zero: bool


@dataclass(frozen=True)
class Conventions:
    """The conventions that a derivative is made by.

    :raises OptionError: an unknown choice.
    """

    kinks: str = "refgrad"
    quantization: str = "zero"
    strong_zero: bool = False

    def __post_init__(self) -> None:
        for option, value, known in (
            ("choice of kinks", self.kinks, KINKS),
            ("quantization", self.quantization, QUANTIZATION),
        ):
            if value not in known:
                raise OptionError(f"There is no {option} {value!r}; there are {choices(known)}.")
        if not isinstance(self.strong_zero, bool):
            raise OptionError(f"strong_zero is True or False, not {self.strong_zero!r}.")

    @classmethod
    def of(cls, function: str, given: Mapping[str, Any]) -> Self:
        """The conventions that a function was given as keyword arguments.

        :raises OptionError: an unknown choice.
        :raises OptionTypeError: one is no convention, and no other parameter of the function.
        """
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise OptionTypeError(f"{function} has no parameter {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
        return cls(**given)

    @property
    def options(self) -> ConventionOptions:
        """The conventions as keyword arguments, for a function that takes them."""
        return ConventionOptions(kinks=self.kinks, quantization=self.quantization, strong_zero=self.strong_zero)


DEFAULT = Conventions()
