"""What a test registers is forgotten behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refgrad.backends.numpy import registry as kernels
from refgrad.conformance import strategies
from refgrad.tables import definitions, extensions, registry, schemas, signatures
from refgrad.tables.dialects import DIALECTS


@contextmanager
def forgetting() -> Iterator[None]:
    """While this lasts operators may be registered; behind it every table is as it was before."""
    kernels._all()  # without other packages, which a test may be about
    strategies._import_families()
    tables: list[dict[Any, Any]] = [
        *(registry.RULES, registry.CONTROL_FLOW_RULES, registry.ZERO, registry.NO_DERIVATIVE, registry.BODY),
        definitions.DEFINITIONS,
        *(DIALECTS, *(one.lowerings for one in DIALECTS.values())),
        *(schemas.DECLARED, signatures.SIGNATURES, extensions.STRATEGIES, extensions.FORWARDS),
        kernels._kernels,
    ]
    before = [{key: list(value) if isinstance(value, list) else value for key, value in t.items()} for t in tables]
    cases = list(extensions.CASES)
    try:
        yield
    finally:
        extensions.CASES[:] = cases
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)
