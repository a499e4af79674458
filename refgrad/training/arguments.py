"""Names and settings that a caller gives, in one form."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from refgrad.errors import OptionError


def listed(given: Any, argument: str) -> list[str]:
    """The names or patterns as a list. A string is one of them.

    :raises OptionError: it is no list of strings.

    >>> listed("head.*", "trainable")
    ['head.*']
    """
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise OptionError(f"{argument} is a list of names or patterns, such as ['head.*'], not {reprlib.repr(given)}.")
    return names


def by_pattern(given: Any, argument: str, example: str) -> dict[str, Any]:
    """The amounts by name or pattern; none for None.

    :param example: a value that is right, for the error.
    :raises OptionError: it is no dict with strings as its keys.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise OptionError(f"{argument} is a dict, such as {example}, not {reprlib.repr(given)}.")
    return dict(given)


__all__ = ["by_pattern", "listed"]
