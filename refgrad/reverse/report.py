"""The report on a derivative before it is written: a verdict on each operator, and the gradients that are zero."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
class UselessGradient(ABC):
    """Names whose gradient is correct but useless, with the reason. `str` gives a sentence for the user.

    `stops` are the operators between the names and the outputs that let no derivative through. `advice` is a remedy.
    """

    names: tuple[str, ...]
    stops: tuple[OperatorVerdict, ...]
    advice: str

    summary: ClassVar[str]  # of the gradient, in few words

    @property
    @abstractmethod
    def reason(self) -> str:
        """The sentence without the remedy."""

    def __str__(self) -> str:
        return f"{self.reason} {self.advice}"


class ZeroGradient(UselessGradient):
    """Names whose gradient is always 0, for all feeds. Without `stops`, no output depends on the names."""

    summary = "always 0"

    @property
    def reason(self) -> str:
        """The node that passes no derivative, or that no output depends on the names."""
        several = len(self.names) > 1
        gradients = (
            f"The gradient{'s' if several else ''} of {choices(self.names, limit=_FEW)} {'are' if several else 'is'}"
        )
        if not self.stops:
            values = "their values" if several else "its values"
            return f"{gradients} 0: no output that is differentiated depends on {values}."
        why = ", ".join(
            f"{row.operator} (node{'s' if len(row.nodes) > 1 else ''} {choices(row.nodes, limit=_FEW)}: {row.reason})"
            for row in self.stops
        )
        return f"{gradients} always 0: no derivative passes through {why}."


class LeakedGradient(UselessGradient):
    """Names whose gradient passes rounding only through scales. `stops` has the first operator that rounds."""

    summary = "only what leaks through rounding"

    @property
    def reason(self) -> str:
        """The node that rounds."""
        several = len(self.names) > 1
        [stop] = self.stops
        gradients = (
            f"gradient{'s' if several else ''} of {choices(self.names, limit=_FEW)} {'are' if several else 'is'}"
        )
        return (
            f"The {gradients} only what leaks through rounding: {stop.operator} (node {choices(stop.nodes)}; {stop.reason}) "
            f"has the derivative 0, so only the scales of the rounded values pass a derivative."
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
        sentences = ["Training would change nothing."]
        for (_, advice), ones in _by_advice(found).items():
            sentences += [*(one.reason for one in ones[:_FEW]), _others(ones), advice]
        raise NoGradientError(
            " ".join(filter(None, sentences)),
            tuple(dict.fromkeys(node for one in found for row in one.stops for node in row.nodes)),
        )


def say_useless(found: Iterable[UselessGradient], named: bool) -> None:
    """Warn of useless gradients. Warn of a name that no output depends on only if the caller `named` it."""
    for (_, advice), ones in _by_advice(one for one in found if one.stops or named).items():
        for one in ones[:_FEW]:
            notice(str(one))
        if more := _others(ones):
            notice(f"{more} {advice}")


def _by_advice(found: Iterable[UselessGradient]) -> dict[tuple[type, str], list[UselessGradient]]:
    groups: dict[tuple[type, str], list[UselessGradient]] = {}
    for one in found:
        groups.setdefault((type(one), one.advice), []).append(one)
    return groups


def _others(ones: Sequence[UselessGradient]) -> str:
    """The sentence for those that are not named one by one, "" if there are none."""
    others = [name for one in ones[_FEW:] for name in one.names]
    if not others:
        return ""
    gradients = (
        f"gradient of {choices(others)} is" if len(others) == 1 else f"gradients of {choices(others, limit=_FEW)} are"
    )
    return f"The {gradients} {ones[-1].summary}, too."
