"""The suite as files, for those who use no Python: gradient models to run, and models to build the gradients of.

    <folder>/manifest.json                    what there is, how far it can be trusted, and what was left out
    <folder>/README.md
    <folder>/schema/*.json                    JSON schemas of manifest.json and case.json
    <folder>/runners/                         programs that run the tests on some runtimes
    <folder>/gradients/tests.tsv              the tests of a folder for programs without a reader of JSON or protobuf
    <folder>/gradients/<test>/                a gradient model, in the layout of onnx's backend tests
        model.onnx, data.json, test_data_set_0/input_*.pb, test_data_set_0/output_*.pb, and both as .npy
    <folder>/forward/<test>/                  the model, what it is fed, what it computes, the cotangents and the gradients
        model.onnx, case.json, feed_*.pb, output_*.pb, cotangent_*.pb, gradient_*.pb, and all as .npy
    <folder>/symbolic/gradients/, forward/    models whose inputs have symbols for sizes
    <folder>/models/gradients/, forward/      whole models

The same cases and oracles give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from onnx import AttributeProto, helper, numpy_helper

from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.runner import Lanes
from refgrad.conformance.judge.running.sources import select
from refgrad.conformance.oracles import get_oracle
from refgrad.conformance.tools.exporting.archive import write_archive
from refgrad.conformance.tools.exporting.expected import ORACLES, Expected, chosen, expect, symbolic
from refgrad.conformance.tools.exporting.known import known_failures
from refgrad.conformance.tools.exporting.models import models_in
from refgrad.conformance.tools.exporting.names import named_tests
from refgrad.errors import OptionError, OutputFileError, WorkerError
from refgrad.escaping import is_printable, json_text
from refgrad.model.external import array_of
from refgrad.model.writing import new_folder, replacing
from refgrad.protos.traverse import every_node
from refgrad.worker import Worker

Progress = Callable[[int, int, str], None]  # how many tests are made, of how many, and the last one's name
FORMAT = "refgrad conformance export 2"
GRADIENTS, FORWARD, SCHEMAS = "gradients", "forward", ("manifest", "case")
NUMBERS, SYMBOLIC, MODELS = "", "symbolic", "models"  # the folders that have both
LISTED = "tests.tsv"
RUNNERS = ("run.py", "runtimes.py", "run.mjs", "run.c")
_MODEL_SECONDS = 1800.0  # in which a test of a whole model has to be made


@dataclass(frozen=True)
class Manifest:
    """The result of an export: `tests` has entries of `document["tests"]`, `left_out` the reasons, both by the test's name."""

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
    models: str | os.PathLike[str] | None = None,
    archive: bool = False,
    oracles: Sequence[str] = ORACLES,
    progress: Progress | None = None,
) -> Manifest:
    """Export the curated cases (`expected.chosen`) into a new folder.

    :param operators: "Conv", "Mul"; all by default.
    :param opset: "21", "13-21", "newest" or "all", as in `sources.select`; by default each case has its own.
    :param dtype: float types, separated by commas; by default each case has its own.
    :param models: a folder of whole models, or one model, to export too, see `models.models_in`.
    :param archive: write one file `folder`, a .zip archive whose bytes are the same every time, instead of a folder.
    :raises UnknownNameError: one of the operators has no case.
    :raises OptionError: an opset or type that does not exist; nothing to export.
    :raises OutputFileError: the folder is there already, or cannot be written.
    """
    whole = {} if models is None else models_in(models)
    wanted = None if operators is None else frozenset(operators)
    numbers, symbols = chosen(wanted), symbolic(wanted)
    if opset is not None or dtype is not None:
        numbers, symbols = (
            named_tests(select(named.values(), opset=opset or "newest", dtype=dtype)) for named in (numbers, symbols)
        )
    return export(folder, numbers, symbols=symbols, models=whole, archive=archive, oracles=oracles, progress=progress)


def export(
    folder: str | os.PathLike[str],
    cases: Mapping[str, Case] | Iterable[Case],
    *,
    symbols: Mapping[str, Case] | None = None,
    models: Mapping[str, Case] | None = None,
    archive: bool = False,
    oracles: Sequence[str] = ORACLES,
    progress: Progress | None = None,
) -> Manifest:
    """Export cases into a new folder: all of it, or nothing.

    :param cases: by the names of their tests; without, names are made of what the cases have.
    :param symbols: further cases, for the folder `SYMBOLIC`; `models` are those for `MODELS`.
    :param archive: as in `export_suite`.
    :param oracles: who may confirm an expected value; it takes two.
    :raises OptionError: there is no case, or no such oracle.
    :raises OutputFileError: the folder is there already, or cannot be written.
    """
    numbers = dict(cases) if isinstance(cases, Mapping) else named_tests(cases)
    sections = {NUMBERS: numbers, SYMBOLIC: symbols or {}, MODELS: models or {}}
    if not any(sections.values()):
        raise OptionError("There is no case to export: choose other operators, another opset or type.")
    asked = {name: get_oracle(name).trust for name in oracles}
    if not archive:
        with new_folder(folder) as made:
            document = _fill(made, sections, asked, progress)
        return Manifest(Path(folder), document)
    if os.path.lexists(folder):
        raise OutputFileError(f"{str(folder)!r} exists. Give the name of a file that does not, and it is made.")
    with replacing(folder) as file, tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        document = _fill(made, sections, asked, progress)
        write_archive(made, file)
    return Manifest(Path(folder), document)


def _fill(
    made: Path, cases: Mapping[str, Mapping[str, Case]], asked: Mapping[str, str], progress: Progress | None
) -> dict[str, Any]:
    """Write the suite into an empty folder; return the content of its manifest."""
    tests: dict[str, dict[str, Any]] = {}
    left_out: dict[str, dict[str, Any]] = {}
    place = {name: section for section, named in cases.items() for name in named}
    for done, (name, case, found) in enumerate(_tests_of(cases, tuple(asked)), 1):
        about = {"name": name, "section": place[name], **_about(case)}
        if not isinstance(found, str) and (broken := _broken_names(found)):
            what = "tab or the end of a line" if set(broken[0]) & set("\t\n\r") else "control character"
            found = f"tests.tsv cannot hold the {what} in the name {broken[0]!r}."
        if isinstance(found, str):
            left_out[name] = {**about, "why": found}
        else:
            tests[name] = {**about, **_write(made / place[name], made, name, case, found)}
        if progress:
            progress(done, len(place), name)
    beside = [*_write_lists(made, cases, tests), *_copy(made, len(tests))]
    document = {
        "$schema": "schema/manifest.schema.json",
        "format": FORMAT,
        "suite": f"refgrad {metadata.version('refgrad')}",
        "oracles": dict(asked),
        "files": _sums(made, beside),
        "tests": [
            {key: value for key, value in tests[name].items() if key != _ROWS} for name in place if name in tests
        ],
        "left_out": [left_out[name] for name in place if name in left_out],
    }
    _write_json(made / "manifest.json", document)
    return document


_ROWS = "rows"  # of an entry while it is made: what the lists say of the test


def _tests_of(
    cases: Mapping[str, Mapping[str, Case]], oracles: Sequence[str]
) -> Iterator[tuple[str, Case, Expected | str]]:
    """Each case with its name and the test that it makes, as they come; whole models last, and one at a time."""
    small = [item for section, named in cases.items() if section != MODELS for item in named.items()]
    large = cases.get(MODELS, {}).items()
    for items, limits in ((small, ()), (large, (_MODEL_SECONDS, 0, 1))):
        with Lanes(*limits) as lanes:
            for (name, case), found in lanes.each(lambda item, worker: _test_of(item[1], oracles, worker), items):
                yield name, case, found


def _test_of(case: Case, oracles: Sequence[str], worker: Worker) -> Expected | str:
    """The test that a case makes, or why there is none."""
    try:
        made: Expected = worker.call(expect, case, oracles)
    except WorkerError as error:
        return str(error)
    return made


def _broken_names(expected: Expected) -> list[str]:
    """The names of tensors that would break a row of a list, or that a reader would not see as they are."""
    names = (*expected.feeds, *expected.gradients, *expected.problem.feeds, *expected.results)
    return [name for name in names if not is_printable(name)]


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
    return {a.name: _finite(_attribute(a)) for a in sorted(attributes, key=lambda a: a.name)}


def _finite(value: Any) -> Any:
    """The value with texts for infinities and NaN, which JSON does not have."""
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


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


def _write(folder: Path, root: Path, name: str, case: Case, expected: Expected) -> dict[str, Any]:
    """Write a test in both forms into the folder of its section; what the manifest says of it."""
    problem = expected.problem
    gradients, data = folder / GRADIENTS / name, folder / GRADIENTS / name / "test_data_set_0"
    data.mkdir(parents=True)
    files = [_write_model(gradients / "model.onnx", expected.model)]
    files.append(_write_json(gradients / "data.json", {"atol": expected.tolerance, "rtol": 0.0}))
    rows = {GRADIENTS: [f"test\t{name}\t{name}/model.onnx\t{expected.tolerance!r}"]}
    arrays: Mapping[str, Any]
    for kind, arrays in (("input", expected.feeds), ("output", expected.gradients)):
        paths = _write_tensors(data, kind, arrays)
        files += _twice(paths)
        rows[GRADIENTS] += _listed(kind, paths, arrays, folder / GRADIENTS)
    forward = folder / FORWARD / name
    forward.mkdir(parents=True)
    files.append(_write_model(forward / "model.onnx", problem.model))
    rows[FORWARD] = [f"test\t{name}\t{name}/model.onnx\t{expected.results_tolerance!r}"]
    wanted = {wrt: expected.gradients[output] for wrt, output in expected.outputs.items()}
    tensors = {}
    for kind, arrays in (
        ("feed", problem.feeds),
        ("output", expected.results),
        ("cotangent", problem.cotangents),
        ("gradient", wanted),
    ):
        paths = _write_tensors(forward, kind, arrays)
        files += _twice(paths)
        tensors[f"{kind}s"] = {key: path.name for key, path in paths.items()}
        if kind in ("feed", "output"):
            rows[FORWARD] += _listed("input" if kind == "feed" else kind, paths, arrays, folder / FORWARD)
    trust = {
        "tolerance": expected.tolerance,
        "tolerance_reason": expected.reason,
        "confirmed": {n: list(o) for n, o in expected.confirmed.items()},
    }
    document = {"$schema": _up(forward, root, "schema/case.schema.json"), "name": name, **_about(case), **tensors}
    document["outputs_tolerance"] = expected.results_tolerance
    files.append(_write_json(forward / "case.json", document | trust))
    return {
        "gradient": (folder / GRADIENTS / name).relative_to(root).as_posix(),
        "forward": forward.relative_to(root).as_posix(),
        "operators": sorted({node.op_type for node in every_node(expected.model)}),
        "dtypes": list(expected.dtypes),
        **trust,
        "fails": known_failures(name, case.name),
        "files": _sums(root, files),
        _ROWS: rows,
    }


def _up(folder: Path, root: Path, path: str) -> str:
    """A path in `root` as `folder` sees it."""
    return str(PurePosixPath(*[".."] * len(folder.relative_to(root).parts), path))


def _twice(paths: Mapping[str, Path]) -> Iterator[Path]:
    """The files of tensors: as TensorProto and as .npy."""
    for path in paths.values():
        yield from (path, path.with_suffix(".npy"))


def _listed(kind: str, paths: Mapping[str, Path], arrays: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """A row of a list for each tensor: what it is, its name, its type and its file."""
    for name, path in paths.items():
        file = path.with_suffix(".npy").relative_to(folder).as_posix()
        yield f"{kind}\t{name}\t{np.asarray(arrays[name]).dtype.name}\t{file}"


def _write_lists(
    made: Path, cases: Mapping[str, Mapping[str, Case]], tests: Mapping[str, Mapping[str, Any]]
) -> Iterator[Path]:
    """Write the list of each folder that has tests."""
    for section, named in cases.items():
        for kind in (GRADIENTS, FORWARD):
            rows = [row for name in named if name in tests for row in tests[name][_ROWS][kind]]
            if rows:
                path = made / section / kind / LISTED
                path.write_text("\n".join(rows) + "\n", encoding="utf-8", newline="\n")
                yield path


def _copy(made: Path, tests: int) -> Iterator[Path]:
    """Write the files that differ between exports at most in the number of tests: the README, the schemas and the runners."""
    package = resources.files("refgrad.conformance")
    readme, text = made / "README.md", package.joinpath("tools", "exporting", "suite.md").read_text(encoding="utf-8")
    readme.write_text(text.replace("{tests}", f"{tests:,}"), encoding="utf-8", newline="\n")
    yield readme
    for schema in SCHEMAS:
        yield _copied(package.joinpath("schema", f"{schema}.schema.json"), made / "schema")
    for runner in RUNNERS:
        yield _copied(package.joinpath("tools", "exporting", "runners", runner), made / "runners")


def _copied(file: Traversable, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / file.name
    path.write_bytes(file.read_bytes())
    return path


def _write_model(path: Path, model: Any) -> Path:
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _write_tensors(folder: Path, kind: str, arrays: Mapping[str, Any]) -> dict[str, Path]:
    """A file for each array, numbered in their order; the paths by the names of the arrays."""
    paths = {}
    for place, (name, value) in enumerate(arrays.items()):
        array = np.asarray(value)
        paths[name] = _write_model(folder / f"{kind}_{place}.pb", numpy_helper.from_array(array, name))
        with paths[name].with_suffix(".npy").open("wb") as file:
            np.lib.format.write_array(file, _bits(array), allow_pickle=False)
    return paths


def _bits(array: np.ndarray) -> np.ndarray:
    """The array; of a type that NumPy does not have, such as bfloat16, its bits as unsigned integers, an element each."""
    own = array.dtype.type.__module__ == np.__name__
    return np.asarray(array if own else array.view(f"u{array.dtype.itemsize}"), order="C")


def _write_json(path: Path, document: Mapping[str, Any]) -> Path:
    text = json_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
    path.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return path


def _sums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its path in `folder`."""
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)}
