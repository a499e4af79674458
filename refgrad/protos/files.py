"""Results on disk: a file is written whole or not at all."""

from __future__ import annotations

import os
import reprlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import set_external_data

from refgrad.errors import OutputFileError
from refgrad.protos.walk import every_node, tensors_within

_PROTOBUF_LIMIT = 2**31 - 1
_INLINE = 1024  # bytes; smaller initializers stay in the model
_PAGE = 4096  # external data is mapped into memory by page
_CHUNK = 1 << 24


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block succeeds, and disappears when it does not.

    :raises OutputFileError: `path` cannot be written.
    """
    target = writable(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise OutputFileError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


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
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, target)
    except OSError as error:
        raise OutputFileError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone where it was renamed


def save_gradient(gradient: ModelProto, path: str | os.PathLike[str], source: str | os.PathLike[str]) -> Path | None:
    """Write the gradient of the model at `source`. Return the data file that was written beside it, or None.

    External data of `source` is referenced where both are in the same folder. Elsewhere the tensors that the gradient needs
    are copied into `<path>.data`; so are the weights of a result over 2 GB. `gradient` is modified.

    :raises OutputFileError: the result cannot be written, or would replace the model itself.
    """
    target, origin = writable(path), Path(source)
    data = target.with_name(f"{target.name}.data")
    refuse_replacing(origin, target, data)
    tensors = [*gradient.graph.initializer, *(a.t for n in gradient.graph.node for a in n.attribute if a.HasField("t"))]
    external = any(t.data_location == TensorProto.EXTERNAL for t in tensors)
    moved = external and target.parent.resolve() != origin.parent.resolve()
    if not moved and gradient.ByteSize() <= _PROTOBUF_LIMIT:
        with replacing(target) as file:
            file.write_bytes(gradient.SerializeToString())
        return None
    with replacing(target) as file, replacing(data) as data_file:
        with data_file.open("wb") as out:
            for tensor in tensors:
                _move(tensor, origin.parent, out, data.name)
        file.write_bytes(gradient.SerializeToString())
    return data


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


def refuse_replacing_inputs(target: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Refuse to write to `target` where it is one of the files that are read, or where no file can be.

    :raises OutputFileError: the reason.
    """
    file = writable(target)
    for other in filter(Path.exists, map(Path, inputs)):
        if file.exists() and file.samefile(other):
            raise OutputFileError(f"{str(file)!r} is read, too. Write to another file.")


def refuse_replacing(model: Path, *targets: Path) -> None:
    """Refuse to write to `targets` where one of them is the model at this path or holds its weights.

    :raises OutputFileError: one does.
    """
    for file in filter(Path.is_file, targets):
        if file.samefile(model):
            raise OutputFileError(f"{str(file)!r} is the model itself. Write to another file.")
        if any(other.exists() and file.samefile(other) for other in _data_files(model)):
            raise OutputFileError(f"{str(file)!r} holds the weights of the model. Write to another file.")


def _data_files(model: Path) -> set[Path]:
    """The files of external data that the model at this path refers to."""
    proto = onnx.load(model, load_external_data=False)
    tensors = (*proto.graph.initializer, *tensors_within(every_node(proto)))
    return {model.parent / entry.value for t in tensors for entry in t.external_data if entry.key == "location"}


def _move(tensor: TensorProto, folder: Path, out: BinaryIO, location: str) -> None:
    """Append the bytes of a large tensor to `out` and let the tensor refer to them."""
    external = tensor.data_location == TensorProto.EXTERNAL
    if not external and len(tensor.raw_data) <= _INLINE:
        return
    out.write(b"\0" * (-out.tell() % _PAGE))
    offset = out.tell()
    if external:
        entry = {e.key: e.value for e in tensor.external_data}
        start = int(entry.get("offset", 0))
        with (folder / entry["location"]).open("rb") as source:
            source.seek(start)
            left = int(entry.get("length", os.fstat(source.fileno()).st_size - start))
            while left and (chunk := source.read(min(left, _CHUNK))):
                left -= out.write(chunk)
    else:
        out.write(tensor.raw_data)
    tensor.raw_data = b""
    set_external_data(tensor, location, offset, out.tell() - offset)
    tensor.ClearField("raw_data")
