"""The declared shapes of the inputs of a node. A body refuses by name an input that does not fit, and emits nothing for it.

A size that the model does not say, or says by a symbol, is None, and fits every other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import UnsupportedFormError

Op = Emitter | FunctionEmitter
Size = int | None
Due = Sequence[Size | tuple[Size, ...]]  # a shape; of a tuple of sizes, an axis has one


def sizes(op: Op, value: str | None, rank: int) -> tuple[Size, ...]:
    """The sizes of an input, of which `rank` axes are read; it has them, or `check_shape` refuses it."""
    shape = None if value is None else op.shape(value)
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


def one_number(op: Op, name: str, value: str | None) -> Size:
    """An input that is one number, where it is a constant."""
    given = op.constant(value)
    if given is None:
        return None
    if given.size != 1:
        raise UnsupportedFormError(f"its input {name} has the shape {list(given.shape)}; it is one number")
    return int(given.reshape(()))


def check_shape(op: Op, name: str, value: str | None, *due: Due, given: str = "") -> None:
    """Refuse the input called `name` by UnsupportedFormError where its declared shape fits none of `due`.

    :param given: the attributes that ask for these shapes, for the message.
    """
    if wrong := misshapen(op, name, value, *due, given=given):
        raise UnsupportedFormError(wrong)


def misshapen(op: Op, name: str, value: str | None, *due: Due, given: str = "") -> str:
    """The reason why the shape of the input called `name` does not fit, or ""."""
    shape = None if value is None else op.shape(value)
    if shape is None or any(_fits(shape, one) for one in due):
        return ""
    known = ", ".join(_text(dim if isinstance(dim, int) else None) for dim in shape)
    with_ = f"with {given} " if given else ""
    return f"its input {name} has the shape [{known}]; {with_}it is {' or '.join(map(_shape, due))}"


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
