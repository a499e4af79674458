"""Links to external data: the rules for following them, and their targets.

Like a location, a link beside a model is text from a stranger. Two kinds are followed. One leads into a folder that the user
named: by the parameter `data_folders`, the option `--data-folder` or the variable `REFGRAD_DATA_FOLDERS`. The other is in the
Hugging Face hub's cache, and leads from `models--<name>/snapshots/<revision>`, or a folder in it, to `blobs/<hash>` of the
same repository. The functions here return the target of a link: a path without links, to be opened without following any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from refgrad.errors import OptionError

VARIABLE = "REFGRAD_DATA_FOLDERS"
_REPOSITORY, _SNAPSHOTS, _BLOBS = "models--", "snapshots", "blobs"  # folders of the hub's cache
_NAMED: ContextVar[tuple[str, ...]] = ContextVar("_NAMED", default=())

P = ParamSpec("P")
R = TypeVar("R")
Folders = Iterable[str | os.PathLike[str]]


@contextmanager
def data_in(folders: Folders | None) -> Iterator[None]:
    """Let links to external data lead into these folders, and into folders in them. A link that leads elsewhere is refused.

    >>> with data_in(["/data/weights"]):  # doctest: +SKIP
    ...     gradient = refgrad.gradient("model.onnx")

    :param folders: folders that links may lead into, in addition to the folders that were named before.
    :raises OptionError: one of them is no folder.
    """
    token = _NAMED.set(named(folders))
    try:
        yield
    finally:
        _NAMED.reset(token)


def with_data_in(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` such that links may lead into its argument `data_folders` while it runs."""

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        folders: Any = keywords.pop("data_folders", None)
        with data_in(folders):
            return function(*arguments, **keywords)

    return call


def named(folders: Folders | None = None) -> tuple[str, ...]:
    """The folders that were named in this process, and these.

    :raises OptionError: one of them is no folder.
    """
    return (*_NAMED.get(), *checked(folders))


def checked(folders: Folders | None, what: str = "data_folders") -> tuple[str, ...]:
    """The absolute paths of named folders.

    :raises OptionError: one of them is no folder.
    """
    if folders is None:
        return ()
    if isinstance(folders, str | os.PathLike):
        raise OptionError(f"{what}={str(folders)!r} is a path. Give a list of folders: [{str(folders)!r}].")
    given: Any = folders
    listed = list(given) if isinstance(given, Iterable) else [given]
    if not all(one and isinstance(one, str | os.PathLike) for one in listed):
        raise OptionError(f"{what}={folders!r} is not a list of paths. Give one, such as ['weights'].")
    whole = tuple(os.path.abspath(folder) for folder in listed)
    for folder in whole:
        if not os.path.isdir(folder):
            raise OptionError(
                f"{what}: there is no folder {folder!r}. Name the folder that links to external data lead to."
            )
    return whole


def places(folder: Path, location: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """The allowed targets of the link at `location` in `folder`: each a trusted folder, and the path of the file in it."""
    yield from _in_cache(folder, location)
    target = Path(os.path.realpath(folder.joinpath(*location)))
    for trusted in (*named(), *filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))):
        root = Path(os.path.realpath(trusted))
        if target != root and target.is_relative_to(root):
            yield root, list(target.relative_to(root).parts)


def _in_cache(folder: Path, location: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """The blob of the same repository that a link in a snapshot of the hub's cache names directly, not by another link."""
    at = Path(os.path.realpath(folder)).joinpath(*location)
    try:
        text = Path(os.readlink(at))
    except OSError:  # it is no link, or one of its folders is a link
        return
    below, blob = at.parent.parts, text.name
    for place, part in enumerate(below):
        is_snapshot = part == _SNAPSHOTS and place + 1 < len(below) and below[place - 1].startswith(_REPOSITORY)
        if not is_snapshot or blob in ("", os.pardir):
            continue
        repository = Path(*below[:place])
        if text.is_absolute():
            leads_there = os.path.realpath(text.parent) == str(repository / _BLOBS)
        else:
            leads_there = text.parts == (*[os.pardir] * (len(below) - place), _BLOBS, blob)
        if leads_there:
            yield repository, [_BLOBS, blob]
