"""External data: the file beside a model that holds the values of a tensor, and the rules for reading it.

A model comes from a stranger, and so do the locations in it. They are resolved here and nowhere else. A location is the
relative path of a regular file in the folder of the model, without a link on the way except those that may be followed
(`links`), and the data read there has the size of the tensor. Checks hold for the opened file: replacing it between the
check and the reading changes nothing.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from refgrad import links
from refgrad.errors import InvalidModelError
from refgrad.protos.memory import allowed
from refgrad.protos.messages import LARGEST
from refgrad.protos.traverse import tensors_without_initializers
from refgrad.protos.types import KNOWN

_FIELDS = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data")
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
_COPIED, _GREAT = 1 << 18, 1 << 28  # bytes: to learn the length of raw data is to copy it
_MAPS = 32  # files of a model that are mapped: each keeps a descriptor
_KEYS = ("location", "offset", "length")
_CHUNK = 1 << 20
_SHOWN = 200  # characters of a name in a message
_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # of a file; onnx's checker fails at longer ones
_PUT_BACK = "Put the data file back beside the model."
_EXPORT = "Export the model again."
_FILE = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_FILE_ITSELF = _FILE | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link; a FIFO does not block
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER_ITSELF = _FOLDER | getattr(os, "O_NOFOLLOW", 0)
_FROM_FOLDER = {os.open, os.stat} <= os.supports_dir_fd  # Windows opens by whole paths alone
_PACKED: dict[int, int] = {  # bits of an element, where several share a byte
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.FLOAT6E2M3: 6,
    TensorProto.FLOAT6E3M2: 6,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}


@dataclass(frozen=True, eq=False)
class Opened:
    """A model in memory whose external data stays in files beside `path`, the path of the model that it was made of."""

    proto: ModelProto
    path: Path


ModelSource: TypeAlias = "ModelProto | Opened | str | os.PathLike[str]"


PLACE_OF_DATA = "Give the path of a model in that folder: data_beside='model.onnx'"


def place_of(model: ModelSource) -> str | os.PathLike[str]:
    """The path beside which the external data of a model lies; "" for a model in memory without one."""
    if isinstance(model, Opened):
        return model.path
    return "" if isinstance(model, ModelProto) else model


class ExternalData:
    """The external data of the model at `path`. Use it in `with`: it keeps the last file open.

    :raises InvalidModelError: each method, for a tensor whose data may not be read. The message names tensor and location.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._model = Path(path)
        self._location: str | None = None
        self._file = -1
        self._size = 0
        self._loaded = 0
        self._is_linked = False
        self._mapped: dict[str, mmap.mmap] = {}

    def __enter__(self) -> ExternalData:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def check(self, tensor: TensorProto, missing: bool = False) -> None:
        """Check that the data of `tensor` can be read. With `missing`, its file need not be there."""
        try:
            self._extent(tensor)
        except _UnusableError as error:
            if not (missing and error.is_missing):
                raise self._refusal(tensor, error) from error

    def is_linked(self, tensor: TensorProto) -> bool:
        """True if a link leads to the data of `tensor`: other programs may refuse to follow it. False for a missing file."""
        self.check(tensor, missing=True)
        return self._is_linked

    def chunks(self, tensor: TensorProto) -> Iterator[bytes]:
        """Yield the data of `tensor` part by part."""
        try:
            offset, left = self._extent(tensor)
            while left:
                os.lseek(self._file, offset, os.SEEK_SET)
                chunk = os.read(self._file, min(left, _CHUNK))
                if not chunk:
                    raise _UnusableError("the file became shorter while it was read", "Read the model again.")
                offset, left = offset + len(chunk), left - len(chunk)
                yield chunk
        except _UnusableError as error:
            raise self._refusal(tensor, error) from error

    def load(self, tensor: TensorProto) -> None:
        """Put the data of `tensor` into it.

        :raises InvalidModelError: this and what was loaded before are more than may be taken (`memory.at_most`).
        """
        self.count(tensor)
        tensor.raw_data = b"".join(self.chunks(tensor))
        tensor.ClearField("data_location")
        tensor.ClearField("external_data")

    def array(self, tensor: TensorProto, rows: slice | None = None) -> np.ndarray:
        """The values of `tensor`, read into memory once, or only these rows of its first axis.

        :raises InvalidModelError: as `load`.
        """
        if not _lies_as_array(tensor):
            whole = TensorProto()
            whole.CopyFrom(tensor)
            self.load(whole)
            return array_of(whole) if rows is None else array_of(whole)[rows]
        shape, first = tuple(tensor.dims), 0
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            shape = (last - first, *shape[1:])
        self.count(tensor, math.prod(shape))
        array = np.empty(shape, dtype_of(tensor))
        left = array.reshape(-1).view(np.uint8).data
        try:
            offset, _ = self._extent(tensor)
            file = io.FileIO(self._file, closefd=False)
            file.seek(offset + first * math.prod(shape[1:]) * array.itemsize)
            while left:
                count = file.readinto(left[:_CHUNK])
                if not count:
                    raise _UnusableError("the file became shorter while it was read", "Read the model again.")
                left = left[count:]
        except _UnusableError as error:
            raise self._refusal(tensor, error) from error
        return array

    def mapped(self, tensor: TensorProto) -> np.ndarray:
        """The values of `tensor` where they lie in their file, mapped into memory, or a copy of a few. They are read-only.

        The file must not be written to as long as the array is used. Replacing it changes nothing.
        """
        try:
            offset, size = self._extent(tensor)
            if not _lies_as_array(tensor) or size < _COPIED or offset % dtype_of(tensor).itemsize:
                return _frozen(self.array(tensor))
            location = _location(tensor)
            if location not in self._mapped:
                if len(self._mapped) == _MAPS:
                    return _frozen(self.array(tensor))
                self._mapped[location] = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        except _UnusableError as error:
            raise self._refusal(tensor, error) from error
        except OSError:  # the file system does not map files
            return _frozen(self.array(tensor))
        values = np.frombuffer(self._mapped[location], np.uint8, size, offset)
        return values.view(dtype_of(tensor)).reshape(tuple(tensor.dims))

    def count(self, tensor: TensorProto, elements: int | None = None) -> None:
        """Count the bytes of `tensor`, which is read or mapped, or of so many of its elements.

        :raises InvalidModelError: these and those before are more than may be taken (`memory.at_most`).
        """
        limit = allowed()
        if limit is None:
            return
        self.check(tensor)
        self._loaded += _bytes_of(tensor) if elements is None else elements * dtype_of(tensor).itemsize
        if self._loaded > limit:
            raise InvalidModelError(
                f"With tensor {_shown(tensor.name)} the external data of {str(self._model)!r} takes {self._loaded} bytes, "
                f"and max_memory is {limit}. Give it more, or do not take this model."
            )

    def _refusal(self, tensor: TensorProto, error: _UnusableError) -> InvalidModelError:
        return _refusal(tensor, error, f" of {str(self._model)!r}" if self._model.name else "")

    def _extent(self, tensor: TensorProto) -> tuple[int, int]:
        """Open the file of `tensor`. Return where its data begins, and how many bytes it has."""
        location, offset, length = _entries(tensor)
        if location != self._location:
            self._close()
            self._open(location)
            self._location = location
        needed = _bytes_of(tensor)
        if length is None and offset <= self._size:
            length = self._size - offset
        end = offset + (needed if length is None else length)
        if end > self._size:
            raise _UnusableError(f"it is truncated: the file has {self._size} bytes, {end} are needed", _PUT_BACK)
        if length != needed:
            what = f"{TensorProto.DataType.Name(tensor.data_type)}{list(tensor.dims)}"
            raise _UnusableError(f"it has {length} bytes, and {what} has {needed}", _EXPORT)
        return offset, needed

    def _open(self, location: str) -> None:
        *folders, name = _parts(location)
        folder = self._model.parent
        try:
            self._file, self._is_linked = _opened(folder, [*folders, name])
            found = os.fstat(self._file)
            is_model = os.path.samestat(found, self._model.stat())
        except FileNotFoundError as error:
            whole = _shown(str(folder / location))
            raise _UnusableError(f"it is missing: there is no file {whole}", _PUT_BACK, is_missing=True) from error
        except OSError as error:
            said = error.strerror or str(error)
            raise _UnusableError(f"the file cannot be opened: {said}", "Check its name and permissions.") from error
        except ValueError as error:  # NUL, or a character that no file name has
            raise _UnusableError("no file can have this name", _EXPORT) from error
        if is_model:
            raise _UnusableError("this is the file of the model itself", _EXPORT)
        if found.st_nlink > 1:
            raise _UnusableError(
                f"{_shown(name)} has a second name (hard link), which may lie outside of the model's folder",
                "Put a copy of the file in its place.",
            )
        self._size = found.st_size

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._location, self._is_linked = -1, None, False


class _UnusableError(Exception):
    """Why the data of a tensor cannot be used, and what to do."""

    def __init__(self, why: str, advice: str, is_missing: bool = False) -> None:
        super().__init__(f"{why}. {advice}")
        self.is_missing = is_missing


def _refusal(tensor: TensorProto, error: _UnusableError, where: str = "") -> InvalidModelError:
    whose = f"tensor {_shown(tensor.name)}{where}" if where else _shown(tensor.name)
    return InvalidModelError(f"The external data of {whose} at {_shown(_location(tensor))} cannot be used: {error}")


class _LinkError(_UnusableError):
    """Raised for a location that has a link in it."""

    def __init__(self, part: str) -> None:
        super().__init__(
            f"{_shown(part)} is a link, which may lead out of the model's folder",
            "If you trust the folder that it leads to, name that folder: data_folders=[...], "
            f"or the environment variable {links.VARIABLE}.",
        )


def _opened(folder: Path, location: list[str]) -> tuple[int, bool]:
    """Open the file at `location` in `folder`. Return its descriptor, and True if a link led there."""
    try:
        return _walked(folder, location), False
    except _LinkError:
        for trusted, below in links.places(folder, location):
            return _walked(trusted, below), True
        raise


def _walked(folder: Path, location: list[str]) -> int:
    with closing(_Place(folder)) as place:
        for part in location[:-1]:
            place.enter(part)
        return place.open(location[-1])


class _Place:
    """A folder that is walked into part by part; no part is a link."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._descriptor = os.open(folder, _FOLDER) if _FROM_FOLDER else None

    def enter(self, part: str) -> None:
        """Go into the folder `part`."""
        self._seen(part, stat.S_ISDIR, "no folder")
        if self._descriptor is not None:
            below = os.open(part, _FOLDER_ITSELF, dir_fd=self._descriptor)
            os.close(self._descriptor)
            self._descriptor = below
        self._path /= part

    def open(self, name: str) -> int:
        """Open the file `name`, and return its descriptor."""
        seen = self._seen(name, stat.S_ISREG, "no regular file")
        whole = name if self._descriptor is not None else str(self._path / name)
        opened = os.open(whole, _FILE_ITSELF, dir_fd=self._descriptor)
        if not os.path.samestat(seen, os.fstat(opened)):  # replaced in between
            os.close(opened)
            raise _LinkError(name)
        return opened

    def _seen(self, part: str, wanted: Callable[[int], bool], what: str) -> os.stat_result:
        whole = part if self._descriptor is not None else str(self._path / part)
        seen = os.stat(whole, dir_fd=self._descriptor, follow_symlinks=False)
        if stat.S_ISLNK(seen.st_mode) or getattr(seen, "st_reparse_tag", False):
            raise _LinkError(part)
        if not wanted(seen.st_mode):
            raise _UnusableError(f"{_shown(part)} is {'a folder' if stat.S_ISDIR(seen.st_mode) else what}", _PUT_BACK)
        return seen

    def close(self) -> None:
        """Close the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)


def check(model: ModelProto, path: str | os.PathLike[str], missing: bool = False) -> None:
    """Check the external data of every tensor of the model at `path`. With `missing`, files need not be there.

    :raises InvalidModelError: something may not be read, or does not fit its tensor.
    """
    with ExternalData(path) as data:
        for tensor in external_tensors(model):
            data.check(tensor, missing)


def load(model: ModelProto, path: str | os.PathLike[str], tensors: Iterable[TensorProto] | None = None) -> None:
    """Read the external data of `tensors`, or of every tensor of `model`, into them. The model lies at `path`.

    :raises InvalidModelError: something may not be read, or does not fit its tensor.
    """
    with ExternalData(path) as data:
        for tensor in external_tensors(model) if tensors is None else filter(is_external, tensors):
            data.load(tensor)


def loaded(model: Opened) -> ModelProto:
    """A copy of the model with its data in memory.

    :raises InvalidModelError: something may not be read, or does not fit its tensor.
    """
    whole = ModelProto()
    whole.CopyFrom(model.proto)
    load(whole, model.path)
    return whole


def links_leave(model: ModelProto, path: str | os.PathLike[str]) -> bool:
    """True if a link leads to external data outside of the real folder of the model at `path` (with links resolved).

    :raises InvalidModelError: something may not be read.
    """
    folder = Path(os.path.realpath(path)).parent
    with ExternalData(path) as data:
        linked = {_location(tensor) for tensor in external_tensors(model) if data.is_linked(tensor)}
    files = (Path(os.path.realpath(Path(path).parent / location)) for location in linked)
    return not all(file.is_relative_to(folder) for file in files)


def values_of(tensor: TensorProto, data: ExternalData) -> np.ndarray:
    """The values of a tensor, wherever they lie. The array may be read-only.

    :raises InvalidModelError: its type is unknown, or its data cannot be used.
    """
    return data.array(tensor) if is_external(tensor) else array_of(tensor)


def without_links(model: Opened) -> tuple[ModelProto, str]:
    """The model with the places of its data in a folder, the second result, where no link leads to them.

    :raises InvalidModelError: something may not be read.
    """
    folder = os.path.abspath(model.path.parent)
    with ExternalData(model.path) as data:
        if not any(data.is_linked(tensor) for tensor in external_tensors(model.proto)):
            return model.proto, folder
    made = ModelProto()
    made.CopyFrom(model.proto)
    entries = [e for tensor in external_tensors(made) for e in tensor.external_data if e.key == "location"]
    files = {entry.value: os.path.realpath(os.path.join(folder, entry.value)) for entry in entries}
    common = os.path.commonpath([os.path.dirname(file) for file in files.values()])
    for entry in entries:
        entry.value = Path(os.path.relpath(files[entry.value], common)).as_posix()
    return made, common


def is_external(tensor: TensorProto) -> bool:
    """True if the values of `tensor` lie in a file beside the model."""
    return tensor.data_location == TensorProto.EXTERNAL


def external_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of `model` whose values lie in a file."""
    yield from filter(is_external, model.graph.initializer)
    yield from filter(is_external, tensors_without_initializers(model))


def bytes_in_files(model: ModelProto) -> int:
    """How many bytes the tensors have whose values lie in files. They have been checked."""
    return sum(map(_bytes_of, external_tensors(model)))


def files_beside(model: ModelProto, path: str | os.PathLike[str]) -> set[Path]:
    """The files that tensors of the model at `path` name, whether they may be read or not."""
    folder = Path(path).parent
    named = (entry for tensor in external_tensors(model) for entry in tensor.external_data if entry.key == "location")
    return {folder / entry.value for entry in named if "\0" not in entry.value}


def refuse_unknown_type(tensor: TensorProto) -> None:
    """Refuse a tensor of a type that onnx does not know.

    :raises InvalidModelError: onnx does not know the type.
    """
    if tensor.data_type not in KNOWN:
        raise InvalidModelError(
            f"Tensor {tensor.name!r} has the type {tensor.data_type}, which onnx does not know. Export the model again, "
            "or upgrade onnx."
        )


def dtype_of(tensor: TensorProto) -> np.dtype[Any]:
    """The type of a tensor's values.

    :raises InvalidModelError: the tensor has a type that onnx does not know.
    """
    refuse_unknown_type(tensor)
    return helper.tensor_dtype_to_np_dtype(tensor.data_type)


def refuse_mismatch(tensor: TensorProto) -> None:
    """Refuse a tensor whose data does not fit its type and shape. Raw data of 256 KiB to 256 MiB is not measured.

    :raises InvalidModelError: it does not.
    """
    refuse_unknown_type(tensor)
    held = [name for name in _FIELDS if len(getattr(tensor, name))]
    count = math.prod(tensor.dims)
    if any(dim < 0 for dim in tensor.dims):
        what = "a size below 0"
    elif is_external(tensor):
        _refuse_place(tensor)
        what = "data in the model as well as in a file" if held or tensor.HasField("raw_data") else ""
    elif len(held) > 1 or (held and tensor.HasField("raw_data") and tensor.raw_data):
        what = "data in more than one field"
    elif held and held[0] != (field := helper.tensor_dtype_to_field(tensor.data_type)):
        what = f"data in {held[0]}, and not in {field}"
    elif held:
        needed = -(-count * _PACKED.get(tensor.data_type, 8) // 8) * (1 + (tensor.data_type in _COMPLEX))
        what = "" if len(getattr(tensor, held[0])) == needed else "data of another size"
    elif tensor.data_type == TensorProto.STRING:
        what = "no strings" if count else ""
    elif (needed := _bytes_of(tensor)) and not tensor.HasField("raw_data"):
        what = "no data"
    elif needed > LARGEST:
        what = "less data than that, which no file holds"
    else:
        is_measured = (
            needed < _COPIED or needed >= _GREAT
        )  # more than the usual weights: a size that a few bytes may declare
        what = "data of another size" if is_measured and len(tensor.raw_data) != needed else ""
    if what:
        shape = f"{TensorProto.DataType.Name(tensor.data_type)}{list(tensor.dims[:8])}"
        raise InvalidModelError(f"Tensor {_shown(tensor.name)} of {shape} has {what}. Export the model again.")


def _refuse_place(tensor: TensorProto) -> None:
    try:
        _parts(_entries(tensor)[0])
    except _UnusableError as error:
        raise _refusal(tensor, error) from error


def refuse_external(tensor: TensorProto, advice: str = "Give the path of the model") -> None:
    """Refuse a tensor whose values lie in a file, where no folder is known to look for it.

    :raises InvalidModelError: they do.
    """
    if is_external(tensor):
        raise InvalidModelError(
            f"The values of tensor {_shown(tensor.name)} lie in a file, {_shown(_location(tensor))}, and only a model that is "
            f"read by its path has a folder to look in. {advice}, or load it with its external data."
        )


def array_of(tensor: TensorProto) -> np.ndarray:
    """Return the values of a tensor that holds them.

    :raises InvalidModelError: its type is unknown, its data does not fit its shape, or its values lie in a file.
    """
    refuse_unknown_type(tensor)
    refuse_external(tensor)
    try:
        return numpy_helper.to_array(tensor)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidModelError(f"Tensor {tensor.name!r} cannot be read: {error}. Export the model again.") from error


def _lies_as_array(tensor: TensorProto) -> bool:
    """True if an array can share the memory of a tensor: each element has bytes of its own."""
    refuse_unknown_type(tensor)
    return tensor.data_type not in _PACKED and tensor.data_type != TensorProto.STRING and sys.byteorder == "little"


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _entries(tensor: TensorProto) -> tuple[str, int, int | None]:
    """The location, the offset and the length, None where none is given."""
    found: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in found and entry.key in _KEYS:
            raise _UnusableError(f"its {entry.key} is given twice", _EXPORT)
        found[entry.key] = entry.value
    for key in ("offset", "length"):
        if not re.fullmatch(r"[0-9]{1,19}", found.get(key, "0")):
            raise _UnusableError(f"its {key} is no number of bytes: {_shown(found[key])}", _EXPORT)
    return found.get("location", ""), int(found.get("offset", 0)), int(found["length"]) if "length" in found else None


def _parts(location: str) -> list[str]:
    """The folders of a location, and the name of its file."""
    is_windows = os.name == "nt"
    if location.startswith("/") or (is_windows and (location.startswith("\\") or ":" in location)):
        raise _UnusableError("the path is absolute, and data lies in the folder of the model", _EXPORT)
    parts = [part for part in re.split(r"[\\/]" if is_windows else "/", location) if part not in ("", ".")]
    if ".." in parts:
        raise _UnusableError("the path leads upwards (..), and data lies in the folder of the model", _EXPORT)
    if not parts:
        raise _UnusableError("this is not the name of a file", _EXPORT)
    if max(len(part.encode(errors="replace")) for part in parts) > _LONGEST_NAME or len(location) > _LONGEST_PATH:
        raise _UnusableError("no file can have so long a name", _EXPORT)
    return parts


def size_in_model(tensor: TensorProto) -> int:
    """How many bytes the numbers of a tensor take in the file of a model, about."""
    if is_external(tensor) or tensor.data_type not in KNOWN or tensor.data_type == TensorProto.STRING:
        return 0
    return _bytes_of(tensor)


def _bytes_of(tensor: TensorProto) -> int:
    """How many bytes the values of `tensor` have."""
    if tensor.data_type not in KNOWN:
        raise _UnusableError(f"onnx does not know its type, {tensor.data_type}", _EXPORT)
    if tensor.data_type == TensorProto.STRING:
        raise _UnusableError("strings cannot lie in a file", _EXPORT)
    if any(dim < 0 for dim in tensor.dims):
        raise _UnusableError(f"the shape {list(tensor.dims)} has a size below 0", _EXPORT)
    bits = _PACKED.get(tensor.data_type) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-math.prod(tensor.dims) * bits // 8)


def _location(tensor: TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
