"""A state_dict in a file: .npz of NumPy, or .safetensors."""

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
    """The arrays of a .npz or .safetensors file by name.

    :raises OptionError: there is no such file, it has neither format, it is malformed, it is larger than `max_memory`, or it
        has a type that NumPy does not have.
    """
    if not os.path.exists(path):
        raise OptionError(f"There is no file {reprlib.repr(str(path))}. {_ADVICE}")
    with open_regular(path, OptionError, _ADVICE) as opened:
        is_npz = is_archive(opened)
    if is_npz:
        found = read_arrays(path, "The tensors of a state_dict", error=OptionError)
    else:
        found = read_safetensors(path, OptionError, "cannot be read as a state_dict", _ADVICE).tensors
    if not found:
        raise OptionError(f"{reprlib.repr(str(path))} holds no tensors. {_ADVICE}")
    return found
