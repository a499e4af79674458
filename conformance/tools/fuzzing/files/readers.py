"""Everything that reads a file other than a model, each with an undamaged file and the use of what it reads."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper

from refgrad.backends import get_backend
from refgrad.backends.base import check_feeds, graph_inputs
from refgrad.conformance import reports as reporting
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running import sources
from refgrad.conformance.judge.running.journal import Journal
from refgrad.conformance.judge.running.limitations import Limitations
from refgrad.conformance.judge.running.results import About, Results, load, merge
from refgrad.conformance.locating.recordings import Recording, match, read_recording
from refgrad.conformance.tools.parity.kept import Kept
from refgrad.conformance.tools.parity.pair import Pair
from refgrad.conformance.verdicts import RIGHT, WRONG
from refgrad.model import native
from refgrad.parameters.states import read_state_dict
from refgrad.parameters.weights import weights
from refgrad.protos.arrays import mapped_array, read_arrays
from refgrad.training import Adam, Arrays, Run, StepModel, Training, open_data, step_model

_SETTINGS: dict[str, Any] = {
    "builders": ["refgrad"], "executors": ["numpy"], "oracles": ["differences"], "seed": 0, "seconds": 60.0,
    "memory": 1 << 30, "sources": ["tables"], "opset": "newest", "every": 1, "feeds": None,
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A reader: the name of its file, the kind of damage (`damage.DAMAGES`), an undamaged file, and the function that reads.

    An error of `read` names the file. `use` takes the result of `read`, and its errors need not name the file.
    """

    file: str
    kind: str
    whole: Callable[[], bytes]
    read: Callable[[Path], Any]
    use: Callable[[Any], object] = lambda found: None


@cache
def _model() -> ModelProto:
    return native.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
        "<float[2, 1] a = {0.5, 1}> { y = MatMul(x, a) }"
    )


@cache
def _step() -> StepModel:
    return step_model(_model(), optimizer=Adam())


def _samples() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((7, 2)).astype(np.float32)
    return {"x": x, "label": x @ np.array([[1], [2]], np.float32)}


def _archive(arrays: Mapping[str, np.ndarray], save: Callable[..., None] = np.savez) -> bytes:
    written = io.BytesIO()
    save(written, **arrays)
    return written.getvalue()


def _array() -> bytes:
    written = io.BytesIO()
    np.save(written, _samples()["x"])
    return written.getvalue()


def _tensors() -> bytes:
    import safetensors.numpy

    return bytes(safetensors.numpy.save({"a": _W, "a.grad": _SLOPE, "n": np.arange(3)}))


def _tensor() -> bytes:
    return bytes(numpy_helper.from_array(_samples()["x"][:3], "x").SerializeToString())


def _results() -> Results:
    rows = (
        ResultRow("Relu-1", "refgrad", "numpy", RIGHT, ("differences",)),
        ResultRow("Relu-2", "refgrad", "numpy", WRONG, (), ("differences",), 0.5, 1e-6, "expected 1, got 2"),
    )
    about = {row.case: About("Relu", 18, "float32") for row in rows}
    return Results(_SETTINGS, {"refgrad": "1.0", "numpy": "2.0"}, about, rows)


def _journal() -> bytes:
    lines: list[dict[str, Any]] = [{"format": "refgrad conformance journal 1", "settings": _SETTINGS}]
    for row in _results().rows:
        written = {
            "builder": row.builder,
            "executor": row.executor,
            "verdict": row.verdict,
            "witnesses": list(row.witnesses),
        }
        lines.append({"case": row.case, "rows": [written]})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _limitations() -> bytes:
    return b'[[limitation]]\noperator = "Relu"\nverdict = "wrong"\nreason = "it says so"\n'


@cache
def _checkpoint() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        run = Run(Training(_step(), 0.05), Arrays(_step(), _samples()), 1, 3, checkpoint=path, every=2)
        run.run()
        return path.read_bytes()


def _kept() -> bytes:
    import tempfile

    kept = Kept()
    kept.add("Relu", Pair(_model(), _model(), _model(), {"x": _samples()["x"]}), {"y": np.ones(3)})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.npz"
        kept.save(path)
        return path.read_bytes()


def _feed(arrays: Mapping[str, Any]) -> object:
    prepared = get_backend("numpy").prepare(_model())
    return prepared.run(check_feeds(arrays, graph_inputs(_model().graph)))


def _train(arrays: Mapping[str, Any]) -> object:
    return list(Arrays(_step(), arrays).batches(3, np.random.default_rng(0)))


def _shards(path: Path) -> object:
    return list(open_data(_step(), path.parent).batches(3, np.random.default_rng(0)))


def _mapped(path: Path) -> dict[str, Any]:
    return {"x": mapped_array(path), "label": _samples()["label"]}


def _resume(path: Path) -> object:
    run = Run(Training(_step(), 0.05), Arrays(_step(), _samples()), 2, 3, checkpoint=path, every=2, resume=True)
    return run.run(), run.best_epoch


def _report(path: Path) -> object:
    found = merge([load(path), load(path)])
    for row in found.rows:
        found.command(row)
    for suffix in (".json", ".xml", ".md", ".html"):
        reporting.write(found, path.with_name(f"made{suffix}"), ())
    return found.faults


def _go_on(path: Path) -> object:
    with Journal(path, _SETTINGS, resume=True) as journal:
        journal.append("Relu-3", list(_results().rows))
        return journal.done


def _compare(found: Recording) -> object:
    return match(_model(), found.for_model(_model()), {"a": np.array([[3], [4]], np.float32)})


def _arrays(path: Path) -> dict[str, np.ndarray]:
    return read_arrays(path, "Arrays")


def _weights(state: Mapping[str, np.ndarray]) -> object:
    return weights(_model(), state)


_W, _SLOPE = np.array([[0.5], [1]], np.float32), np.array([[3], [4]], np.float32)

READERS: Mapping[str, Reader] = {
    "feeds": Reader("x.npz", "archive", lambda: _archive({"x": _samples()["x"]}, np.savez_compressed), _arrays, _feed),
    "training data": Reader("x.npz", "archive", lambda: _archive(_samples()), _arrays, _train),
    "a shard": Reader("0.npz", "archive", lambda: _archive(_samples()), _shards),
    "an array": Reader("x.npy", "array", _array, _mapped, _train),
    "a state_dict (.npz)": Reader("s.npz", "archive", lambda: _archive({"a": _W}), read_state_dict, _weights),
    "a state_dict (.safetensors)": Reader("s.safetensors", "safetensors", _tensors, read_state_dict, _weights),
    "a recording (.npz)": Reader(
        "r.npz", "archive", lambda: _archive({"a": _W, "a_grad": _SLOPE}), read_recording, _compare
    ),
    "a recording (.safetensors)": Reader("r.safetensors", "safetensors", _tensors, read_recording, _compare),
    "a recording (.pb)": Reader("t.pb", "value", _tensor, lambda path: read_recording(path.parent), _compare),
    "a journal": Reader("j.jsonl", "lines", _journal, _go_on),
    "results": Reader("r.json", "json", lambda: _results().text().encode(), _report),
    "limitations": Reader("l.toml", "toml", _limitations, Limitations.read),
    "a checkpoint": Reader("c.safetensors", "safetensors", _checkpoint, _resume),
    "equal gradients": Reader("k.npz", "archive", _kept, lambda path: list(Kept.load(path))),
    "a case": Reader("input_0.pb", "value", _tensor, lambda path: list(sources.folder(path.parent.parent))),
}


def place(reader: Reader, folder: Path) -> Path:
    """The path for the file of a reader in a folder, after the files that it needs beside it are written."""
    if reader is not READERS["a case"]:
        return folder / reader.file
    (folder / "model.onnx").write_bytes(_model().SerializeToString())
    data = folder / "test_data_set_0"
    data.mkdir()
    tensor = numpy_helper.from_array(_samples()["label"][:3], "y")
    (data / "output_0.pb").write_bytes(tensor.SerializeToString())
    return data / reader.file
