"""Arrays from .npz and .npy files, which may be a stranger's: no pickles, and no more memory than is allowed.

A header is checked before any memory is allocated for its array. It has to describe an array of numbers, booleans, texts or
bytes, and the array has to be as large as the data in the file.
"""

from __future__ import annotations

import ast
import lzma
import math
import os
import re
import reprlib
import struct
import zipfile
import zlib
from typing import IO, NamedTuple

import numpy as np

from refgrad.errors import FeedError, RefgradError
from refgrad.protos.inputs import open_regular
from refgrad.protos.memory import allowed

_MAGIC = b"\x93NUMPY"
_LENGTHS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}  # the type of the header's length, by version
_LONGEST = 1 << 16  # bytes of a header
_KEYS = {"descr", "fortran_order", "shape"}
_TYPES = re.compile(r"[<>=|]?[biufcSUV]\d{1,9}")  # no objects, no dates, no fields
_MOST = 2**63 - 1  # bytes that an array may have
_INFLATED = 1100  # unpacked bytes per packed byte that DEFLATE reaches at most, rounded up
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_IS_ENCRYPTED, _IS_AFTER = 1, 8  # flags of an entry; with the second, its sizes come after its data
_LOCAL = struct.Struct("<4s5H3L2H")  # the header before an entry
_ELSEWHERE = 0xFFFFFFFF  # a size that is written behind the header
_BEGINNINGS = (b"PK\x03\x04", b"PK\x05\x06")  # of an archive; the second is of an archive without entries
_LAST = 0x10FFFF  # of Unicode
_SURROGATES = 0xD800, 0xDFFF  # halves of characters, which no text has
_CHUNK = 1 << 24
# What zipfile, zlib and NumPy raise for files that are damaged. NotImplementedError is a RuntimeError.
_DAMAGED = (
    OSError, ValueError, EOFError, LookupError, RuntimeError, OverflowError, TypeError, SyntaxError, MemoryError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error,
)  # fmt: skip


class _Header(NamedTuple):
    """The array that a header describes, and the length of the header in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    is_fortran: bool
    length: int

    @property
    def size(self) -> int:
        """The number of bytes that the numbers take."""
        return math.prod(self.shape) * self.dtype.itemsize


_SEPARATORS = {".csv": ",", ".tsv": "\\t"}  # of tables in text, by the end of the name


def _conversion(path: str) -> str:
    """The sentence about how to write an .npz file with the content of another file."""
    if (separator := _SEPARATORS.get(os.path.splitext(path)[1].lower())) is None:
        return "Save arrays by name: numpy.savez(path, x=x, y=y)."
    return (
        f"For a table with names in its first line: t = numpy.genfromtxt({reprlib.repr(path)}, delimiter='{separator}', "
        "names=True); *xs, y = t.dtype.names; numpy.savez('data.npz', x=numpy.stack([t[k] for k in xs], 1), y=t[y])."
    )


def read_arrays(
    path: str | os.PathLike[str],
    what: str,
    max_memory: int | None = None,
    error: type[RefgradError] = FeedError,
) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, in the byte order of this machine. A name is only a name: it may be any text.

    :param what: the name of the arrays in an error, in the plural.
    :param max_memory: the number of bytes that all arrays may take together; a small file may hold large arrays. By default
        the limit of `memory.at_most`.
    :param error: the class of the errors.
    :raises RefgradError: there is no such file, it is no .npz file, it is damaged, it holds other things than arrays, or the
        arrays are larger than `max_memory`.
    """
    shown = reprlib.repr(str(path))
    advice = f"{what} are a .npz file: numpy.savez(path, x=x, y=y)."
    if not os.path.exists(path):
        raise error(f"There is no file {shown}. {advice}")
    with open_regular(path, error, advice) as opened:
        if not is_archive(opened) or not zipfile.is_zipfile(opened):
            raise error(f"{shown} is no .npz file. {_conversion(str(path))}")
        limit = allowed(max_memory)
        try:
            with zipfile.ZipFile(opened) as archive:
                entries = _entries(archive, opened)
                held = 0
                for entry in entries.values():
                    held += _size_of(archive, entry)
                    if limit is not None and held > limit:
                        raise error(
                            f"{shown} holds {held} bytes or more when it is unpacked, and max_memory is {limit}. "
                            "Give it more, or feed less at a time."
                        )
                return {name: _unpacked(archive, entry) for name, entry in entries.items()}
        except RefgradError:
            raise
        except _DAMAGED as failure:
            said = str(failure) or type(failure).__name__
            raise error(
                f"{shown} cannot be read as a .npz file: {said}. Write it with numpy.savez(path, x=x, y=y)."
            ) from failure


def described_arrays(path: str | os.PathLike[str]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """The types and shapes of the arrays of an .npz file. Only the headers are read.

    :raises FeedError: there is no such file, it is no .npz file, or its directory or a header is damaged.
    """
    shown = reprlib.repr(str(path))
    with open_regular(path, FeedError) as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                found = {}
                for name, entry in _entries(archive, opened).items():
                    with archive.open(entry) as part:
                        header = _header_of(part)
                    found[name] = header.dtype, header.shape
                return found
        except _DAMAGED as failure:
            said = str(failure) or type(failure).__name__
            raise FeedError(
                f"{shown} is no .npz file, or a damaged one: {said}. Write it with numpy.savez(path, x=x, y=y)."
            ) from failure


def mapped_array(path: str | os.PathLike[str]) -> np.ndarray:
    """The array of an .npy file, mapped into memory: only the parts that are used are read.

    :raises FeedError: there is no such file, it is no .npy file, or it is damaged.
    """
    with open_regular(path, FeedError, "Write it with numpy.save(path, x).") as opened:
        try:
            header = _header_of(opened)
            size = os.fstat(opened.fileno()).st_size
            if header.length + header.size != size:
                raise ValueError(f"it has {size} bytes, and its header says {header.length + header.size}")
            if not header.size:
                return np.zeros(header.shape, header.dtype)
            order = "F" if header.is_fortran else "C"
            array = np.memmap(opened, header.dtype, "r", header.length, header.shape, order)  # type: ignore[call-overload]
            _refuse_impossible(array)
            return array  # type: ignore[no-any-return]
        except _DAMAGED as failure:
            said = str(failure) or type(failure).__name__
            raise FeedError(
                f"{reprlib.repr(str(path))} cannot be read: {said}. Write it with numpy.save(path, x)."
            ) from failure


def is_archive(opened: IO[bytes]) -> bool:
    """True if a file begins as a .npz file does. Afterwards the file is at its beginning again."""
    found = opened.read(len(_BEGINNINGS[0]))
    opened.seek(0)
    return found in _BEGINNINGS


def _entries(archive: zipfile.ZipFile, opened: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
    """The entries by the names of their arrays.

    :raises ValueError: one of them cannot be what numpy.savez writes.
    """
    found: dict[str, zipfile.ZipInfo] = {}
    size = os.fstat(opened.fileno()).st_size
    for entry in archive.infolist():
        name, shown = entry.filename.removesuffix(".npy"), reprlib.repr(entry.filename)
        if not entry.filename.endswith(".npy"):
            raise ValueError(f"its entry {shown} is no array")
        if name in found:
            raise ValueError(f"its entry {shown} is there twice")
        if entry.flag_bits & _IS_ENCRYPTED:
            raise ValueError(f"its entry {shown} is encrypted")
        if entry.compress_type not in _METHODS:
            raise ValueError(f"its entry {shown} is compressed by a method that numpy.savez has not")
        most = entry.compress_size * (1 if entry.compress_type == zipfile.ZIP_STORED else _INFLATED)
        if entry.compress_size > size or entry.file_size > most:
            raise ValueError(f"its entry {shown} cannot have {entry.file_size} bytes")
        opened.seek(entry.header_offset)
        if not _is_as_listed(opened.read(_LOCAL.size), entry):
            raise ValueError(f"its entry {shown} is not what the directory of the archive says")
        found[name] = entry
    return found


def _is_as_listed(written: bytes, entry: zipfile.ZipInfo) -> bool:
    """True if the header before an entry agrees with the directory, as far as it has the values. Other programs read it."""
    if len(written) != _LOCAL.size:
        return False
    _, _, flags, method, _, _, checksum, packed, size, *_ = _LOCAL.unpack(written)
    if method != entry.compress_type or (flags ^ entry.flag_bits) & (_IS_ENCRYPTED | _IS_AFTER):
        return False
    if flags & _IS_AFTER:
        return True
    return (
        checksum == entry.CRC and packed in (entry.compress_size, _ELSEWHERE) and size in (entry.file_size, _ELSEWHERE)
    )


def _size_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """The number of bytes that the numbers of an entry take, by its header."""
    with archive.open(entry) as opened:
        return _header_of(opened).size


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as opened:
        header, shown = _header_of(opened), reprlib.repr(entry.filename)
        if header.length + header.size != entry.file_size:
            due = header.length + header.size
            raise ValueError(f"its entry {shown} has {entry.file_size} bytes, and by its header {due}")
        numbers = np.empty(header.size, np.uint8)
        at = 0
        while at < len(numbers):
            part = opened.read(_CHUNK)
            if not part:
                raise ValueError(f"its entry {shown} is cut off")
            numbers[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        if opened.read(1):  # to the end, where the checksum is
            raise ValueError(f"its entry {shown} is longer than it says")
    if not header.size:
        return np.zeros(header.shape, header.dtype)
    flat: np.ndarray = numbers.view(header.dtype)
    array = flat.reshape(header.shape[::-1]).T if header.is_fortran else flat.reshape(header.shape)
    _refuse_impossible(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _header_of(opened: IO[bytes]) -> _Header:
    """The header that a file or an entry begins with.

    :raises ValueError: there is no header, or it does not describe an array of a type above.
    """
    beginning = opened.read(len(_MAGIC) + 2)
    if beginning[: len(_MAGIC)] != _MAGIC or len(beginning) < len(_MAGIC) + 2:
        raise ValueError("it does not begin as an array of NumPy does")
    spelt = _LENGTHS.get((beginning[-2], beginning[-1]))
    if spelt is None:
        raise ValueError(f"it is written in version {beginning[-2]}.{beginning[-1]}, which is not known")
    prefix = opened.read(struct.calcsize(spelt))
    [length] = struct.unpack(spelt, prefix)
    if length > _LONGEST:
        raise ValueError(f"its header has {length} bytes")
    text = opened.read(length)
    if len(text) != length:
        raise ValueError("its header is cut off")
    try:
        found = ast.literal_eval(text.decode("utf-8" if beginning[-2] == 3 else "latin1").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError("its header cannot be read") from error
    if not isinstance(found, dict) or found.keys() != _KEYS:
        raise ValueError("its header does not say type, order and shape")
    dtype, shape = _dtype_of(found["descr"]), _shape_of(found["shape"])
    if math.prod(max(size, 1) for size in shape) * max(dtype.itemsize, 1) > _MOST:  # NumPy has none, even beside a 0
        raise ValueError(f"its shape is {reprlib.repr(shape)}, which no array has")
    return _Header(dtype, shape, _flag_of(found["fortran_order"]), len(beginning) + len(prefix) + length)


def _dtype_of(spelt: object) -> np.dtype:
    if not isinstance(spelt, str):
        raise ValueError("it has several fields for each element")
    if spelt in ("|O", "O"):
        raise ValueError("it holds objects of Python, which are never unpickled")
    if not _TYPES.fullmatch(spelt):
        raise ValueError(f"it has the type {reprlib.repr(spelt)}, which is no type of numbers or texts")
    try:
        return np.dtype(spelt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it has the type {reprlib.repr(spelt)}, which does not exist") from error


def _shape_of(given: object) -> tuple[int, ...]:
    if not isinstance(given, tuple) or not all(type(size) is int and size >= 0 for size in given):
        raise ValueError(f"its shape is {reprlib.repr(given)}, and sizes are whole numbers of at least 0")
    return given


def _flag_of(given: object) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"its order is {reprlib.repr(given)}, and has to be True or False")
    return given


def _refuse_impossible(array: np.ndarray) -> None:
    """Refuse bytes that are no boolean, and numbers that are no character: NumPy would fail at them later.

    :raises ValueError: the array has such bytes or numbers.
    """
    flat = array.reshape(-1, order="A")
    if array.dtype.kind == "b" and (flat.view(np.uint8) > 1).any():
        raise ValueError("it has booleans that are neither true nor false")
    if array.dtype.kind == "U" and array.dtype.itemsize:
        characters = np.ascontiguousarray(flat).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        low, high = _SURROGATES
        if ((characters > _LAST) | ((characters >= low) & (characters <= high))).any():
            raise ValueError("it has texts with characters that do not exist")
