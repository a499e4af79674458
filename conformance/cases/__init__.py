"""Tables of cases, a file per family. `every_case` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from refgrad.conformance.case import Case


@cache
def families() -> Mapping[str, tuple[Case, ...]]:
    """The cases of every family, by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: tuple(importlib.import_module(f"{__name__}.{name}").cases()) for name in names}


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every family, by the name of the family."""
    return tuple(case for cases in families().values() for case in cases)
