"""Is a choice recorded? A finite number where no derivative exists needs a row in the tables of kinks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from refgrad.conformance.tools.jets.judging import JetVerdict
from refgrad.conformance.tools.jets.planes import EXISTS, UNDEFINED
from refgrad.tables.kink_choices import KINK_CHOICES
from refgrad.tables.kinks import KINKS, Point


def _has_finite(point: Point) -> bool:
    """True if a row of KINKS has a finite number."""
    return any(np.any(np.isfinite(np.array(x, float))) for x in point if x is not None)


_FIRST = {(kink.operator, kink.where) for kink in KINKS if _has_finite(kink.ours)}
_HIGHER = {
    (kink.operator, where, order): kink for kink in KINK_CHOICES for where in kink.where for order in kink.orders
}
FINITE = ("zero", "one side", "mean", "asymmetric", "finite")


def unrecorded(verdict: JetVerdict) -> bool:
    """True if refgrad returns a finite number where no derivative exists, and no row says so.

    A row of KINKS is for order 1. Higher orders are 0 there, unless a row of KINK_CHOICES says otherwise.
    """
    if verdict.status in (EXISTS, UNDEFINED) or verdict.says not in FINITE:
        return False
    row = _HIGHER.get((verdict.operator, verdict.row, verdict.order))
    if row is not None and verdict.says in row.choices:
        return False
    return (verdict.operator, verdict.row) not in _FIRST or (verdict.order > 1 and verdict.says != "zero")


def faults(verdicts: Iterable[JetVerdict]) -> list[JetVerdict]:
    """The disagreements, and the choices that no row records."""
    return [verdict for verdict in verdicts if verdict.says == "wrong" or unrecorded(verdict)]
