"""Do gradients agree? Cases, oracles and verdicts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judging.check import Check, Row, check
from refgrad.conformance.oracles.central import FiniteDifference, directional

if TYPE_CHECKING:
    from refgrad.conformance.exporting.export import export_suite
    from refgrad.conformance.exporting.gradient_backend_test import GradientBackendTest
    from refgrad.conformance.locating.bisection import Bisected, bisect
    from refgrad.conformance.locating.comparing import compare
    from refgrad.conformance.locating.location import Located, locate
    from refgrad.conformance.locating.verdicts import Comparison
    from refgrad.conformance.running.results import Results
    from refgrad.conformance.running.runner import Plan
    from refgrad.conformance.running.sources import select, tables
    from refgrad.conformance.running.suite import run_suite
    from refgrad.conformance.tracing.nonfinite import NonFinite, nonfinite

__all__ = [
    "Bisected",
    "Case",
    "Check",
    "Comparison",
    "FiniteDifference",
    "GradientBackendTest",
    "Located",
    "NonFinite",
    "Plan",
    "Results",
    "Row",
    "bisect",
    "check",
    "compare",
    "directional",
    "export_suite",
    "locate",
    "node_case",
    "nonfinite",
    "run_suite",
    "select",
    "tables",
]

_LATER = {  # what `refgrad.gradient` and `refgrad check` have no use for: imported when it is asked for
    "Bisected": "locating.bisection",
    "Comparison": "locating.verdicts",
    "GradientBackendTest": "exporting.gradient_backend_test",
    "Located": "locating.location",
    "NonFinite": "tracing.nonfinite",
    "Plan": "running.runner",
    "Results": "running.results",
    "bisect": "locating.bisection",
    "compare": "locating.comparing",
    "export_suite": "exporting.export",
    "locate": "locating.location",
    "nonfinite": "tracing.nonfinite",
    "run_suite": "running.suite",
    "select": "running.sources",
    "tables": "running.sources",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
