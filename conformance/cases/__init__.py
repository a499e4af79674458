"""Tables of cases, a file per family. `every_case` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from functools import cache, partial

from refgrad.conformance.case import Case, node_case
from refgrad.tables import extensions, plugins

# Tables besides `cases`: another type, models that round, and cases that a runtime gets wrong or that end its process.
FURTHER = {"control_flow": "apart", "linear": "in_double", "quantization": "rounded", "recurrent": "apart"}


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every built-in family, in the order of the families' names."""
    return tuple(case for cases in _families().values() for case in cases)


def families() -> Mapping[str, tuple[Case, ...]]:
    """The cases of every family by its name, those of `FURTHER` and of other packages included."""
    further = {name: getattr(importlib.import_module(f"{__name__}.{name}"), table)() for name, table in FURTHER.items()}
    return {name: (*cases, *further.get(name, ())) for name, cases in _families().items()} | dict(_of_packages())


def built_in() -> Collection[str]:
    """The names of the families of this package."""
    return _families().keys()


def _of_packages() -> dict[str, tuple[Case, ...]]:
    """The cases that other packages register, by the name of the registering module."""
    plugins.load()
    found: dict[str, tuple[Case, ...]] = {}
    for entry in extensions.CASES:
        make = partial(node_case, entry.op_type, domain=entry.domain)
        make = partial(make, opset=1) if entry.domain else make
        made = tuple(entry.function(make))
        found[entry.function.__module__] = found.get(entry.function.__module__, ()) + made
    return found


@cache
def _families() -> Mapping[str, tuple[Case, ...]]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: tuple(importlib.import_module(f"{__name__}.{name}").cases()) for name in names}
