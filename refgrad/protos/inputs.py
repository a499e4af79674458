"""Files that are read: regular ones, opened without waiting, and no larger than is allowed."""

from __future__ import annotations

import os
import reprlib
import stat
from io import BufferedReader
from pathlib import Path

from refgrad.errors import RefgradError
from refgrad.protos.memory import allowed

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """True if `path` is a regular file, or a link to one. Reading anything else may never end."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # there is no file, or no file can have this name
        return False


def open_regular(path: str | os.PathLike[str], error: type[RefgradError], advice: str = "") -> BufferedReader:
    """A regular file, opened to be read.

    :param error: the class of the errors.
    :param advice: the last sentence of an error.
    :raises RefgradError: there is no such file, it cannot be opened, or it is a folder, a FIFO, a device or a socket. These
        are refused before they are opened: a FIFO has no end, and opening a device may have an effect.
    """
    shown = reprlib.repr(str(path))
    try:
        _refuse_special(os.stat(path), shown, error, advice)
        opened = open(os.open(path, _FLAGS), "rb")  # noqa: SIM115  (for whoever asks)
    except FileNotFoundError as failure:
        raise error(f"There is no file {shown}. {advice}".rstrip()) from failure
    except OSError as failure:
        raise error(f"{shown} cannot be read: {failure.strerror or failure}. {advice}".rstrip()) from failure
    except RefgradError:  # some of these are ValueErrors, too
        raise
    except ValueError as failure:
        raise error(f"{shown} cannot be read: no file can have this name. {advice}".rstrip()) from failure
    try:
        _refuse_special(os.fstat(opened.fileno()), shown, error, advice)  # replaced in between
    except RefgradError:
        opened.close()
        raise
    return opened


def _refuse_special(found: os.stat_result, shown: str, error: type[RefgradError], advice: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(found.st_mode)), "something else")
        raise error(f"{shown} is {kind}, and no regular file. {advice}".rstrip())


def read_bytes(path: str | os.PathLike[str], error: type[RefgradError], advice: str = "") -> bytes:
    """The content of a regular file.

    :raises RefgradError: as by `open_regular`, or the file is larger than the memory limit (`memory.at_most`).
    """
    limit = allowed()
    with open_regular(path, error, advice) as opened:
        size = os.fstat(opened.fileno()).st_size
        if limit is not None and size > limit:
            raise error(f"{reprlib.repr(str(path))} has {size} bytes, and max_memory is {limit}. Give it more.")
        try:
            return opened.read()
        except OSError as failure:
            said = f"{reprlib.repr(str(path))} cannot be read: {failure.strerror or failure}."
            raise error(f"{said} {advice}".rstrip()) from failure


def read_text(path: str | os.PathLike[str], error: type[RefgradError], advice: str = "") -> str:
    """The text in a regular file in UTF-8.

    :raises RefgradError: as by `read_bytes`, or the file is not UTF-8.
    """
    try:
        return read_bytes(path, error, advice).decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{str(Path(path))!r} is not a text file in UTF-8. {advice}".rstrip()) from failure
