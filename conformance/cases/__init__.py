"""Tables of cases, a file per family: `every_case` has the built-in ones, `of_operators` also `FURTHER` and other packages'.

The cases of Conv are in convolution.py, as its rule is, and in the tables of all operators (`ACROSS`). `of_operators` reads
these files alone. Reading a case's model makes it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterator
from functools import cache, partial
from typing import Any

from refgrad.conformance.case import MODEL, Case, node_case
from refgrad.conformance.cases import microsoft
from refgrad.errors import PluginError
from refgrad.tables import extensions, plugins
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.once import place, qualified, raised_at
from refgrad.tables.registry import RULES, STRUCTURES
from refgrad.tables.schemas import find_schema

ACROSS = ("degenerate", "kinks", "opsets", "rare", "special")

# Further tables: in float64, of rounding models, and of cases that a runtime computes wrongly or dies of.
FURTHER = {"control_flow": "apart", "linear": "in_double", "quantization": "rounded", "recurrent": "apart"}


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every built-in family, in the order of the families' names."""
    return tuple(case for _, file in _files() for case in _cases(file))


def of_operators(operators: Collection[str] | None = None) -> Iterator[tuple[str, Case]]:
    """The cases of these operators, all by default, each with the name of its family.

    The cases of `FURTHER` and of other packages are included; the family of another package is its module.

    :raises PluginError: the cases of another package fail, for one of these operators.
    """
    files = None if operators is None else _files_of(operators)
    for family, file in _files():
        if files is None or file in files:
            further = _table(file, FURTHER[file]) if file in FURTHER else ()
            yield from ((family, case) for case in (*_cases(file), *further) if _asked(case, operators))
    for family, cases in _of_packages(operators).items():
        yield from ((family, case) for case in cases if _asked(case, operators))


def built_in() -> Collection[str]:
    """The names of the families of this package."""
    return {family for family, _ in _files()}


def covered() -> frozenset[str]:
    """The operators with a rule, a control-flow rule or a function body, and those with cases in other packages."""
    plugins.load()
    keys = {*RULES, *STRUCTURES, *DEFINITIONS}
    return frozenset(qualified(*key) for key in keys) | {entry.operator for entry in extensions.CASES}


@cache
def _files() -> tuple[tuple[str, str], ...]:
    """Every file of cases with its family; the family `microsoft` has several files."""
    families = sorted(module.name for module in pkgutil.iter_modules(__path__))
    own = microsoft.__path__
    parts = {"microsoft": [f"microsoft.{name}" for name in sorted(module.name for module in pkgutil.iter_modules(own))]}
    return tuple((family, file) for family in families for file in parts.get(family, [family]))


def _files_of(operators: Collection[str]) -> Collection[str] | None:
    """The files with the cases of these operators; None if all files must be read."""
    found = set(ACROSS)
    for name in operators:
        domain, _, op_type = name.rpartition(".")
        key = domain, op_type
        known = RULES.get(key) or STRUCTURES.get(key) or DEFINITIONS.get(key)
        if known is not None:
            room, _, file = getattr(known, "function", known).__module__.removeprefix("refgrad.").partition(".")
            file = file.partition(".")[0]
            if room not in ("rules", "microsoft"):
                return None  # another package replaced it
            found |= {file, f"microsoft.{file}"}
        elif find_schema(op_type, domain) is not None or name == MODEL:
            return None
    return found


def _asked(case: Case, operators: Collection[str] | None) -> bool:
    return operators is None or case.operator in operators


@cache
def _cases(file: str) -> tuple[Case, ...]:
    return _table(file, "cases")


@cache
def _table(file: str, table: str) -> tuple[Case, ...]:
    return tuple(getattr(importlib.import_module(f"{__name__}.{file}"), table)())


def _of_packages(operators: Collection[str] | None) -> dict[str, tuple[Case, ...]]:
    """The cases that other packages register, by the name of the registering module."""
    plugins.load()
    found: dict[str, tuple[Case, ...]] = {}
    for entry in extensions.CASES:
        make = partial(_made, entry.op_type, domain=entry.domain)
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


def _made(op_type: str, *inputs: Any, **options: Any) -> Case:
    """A case whose model is made at once, so that an error has the line of its author."""
    case = node_case(op_type, *inputs, **options)
    _ = case.model
    return case


def _case(made: object) -> Case:
    if not isinstance(made, Case):
        raise TypeError(f"it yields {made!r}; yield what make(...) returns")
    return made
