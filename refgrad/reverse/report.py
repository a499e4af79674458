"""The report on a derivative before it is written: a verdict on each operator, and the gradients that are zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from refgrad.errors import NoGradientError, abridged, choices
from refgrad.markup import BAD, ROWS, html_table
from refgrad.notices import notice

_DERIVATIVES = {"rule": "rule", "zero": "zero", "none": "refused: no derivative", "missing": "refused: no rule"}
_FEW = 3  # nodes or values that a sentence names


@dataclass(frozen=True)
class OperatorVerdict:
    """The verdict of preflight on one operator: "rule", "zero", "none" (no derivative exists) or "missing", and why."""

    operator: str
    verdict: str
    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class UselessGradient:
    """Names whose gradient is correct but useless, with the reason. `str` gives a sentence for the user.

    `stops` are the operators between the names and the outputs that let no derivative through. `advice` is a remedy.
    """

    names: tuple[str, ...]
    stops: tuple[OperatorVerdict, ...]
    advice: str


class ZeroGradient(UselessGradient):
    """Names whose gradient is always 0, for all feeds. Without `stops`, no output depends on the names."""

    def __str__(self) -> str:
        several = len(self.names) > 1
        reason = (
            f"The gradient{'s' if several else ''} of {choices(self.names, limit=_FEW)} {'are' if several else 'is'}"
        )
        if not self.stops:
            values = "their values" if several else "its values"
            return f"{reason} 0: no output that is differentiated depends on {values}. {self.advice}"
        why = ", ".join(
            f"{row.operator} (node{'s' if len(row.nodes) > 1 else ''} {choices(row.nodes, limit=_FEW)}: {row.reason})"
            for row in self.stops
        )
        return f"{reason} always 0: no derivative passes through {why}. {self.advice}"


class LeakedGradient(UselessGradient):
    """Names whose gradient passes rounding only through scales. `stops` has the first operator that rounds."""

    def __str__(self) -> str:
        several = len(self.names) > 1
        [stop] = self.stops
        gradients = (
            f"gradient{'s' if several else ''} of {choices(self.names, limit=_FEW)} {'are' if several else 'is'}"
        )
        return (
            f"The {gradients} only what leaks through rounding: {stop.operator} (node {choices(stop.nodes)}; {stop.reason}) "
            f"has the derivative 0, so only the scales of the rounded values pass a derivative. {self.advice}"
        )


@dataclass(frozen=True)
class Report:
    """Every operator that reads a value which depends on `wrt`, on the way to `outputs` or not.

    `zeros` are the names in `wrt` whose gradient is 0 for every input, `leaks` the names whose gradient only leaks through
    rounding.
    """

    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: tuple[OperatorVerdict, ...]
    zeros: tuple[ZeroGradient, ...] = ()
    leaks: tuple[LeakedGradient, ...] = ()

    @property
    def ok(self) -> bool:
        """True if `gradient` would succeed."""
        return not self.refused

    @property
    def refused(self) -> tuple[OperatorVerdict, ...]:
        """The operators that stand in the way."""
        return tuple(row for row in self.rows if row.verdict in ("none", "missing"))

    def table(self, nodes: int | None = _FEW) -> list[dict[str, Any]]:
        """A row for each operator, those that are refused first; so many nodes of these are named, None names all."""
        refused = self.refused
        return [
            {
                "operator": row.operator,
                "nodes": len(row.nodes),
                "derivative": _DERIVATIVES[row.verdict],
                "formula or reason": row.reason,
                "": abridged(row.nodes, nodes) if row in refused else "",
            }
            for row in sorted(self.rows, key=lambda row: row not in refused)
        ]

    def _repr_html_(self) -> str:
        """The table, and what is zero, for a notebook."""
        by = f"{abridged(self.outputs)} by {abridged(self.wrt)}"
        title = f"{by}: {'has a gradient' if self.ok else 'has no gradient'}"
        colors = {_DERIVATIVES["none"]: BAD, _DERIVATIVES["missing"]: BAD}
        return html_table(
            self.table(), title, map(str, (*self.zeros, *self.leaks)), colors, max(ROWS, len(self.refused))
        )


def refuse_zeros(zeros: Iterable[ZeroGradient], wrt: Iterable[str]) -> None:
    """Refuse a training in which no weight gets a gradient.

    :raises NoGradientError: the gradient of every name in `wrt` is 0 for all feeds.
    """
    found = list(zeros)
    if set(wrt) <= {name for one in found for name in one.names}:
        raise NoGradientError(
            f"Training would change nothing. {' '.join(map(str, found))}",
            tuple(dict.fromkeys(node for one in found for row in one.stops for node in row.nodes)),
        )


def say_useless(found: Iterable[UselessGradient], named: bool) -> None:
    """Warn of useless gradients. Warn of a name that no output depends on only if the caller `named` it."""
    for one in found:
        if one.stops or named:
            notice(str(one))
