"""Oracles know a gradient without its rules. Each says whether it applies to a problem, and how far to trust it."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from refgrad.conformance.problems.observation import (
    Built,
    Directional,
    Elementwise,
    NotApplicable,
    Observation,
    Oracle,
    Property,
)
from refgrad.errors import OptionError, choices, did_you_mean

__all__ = [
    "Built",
    "Directional",
    "Elementwise",
    "NotApplicable",
    "Observation",
    "Oracle",
    "Property",
    "get_oracle",
    "oracles",
]


@cache
def oracles() -> dict[str, Oracle]:
    """Every oracle by name: each module here has one, `ORACLE`."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [module.ORACLE for module in modules if hasattr(module, "ORACLE")]
    return {oracle.name: oracle for oracle in found}


def get_oracle(name: str) -> Oracle:
    """The oracle of that name.

    :raises OptionError: there is none.
    """
    if name not in oracles():
        raise OptionError(
            f"There is no oracle {name!r}.{did_you_mean(name, oracles())} There are {choices(oracles())}."
        )
    return oracles()[name]
