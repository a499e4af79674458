"""Every known difference from ONNX Runtime's gradient graph, a TOML file per family."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from refgrad.conformance.known.differences.difference import KINDS, KnownDifference
from refgrad.conformance.known.records import files, read
from refgrad.errors import choices

__all__ = ["KINDS", "KnownDifference", "known_differences"]

_KEYS = {"operators": list, "kind": str, "reason": str, "cases": str}


@cache
def known_differences() -> tuple[KnownDifference, ...]:
    """The known differences of every family, by the name of the family."""
    return tuple(found for path in files(__file__) for found in read_differences(path))


def read_differences(path: Path) -> list[KnownDifference]:
    """The known differences of one file, in its order.

    :raises RecordsError: the file is malformed.
    """
    found = []
    for record in read(path, "departure", _KEYS, optional=("operators", "cases"), named_by=("operators", "kind")):
        if record["kind"] not in KINDS:
            raise record.wrong(f"kind is {record['kind']!r}. There are {choices(KINDS)}.")
        found.append(KnownDifference(**{**record.values, "operators": tuple(record.values.get("operators", ()))}))
    return found
