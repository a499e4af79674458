"""What is wrong elsewhere, a file per family; each finding is a model that shows it (docs/findings.md)."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from refgrad.conformance.findings.finding import Finding


@cache
def findings() -> tuple[Finding, ...]:
    """Every finding: by system, then by operator."""
    modules = pkgutil.iter_modules(__path__)
    families = sorted(module.name for module in modules if not module.ispkg and module.name != "finding")
    found = [f for name in families for f in importlib.import_module(f"{__name__}.{name}").FINDINGS]
    return tuple(sorted(found, key=lambda finding: (finding.system, finding.operator)))
