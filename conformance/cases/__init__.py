"""Tables of cases, a file per family. `every_case` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from refgrad.conformance.case import Case

# What a family has beside `cases`: another type, models that round, and where a runtime is wrong or ends the process.
FURTHER = {"control_flow": "apart", "linear": "in_double", "quantization": "rounded", "recurrent": "apart"}


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every family, by the name of the family."""
    return tuple(case for cases in _families().values() for case in cases)


def families() -> Mapping[str, tuple[Case, ...]]:
    """The cases of every family by its name, with those in `FURTHER`."""
    further = {name: getattr(importlib.import_module(f"{__name__}.{name}"), table)() for name, table in FURTHER.items()}
    return {name: (*cases, *further.get(name, ())) for name, cases in _families().items()}


@cache
def _families() -> Mapping[str, tuple[Case, ...]]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: tuple(importlib.import_module(f"{__name__}.{name}").cases()) for name in names}
