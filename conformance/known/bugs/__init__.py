"""Faults of other systems, a TOML file per family; each known bug is a model that shows one (docs/findings.md)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from refgrad.conformance.known.bugs.bug import RELEASES, VERSIONS, KnownBug
from refgrad.conformance.known.bugs.reading import arrays_of, inputs_of, model_of, outputs_of
from refgrad.conformance.known.records import files, read
from refgrad.errors import choices

_KEYS = {
    "system": str,
    "operator": str,
    "fault": str,
    "until": str,
    "proof": str,
    "crashes": bool,
    "tolerance": float,
    "optimized": bool,
    "disputed": str,
    "forward": str,
    "model": str,
    "feeds": dict,
    "expected": dict,
}
_OPTIONAL = ("until", "proof", "crashes", "tolerance", "optimized", "disputed", "forward")
# As they are in a `KnownBug`.
_PLAIN = ("system", "operator", "fault", "until", "proof", "crashes", "tolerance", "optimized", "disputed")


@cache
def known_bugs() -> tuple[KnownBug, ...]:
    """Every known bug: by system, then by operator."""
    found = [bug for path in files(__file__) for bug in read_bugs(path)]
    return tuple(sorted(found, key=lambda bug: (bug.system, bug.operator)))


def read_bugs(path: Path) -> Iterator[KnownBug]:
    """The known bugs of one file, in its order.

    :raises RecordsError: the file is malformed, or one of its models or arrays.
    """
    for record in read(path, "finding", _KEYS, _OPTIONAL, named_by=("operator", "fault")):
        if record["system"] not in VERSIONS:
            raise record.wrong(f"system is {record['system']!r}. There are {choices(VERSIONS)}.")
        if record.values.get("until", VERSIONS[record["system"]]) not in (known := RELEASES[record["system"]]):
            raise record.wrong(f"until is {record['until']!r}. The findings are about the releases {choices(known)}.")
        if ("proof" in record.values) == ("forward" in record.values):
            raise record.wrong("Give it a proof, or the forward model of a gradient kernel, which is one.")
        model = model_of(record, "model")
        yield KnownBug(
            model=model,
            forward=model_of(record, "forward") if "forward" in record.values else None,
            feeds=arrays_of(record, "feeds", inputs_of(model), every=True),
            expected=arrays_of(record, "expected", outputs_of(model)),
            **{key: record[key] for key in _PLAIN if key in record.values},
        )
