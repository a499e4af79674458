"""Warnings beside a result: a `ModelWarning` at the line that called refgrad, however deep inside it was raised."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from refgrad.errors import ModelWarning

_OWN = ("refgrad", "contextlib", "torch", "jax")  # the packages whose lines no notice names
_is_quiet: ContextVar[bool] = ContextVar("refgrad_is_quiet", default=False)


def notice(message: str | Warning) -> None:
    """Warn of something, as if the first line outside of refgrad did: Python's filters see the line of the caller."""
    if not _is_quiet.get():
        if isinstance(message, Warning):
            warnings.warn(message, stacklevel=_depth())
        else:
            warnings.warn(message, ModelWarning, stacklevel=_depth())


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing meanwhile: of a model that refgrad made itself, or one of which it has been said."""
    before = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(before)


def _depth() -> int:
    """The `stacklevel` at which `notice` warns of its first caller outside of refgrad."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        frame, depth = frame.f_back, depth + 1
    return depth
