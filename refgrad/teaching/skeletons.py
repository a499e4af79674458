"""The file that a reader begins with."""

from __future__ import annotations

import os
from pathlib import Path

from refgrad.errors import OutputFileError
from refgrad.protos.files import writable
from refgrad.teaching.chapters import chapter_of


def start(number: int, path: str | os.PathLike[str]) -> Path:
    """Write the skeleton of an answer to the exercise of a chapter. It returns `path`.

    :raises OptionError: there is no such chapter.
    :raises OutputFileError: `path` exists, or cannot be written. An answer is never written over.
    """
    text, target = chapter_of(number).skeleton, writable(path)
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OutputFileError(
            f"{str(target)!r} exists, and may be an answer. Move it away, or give another name."
        ) from None
    except OSError as error:
        target.unlink(missing_ok=True)
        raise OutputFileError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from error
    return target
