"""Options that are numbers: each has a row in `refgrad.ranges`, and is checked when the command line is read."""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer

from refgrad.errors import OptionError, counted
from refgrad.ranges import RANGES, checked

_MARK = "range_of"  # the attribute of a callback that checks


def number(name: str, *flags: str, **settings: Any) -> Any:
    """A Typer option whose number lies in a range of `refgrad.ranges`.

    :param name: the name of the row.
    :param flags: as for `typer.Option`.
    :raises KeyError: there is no such row.
    """
    RANGES[name]

    def check(param: typer.CallbackParam, value: Any) -> Any:
        for one in value if isinstance(value, list | tuple) else () if value is None else (value,):
            checked(name, one, max(param.opts, key=len))
        return value

    setattr(check, _MARK, name)
    settings.setdefault("metavar", "N" if RANGES[name].whole else "NUMBER")
    return typer.Option(*flags, callback=check, **settings)


def refuse_text(param: Any, value: Any) -> None:
    """Refuse what is given for an option of `number` if it is no number at all.

    :raises OptionError: the option, the text, and the range.
    """
    name = getattr(param.callback, _MARK, None)
    if name and isinstance(value, tuple) and any(str(text).startswith("-") and text[1:2].isalpha() for text in value):
        several = " ".join(map(str, value))
        due = f"{counted(param.nargs, 'number')}, {param.metavar}"
        raise OptionError(f"{max(param.opts, key=len)} takes {due}, not {several!r}.")
    for text in value if isinstance(value, list | tuple) else (value,):
        if name and isinstance(text, str) and not _is_number(text, RANGES[name].whole):
            checked(name, text, max(param.opts, key=len))


def _is_number(text: str, whole: bool) -> bool:
    try:
        int(text) if whole else float(text)
    except ValueError:
        return False
    return True


def require_ranges(command: Callable[..., Any]) -> None:
    """Require that each number that a command takes has a range.

    :raises TypeError: one has none.
    """
    for name, hint in get_type_hints(command, include_extras=True).items():
        given = getattr(hint, "__metadata__", ())
        if (
            name != "return"
            and is_numeric(hint)
            and not any(hasattr(getattr(one, "callback", None), _MARK) for one in given)
        ):
            raise TypeError(f"Parameter {name!r} of {command} is a number: make its option with `number`.")


def is_numeric(hint: Any) -> bool:
    """True if an annotation is a number (integer or float), several numbers, or a number or None."""
    if hasattr(hint, "__metadata__"):
        return is_numeric(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType, list, tuple):
        return any(map(is_numeric, get_args(hint)))
    return hint in (int, float)
