"""The shapes of the inputs of a node: declared shapes, or the shapes of arrays. An input that does not fit is refused by name.

A size that the model does not say, or says by a symbol, is None, and fits every other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from refgrad.extend import Arguments, UnsupportedFormError
from refgrad.tables.definitions import Shapes

Size = int | None
Due = Sequence[Size | tuple[Size, ...]]  # a shape; of a tuple of sizes, an axis has one


def sizes(shapes: Shapes, value: Any, rank: int) -> tuple[Size, ...]:
    """The sizes of an input, of which `rank` axes are read; it has them, or `check_shape` refuses it."""
    shape = None if value is None else shapes.shape(value)
    if shape is None or len(shape) != rank:
        return (None,) * rank
    return tuple(dim if isinstance(dim, int) else None for dim in shape)


def first(*given: Size) -> Size:
    """The first size that is known."""
    return next((size for size in given if size is not None), None)


def product(*given: Size) -> Size:
    """The product, where every size is known."""
    return None if None in given else math.prod(size for size in given if size is not None)


def total(*given: Size) -> Size:
    """The sum, where every size is known."""
    return None if None in given else sum(size for size in given if size is not None)


def divided(what: str, size: Size, count: int, name: str) -> Size:
    """A size by a count, which the attribute called `name` gives and which divides it."""
    if size is None:
        return None
    if count < 1 or size % count:
        raise UnsupportedFormError(f"{name}={count} does not divide {what}, which has {size} columns")
    return size // count


def one_number(shapes: Shapes, name: str, value: Any) -> Size:
    """An input that is one number, where it is a constant."""
    check_one(shapes, name, value)
    given = shapes.constant(value)
    return None if given is None else int(given.reshape(()))


def check_one(shapes: Shapes, name: str, value: Any) -> None:
    """Refuse an input that is not one number."""
    shape = None if value is None else shapes.shape(value)
    if any(isinstance(size, int) and size != 1 for size in shape or ()):
        raise UnsupportedFormError(f"its input {name} has the shape {list(shape or ())}; it is one number")


def check_flags(args: Arguments, *names: str) -> None:
    """Refuse flags that are not 0 or 1."""
    for name in names:
        if (flag := getattr(args, name)) not in (0, 1):
            raise UnsupportedFormError(f"{name} is {flag}; there are 0 and 1")


def check_known(args: Arguments, name: str, *known: Any) -> None:
    """Refuse an attribute that has none of the known values."""
    if (value := getattr(args, name)) not in known:
        raise UnsupportedFormError(f"its {name} {value!r} is not known; there are {', '.join(map(str, known))}")


def check_pairs(args: Arguments, *names: str) -> None:
    """Refuse a node that has some of these inputs without the others."""
    if len({getattr(args, name) is None for name in names}) > 1:
        no = "neither" if len(names) == 2 else "none"
        raise UnsupportedFormError(f"it needs {' and '.join(names)}, or {no} of them")


def check_shape(shapes: Shapes, name: str, value: Any, *due: Due, given: str = "") -> None:
    """Refuse the input called `name` by UnsupportedFormError where its declared shape fits none of `due`.

    :param given: the attributes that ask for these shapes, for the message.
    """
    if wrong := misshapen(shapes, name, value, *due, given=given):
        raise UnsupportedFormError(wrong)


def misshapen(shapes: Shapes, name: str, value: Any, *due: Due, given: str = "") -> str:
    """The reason why the shape of the input called `name` does not fit, or ""."""
    shape = None if value is None else shapes.shape(value)
    if shape is None or any(_fits(shape, one) for one in due):
        return ""
    known = ", ".join(_text(dim if isinstance(dim, int) else None) for dim in shape)
    with_ = f"with {given} " if given else ""
    return f"its input {name} has the shape [{known}]; {with_}it is {' or '.join(dict.fromkeys(map(_shape, due)))}"


def _fits(shape: Sequence[int | str | None], due: Due) -> bool:
    return len(shape) == len(due) and all(
        not isinstance(dim, int) or None in valid or dim in valid
        for dim, valid in zip(shape, map(_choices, due), strict=True)
    )


def _choices(due: Size | tuple[Size, ...]) -> tuple[Size, ...]:
    return due if isinstance(due, tuple) else (due,)


def _shape(due: Due) -> str:
    return f"[{', '.join(' or '.join(map(_text, dict.fromkeys(_choices(one)))) for one in due)}]"


def _text(size: Size) -> str:
    return "?" if size is None else str(size)
