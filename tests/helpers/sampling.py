"""The sample of a matrix: one of N of its tests or cases, chosen by a hash of the package (`tests/conftest.py`)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import pytest

VARIABLE = "REFGRAD_SAMPLE"
ROOT = Path(__file__).parents[2]
SOURCES = ("refgrad", "backends", "conformance")
T = TypeVar("T")


def share() -> int:
    """The number N in "one of N tests", from the environment.

    :raises pytest.UsageError: it is not a positive integer.
    """
    text = os.environ.get(VARIABLE) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise pytest.UsageError(
            f"{VARIABLE}={text!r} is not a positive integer: 1 runs all tests, 8 one of eight of every matrix."
        )
    return int(text)


@cache
def content() -> str:
    """The first eight digits of a hash of the package's files. Another hash selects another sample."""
    found = sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in {".py", ".toml", ".json"}:
                found.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:8]


def kept(names: Iterable[str], one_of: int, content: str) -> set[str]:
    """The sampled names: one of `one_of` tests `module::function[operator-form]` of each function, and at least one."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    chosen: set[str] = set()
    for function, same in functions.items():
        same.sort(key=lambda name: (name.partition("[")[2].partition("-")[0], _number(name, content)))
        chosen.update(same[_number(function, content) % min(one_of, len(same)) :: one_of])
    return chosen


def sampled(values: Sequence[T], matrix: str) -> list[T]:
    """The sample of `values` that a test loops over: one of N, and at least one."""
    named = {f"{matrix}[{number}]": value for number, value in enumerate(values)}
    chosen = kept(named, share(), content())
    return [value for name, value in named.items() if name in chosen]


def _number(name: str, content: str) -> int:
    return int(sha256(f"{content} {name}".encode()).hexdigest(), 16)
