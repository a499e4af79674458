"""Gradients that a builder writes wrongly, a TOML file per builder; each finding has a model that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from refgrad.conformance.case import NODE
from refgrad.conformance.findings.builders.finding import BuilderFinding
from refgrad.conformance.findings.reading import arrays_of, inputs_of, model_of, outputs_of
from refgrad.conformance.records import files, read

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
_PLAIN = ("operator", "fault", "graph", "proof", "executor")  # as they are in a `BuilderFinding`


@cache
def builder_findings() -> tuple[BuilderFinding, ...]:
    """Every finding about a builder: by system, then by operator."""
    found = [finding for path in files(__file__) for finding in read_findings(path)]
    return tuple(sorted(found, key=lambda finding: (finding.system, finding.operator)))


def read_findings(path: Path) -> Iterator[BuilderFinding]:
    """The findings of one file, in its order. The file is named after the system; a finding is about its model's first node.

    :raises RecordsError: the file is malformed, or one of its models or arrays.
    """
    for record in read(path, "finding", _KEYS, optional=("executor",), named_by=("operator", "fault")):
        model = model_of(record, "model")
        model.graph.node[0].name = NODE
        inputs, outputs = inputs_of(model), outputs_of(model)
        given = record["given"]
        yield BuilderFinding(
            system=path.stem,
            builders=tuple(record["builders"]),
            model=model,
            feeds=arrays_of(record, "feeds", inputs, every=True),
            cotangents=arrays_of(record, "cotangents", outputs, every=True),
            expected=arrays_of(record, "expected", inputs),
            given=given if isinstance(given, str) else arrays_of(record, "given", inputs),
            **{key: record[key] for key in _PLAIN if key in record.values},
        )
