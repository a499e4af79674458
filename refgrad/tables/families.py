"""Packages that hold a file per family: importing one registers what all of its files define."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable


def import_families(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, by its `__name__` and `__path__`."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
