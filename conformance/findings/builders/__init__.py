"""Gradients that a builder writes wrongly, a file per builder; each finding is a model that shows it (docs/findings.md)."""

from __future__ import annotations

from refgrad.conformance.findings.builders import onnx_ad, onnxruntime
from refgrad.conformance.findings.builders.finding import BuilderFinding


def builder_findings() -> tuple[BuilderFinding, ...]:
    """Every finding about a builder: by system, then by operator."""
    found = (*onnx_ad.FINDINGS, *onnxruntime.FINDINGS)
    return tuple(sorted(found, key=lambda finding: (finding.system, finding.operator)))
