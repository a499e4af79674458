"""The tests of the exported suite that a runtime is known to fail: `known_failures.json`, which docs/generate.py writes."""

from __future__ import annotations

import json
import zlib
from functools import cache
from importlib import resources
from typing import Any


def known_failures(test: str, case: str) -> dict[str, str]:
    """Why each runtime that does not pass the gradient model of a test does not, by its name and version.

    :param case: what the suite calls the case: a test of that name that is made of another case is not known.
    """
    known = _known()
    if known["cases"].get(test) != f"{zlib.crc32(case.encode()):08x}":
        return {}
    return {
        runtime: f"{group['verdict']}: {group['why']}"
        for runtime, groups in known["runtimes"].items()
        for group in groups
        if test in group["tests"]
    }


@cache
def _known() -> dict[str, Any]:
    """`cases` has a checksum of the name of each test's case; `runtimes` the tests with a verdict for one reason."""
    text = resources.files("refgrad.conformance.exporting").joinpath("known_failures.json").read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    for groups in known["runtimes"].values():
        for group in groups:
            group["tests"] = frozenset(group["tests"])
    return known
