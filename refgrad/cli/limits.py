"""The options of every command that reads a model: the limits `--max-memory` and `--max-seconds`, and `--data-folder`."""

from __future__ import annotations

import inspect
import os
import reprlib
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Annotated, Any

import typer

from refgrad import links
from refgrad.cli import own_code
from refgrad.cli.containment import end_later, limit_memory
from refgrad.cli.numbers import number
from refgrad.errors import OptionError, choices
from refgrad.interruption import OutOfTime
from refgrad.protos.memory import at_most
from refgrad.ranges import checked
from refgrad.sizes import in_bytes
from refgrad.worker import SECONDS

_WITH_VERDICTS = ("check", "compare")  # commands that run the code of others in a process of its own

_OPTIONS = {
    "max_memory": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Refuse a model whose feeds, weights and values need more memory than SIZE: a number of bytes, or 500M, 8G.",
        ),
    ],
    "max_seconds": Annotated[
        float | None, number("max_seconds", metavar="SECONDS", help="Stop after this many seconds.")
    ],
    "data_folder": Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Follow links to external data that lead into this folder. May be repeated."),
    ],
}


def limited(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with these options, which hold while it runs."""

    @wraps(command)
    def call(
        *,
        max_memory: str | None = None,
        max_seconds: float | None = None,
        data_folder: list[str] | None = None,
        **given: Any,
    ) -> Any:
        with (
            _within(max_memory, max_seconds, _less(given) + _hanging(command.__name__, given)),
            _links_into(data_folder),
        ):
            return command(**given)

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in _OPTIONS.items()
    ]
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    return call


@contextmanager
def _within(max_memory: str | None, max_seconds: float | None, remedy: str) -> Iterator[None]:
    size = None if max_memory is None else _limit(max_memory)
    if size is not None:
        limit_memory(size)
    with at_most(size), _for_seconds(max_seconds, remedy):
        yield


def _less(given: Mapping[str, Any]) -> str:
    """The ways to ask a command for less, each with its option."""
    options = {"dim": "small random inputs (--dim 1)", "wrt": "some gradients (--wrt NAMES)"}
    known = ", ".join(text for name, text in options.items() if name in given)
    return f"{known} or a part of the model." if known else "a part of the model."


def _hanging(command: str, given: Mapping[str, Any]) -> str:
    """A sentence about the builders and executors of the user's own, which may hang; "" if there are none."""
    names = own_code.of_options(given)
    if not names:
        return ""
    ended = f": a call of it ends after {SECONDS:g} s, with a verdict" if command in _WITH_VERDICTS else ""
    return f" {choices(names)} may hang, too{ended}."


@contextmanager
def _links_into(folders: list[str] | None) -> Iterator[None]:
    """Let links to external data lead into these folders, in this process and in those that it starts."""
    whole = links.checked(folders, "--data-folder")
    if parted := [folder for folder in whole if os.pathsep in folder]:
        raise OptionError(f"--data-folder {parted[0]!r} has {os.pathsep!r} in its name. Name a folder without.")
    before = os.environ.get(links.VARIABLE)
    try:
        if whole:
            os.environ[links.VARIABLE] = os.pathsep.join([*filter(None, [before]), *whole])
        yield
    finally:
        if whole and before is None:
            del os.environ[links.VARIABLE]
        elif before is not None:
            os.environ[links.VARIABLE] = before


@contextmanager
def _for_seconds(seconds: float | None, remedy: str) -> Iterator[None]:
    """Raise `OutOfTime` where this is still going on after so many seconds."""
    if seconds is None:
        yield
        return
    if not hasattr(signal, "setitimer"):
        raise OptionError("--max-seconds needs timers that this system does not have. Leave it out.")
    said = f"This did not finish within --max-seconds {seconds:g}. Give it more time, or ask for less, such as {remedy}"

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(said)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with end_later(seconds, said):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _limit(text: str) -> int:
    """The bytes that `--max-memory` allows."""
    size = in_bytes(text)
    if size is None:
        raise OptionError(
            f"--max-memory {reprlib.repr(text)} is not a size. Give a number of bytes, or one like 500M or 8G."
        )
    return int(checked("max_memory", size, "--max-memory"))
