"""Tensors from .safetensors files, which may be a stranger's.

A file is the length of its header in 8 bytes, the header, and the numbers. The header is a JSON object with the type, the shape
and the place of each tensor. It may have texts by name under `__metadata__`
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from refgrad.errors import RefgradError
from refgrad.protos.documents import parse_json, record_of, typed
from refgrad.protos.inputs import read_bytes

_TYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_METADATA = "__metadata__"
_PREFIX = 8  # bytes: the length of the header
_LONGEST = 100_000_000  # bytes of a header, as the format says


class Stored(NamedTuple):
    """The content of a file: tensors by name, which nobody may write to, and texts by name."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]


class _Entry(NamedTuple):
    """The description of a tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]


def read_safetensors(path: str | os.PathLike[str], error: type[RefgradError], what: str, advice: str) -> Stored:
    """The tensors and the metadata of a file.

    :param error: the class of the errors.
    :param what: the complaint of an error, such as "is no whole checkpoint".
    :param advice: the last sentence of an error.
    :raises RefgradError: there is no such file, it is larger than the memory that is allowed, it is damaged, or has a type that
        NumPy does not have.
    """
    content = read_bytes(path, error, advice)
    try:
        return _parsed(content)
    except ValueError as failure:
        raise error(f"{reprlib.repr(str(path))} {what}: {failure}. {advice}") from failure


def _parsed(content: bytes) -> Stored:
    length = int.from_bytes(content[:_PREFIX], "little")
    if len(content) < _PREFIX or length > min(_LONGEST, len(content) - _PREFIX):
        raise ValueError("its header is cut off")
    header = content[_PREFIX : _PREFIX + length]
    if header[:1] != b"{":
        raise ValueError("it does not begin as a safetensors file does")
    document = parse_json(header.rstrip(b" "))
    metadata: dict[str, str] = typed(document.pop(_METADATA, {}), dict[str, str], _METADATA)
    entries = {name: record_of(_Entry, entry, reprlib.repr(name)) for name, entry in document.items()}
    found: dict[str, np.ndarray] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        shown = reprlib.repr(name)
        if entry.dtype not in _TYPES:
            raise ValueError(f"{shown} has the type {reprlib.repr(entry.dtype)}, which is not known")
        if len(entry.data_offsets) != 2 or entry.data_offsets[0] != end or min(entry.shape, default=0) < 0:
            raise ValueError(f"the numbers of {shown} are not where the ones before end, or a size is below 0")
        dtype = np.dtype(_TYPES[entry.dtype])
        start, end = entry.data_offsets
        if end - start != math.prod(entry.shape) * dtype.itemsize or end > len(content) - _PREFIX - length:
            raise ValueError(f"{shown} of {entry.dtype}{reprlib.repr(list(entry.shape))} has {end - start} bytes")
        numbers = np.frombuffer(content, np.uint8, end - start, _PREFIX + length + start)
        if entry.dtype == "BOOL" and (numbers > 1).any():
            raise ValueError(f"{shown} has booleans that are neither true nor false")
        found[name] = numbers.view(dtype).reshape(entry.shape)
    if end != len(content) - _PREFIX - length:
        raise ValueError("it has numbers of no tensor")
    return Stored({name: found[name] for name in entries}, metadata)
