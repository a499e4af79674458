"""Strategies of ONNX Runtime's forward operators (com.microsoft), a file per family."""

from __future__ import annotations

from refgrad.protos.domains import MICROSOFT
from refgrad.tables.families import import_families


def named(*operators: str) -> list[str]:
    """The names of operators with their domain in front."""
    return [f"{MICROSOFT}.{operator}" for operator in operators]


import_families(__name__, __path__)
