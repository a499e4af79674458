"""The penalties of the onnxcustom notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from refgrad.compat.training.naming import made_of
from refgrad.errors import OptionError


class BaseLearningPenalty(ABC):
    """A penalty for large weights, which is added to the loss of a batch."""

    @staticmethod
    def select(class_name: BaseLearningPenalty | str | None, **kwargs: float) -> BaseLearningPenalty:
        """The penalty "elastic" with these arguments, or none for None; a penalty is returned as it is.

        :raises OptionError: there is no such penalty, or it does not take these arguments.
        """
        return made_of(ElasticLearningPenalty, kwargs) if class_name == "elastic" else penalty_of(class_name)

    @property
    @abstractmethod
    def amounts(self) -> tuple[float, float] | None:
        """l1 and l2 of every weight; None without a penalty."""


class NoLearningPenalty(BaseLearningPenalty):
    """Nothing."""

    @property
    def amounts(self) -> tuple[float, float] | None:
        """None."""
        return None

    def __repr__(self) -> str:
        """The class."""
        return "NoLearningPenalty()"


class ElasticLearningPenalty(BaseLearningPenalty):
    """l1·Σ|w| + l2·Σw²"""

    def __init__(self, l1: float = 0.5, l2: float = 0.5) -> None:
        self.l1, self.l2 = l1, l2

    @property
    def amounts(self) -> tuple[float, float] | None:
        """l1 and l2."""
        return self.l1, self.l2

    def __repr__(self) -> str:
        """The arguments."""
        return f"ElasticLearningPenalty(l1={self.l1!r}, l2={self.l2!r})"


def penalty_of(given: BaseLearningPenalty | str | None) -> BaseLearningPenalty:
    """The penalty that an argument means.

    :raises OptionError: it is none.
    """
    if given is None:
        return NoLearningPenalty()
    if not isinstance(given, BaseLearningPenalty):
        raise OptionError(f"learning_penalty is ElasticLearningPenalty(…), or None; not {given!r}.")
    return given
