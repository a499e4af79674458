"""The file that a reader begins with."""

from __future__ import annotations

import os
from pathlib import Path

from refgrad.errors import OutputFileError
from refgrad.model.writing import replacing, writable
from refgrad.teaching.chapters import chapter_of


def start(number: int, path: str | os.PathLike[str]) -> Path:
    """Write the skeleton of an answer to the exercise of a chapter. It returns `path`.

    :raises OptionError: there is no such chapter.
    :raises OutputFileError: `path` exists, or cannot be written. An answer is never written over.
    """
    text, target = chapter_of(number).skeleton, writable(path)
    if target.exists() or target.is_symlink():
        raise OutputFileError(f"{str(target)!r} exists, and may be an answer. Move it away, or give another name.")
    with replacing(target) as file:
        file.write_text(text, encoding="utf-8")
    return target
