"""The points of operators that are polynomials of low degree: their first small case, with every float 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from refgrad.conformance.case import Case, is_float
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.tools.jets.point import SpecialPoint
from refgrad.conformance.tools.jets.points import AT_ZERO, POINTS

_LARGEST = 256  # elements of all floats that are fed


@dataclass(frozen=True)
class ZeroPoint(SpecialPoint):
    """A case of the tables with every float 0."""

    given: Case | None = None

    def case(self) -> Case:
        """The case at 0."""
        assert self.given is not None
        feeds = {name: np.zeros_like(x) if is_float(x) else x for name, x in self.given.feeds.items()}
        return replace(self.given, feeds=feeds, values="special")


def zero_points() -> Iterator[ZeroPoint]:
    """A point for each operator of `AT_ZERO`.

    :raises LookupError: an operator has no small case.
    """
    left = set(AT_ZERO)
    for case in tables():
        sizes = [x.size for x in case.feeds.values() if is_float(x)]
        if case.operator in left and case.values == "smooth" and all(sizes) and 0 < sum(sizes) <= _LARGEST:
            left.discard(case.operator)
            yield ZeroPoint(case.operator, "every float is 0", (), {}, "every float is 0", True, False, case)
    if left:
        raise LookupError(f"conformance/cases/ has no small smooth case of {', '.join(sorted(left))}.")


def every_point() -> list[SpecialPoint]:
    """The points of all operators."""
    return [*POINTS, *zero_points()]
