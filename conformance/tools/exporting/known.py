"""The tests of the exported suite that a runtime is known to fail, from reports/known_failures.json."""

from __future__ import annotations

import json
import zlib
from functools import cache
from importlib import resources
from typing import Any


def known_failures(test: str, case: str) -> dict[str, str]:
    """The reason why a runtime fails the gradient model of a test, by its name and version.

    :param case: what the suite calls the case: a test of that name that is made of another case is not known.
    """
    known = _known()
    checksum, *failed = known["tests"].get(test, [""])
    if checksum != f"{zlib.crc32(case.encode()):08x}":
        return {}
    return {known["runtimes"][runtime]: known["reasons"][reason] for runtime, reason in failed}


@cache
def _known() -> dict[str, Any]:
    """`tests` has a checksum of the name of each test's case, and pairs of an index of `runtimes` and one of `reasons`."""
    text = resources.files("refgrad.reports").joinpath("known_failures.json").read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known
