"""The models that once ended or kept a process go through every command: none of them dies, raises or keeps running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from refgrad.conformance.fuzzing import commands
from refgrad.worker import Worker

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.thorough,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="commands are typed in copies of a process"),
]

FOUND = sorted((Path(__file__).parent / "data" / "fuzzing").iterdir())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(commands.SECONDS * len(commands.COMMANDS)) as worker:
        yield worker


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_no_command_dies_of_what_once_ended_a_process(file: Path, worker: Worker) -> None:
    assert worker.call(commands.typed, file.read_bytes(), commands.COMMANDS).faults == ()
