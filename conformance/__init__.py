"""Do gradients agree? Cases, oracles and verdicts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.check import Check, Row, check
from refgrad.conformance.differences import Difference, directional

if TYPE_CHECKING:
    from refgrad.conformance.export import export_suite
    from refgrad.conformance.gradient_backend_test import GradientBackendTest
    from refgrad.conformance.results import Results
    from refgrad.conformance.runner import Plan
    from refgrad.conformance.sources import select, tables
    from refgrad.conformance.suite import run_suite

__all__ = [
    "Case",
    "Check",
    "Difference",
    "GradientBackendTest",
    "Plan",
    "Results",
    "Row",
    "check",
    "directional",
    "export_suite",
    "node_case",
    "run_suite",
    "select",
    "tables",
]

_LATER = {  # what `refgrad.gradient` and `refgrad check` have no use for: imported when it is asked for
    "GradientBackendTest": "gradient_backend_test",
    "Plan": "runner",
    "Results": "results",
    "export_suite": "export",
    "run_suite": "suite",
    "select": "sources",
    "tables": "sources",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
