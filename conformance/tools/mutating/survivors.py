"""The mutants that survive, and why. They are in survivors.toml, whose first lines describe a row."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from refgrad.conformance.known.records import read
from refgrad.errors import choices

_FILE = Path(__file__).with_suffix(".toml")
_PATTERNS = ("operator", "place", "change")
_KEYS = {"reason": str, "limit": bool, "mutants": list}


@dataclass(frozen=True)
class Equivalent:
    """Mutants that no case catches, and why. `operator`, `place` and `change` are patterns in which `*` matches anything.

    `limit`: the mutants are not equivalent, but the suite does not test what would tell: another point, a second derivative.
    """

    operator: str
    place: str
    change: str
    reason: str
    limit: bool = False

    def matches(self, operator: str, place: str, change: str) -> bool:
        """True if the row covers the mutant."""
        pairs = ((self.operator, operator), (self.place, place), (self.change, change))
        return all(fnmatchcase(text, _literal(pattern)) for pattern, text in pairs)


def _literal(pattern: str) -> str:
    """The pattern with only `*` special: the places of emissions have brackets."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


@cache
def equivalents() -> tuple[Equivalent, ...]:
    """Every row of the table."""
    return tuple(read_equivalents(_FILE))


def read_equivalents(path: Path) -> list[Equivalent]:
    """The rows of a file, in its order.

    :raises RecordsError: the file is malformed.
    """
    found = []
    for record in read(path, "equivalent", _KEYS, optional=("limit",), named_by=("reason",)):
        for row in record["mutants"]:
            if not isinstance(row, dict) or row.keys() != set(_PATTERNS):
                raise record.wrong(f"mutants has {row!r}. Write {{ ... }} with {choices(_PATTERNS)}.")
            found.append(Equivalent(**row, reason=record["reason"], limit=record.values.get("limit", False)))
    return found
