"""Find the executors: entry points of the group `refgrad.backends`, or the three built-in ones without an install."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from typing import Any

from refgrad.backends.base import Backend
from refgrad.errors import BackendError, choices, did_you_mean, of_type

GROUP = "refgrad.backends"

BUILT_IN = {
    "numpy": "refgrad.backends.numpy:NumpyBackend",
    "ort-cpu": "refgrad.backends.onnxruntime:CpuBackend",
    "ort-cuda": "refgrad.backends.onnxruntime:CudaBackend",
}


def names() -> list[str]:
    """List every known executor, available or not, the built-in ones first."""
    return list(_targets())


def available() -> list[str]:
    """List the executors that can be used here."""
    return [name for name, reason in backends().items() if reason is None]


def backends() -> dict[str, str | None]:
    """Return every known executor with the reason why it cannot be used here; None where it can."""
    return {name: _load(name)[1] for name in names()}


def get_backend(name: str) -> Backend:
    """Return the executor called `name`.

    :raises BackendError: there is no such executor, or it cannot be used here.
    """
    known = names()
    if name not in known:
        raise BackendError(
            f"There is no executor {name!r}.{did_you_mean(name, known)} There are {choices(known)}. A package adds one "
            f"with an entry point of the group {GROUP!r}."
        )
    backend, reason = _load(name)
    if backend is None or reason is not None:
        raise BackendError(f"Executor {name!r} cannot be used here: {reason}. Available: {choices(available())}.")
    return backend


@cache
def _targets() -> dict[str, str]:
    """Map each name to `module:attribute`. An entry point overrides the built-in executor of its name.

    Cached: reading the metadata of every installed package takes some 20 ms.
    """
    return BUILT_IN | {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def _load(name: str) -> tuple[Backend | None, str | None]:
    """Return the executor, and why it is unavailable. An error in a foreign module must not break the others."""
    target = _targets()[name]
    try:
        backend = _resolve(target)
        return backend, backend.unavailable()
    except Exception as error:
        return None, f"loading {target!r} failed with {type(error).__name__}: {error}"


def _resolve(target: str) -> Backend:
    module, _, attribute = target.partition(":")
    found: Any = import_module(module)
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    backend = found() if isinstance(found, type) else found
    if not isinstance(backend, Backend):
        raise TypeError(f"it is {of_type(backend)}, not a refgrad.backends.Backend; wrap() makes one")
    return backend
