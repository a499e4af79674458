"""Do gradients agree? Cases, oracles and verdicts."""

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.check import Check, Row, check
from refgrad.conformance.differences import Difference, directional

__all__ = ["Case", "Check", "Difference", "Row", "check", "directional", "node_case"]
