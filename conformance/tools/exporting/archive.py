"""A folder as one .zip file whose bytes depend only on the names and contents of its files."""

from __future__ import annotations

import zipfile
from pathlib import Path

_TIME = (1980, 1, 1, 0, 0, 0)  # the first that the format knows
_MODE = 0o100644 << 16  # a regular file that everybody may read
_UNIX = 3


def write_archive(folder: Path, path: Path) -> None:
    """Write the files of a folder, sorted by name, with one time and one set of permissions.

    Small and numerous, they compress well; the same version of zlib compresses the same way.
    """
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, file in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, _MODE, _UNIX
            archive.writestr(entry, file.read_bytes())
