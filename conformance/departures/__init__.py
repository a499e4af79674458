"""Every departure from ONNX Runtime's gradient graph, a TOML file per family."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from refgrad.conformance.departures.departure import KINDS, Departure
from refgrad.conformance.records import files, read
from refgrad.errors import choices

__all__ = ["KINDS", "Departure", "every_departure"]

_KEYS = {"operators": list, "kind": str, "reason": str, "cases": str}


@cache
def every_departure() -> tuple[Departure, ...]:
    """The departures of every family, by the name of the family."""
    return tuple(found for path in files(__file__) for found in read_departures(path))


def read_departures(path: Path) -> list[Departure]:
    """The departures of one file, in its order.

    :raises RecordsError: the file is malformed.
    """
    found = []
    for record in read(path, "departure", _KEYS, optional=("operators", "cases"), named_by=("operators", "kind")):
        if record["kind"] not in KINDS:
            raise record.wrong(f"kind is {record['kind']!r}. There are {choices(KINDS)}.")
        found.append(Departure(**{**record.values, "operators": tuple(record.values.get("operators", ()))}))
    return found
