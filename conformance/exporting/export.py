"""The suite as files, for those who use no Python: gradient models to run, and models to build the gradients of.

    <folder>/manifest.json                    what there is, how far it can be trusted, and what was left out
    <folder>/README.md
    <folder>/schema/*.json                    JSON schemas of manifest.json and case.json
    <folder>/gradients/<test>/                a gradient model, in the layout of onnx's backend tests
        model.onnx, data.json, test_data_set_0/input_*.pb, test_data_set_0/output_*.pb
    <folder>/forward/<test>/                  the model, what it is fed, the cotangents, and the gradients that come out
        model.onnx, case.json, feed_*.pb, cotangent_*.pb, gradient_*.pb

The same cases and oracles give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, helper, numpy_helper

from refgrad.conformance.case import Case
from refgrad.conformance.exporting.expected import ORACLES, Expected, chosen, expect, named_tests
from refgrad.conformance.oracles import get_oracle
from refgrad.conformance.running.runner import in_lanes
from refgrad.conformance.running.sources import select
from refgrad.conformance.running.suite import Progress
from refgrad.errors import OptionError, WorkerError
from refgrad.protos.external import array_of
from refgrad.protos.files import new_folder
from refgrad.show.tables import escaped_json
from refgrad.worker import Worker

FORMAT = "refgrad conformance export 1"
GRADIENTS, FORWARD, SCHEMAS = "gradients", "forward", ("manifest", "case")


@dataclass(frozen=True)
class Manifest:
    """What was exported. `tests` has an entry of `document["tests"]` by each test's name, `left_out` the reason by name."""

    folder: Path
    document: Mapping[str, Any]

    @property
    def tests(self) -> dict[str, Mapping[str, Any]]:
        """The entry of each test, by name."""
        return {entry["name"]: entry for entry in self.document["tests"]}

    @property
    def left_out(self) -> dict[str, str]:
        """Why a test is left out, by name."""
        return {entry["name"]: entry["why"] for entry in self.document["left_out"]}


def export_suite(
    folder: str | os.PathLike[str],
    operators: Iterable[str] | None = None,
    opset: str | None = None,
    dtype: str | None = None,
    *,
    oracles: Sequence[str] = ORACLES,
    progress: Progress | None = None,
) -> Manifest:
    """Export the curated cases (`expected.chosen`) into a new folder.

    :param operators: "Conv", "Mul"; all by default.
    :param opset: "21", "13-21", "newest" or "all", as in `sources.select`; by default each case has its own.
    :param dtype: float types, separated by commas; by default each case has its own.
    :raises UnknownNameError: no case is of such an operator.
    :raises OptionError: an opset or type that does not exist; nothing to export.
    :raises OutputFileError: the folder is there already, or cannot be written.
    """
    named = chosen(operators)
    if opset is not None or dtype is not None:
        named = named_tests(select(named.values(), opset=opset or "newest", dtype=dtype))
    return export(folder, named, oracles=oracles, progress=progress)


def export(
    folder: str | os.PathLike[str],
    cases: Mapping[str, Case] | Iterable[Case],
    *,
    oracles: Sequence[str] = ORACLES,
    progress: Progress | None = None,
) -> Manifest:
    """Export cases into a new folder: all of it, or nothing.

    :param cases: by the names of their tests; without, names are made of the operator and its attributes.
    :param oracles: who may confirm an expected value; it takes two.
    :raises OptionError: there is no case, or no such oracle.
    :raises OutputFileError: the folder is there already, or cannot be written.
    """
    named = dict(cases) if isinstance(cases, Mapping) else named_tests(cases)
    if not named:
        raise OptionError("There is no case to export: choose other operators, another opset or type.")
    asked = {name: get_oracle(name).trust for name in oracles}
    with new_folder(folder) as made:
        tests, left_out = [], []
        answers = in_lanes(lambda item, worker: _test_of(item[1], oracles, worker), named.items())
        for done, ((name, case), found) in enumerate(answers, 1):
            if isinstance(found, str):
                left_out.append({"name": name, **_about(case), "why": found})
            else:
                tests.append({"name": name, **_about(case), **_write(made, name, case, found)})
            if progress:
                progress(done, len(named), name)
        place = {name: number for number, name in enumerate(named)}
        for entries in (tests, left_out):
            entries.sort(key=lambda entry: place[entry["name"]])
        for schema in SCHEMAS:
            path = made / "schema" / f"{schema}.schema.json"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(resources.files("refgrad.conformance").joinpath("schema", path.name).read_bytes())
        (made / "README.md").write_text(_readme(len(tests)), encoding="utf-8", newline="\n")
        beside = [made / "README.md", *sorted((made / "schema").iterdir())]
        document = {
            "$schema": "schema/manifest.schema.json",
            "format": FORMAT,
            "suite": f"refgrad {metadata.version('refgrad')}",
            "oracles": asked,
            "files": _sums(made, beside),
            "tests": tests,
            "left_out": left_out,
        }
        _write_json(made / "manifest.json", document)
    return Manifest(Path(folder), document)


def _test_of(case: Case, oracles: Sequence[str], worker: Worker) -> Expected | str:
    """The test that a case makes, or why there is none."""
    try:
        made: Expected = worker.call(expect, case, oracles)
    except WorkerError as error:
        return str(error)
    return made


def _about(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "operator": case.operator,
        "opset": case.opset,
        "dtype": case.dtype,
        "attributes": _attributes(case),
    }


def _attributes(case: Case) -> dict[str, Any]:
    """The attributes of the node that a case is about; empty where it has several nodes."""
    attributes = () if case.subject is None else case.subject.attribute
    return {a.name: _attribute(a) for a in sorted(attributes, key=lambda a: a.name)}


def _attribute(attribute: AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, int | float):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if attribute.type == AttributeProto.TENSOR:
        return array_of(value).tolist()
    if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        return list(value)
    if attribute.type == AttributeProto.STRINGS:
        return [entry.decode(errors="replace") for entry in value]
    return AttributeProto.AttributeType.Name(attribute.type).lower()  # a graph: it is in the model


def _write(folder: Path, name: str, case: Case, expected: Expected) -> dict[str, Any]:
    """Write a test in both forms; what the manifest says of it."""
    question = expected.question
    gradients, data = folder / GRADIENTS / name, folder / GRADIENTS / name / "test_data_set_0"
    data.mkdir(parents=True)
    files = [_write_model(gradients / "model.onnx", expected.model)]
    files.append(_write_json(gradients / "data.json", {"atol": expected.tolerance, "rtol": 0.0}))
    files += _write_tensors(data, "input", expected.feeds).values()
    files += _write_tensors(data, "output", expected.gradients).values()
    forward = folder / FORWARD / name
    forward.mkdir(parents=True)
    files.append(_write_model(forward / "model.onnx", question.model))
    wanted = {wrt: expected.gradients[output] for wrt, output in expected.outputs.items()}
    tensors = {
        "feeds": _write_tensors(forward, "feed", question.feeds),
        "cotangents": _write_tensors(forward, "cotangent", question.cotangents),
        "gradients": _write_tensors(forward, "gradient", wanted),
    }
    trust = {"tolerance": expected.tolerance, "confirmed": {n: list(o) for n, o in expected.confirmed.items()}}
    document = {"$schema": "../../schema/case.schema.json", "name": name, **_about(case)}
    document |= {kind: {key: path.name for key, path in written.items()} for kind, written in tensors.items()}
    files += [path for written in tensors.values() for path in written.values()]
    files.append(_write_json(forward / "case.json", document | trust))
    return {**trust, "files": _sums(folder, files)}


def _write_model(path: Path, model: Any) -> Path:
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _write_tensors(folder: Path, kind: str, arrays: Mapping[str, Any]) -> dict[str, Path]:
    """A file for each array, numbered in their order; the paths by the names of the arrays."""
    paths = {}
    for place, (name, array) in enumerate(arrays.items()):
        tensor = numpy_helper.from_array(np.asarray(array), name)
        paths[name] = _write_model(folder / f"{kind}_{place}.pb", tensor)
    return paths


def _write_json(path: Path, document: Mapping[str, Any]) -> Path:
    text = escaped_json(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
    path.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return path


def _sums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its path in `folder`."""
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)}


def _readme(tests: int) -> str:
    return f"""\
# Gradients of ONNX operators: {tests} tests

Made by the conformance suite of refgrad. `manifest.json` lists the tests: operator, opset, type, attributes, tolerance, who
confirmed each gradient, the SHA-256 of every file, and what was left out and why.

**To test a runtime**, run the folders in `gradients/` as the backend tests of ONNX: `model.onnx` is a gradient in plain ai.onnx
operators; feed it `test_data_set_0/input_0.pb`, `input_1.pb`, ... in the order of its inputs and compare its outputs with
`output_0.pb`, .... The files hold a TensorProto each. An element may be off by `atol` in `data.json`; `rtol` is 0, because the
elements of a gradient are sums, and one that cancels is no more accurate than its terms.

**To test a gradient builder**, take the folders in `forward/`: `model.onnx` is what to differentiate, and `case.json` says how.
Feed the model the `feeds`. With the `cotangents` v, one for each output y, the gradients of Σ v·y by each input are in
`gradients`. An element may be off by `tolerance`.

The schemas of `manifest.json` and `case.json` are in `schema/`. The values come from float64 and are rounded to the type of the
test. What is `confirmed` was found right by at least two oracles; `oracles` in the manifest says what these know.
"""
