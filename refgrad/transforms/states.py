"""A state_dict in a file: .npz of NumPy, or .safetensors."""

from __future__ import annotations

import importlib
import os
import reprlib
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from refgrad.errors import OptionError
from refgrad.protos.memory import allowed

_ADVICE = "Write one with numpy.savez(path, **arrays) or safetensors.torch.save_file(module.state_dict(), path)."
_TYPES = {
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


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a .npz or .safetensors file by name. The second needs the package safetensors.

    :raises OptionError: there is no such file, it is neither, it is malformed, larger than `max_memory`, or has a type that
        NumPy has not.
    """
    file = Path(path)
    shown = reprlib.repr(str(file))
    if not file.is_file():
        raise OptionError(f"There is no file {shown}. {_ADVICE}")
    try:
        found = _of_npz(file) if zipfile.is_zipfile(file) else _of_safetensors(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise OptionError(f"{shown} cannot be read as a state_dict: {error}. {_ADVICE}") from error
    if not found:
        raise OptionError(f"{shown} holds no tensors. {_ADVICE}")
    return found


def _refuse_large(size: int) -> None:
    limit = allowed()
    if limit is not None and size > limit:
        raise ValueError(f"it holds {size} bytes, and max_memory is {limit}")


def _of_npz(file: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(file) as archive:
        _refuse_large(sum(entry.file_size for entry in archive.infolist()))
    with file.open("rb") as opened:
        arrays = np.load(opened, allow_pickle=False)
        return {name: arrays[name] for name in arrays.files}


def _of_safetensors(file: Path) -> dict[str, np.ndarray]:
    try:
        safetensors: Any = importlib.import_module("safetensors")  # whose types differ where it is not installed
    except ImportError as error:
        raise OptionError(
            "Reading .safetensors needs a package: pip install safetensors. Or give a .npz file."
        ) from error
    _refuse_large(file.stat().st_size)
    try:
        tensors = safetensors.deserialize(file.read_bytes())
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    found = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in _TYPES:
            raise ValueError(f"{name!r} has the type {tensor['dtype']}, which is not known")
        found[name] = np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return found
