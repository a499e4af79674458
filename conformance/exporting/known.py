"""Which tests of the exported suite a runtime is known not to pass: `known_failures.json`, which docs/generate.py writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources


def known_failures(test: str, case: str) -> dict[str, str]:
    """Why each runtime that does not pass a test does not, by its name and version.

    :param case: what the suite calls the case: a test of that name that is made of another case is not known.
    """
    found: dict[str, str] = {}
    for runtime, failures in _known().items():
        known = failures.get(test)
        if known is not None and known[0] == case:
            found[runtime] = known[1]
    return found


@cache
def _known() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """By runtime and test: the case, and the verdict with its reason."""
    text = resources.files("refgrad.conformance.exporting").joinpath("known_failures.json").read_text(encoding="utf-8")
    return {
        runtime: {
            test: (case, f"{group['verdict']}: {group['why']}")
            for group in groups
            for test, case in group["tests"].items()
        }
        for runtime, groups in json.loads(text).items()
    }
