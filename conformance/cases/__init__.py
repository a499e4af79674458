"""Tables of cases, a file per family. `every_case` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from refgrad.conformance.case import Case


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every family, by the name of the family."""
    families = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(case for name in families for case in importlib.import_module(f"{__name__}.{name}").cases())
