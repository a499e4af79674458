"""Tables of cases, a file per family. `every_case` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from refgrad.conformance.case import Case


def every_case() -> Iterator[Case]:
    """The cases of every family, by the name of the family."""
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        yield from importlib.import_module(f"{__name__}.{module}").cases()
