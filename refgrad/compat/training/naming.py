"""The objects that `select` of onnxcustom makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from refgrad.errors import OptionError

Made = TypeVar("Made")


def made_of(kind: Callable[..., Made], arguments: Mapping[str, Any]) -> Made:
    """An object of a class, with these arguments.

    :raises OptionError: the class does not take them.
    """
    try:
        return kind(**arguments)
    except TypeError as error:
        raise OptionError(f"{kind.__name__} does not take these arguments: {error}.") from error
