"""Judge an answer, in a process of its own."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path

from refgrad.errors import OptionError, WorkerError
from refgrad.escaping import shell_path
from refgrad.teaching.chapters import chapter_of
from refgrad.teaching.verdict import Verdict
from refgrad.worker import Worker

SECONDS = 20.0  # that an answer may take; a right one takes two, five where the machine is busy
MEMORY = 1 << 30  # bytes that it may take, beside the memory of the libraries
_LARGEST = 1 << 20  # bytes of an answer


def judge(number: int, path: str | os.PathLike[str], seconds: float = SECONDS, memory: int = MEMORY) -> Verdict:
    """The verdict on the answer in the file `path` to the exercise of a chapter.

    The answer is Python, and it is run: in a process of its own, which ends after `seconds`, and gets no more than `memory`
    bytes where the system can limit it. That keeps accidents away, and not malice.

    :raises OptionError: there is no such chapter, or no such file, or it is larger than an answer can be.
    """
    chapter_of(number)
    from refgrad.teaching.examination import judge_here  # here: no other command needs the suite for it

    source = _checked(Path(path), number)
    with Worker(seconds, room=memory) as worker:
        try:
            verdict: Verdict = worker.call(judge_here, number, str(source))
        except WorkerError as error:
            return Verdict(number, False, (_ended(error, seconds, memory),))
    return verdict


def _checked(path: Path, number: int) -> Path:
    shown = reprlib.repr(str(path))
    target = shell_path(path if path.suffix == ".py" else "answer.py")
    begin = f"`refgrad teach {number} --start {target}` writes one to begin with."
    try:
        if path.is_dir():
            raise OptionError(f"{shown} is a folder. Give the path of an answer, such as answer.py in it. {begin}")
        if not path.exists():
            raise OptionError(f"There is no file {shown}. {begin}")
        if not path.is_file():
            raise OptionError(f"{shown} is no regular file. Give the path of an answer. {begin}")
        if path.stat().st_size > _LARGEST:
            raise OptionError(f"{shown} is larger than 1 MB: that is no answer. {begin}")
        with open(path, "rb"):
            return path.resolve()
    except OSError as error:
        raise OptionError(f"{shown} cannot be read: {error.strerror or error}.") from error


def _ended(error: WorkerError, seconds: float, memory: int) -> str:
    """The hint on an answer whose process ended without a verdict."""
    if error.verdict == "timed out":
        return f"The answer did not finish within {seconds:g} s. Is there a loop that never ends?"
    if error.verdict == "out of memory":
        return f"The answer uses up the memory, {memory / 2**20:.4g} MB. A rule writes nodes; it needs no large arrays."
    if error.verdict == "raised":
        return f"The answer cannot be judged: {error.raised}: {error}"
    return f"The answer ended its process: {error}. A rule returns its cotangents, and ends nothing."
