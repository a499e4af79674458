"""The builders and executors of a user's own in a command line: their code can end the process, or run for ever."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

_OPTIONS = ("a", "b", "backend", "backends", "builder", "side")  # whose values name builders and executors
_OWN = re.compile(r"(?!(?:refgrad|onnxruntime):)[^\W\d][\w.]*:(?!b?float\d+$)[^\W\d][\w.]*")


def of_options(given: Mapping[str, Any]) -> list[str]:
    """The names among the values of options, by the names of their parameters."""
    values = [given.get(option) for option in _OPTIONS]
    return _named(text for value in values for text in (value if isinstance(value, list) else [value]))


def of_arguments(arguments: Sequence[str]) -> list[str]:
    """The names in a command line that nobody has read yet."""
    flags = [f"--{option}" for option in _OPTIONS]
    joined = [text.partition("=") for text in arguments]
    apart = pairwise(arguments)
    return _named([value for flag, _, value in joined if flag in flags] + [v for flag, v in apart if flag in flags])


def _named(values: Iterable[Any]) -> list[str]:
    """Each package.module:attribute, which may be one of several with commas, or a part of a side."""
    parts = [part for value in values if isinstance(value, str) for part in re.split("[,@]", value)]
    return list(dict.fromkeys(found[0] for part in parts if (found := _OWN.match(part.strip()))))
