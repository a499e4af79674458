"""Arrays by name from .npz files, which may be a stranger's: no pickles, and no more memory than is allowed."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path

import numpy as np

from refgrad.errors import FeedError
from refgrad.protos.memory import allowed


def read_arrays(path: str | os.PathLike[str], what: str, max_memory: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file.

    :param what: what an error calls them, in the plural.
    :param max_memory: how many bytes all of them may have together; a small file may hold large ones. By default what
        `memory.at_most` says.
    :raises FeedError: there is no such file, it is no .npz file, or the arrays are larger than `max_memory`.
    """
    file = Path(path)
    if not file.is_file():
        raise FeedError(f"There is no file {str(file)!r}. {what} are a .npz file: numpy.savez(path, x=x, y=y).")
    if not zipfile.is_zipfile(file):
        raise FeedError(f"{str(file)!r} is no .npz file. Save arrays by name: numpy.savez(path, x=x, y=y).")
    max_memory = allowed(max_memory)
    try:
        if max_memory is not None:
            _refuse_large(file, max_memory)
        with file.open("rb") as opened:
            archive = np.load(opened, allow_pickle=False)
            return {name: archive[name] for name in archive.files}
    except FeedError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise FeedError(
            f"{str(file)!r} cannot be read as a .npz file: {error}. Write it with numpy.savez(path, x=x, y=y)."
        ) from error


def _refuse_large(file: Path, max_memory: int) -> None:
    """Refuse an archive whose arrays are larger than it may be, by what their headers and the archive's own say.

    zipfile reads no more of an entry than the archive says that it holds.
    """
    held = 0
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            held += _size_of(archive, entry)
            if held > max_memory:
                raise FeedError(
                    f"{str(file)!r} holds {held} bytes or more when it is unpacked, and max_memory is {max_memory}. "
                    "Give it more, or feed less at a time."
                )


def _size_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """How many bytes an entry takes: what the header of an array asks for is allocated before it is read."""
    with archive.open(entry) as opened:
        try:
            version = np.lib.format.read_magic(opened)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(opened)
        except ValueError:  # it is no array, and reading it says so
            return entry.file_size
    return math.prod(shape) * int(dtype.itemsize)
