"""The operators of com.microsoft and com.microsoft.nchwc that a release of ONNX Runtime registers.

The table is a file, because refgrad does not need ONNX Runtime; `python docs/runtime_operators.py` writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class RuntimeOperator:
    """An operator as ONNX Runtime registers it.

    An input or output is [its name, its type variable, "single", "optional" or "variadic"]; an attribute is [its type, its
    default, whether a node has to have it]; `cpu` says whether there is a kernel for the CPU.
    """

    version: int
    cpu: bool
    inputs: list[list[str]]
    outputs: list[list[str]]
    attributes: dict[str, list[Any]]
    types: dict[str, list[str]]


def release() -> str:
    """The release of ONNX Runtime of which the table is."""
    return str(_read()["onnxruntime"])


@cache
def runtime_operators() -> dict[tuple[str, str], RuntimeOperator]:
    """Every operator of the table, by domain and name."""
    domains = _read()["operators"].items()
    return {(domain, name): RuntimeOperator(**one) for domain, named in domains for name, one in named.items()}


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return found
