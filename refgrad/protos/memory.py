"""How much memory files, feeds and the values of a run may take: one limit for all that happens within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ALLOWED: ContextVar[int | None] = ContextVar("_ALLOWED", default=None)


@contextmanager
def at_most(size: int | None) -> Iterator[None]:
    """Let files, feeds and the values of runs take `size` bytes, or, where it is None, what they were allowed before."""
    token = _ALLOWED.set(allowed(size))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def allowed(size: int | None = None) -> int | None:
    """`size`, or, where it is None, how many bytes they may take; None for any number."""
    return _ALLOWED.get() if size is None else size
