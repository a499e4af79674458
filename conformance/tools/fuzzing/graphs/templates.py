"""The templates of random graphs: each adds an operator with operands and attributes that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refgrad.conformance.tools.fuzzing.graphs.growing import GraphScope

NEWEST = 99
TEMPLATES: list[tuple[Callable[[GraphScope], Any], float, int, int]] = []


def template(weight: float = 1.0, since: int = 1, until: int = NEWEST) -> Callable[[Callable[[GraphScope], Any]], Any]:
    """Register a template of the opsets `since` to `until`."""

    def register(function: Callable[[GraphScope], Any]) -> Any:
        TEMPLATES.append((function, weight, since, until))
        return function

    return register


def axis_of(s: GraphScope, rank: int) -> int:
    """An axis of a rank, counted from either end."""
    axis = s.rng.randrange(rank)
    return axis - rank if s.chance(0.3) else axis
