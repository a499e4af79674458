"""The settings of a training in words, by which a checkpoint says what differs from the training that it is given to."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_WHY = {  # how to go on, by the name of a field
    "period": "A cosine falls to its minimum in its period, which `refgrad train` sets to the number of epochs: a "
    "training with another number begins anew.",
}
_LONGEST = 120  # characters of a setting in a message


def settings_of(what: str, value: Any) -> dict[str, str]:
    """A dataclass as settings: its class as `what`, and each field as "name=value", as a parameter is written.

    >>> from refgrad.training.schedules import Cosine
    >>> list(settings_of("schedule", Cosine(0.1, period=20)).values())[:3]
    ['schedule Cosine', 'rate=0.1', "unit='epoch'"]
    """
    found = {what: f"{what.replace('.', ' ')} {type(value).__name__}"}
    for one in fields(value):
        inner = getattr(value, one.name)
        if is_dataclass(inner):
            found |= settings_of(f"{what}.{one.name}", inner)
        else:
            found[f"{what}.{one.name}"] = f"{one.name}={inner!r}"
    return found


def difference(before: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """The sentences that say which settings of a training are others now, "" if all are the same.

    Fields of another class are left out: the class is named.
    """
    found: list[str] = []
    why: list[str] = []
    classes: list[str] = []
    for key, text in now.items():
        if before.get(key) == text or any(key.startswith(f"{one}.") for one in classes):
            continue
        classes.append(key)
        found.append(f"{_shortened(before.get(key, 'nothing of this'))} then, and {_shortened(text)} now")
        why += [f" {_WHY[field]}"] if (field := key.rpartition(".")[2]) in _WHY else []
    return f"{'; '.join(found)}.{''.join(why)}" if found else ""


def _shortened(text: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = _LONGEST
    return shortener.repr(text)[1:-1] if len(str(text)) > _LONGEST else str(text)
