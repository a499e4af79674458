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
from refgrad.errors import PluginError
from refgrad.tables import extensions, plugins
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.once import place, qualified, raised_at
from refgrad.tables.registry import CONTROL_FLOW_RULES, RULES
from refgrad.tables.schemas import find_schema

ACROSS = ("degenerate", "kinks", "opsets", "rare", "special")

# Further tables: in float64, of rounding models, and of cases that a runtime computes wrongly or dies of.
FURTHER = {"control_flow": "apart", "linear": "in_double", "quantization": "rounded", "recurrent": "apart"}

_RULES = "refgrad.rules."  # a family has the same name there


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of every built-in family, in the order of the families' names."""
    return tuple(case for _, file in files() for case in _cases(file))


def of_operators(operators: Collection[str] | None = None) -> Iterator[tuple[str, Case]]:
    """The cases of these operators, all by default, each with the name of its family.

    The cases of `FURTHER` and of other packages are included; the family of another package is its module.

    :raises PluginError: the cases of another package fail, for one of these operators.
    """
    chosen = None if operators is None else _files_of(operators)
    for family, file in files():
        if chosen is None or file in chosen:
            further = _table(file, FURTHER[family]) if family in FURTHER else ()
            yield from ((family, case) for case in (*_cases(file), *further) if _asked(case, operators))
    for family, cases in _of_packages(operators).items():
        yield from ((family, case) for case in cases if _asked(case, operators))


def built_in() -> Collection[str]:
    """The names of the families that have files of cases, in this package and in plug-ins."""
    return {family for family, _ in files()}


def covered() -> frozenset[str]:
    """The operators with a rule, a control-flow rule or a function body, and those with cases in other packages."""
    plugins.load()
    keys = {*RULES, *CONTROL_FLOW_RULES, *DEFINITIONS}
    return frozenset(qualified(*key) for key in keys) | {entry.operator for entry in extensions.CASES}


@cache
def files() -> tuple[tuple[str, str], ...]:
    """Every module of cases with its family, in the order of both names. A plug-in with a folder of cases is one family."""
    plugins.load()
    own = [(module.name, f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    others = [(package.rpartition(".")[2], module) for package, module in extensions.modules("cases")]
    return tuple(sorted((*own, *others)))


def _files_of(operators: Collection[str]) -> Collection[str] | None:
    """The modules with the cases of these operators; None if all modules must be read."""
    plugins.load()
    found = {f"{__name__}.{file}" for file in ACROSS}
    for name in operators:
        domain, _, op_type = name.rpartition(".")
        key = domain, op_type
        known = RULES.get(key) or CONTROL_FLOW_RULES.get(key) or DEFINITIONS.get(key)
        if known is not None:
            module = getattr(known, "function", known).__module__
            package = next((one for one in extensions.PACKAGES if module.startswith(f"{one}.")), "")
            if package:
                found.add(f"{package}.cases.{module.rpartition('.')[2]}")
            elif module.startswith(_RULES):
                found.add(f"{__name__}.{module.removeprefix(_RULES).partition('.')[0]}")
            else:
                return None  # another package replaced it
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
    return tuple(getattr(importlib.import_module(file), table)())


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
