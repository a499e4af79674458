"""The models that once ended or kept a process go through every command: none of them dies, raises or keeps running."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from google.protobuf.message import DecodeError

from refgrad.backends import get_backend
from refgrad.conformance.tools.fuzzing import commands
from refgrad.errors import RefgradError
from refgrad.worker import Worker

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="commands are typed in copies of a process"),
]

FOUND = sorted((Path(__file__).parents[2] / "data" / "fuzzing").iterdir())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(commands.SECONDS * len(commands.COMMANDS)) as worker:
        yield worker


@pytest.mark.matrix
@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_no_command_dies_of_what_once_ended_a_process(file: Path, worker: Worker) -> None:
    assert worker.call(commands.typed, file.read_bytes(), commands.COMMANDS).faults == ()


def _prepared(written: list[bytes]) -> int:
    for one in written:
        with contextlib.suppress(RefgradError):
            get_backend("ort-cpu").prepare(onnx.load_model_from_string(one))
    return len(written)


def test_onnx_runtime_is_not_asked_about_what_ends_it() -> None:
    pytest.importorskip("onnxruntime")
    written = []
    for file in FOUND:
        with contextlib.suppress(DecodeError):
            onnx.load_model_from_string(file.read_bytes())
            written.append(file.read_bytes())
    with Worker(240.0) as worker:
        assert worker.call(_prepared, written) == len(written)
