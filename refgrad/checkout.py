"""The folders that lie beside the package in a source checkout. An install maps them into the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[1]
_BESIDE = {"refgrad.backends", "refgrad.conformance", "refgrad.reports"}


class _Finder:
    """It finds `backends/` as `refgrad.backends`, and the others in the same way.

    `refgrad/` has links to the two with code, for static tools. Nothing is imported through them: a file would have another
    path than in an editor, where breakpoints are set, and a system without links has none.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)], target) if name in _BESIDE else None


def project_file() -> Path | None:
    """The pyproject.toml of the checkout that refgrad runs in; None for an installed refgrad, whatever lies beside it."""
    file = _ROOT / "pyproject.toml"
    is_ours = (
        file.is_file() and (_ROOT / "backends").is_dir() and '\nname = "refgrad"\n' in file.read_text(encoding="utf-8")
    )
    return file if is_ours else None


def find_neighbours() -> None:
    """Let imports find these folders if this is a source checkout."""
    if project_file() is not None:
        sys.meta_path.insert(0, _Finder)
