"""The journal of a run: JSON lines, appended as verdicts come, so that a run that was killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.verdicts import VERDICTS
from refgrad.errors import JournalError, choices
from refgrad.protos.documents import parse_json, record_of, typed
from refgrad.protos.inputs import read_bytes

FORMAT = "refgrad conformance journal 1"
_BEGINNING = f'{{"format":"{FORMAT}"'.encode()
_TELLING = len('{"format"')  # bytes of it: with as few another file may begin, too


class Journal:
    """The verdicts on every case that is done. The first line says what was asked; then each line is a case with its rows.

    >>> with Journal(path, {"seed": 0}) as journal:  # doctest: +SKIP
    ...     journal.append("Relu-3-static-opset21", rows)

    :param settings: of the run, in JSON's types. A journal is only resumed with the settings that it was begun with.
    :param resume: go on with a journal, if there is one; otherwise there may be none.
    :raises JournalError: there is one already; other settings; a malformed line; another run writes to it. A last line that
        was cut off when the process died is dropped.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any], resume: bool = False) -> None:
        self.path, self.done = Path(path), dict[str, list[ResultRow]]()
        known = json.loads(json.dumps(dict(settings)))  # as it comes back
        if self.path.is_dir():
            raise JournalError(f"{str(path)!r} is a folder. Name a file for the journal.")
        if self.path.exists() and not resume:
            raise JournalError(
                f"{self.path} is there already. Go on with it with resume=True, or name another journal."
            )
        if self.path.exists() and not self.path.is_file():
            raise JournalError(f"{self.path} is no regular file. Name a file for the journal.")
        try:
            self._file: IO[bytes] = self.path.open("a+b")
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error.strerror}.") from error
        try:
            self._alone()
            size = self._read(known)
            self._file.truncate(size)
            if not size:
                self._write({"format": FORMAT, "settings": known})
        except JournalError:
            self.close()
            raise

    def append(self, case: str, rows: Sequence[ResultRow]) -> None:
        """Write the verdicts on one case: they survive the death of this process.

        :raises JournalError: the disk is full, or fails.
        """
        self.done[case] = list(rows)
        self._write({"case": case, "rows": [_short(row) for row in rows]})

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what could not be written was said when it could not
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise JournalError(
                f"{self.path} cannot be written: {error.strerror}. What is in it stays good: make room, "
                "and go on with resume=True."
            ) from error

    def _alone(self) -> None:
        """Make sure that no other run writes to the file, where the system can tell."""
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"{self.path} belongs to a run that goes on. Wait for it, or name another journal."
            ) from error
        except OSError:  # a file system without locks
            return

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Read the verdicts in the file, and return how many bytes of it are whole lines."""
        size = 0
        lines = read_bytes(self.path, JournalError).splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):  # the last line, cut off
                if number == 1 and not (
                    line.startswith(_BEGINNING) or (len(line) > _TELLING and _BEGINNING.startswith(line))
                ):
                    raise JournalError(f"{self.path} is no journal. Name another file.")
                break
            try:
                entry = parse_json(line, nonfinite=True)
                if not isinstance(entry, dict):
                    raise JournalError(f"{self.path} is no journal: line {number} is no object. Name another file.")
                if number == 1:
                    self._compare(entry, settings)
                else:
                    case = typed(entry["case"], str, "case")
                    self.done[case] = [_row(case, row) for row in typed(entry["rows"], list, "rows")]
            except (ValueError, KeyError) as error:
                raise JournalError(
                    f"{self.path}, line {number}: {error!s}. A journal is not edited: remove the line, or begin another."
                ) from error
            size += len(line)
        return size

    def _compare(self, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        if entry.get("format") != FORMAT:
            raise JournalError(f"{self.path} is no journal of this version: its first line has no {FORMAT!r}.")
        before = typed(entry["settings"], dict, "settings")
        differ = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
        if differ:
            was = "; ".join(f"{key} was {before.get(key)!r}, is {settings.get(key)!r}" for key in differ)
            raise JournalError(
                f"{self.path} was begun with other settings: {was}. Give the same, or name another journal."
            )


def _short(row: ResultRow) -> dict[str, Any]:
    """The fields of a row that are not as in a row without them. 0.0 is a number, None is none."""
    return {
        column.name: value
        for column in fields(row)
        if column.name != "case"
        and ((value := getattr(row, column.name)) != column.default or type(value) is not type(column.default))
    }


def _row(case: str, written: Any) -> ResultRow:
    row = record_of(ResultRow, {**typed(written, dict, "a row"), "case": case}, "a row")
    if row.verdict not in VERDICTS:
        raise ValueError(f"there is no verdict {row.verdict!r}; there are {choices(VERDICTS)}")
    return row
