"""Names of `onnxcustom.utils.onnxruntime_helper`: devices, and arrays as values of ONNX Runtime.

The functions that make or take an OrtDevice or an OrtValue need onnxruntime.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from refgrad.errors import FeedError, OptionError, OptionTypeError, choices

__all__ = [
    "device_to_providers",
    "get_ort_device",
    "get_ort_device_from_session",
    "get_ort_device_type",
    "numpy_to_ort_value",
    "ort_device_to_string",
    "provider_to_device",
]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def device_of(name: Any) -> tuple[str, int]:
    """The type of a device, "cpu" or "cuda", and its number, by a name such as "cuda:1". "gpu" means "cuda".

    :raises OptionError: there is no such device.
    :raises OptionTypeError: `name` is not a string.
    """
    if not isinstance(name, str):
        raise OptionTypeError(f"A device is a name such as 'cpu', not {type(name).__name__}.")
    match = re.fullmatch(r"(cpu)|(?:cuda|gpu)(?::(\d+))?", name)
    if match is None:
        raise OptionError(f"device={name!r}; there are 'cpu' and 'cuda', also with a number, as in 'cuda:1'.")
    return ("cpu", 0) if match[1] else ("cuda", int(match[2] or 0))


def provider_to_device(provider_name: str) -> str:
    """The device of an execution provider: "cpu" or "cuda".

    :raises OptionError: it is another provider.
    """
    for device, provider in _PROVIDERS.items():
        if provider == provider_name:
            return device
    raise OptionError(f"There is no provider {provider_name!r}; there are {choices(_PROVIDERS.values())}.")


def device_to_providers(device: str) -> list[str]:
    """The execution provider of a device, in a list.

    :raises OptionError: there is no such device.
    """
    return [_PROVIDERS[device_of(device)[0]]]


def get_ort_device(device: Any) -> Any:
    """The OrtDevice of a name such as "cuda:1". An OrtDevice is returned as it is.

    :raises OptionError: there is no such device.
    :raises OptionTypeError: `device` is something else.
    """
    from onnxruntime.capi._pybind_state import OrtDevice, OrtMemType

    if isinstance(device, OrtDevice):
        return device
    kind, number = device_of(device)
    return OrtDevice(getattr(OrtDevice, kind)(), OrtMemType.DEFAULT, number)


def get_ort_device_type(device: Any) -> int:
    """The number that ONNX Runtime has for the type of a device: 0 for the CPU, 1 for CUDA.

    :param device: a name, or an OrtDevice.
    :raises OptionError: there is no such device.
    :raises OptionTypeError: `device` is something else.
    """
    return int(get_ort_device(device).device_type())


def ort_device_to_string(device: Any) -> str:
    """The name of an OrtDevice: "cpu", "cuda", "cuda:1".

    :raises OptionTypeError: `device` is not an OrtDevice.
    """
    from onnxruntime.capi._pybind_state import OrtDevice

    if not isinstance(device, OrtDevice):
        raise OptionTypeError(f"Expected an OrtDevice, got {type(device).__name__}.")
    for kind in _PROVIDERS:
        if device.device_type() == getattr(OrtDevice, kind)():
            return f"{kind}:{device.device_id()}" if device.device_id() else kind
    raise OptionError(f"The type {device.device_type()} of the OrtDevice is neither 'cpu' nor 'cuda'.")


def get_ort_device_from_session(session: Any) -> Any:
    """The OrtDevice of the first execution provider of an InferenceSession.

    :raises OptionError: it is neither the provider of the CPU nor the provider of CUDA.
    """
    provider = session.get_providers()[0]
    number = session.get_provider_options().get(provider, {}).get("device_id", 0)
    device = provider_to_device(provider)
    return get_ort_device(device if device == "cpu" else f"{device}:{number}")


def numpy_to_ort_value(arr: np.ndarray, device: Any = None) -> Any:
    """An OrtValue with a copy of an array.

    OrtValue.ortvalue_from_numpy would share the memory of the array, and would not keep it alive.

    :param device: where it is, by name or as an OrtDevice; by default on the CPU.
    :raises FeedError: the array does not consist of numbers.
    """
    from onnxruntime.capi._pybind_state import OrtValue

    if arr.dtype.kind not in "biuf":
        raise FeedError(f"ONNX Runtime makes OrtValues of numbers, not of {arr.dtype.name}.")
    place = get_ort_device("cpu" if device is None else device)
    value = OrtValue.ortvalue_from_shape_and_type(list(arr.shape), arr.dtype.type, place)
    value.update_inplace(np.asarray(arr, order="C"))  # it would copy an array in Fortran's order in the wrong order
    return value
