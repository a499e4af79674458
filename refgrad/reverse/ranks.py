"""Inputs that declare no shape: onnx.checker refuses a gradient that has one, unless their number of axes can be told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

from onnx import ModelProto, ValueInfoProto

from refgrad.errors import InvalidModelError, RefgradError
from refgrad.model.inference.shapeless import of_each_rank
from refgrad.model.reading import read
from refgrad.notices import quiet
from refgrad.protos.traverse import lacks_shape

_ANY_RANK = ContextVar("any_rank", default=False)
_T = TypeVar("_T")


class _ShapelessError(InvalidModelError):
    """A gradient has an input or an output without a shape."""


def of_known_ranks(
    model: ModelProto | str | os.PathLike[str], make: Callable[[ModelProto | str | os.PathLike[str]], _T]
) -> _T:
    """`make(model)`, with the number of axes of inputs without a shape where one alone can be differentiated.

    :raises InvalidModelError: several can, or none.
    """
    try:
        return make(model)
    except _ShapelessError as error:
        results: list[_T] = []
        for declared in of_each_rank(read(model)):
            with suppress(RefgradError), quiet():
                results.append(make(declared))
            if len(results) > 1:
                break
        if len(results) == 1:
            return results[0]
        raise InvalidModelError(str(error)) from None


@contextmanager
def of_any_rank() -> Iterator[None]:
    """Let `gradient` accept inputs of unknown rank in the block, for a result that is run or becomes part of a model."""
    token = _ANY_RANK.set(True)
    try:
        yield
    finally:
        _ANY_RANK.reset(token)


def refuse_shapeless(values: Iterable[ValueInfoProto], adjoints: Mapping[str, str]) -> None:
    """Refuse a gradient with an input or an output without a shape: onnx.checker refuses that model.

    :param adjoints: the value that each cotangent and gradient belongs to.
    :raises InvalidModelError: naming the value whose shape has to be declared.
    """
    for value in filter(lacks_shape, () if _ANY_RANK.get() else values):
        raise _ShapelessError(
            f"{adjoints.get(value.name, value.name)!r} declares no shape, and onnx.checker refuses a gradient with an input "
            "or output that has none. Declare its axes, by names where the sizes are not known. If its rank varies, make one "
            "model per rank."
        )
