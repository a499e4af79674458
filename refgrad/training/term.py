"""A loss as a record: its name, output, label, reduction and settings, and its weight in a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LossTerm:
    """A loss of an output and a label, and its weight in a sum.

    The fields are the parameters of `step_model`, except `weight`, and `settings`, which is `loss_settings` there.
    """

    loss: str
    output: str | None = None
    label: str = "label"
    weight: float = 1.0
    reduction: str = "mean"
    sample_weight: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def added(self) -> list[str]:
        """The inputs that the loss adds to a model."""
        return [name for name in (self.label, self.sample_weight) if name]
