"""Every departure from ONNX Runtime's gradient graph, a file per family."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from refgrad.conformance.departures.departure import KINDS, Departure

__all__ = ["KINDS", "Departure", "every_departure"]


@cache
def every_departure() -> tuple[Departure, ...]:
    """The departures of every family, by the name of the family."""
    families = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "departure")
    return tuple(found for name in families for found in importlib.import_module(f"{__name__}.{name}").DEPARTURES)
