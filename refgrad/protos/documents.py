"""JSON that may be a stranger's: parsed strictly, and checked once against the types of a record."""

from __future__ import annotations

import json
import math
import reprlib
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_DIGITS = 40  # of an integer: the state of a generator of random numbers has 39
_NAMES = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}
Made = TypeVar("Made")


def parse_json(text: str | bytes, *, nonfinite: bool = False) -> Any:
    """The value of a JSON text.

    :param nonfinite: NaN, Infinity and -Infinity are numbers.
    :raises ValueError: it is not JSON in UTF-8 without a byte order mark, an object has a key twice, a number is not finite or
        has more than 40 digits, a string is no Unicode, or lists and objects are nested too deeply.
    """
    given = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        found = json.loads(
            given,
            object_pairs_hook=_once,
            parse_constant=float if nonfinite else _refuse_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
        if "\\u" in given:  # an escape may stand for half a character
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a string has half a character, {error.object[error.start]!a}") from error
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deeply") from error
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {reprlib.repr(again)} is given twice")
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{reprlib.repr(text)} is larger than any number here")
    return number


def record_of(cls: type[Made], document: Any, where: str = "it", *, whole: bool = False) -> Made:
    """The record that an object describes: each key is a field, with a value of the type of that field.

    :param cls: a dataclass or a NamedTuple whose fields are strings, numbers, booleans, objects, tuples of one type, or one of
        these or None.
    :param where: the name of the object in an error.
    :param whole: a field with a default needs a key, too.
    :raises ValueError: a key is no field, a field without a default has no key, or a value has another type.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"{where} is {_shown(document)}, and has to be an object")
    hints = get_type_hints(cls)
    known = list(hints)
    if unknown := [key for key in document if key not in known]:
        raise ValueError(f"{where} has the key {reprlib.repr(unknown[0])}, which is not known")
    if whole and (missing := [name for name in known if name not in document]):
        raise ValueError(f"{where} has no {missing[0]!r}")
    try:
        return cls(**{key: typed(value, hints[key], key) for key, value in document.items()})
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{where}: {error}") from error


def typed(value: Any, kind: Any, where: str) -> Any:
    """A value from JSON as the type `kind`. A list becomes a tuple, and an integer a float, if `kind` says so.

    :raises ValueError: it is of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        [kind] = [one for one in inner if one is not type(None)]
        return typed(value, kind, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_shown(value)}, and has to be a list")
        return tuple(typed(one, inner[0], f"{where}[{place}]") for place, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_shown(value)}, and has to be an object")
        return {key: typed(one, inner[1], f"{where}[{reprlib.repr(key)}]") for key, one in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {_shown(value)}, and has to be {_NAMES[kind]}")
    return value


def _shown(value: Any) -> str:
    return reprlib.repr(value)
