"""Each place of a table is taken once: a second registration is an error that names both places."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from refgrad.errors import RuleError


def qualified(domain: str, op_type: str) -> str:
    """The operator with its domain: "Conv", "com.microsoft.Gelu"."""
    return f"{domain}.{op_type}" if domain else op_type


def once(kind: str, name: str, before: Any, after: Any, replace: bool) -> None:
    """Refuse a second registration. One that comes from the same lines is a module that is loaded again.

    :param kind: what is registered, for the message: "rule", "kernel".
    :param before: the function or class that holds the place; None where it is free.
    :param after: the one that is to take it.
    :raises RuleError: the place is taken, and `replace` is false.
    """
    if before is None or replace or _again(before, after):
        return
    raise RuleError(
        f"{name} has a {kind} already: {place(before)}. {place(after)} would take its place: "
        "say so with replace=True, or remove one of them."
    )


def _again(before: Any, after: Any) -> bool:
    """True if `after` is `before`, loaded again: a reloaded module, or a cell of a notebook that runs again."""
    name = (after.__module__, after.__qualname__)
    if (before.__module__, before.__qualname__) != name:
        return False
    return "__main__" in name or place(before) == place(after)


def place(defined: Any) -> str:
    """The place where a function or a class is defined: "package.module.function (file:line)"."""
    named = f"{defined.__module__}.{defined.__qualname__}"
    plain = inspect.unwrap(defined)
    code = getattr(plain, "__code__", None)
    if code is not None:
        return f"{named} ({code.co_filename}:{code.co_firstlineno})"
    try:
        return f"{named} ({inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]})"
    except (OSError, TypeError):
        return named


def raised_at(error: BaseException, function: Any = None) -> str:
    """The place where an exception was raised, as "file:line": in the file of `function` if the exception passed through it."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (own or frames)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else "no place is known"
