"""Gradients that a builder writes wrongly, a TOML file per builder; each known bug has a model that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from refgrad.conformance.case import NODE
from refgrad.conformance.known.bugs.builders.bug import BuilderBug
from refgrad.conformance.known.bugs.reading import arrays_of, inputs_of, model_of, outputs_of
from refgrad.conformance.known.records import files, read

_KEYS = {
    "operator": str,
    "builders": list,
    "fault": str,
    "graph": str,
    "proof": str,
    "executor": str,
    "model": str,
    "feeds": dict,
    "cotangents": dict,
    "expected": dict,
    "given": dict | str,
}
_PLAIN = ("operator", "fault", "graph", "proof", "executor")  # as they are in a `BuilderBug`


@cache
def builder_bugs() -> tuple[BuilderBug, ...]:
    """Every known bug about a builder: by system, then by operator."""
    found = [bug for path in files(__file__) for bug in read_bugs(path)]
    return tuple(sorted(found, key=lambda bug: (bug.system, bug.operator)))


def read_bugs(path: Path) -> Iterator[BuilderBug]:
    """The known bugs of one file, in its order. The file has the name of the system; a bug is about its model's first node.

    :raises RecordsError: the file is malformed, or one of its models or arrays.
    """
    for record in read(path, "finding", _KEYS, optional=("executor",), named_by=("operator", "fault")):
        model = model_of(record, "model")
        model.graph.node[0].name = NODE
        inputs, outputs = inputs_of(model), outputs_of(model)
        given = record["given"]
        yield BuilderBug(
            system=path.stem,
            builders=tuple(record["builders"]),
            model=model,
            feeds=arrays_of(record, "feeds", inputs, every=True),
            cotangents=arrays_of(record, "cotangents", outputs, every=True),
            expected=arrays_of(record, "expected", inputs),
            given=given if isinstance(given, str) else arrays_of(record, "given", inputs),
            **{key: record[key] for key in _PLAIN if key in record.values},
        )
