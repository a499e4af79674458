"""The choices made where the second or third derivative does not exist, or is finite where it should be infinite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KinkChoice:
    """Points where an operator has no derivative of some orders, and what refgrad gives there.

    `choices` are "zero", "one side" (the derivative of one side), "mean" (of both), "finite" (another number), "asymmetric"
    (it depends on the order in which the inputs are taken). For a point in KINKS every order above the first is 0, unless a row
    here says otherwise.
    """

    operator: str
    where: tuple[str, ...]
    orders: tuple[int, ...]
    choices: tuple[str, ...]
    reason: str


KINK_CHOICES: tuple[KinkChoice, ...] = ()
