"""The versions that a result belongs to: of refgrad, onnx, NumPy and Python, of builders and executors, and the processor."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from refgrad.conformance.problems.systems import builders, executors
from refgrad.conformance.problems.systems.executors import installed
from refgrad.errors import RefgradError

_CPUINFO = Path("/proc/cpuinfo")


def surroundings(names: Iterable[str] = ()) -> dict[str, str]:
    """The versions here, by what has them.

    :param names: builders and executors of the suite, or "package.module:attribute"; one without a distribution has no entry.
    """
    found = {}
    for distribution in ("refgrad", "onnx", "numpy"):
        name, _, version = installed([distribution]).partition(" ")
        found[distribution] = version if name else "unknown"
    found["Python"] = platform.python_version()
    found["processor"] = processor()
    for name in names:
        if version := version_of(name):
            distribution, _, number = version.partition(" ")
            found.setdefault(distribution, number)
    return found


def version_of(name: str) -> str:
    """The distribution of a builder or an executor with its version, such as "onnxruntime 1.32.0"; "" where it is not known."""
    for of in (executors.version, builders.version):
        try:
            if version := of(name):
                return version
        except (RefgradError, ValueError):  # it is the name of the other kind
            continue
    return ""


@cache
def processor() -> str:
    """The name of the processor, and the system."""
    name = platform.processor() or platform.machine()
    if _CPUINFO.is_file():
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {platform.system()}"
