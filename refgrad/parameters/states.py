"""Reads a state_dict from a file: NumPy's .npz, or .safetensors."""

from __future__ import annotations

import os
import reprlib

import numpy as np

from refgrad.errors import OptionError
from refgrad.protos.arrays import is_archive, read_arrays
from refgrad.protos.inputs import open_regular
from refgrad.protos.safetensors import read_safetensors

_ADVICE = "Write one with numpy.savez(path, **arrays) or safetensors.torch.save_file(module.state_dict(), path)."


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a .npz or .safetensors file, by name.

    :raises OptionError: the file does not exist, has neither format, is malformed, has no tensors, is larger than
        `max_memory`, or has an element type that NumPy lacks.
    """
    if not os.path.exists(path):
        raise OptionError(f"There is no file {reprlib.repr(str(path))}. {_ADVICE}")
    with open_regular(path, OptionError, _ADVICE) as opened:
        is_npz = is_archive(opened)
    if is_npz:
        arrays = read_arrays(path, "The tensors of a state_dict", error=OptionError)
    else:
        arrays = read_safetensors(path, OptionError, "cannot be read as the state_dict() of a module", _ADVICE).tensors
    if not arrays:
        raise OptionError(f"{reprlib.repr(str(path))} holds no tensors. {_ADVICE}")
    return arrays
