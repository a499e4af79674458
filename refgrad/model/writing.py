"""Results on disk: a file is written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import reprlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import set_external_data

from refgrad.errors import InvalidModelError, OutputFileError
from refgrad.model import native
from refgrad.model.external import ExternalData, external_tensors, files_beside, is_external, size_in_model
from refgrad.protos.inputs import is_regular, open_regular
from refgrad.protos.messages import LARGEST
from refgrad.protos.traverse import tensors_without_initializers

_INLINE = 1024  # bytes; smaller initializers stay in the model
_PAGE = 4096  # external data is mapped into memory by page
_Key: TypeAlias = tuple[int | str, ...]  # what tells one file from another


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block succeeds, and disappears when it does not.

    :raises OutputFileError: `path` cannot be written.
    """
    target = writable(path)
    temporary = _temporary_beside(target)
    announce(temporary, True)
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise OutputFileError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):  # it is not there, or nothing can be
            temporary.unlink()
        announce(temporary, False)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside `path` that gets its name when the block succeeds, and disappears when it does not.

    :raises OutputFileError: `path` is there already, or cannot be made.
    """
    target = Path(path)
    try:
        is_taken = target.exists() or target.is_symlink()
    except OSError as error:
        raise OutputFileError(f"{reprlib.repr(str(target))} cannot be written: {error.strerror}.") from error
    if is_taken:
        raise OutputFileError(f"{str(target)!r} exists. Give the name of a folder that does not, and it is made.")
    temporary = _temporary_beside(target)
    announce(temporary, True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, target)
    except OSError as error:
        raise OutputFileError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone where it was renamed
        announce(temporary, False)


def announce(temporary: Path, is_there: bool) -> None:
    """Say that a temporary file is about to be made, or is gone. A command tells its parent, which removes leftover files."""


def _temporary_beside(target: Path) -> Path:
    """A name for a temporary file: a short one, since the target's name may be as long as a name can be."""
    return target.with_name(f".refgrad-{secrets.token_hex(8)}.tmp")


def save_made(
    made: ModelProto, path: str | os.PathLike[str], source: ModelProto | str | os.PathLike[str]
) -> Path | None:
    """Write what was made of `source`, a model in memory or at a path: as `save_gradient`, where there is a path."""
    if not isinstance(source, ModelProto):
        return save_gradient(made, path, source)
    with replacing(path) as file:
        file.write_bytes(made.SerializeToString())
    return None


def save_gradient(
    gradient: ModelProto,
    path: str | os.PathLike[str],
    source: str | os.PathLike[str],
    values: Mapping[str, Iterable[np.ndarray]] | None = None,
) -> Path | None:
    """Write the gradient of the model at `source`. Return the data file that was written beside it, or None.

    External data of `source` is referenced if both models are in the same folder. Otherwise the tensors that the gradient
    needs are copied into `<path>.data`. Tensors behind a link are copied, too, because runtimes refuse to follow a link out of
    the folder; so are the weights of a result over 2 GB. `gradient` is modified.

    :param values: new values of initializers whose values lie in a file, by name, as arrays that follow each other. They are
        written into `<path>.data`.
    :raises OutputFileError: the result cannot be written, or would replace the model itself.
    """
    target, origin = writable(path), Path(source)
    data = data_file_of(target)
    refuse_replacing([target, data], models=[origin])
    values = values or {}
    new = [tensor for tensor in gradient.graph.initializer if tensor.name in values]
    kept = [tensor for tensor in gradient.graph.initializer if tensor.name not in values]
    beside = [*filter(is_external, (*kept, *tensors_without_initializers(gradient)))]
    if target.parent.resolve() == origin.parent.resolve() and not _is_linked(beside, origin):
        beside = []
    inner = [*kept, *(a.t for n in gradient.graph.node for a in n.attribute if a.HasField("t"))]
    inner = [tensor for tensor in inner if not is_external(tensor)]
    if not beside and not new and (whole := _serialized(gradient, inner)) is not None:
        with replacing(target) as file:
            file.write_bytes(whole)
        return None
    large = [tensor for tensor in inner if len(tensor.raw_data) > _INLINE]
    with (
        _kept_unless_both(data),
        replacing(target) as file,
        replacing(data) as data_file,
        ExternalData(origin) as source_data,
    ):
        with data_file.open("wb") as out:
            for tensor in beside:
                _move(tensor, source_data.chunks(tensor), out, data.name)
            for tensor in large:
                _move(tensor, [tensor.raw_data], out, data.name)
            for tensor in new:
                _move(tensor, map(_bytes, values[tensor.name]), out, data.name)
        file.write_bytes(gradient.SerializeToString())
    return data


def _serialized(model: ModelProto, inner: Iterable[TensorProto]) -> bytes | None:
    """The bytes of a model; None if they are too many for a file. `inner` are its tensors that lie in it."""
    if sum(size_in_model(tensor) for tensor in inner) > LARGEST:
        return None
    try:
        whole: bytes = model.SerializeToString()
    except (EncodeError, ValueError):  # of more than 2 GB
        return None
    return whole if len(whole) <= LARGEST else None


def _is_linked(tensors: Iterable[TensorProto], model: Path) -> bool:
    with ExternalData(model) as data:
        return any(data.is_linked(tensor) for tensor in tensors)


@contextmanager
def _kept_unless_both(data: Path) -> Iterator[None]:
    """Restore `data` if the block fails after it was replaced: the file that refers to it was not replaced."""
    before, existed = _temporary_beside(data), data.exists()
    announce(before, True)
    with contextlib.suppress(OSError):  # nothing was there, or the file system has no links
        os.link(data, before)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if before.exists():
                os.replace(before, data)
            elif not existed:
                data.unlink()
        raise
    finally:
        with contextlib.suppress(OSError):
            before.unlink()
        announce(before, False)


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file, with its external data if it is a model; of a folder, of all its files and their names.

    :raises InvalidModelError: the external data cannot be used, or a file cannot be read.
    """
    whole = hashlib.sha256()
    if path.is_dir():
        files = [file for file in sorted(_files_within(path)) if file.is_file()]
    else:
        files = [path, *sorted(_checked_data(path))]
    for file in files:
        whole.update(os.fsencode(file.name) + b"\0" if file != path else b"")
        with open_regular(file, InvalidModelError) as read:
            whole.update(hashlib.file_digest(read, "sha256").digest())
    return whole.hexdigest()


def data_file_of(path: Path) -> Path:
    """The path of the file with the weights of a model at `path`, if they are not in it."""
    return path.with_name(f"{path.name}.data")


def writable(path: str | os.PathLike[str]) -> Path:
    """Return `path`.

    :raises OutputFileError: no file can be there: it is a folder or a device, its folder does not exist, the name is too long.
    """
    target = Path(path)
    try:
        is_taken = target.exists() and not target.is_file()
    except OSError as error:  # the name is too long
        raise OutputFileError(f"{reprlib.repr(str(target))} cannot be written: {error.strerror}.") from error
    if is_taken:
        raise OutputFileError(f"{str(target)!r} exists and is no regular file. Give the name of a file to write.")
    if not target.parent.is_dir():
        raise OutputFileError(
            f"There is no folder {str(target.parent)!r} to write {target.name!r} into. Make it first."
        )
    return target


def refuse_replacing(
    outputs: Iterable[str | os.PathLike[str]],
    inputs: Iterable[str | os.PathLike[str]] = (),
    models: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Refuse to write to `outputs` where one of them is read, or where two of them are one file. Files count, not names.

    :param models: models that are read, with the files of their external data, or folders of which every file may be.
    :raises OutputFileError: the reason.
    """
    seen: dict[_Key, Path] = {}
    existing: dict[_Key, Path] = {}
    for path in map(Path, outputs):
        identity = _identity(path)
        key = identity or _place(path)
        if key in seen:
            both = repr(str(path)) if path == seen[key] else f"{str(seen[key])!r}, which is {str(path)!r},"
            raise OutputFileError(f"{both} would be written twice. Give each output a file of its own.")
        seen[key] = path
        if identity:
            existing[identity] = path
    if not existing:  # nothing is replaced
        return
    for other, what in _read_files(inputs, models):
        replaced = existing.get(_identity(other))
        if replaced is not None:
            raise OutputFileError(f"{str(replaced)!r} {what}. Write to another file.")


def _identity(path: Path) -> _Key:
    """The numbers of the file that `path` leads to, or nothing where there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # no file, or a name that none can have
        return ()
    return (found.st_dev, found.st_ino)


def _place(path: Path) -> _Key:
    """The folder and the name of a file made at `path`, without case: some file systems do not tell capital letters."""
    made = Path(os.path.realpath(path))  # where a link leads to that leads nowhere yet
    return (*(_identity(made.parent) or (str(made.parent),)), made.name.casefold())


def _read_files(
    inputs: Iterable[str | os.PathLike[str]], models: Iterable[str | os.PathLike[str]]
) -> Iterator[tuple[Path, str]]:
    for path in map(Path, inputs):
        yield path, "is read, too"
        if path.is_dir():
            yield from ((file, f"lies in {str(path)!r}, which is read") for file in _files_within(path))
    for path in map(Path, models):
        yield path, "is the model itself"
        if path.is_dir():
            yield from ((file, f"lies in {str(path)!r}, which is read") for file in _files_within(path))
            continue
        yield from ((file, "holds the weights of the model") for file in _data_files(path))


def _checked_data(model: Path) -> set[Path]:
    """The files of the external data of a model, each of which may be read."""
    if not is_regular(model):
        return set()
    try:
        proto = native.load(model)
    except Exception:  # no model
        return set()
    with ExternalData(model) as data:
        for tensor in external_tensors(proto):
            data.check(tensor)
    return files_beside(proto, model)


def _files_within(folder: Path) -> Iterator[Path]:
    """Every file in a folder, and in those that it holds or that links in it lead to."""
    folders, seen = [folder], set[_Key]()
    while folders:
        folder = folders.pop()
        if _identity(folder) in seen:
            continue
        seen.add(_identity(folder))
        with contextlib.suppress(OSError):  # nobody may read it
            for path in folder.iterdir():
                if path.is_dir():
                    folders.append(path)
                else:
                    yield path


def _data_files(model: Path) -> set[Path]:
    if not is_regular(model):
        return set()
    try:
        return files_beside(native.load(model), model)
    except Exception:  # no model, as whoever reads it says
        return set()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _move(tensor: TensorProto, chunks: Iterable[bytes | memoryview], out: BinaryIO, location: str) -> None:
    """Append the bytes of a tensor to `out` and let the tensor refer to them."""
    out.write(b"\0" * (-out.tell() % _PAGE))
    offset = out.tell()
    for chunk in chunks:
        out.write(chunk)
    tensor.raw_data = b""
    set_external_data(tensor, location, offset, out.tell() - offset)
    tensor.ClearField("raw_data")
