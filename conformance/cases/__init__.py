"""Tables of cases, a file per family. `every_case` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from functools import cache, partial

from refgrad.conformance.case import Case, node_case
from refgrad.errors import PluginError
from refgrad.tables import extensions, plugins
from refgrad.tables.once import place, raised_at

# Tables besides `cases`: another type, models that round, and cases that a runtime gets wrong or that end its process.
FURTHER = {"control_flow": "apart", "linear": "in_double", "quantization": "rounded", "recurrent": "apart"}


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every built-in family, in the order of the families' names."""
    return tuple(case for cases in _families().values() for case in cases)


def families(operators: Collection[str] | None = None) -> Mapping[str, tuple[Case, ...]]:
    """The cases of every family by its name, those of `FURTHER` and of other packages included.

    :param operators: those that are asked for; where the cases of another package's other operators fail, they are left out.
    :raises PluginError: the cases of another package fail.
    """
    further = {name: getattr(importlib.import_module(f"{__name__}.{name}"), table)() for name, table in FURTHER.items()}
    return {name: (*cases, *further.get(name, ())) for name, cases in _families().items()} | _of_packages(operators)


def built_in() -> Collection[str]:
    """The names of the families of this package."""
    return _families().keys()


def _of_packages(operators: Collection[str] | None) -> dict[str, tuple[Case, ...]]:
    """The cases that other packages register, by the name of the registering module."""
    plugins.load()
    found: dict[str, tuple[Case, ...]] = {}
    for entry in extensions.CASES:
        make = partial(node_case, entry.op_type, domain=entry.domain)
        make = partial(make, opset=1) if entry.domain else make
        try:
            made = tuple(_case(one) for one in entry.function(make))
        except Exception as error:  # whatever its author's code raises
            if operators is not None and entry.operator not in operators:
                continue
            raise PluginError(
                f"The cases of {entry.operator}, {place(entry.function)}, fail: {type(error).__name__}: "
                f"{' '.join(str(error).split()).rstrip('.')} ({raised_at(error, entry.function)})."
            ) from error
        found[entry.function.__module__] = found.get(entry.function.__module__, ()) + made
    return found


def _case(made: object) -> Case:
    if not isinstance(made, Case):
        raise TypeError(f"it yields {made!r}; yield what make(...) returns")
    return made


@cache
def _families() -> Mapping[str, tuple[Case, ...]]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: tuple(importlib.import_module(f"{__name__}.{name}").cases()) for name in names}
