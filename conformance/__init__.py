"""Do gradients agree? Cases, oracles and verdicts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judge.check import check
from refgrad.conformance.judge.found import Check, Row
from refgrad.conformance.oracles.central import FiniteDifference, directional

if TYPE_CHECKING:
    from refgrad.conformance.judge.nan.nonfinite import NonFinite, nonfinite
    from refgrad.conformance.judge.running.results import Results
    from refgrad.conformance.judge.running.runner import Plan
    from refgrad.conformance.judge.running.sources import select, tables
    from refgrad.conformance.judge.running.suite import run_suite
    from refgrad.conformance.locating.bisection import Bisected, bisect
    from refgrad.conformance.locating.comparing import compare
    from refgrad.conformance.locating.location import Located, locate
    from refgrad.conformance.locating.verdicts import Comparison
    from refgrad.conformance.tools.exporting.export import export_suite
    from refgrad.conformance.tools.exporting.gradient_backend_test import GradientBackendTest

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
    "GradientBackendTest": "tools.exporting.gradient_backend_test",
    "Located": "locating.location",
    "NonFinite": "judge.nan.nonfinite",
    "Plan": "judge.running.runner",
    "Results": "judge.running.results",
    "bisect": "locating.bisection",
    "compare": "locating.comparing",
    "export_suite": "tools.exporting.export",
    "locate": "locating.location",
    "nonfinite": "judge.nan.nonfinite",
    "run_suite": "judge.running.suite",
    "select": "judge.running.sources",
    "tables": "judge.running.sources",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
