"""The arrays that the classes of onnxcustom take and return, and the executor that they run on."""

from __future__ import annotations

from importlib import util
from typing import Any

import numpy as np

from refgrad.backends import available, get_backend
from refgrad.compat.utils.onnxruntime_helper import numpy_to_ort_value
from refgrad.errors import OptionError, choices

_DEVICES = {"cpu": ("ort-cpu", "numpy"), "cuda": ("ort-cuda",)}  # the executors to use, the best first


class Coefficients(np.ndarray):
    """An array with the method `numpy()`, like the OrtValue that onnxcustom returns."""

    def numpy(self) -> np.ndarray:
        """The array."""
        return np.asarray(self)


def array_from(value: Any) -> np.ndarray:
    """The array of an OrtValue, of `Coefficients`, or of anything that NumPy makes an array of."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def ort_value_from(array: np.ndarray) -> Any:
    """The OrtValue of an array, on the CPU. Without onnxruntime it is an array with the method `numpy()`."""
    return numpy_to_ort_value(array) if util.find_spec("onnxruntime") else array.view(Coefficients)


def executor(device: str, backend: str | None) -> str:
    """The name of the executor for a device, "cpu" or "cuda", unless `backend` names one.

    :raises OptionError: there is no such device.
    :raises BackendError: the executor is not available.
    """
    if device not in _DEVICES:
        raise OptionError(f"device={device!r}; there are {choices(_DEVICES)}.")
    if backend is not None:
        get_backend(backend)
        return backend
    usable = [name for name in _DEVICES[device] if name in available()]
    if usable:
        return usable[0]
    return get_backend(_DEVICES[device][0]).name  # it raises the error that says why
