"""Do gradients agree? Cases, oracles and verdicts."""

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.check import Check, Row, check
from refgrad.conformance.differences import Difference, directional
from refgrad.conformance.export import export, export_suite
from refgrad.conformance.gradient_backend_test import GradientBackendTest

__all__ = [
    "Case",
    "Check",
    "Difference",
    "GradientBackendTest",
    "Row",
    "check",
    "directional",
    "export",
    "export_suite",
    "node_case",
]
