"""Random feeds with which a model runs: sizes that its windows and reshapes need, and integers that mean something.

Sizes that are not given are tried: first one small size for all, then larger ones. Floats are drawn at random. Integers depend
on how the model reads them: rows of the table that they index, the number that they are compared with, lengths as long as the
sequence, masks that hide nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from onnx import ModelProto, TensorProto

from refgrad.backends.base import Value, graph_inputs
from refgrad.conformance.problems.feeds import DOMAINS, SIZE, check_sizes, random_feeds
from refgrad.errors import FeedError, RefgradError
from refgrad.model.external import array_of, is_external
from refgrad.model.roles import Read, Reads
from refgrad.planning.folding import folded
from refgrad.planning.sizes import axis_name, size_of
from refgrad.protos.traverse import nested

T = TypeVar("T")
_LADDER = (1, 8, 16, 32, 64, 96, 128, 224, 256, 320, 512, 640, 1024, 4096, 16000)
_MOST = 1 << 19  # elements of all feeds together
_LARGE = 1 << 14  # elements of all feeds of one sample
_FINITE = 64  # the largest size that is tried to make results finite, once the model runs
_LENGTH = re.compile(r"(?:.*[_.])?(?:len|lens|length|lengths)\d*", re.IGNORECASE)
_ENDLESS = "the loop still goes on"  # of a model that other sizes do not end
_RECURRENT = ("sequence_lens", "seqlens_k", "sequence_lengths")


class Fitted(NamedTuple, Generic[T]):
    """Feeds with which a model runs, a description of them, and the result of the run."""

    feeds: dict[str, Any]
    described: str
    result: T


def fitting_feeds(
    model: ModelProto,
    run: Callable[[dict[str, Any]], T],
    is_finite: Callable[[T], bool],
    *,
    inputs: Sequence[Value] | None = None,
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    domains: Sequence[str] = DOMAINS,
) -> Fitted[T]:
    """Random feeds with which the model runs, the same for the same seed.

    Sizes are tried only if `size` is the default and a dimension has no size. If nothing makes the results finite, the first
    feeds with which the model runs are returned.

    :param run: runs the model on feeds; it raises a `RefgradError` if the model does not run.
    :param is_finite: True if all results are finite.
    :param inputs: the inputs to feed; by default all inputs of the model.
    :param domains: where floats are drawn from, in this order.
    :raises FeedError: as `random_feeds`, or the model does not run at any size that is tried.
    """
    declared = graph_inputs(model.graph) if inputs is None else inputs
    meant = _Meaning(model)
    check_sizes(declared, seed, size, sizes)
    first: RefgradError | None = None
    some: Fitted[T] | None = None
    tried: list[int] = []
    for batch, other, inner in _tries(declared, size, sizes or {}):
        if some is not None and other > _FINITE:
            break
        shaped = [_of_size(value, batch, other, inner, sizes or {}, declared) for value in declared]
        try:
            for domain in domains:
                drawn = dict(random_feeds(shaped, seed=seed, domain=domain))
                feeds = meant.put(drawn, np.random.default_rng([seed, 1]))
                found = Fitted(feeds, _described(domain, declared, feeds, size), run(feeds))
                if is_finite(found.result):
                    return found
                some = some or found
        except RefgradError as error:
            if _ENDLESS in str(error):
                raise
            first = first or error
        tried.append(other)
    if some is not None:
        return some
    assert first is not None
    if len(tried) < 2:
        raise first
    raise FeedError(
        f"The model runs with none of the sizes that were tried, from {tried[0]} to {tried[-1]}. With {tried[0]}: "
        f"{str(first).rstrip('.')}. Give the sizes that it needs with sizes={{...}}, or the inputs with feeds={{...}}."
    ) from first


def _described(domain: str, inputs: Sequence[Value], feeds: Mapping[str, Any], size: int) -> str:
    """The numbers that floats are drawn from, and the sizes by symbol if they are not `size`."""
    sizes: dict[str, int] = {}
    for value in inputs:
        if value.name in feeds and value.shape is not None:
            shape = np.shape(feeds[value.name])
            sizes |= {dim: number for dim, number in zip(value.shape, shape, strict=False) if isinstance(dim, str)}
    return ", ".join([domain, *(f"{dim}={n}" for dim, n in sizes.items() if n != size and dim.isidentifier())])


def _tries(inputs: Sequence[Value], size: int, sizes: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """The sizes to try: of the first axes, which count samples, of the others, and of unknown axes between numbers.

    Of large samples there is one: with more, a check takes as many times as long and says the same.
    An axis between numbers counts steps as often as samples: (1, steps, features), or the state (layers, samples, hidden).
    """
    sample = sum(_elements(_of_size(value, 1, size, size, sizes, inputs)) for value in inputs)
    yield 1 if size == SIZE and sample > _LARGE else size, size, size
    known = [
        isinstance(dim, int) or dim in sizes or axis_name(value.name, axis) in sizes
        for value in inputs
        if not value.has_default
        for axis, dim in enumerate(value.shape or ())
    ]
    if size != SIZE or all(known):
        return
    has_inner = any(_is_inner(value, axis) for value in inputs for axis in range(len(value.shape or ())))
    for other in (size, *_LADDER):
        for inner in (other, 1) if has_inner else (other,):
            if sum(_elements(_of_size(value, 1, other, inner, sizes, inputs)) for value in inputs) <= _MOST:
                yield 1, other, inner


def _elements(value: Value) -> int:
    return math.prod(dim for dim in value.shape or () if isinstance(dim, int))


def _is_inner(value: Value, axis: int) -> bool:
    """True if the axis has no size and no name, and stands between two numbers."""
    shape = value.shape or ()
    return (
        0 < axis < len(shape) - 1
        and shape[axis] is None
        and isinstance(shape[axis - 1], int)
        and isinstance(shape[axis + 1], int)
    )


def _of_size(
    value: Value, batch: int, other: int, inner: int, sizes: Mapping[str, int], inputs: Sequence[Value]
) -> Value:
    """The input with numbers for its sizes."""
    if value.shape is None:
        return value
    counting = {one.shape[0] for one in inputs if one.shape and len(one.shape) > 1}
    counting -= {dim for one in inputs for dim in (one.shape or ())[1:]}
    symbols = {dim for one in inputs for dim in one.shape or () if isinstance(dim, str)}
    known = {symbol: sizes.get(symbol, batch if symbol in counting else other) for symbol in symbols}
    plain = {symbol: number for symbol, number in known.items() if symbol.isidentifier()}

    def number(axis: int, dim: int | str | None) -> int:
        own = axis_name(value.name, axis)
        if own in sizes and not isinstance(dim, int):
            return sizes[own]
        if isinstance(dim, str):
            formula = None if dim in sizes else size_of(dim, plain)
            return known[dim] if formula is None else formula
        if dim is not None:
            return dim
        if _is_inner(value, axis):
            return inner
        return batch if axis == 0 and len(value.shape or ()) > 1 else other

    return replace(value, shape=tuple(number(axis, dim) for axis, dim in enumerate(value.shape)))


class _Meaning:
    """The integers that inputs of a model stand for, by the operators that read them and by their names."""

    def __init__(self, model: ModelProto) -> None:
        self._integers = {
            value.name
            for value in model.graph.input
            if value.type.tensor_type.elem_type in (TensorProto.INT32, TensorProto.INT64)
        }
        self._model = model

    @cached_property
    def _reads(self) -> Reads:
        return Reads(self._model)

    @cached_property
    def _constants(self) -> dict[str, np.ndarray]:
        """The values of initializers, and of Constants, by name. Initializers in files are left out."""
        nodes = (node for node in nested(self._model.graph.node) if node.op_type == "Constant")
        known = {t.name: array_of(t) for t in self._model.graph.initializer if not is_external(t)}
        return known | {node.output[0]: value for node in nodes if (value := folded(node, {}, [])) is not None}

    def put(self, feeds: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The feeds, in which integers are what the model takes them for. Integers of which nothing is known stay."""
        for name in sorted(self._integers & feeds.keys()):
            feed = feeds[name]
            meant = self._values(name, feed.shape, self._reads.of(name), feeds, rng)
            if meant is not None:
                feeds[name] = np.asarray(meant, feed.dtype)
        return feeds

    def _values(
        self,
        name: str,
        shape: tuple[int, ...],
        reads: Sequence[Read],
        feeds: Mapping[str, Any],
        rng: np.random.Generator,
    ) -> np.ndarray | None:
        if any(read.formal in _RECURRENT for read in reads) or _LENGTH.fullmatch(name):
            return np.full(shape, self._length(name, reads, feeds))
        if any(read.op_type == "Gather" and read.input == 1 for read in reads):
            rows = [count for read in reads if (count := self._rows(read)) is not None]
            if rows and "position" in name.lower() and shape:
                return np.broadcast_to(np.arange(shape[-1]) % min(rows), shape)
            return rng.integers(0, min(rows), shape) if rows and min(rows) > 0 else None
        if "mask" in name.lower():
            return np.ones(shape)
        compared = [self._constants.get(read.inputs[1 - read.input]) for read in reads if read.op_type == "Equal"]
        known = [value for value in compared if value is not None and value.size]
        classes = [value for value in known if value.size > 1]  # of a comparison that makes one-hot vectors
        if classes:
            return rng.choice(np.unique(classes[0]), shape)
        return np.full(shape, known[0].item()) if known and math.prod(shape) == 1 else None

    def _rows(self, read: Read) -> int | None:
        """The number of rows of the table that a Gather reads; None if the table is computed."""
        table = self._constants.get(read.inputs[0])
        return len(table) if table is not None and table.ndim else None

    def _length(self, name: str, reads: Sequence[Read], feeds: Mapping[str, Any]) -> int:
        """The length of the sequences whose lengths the input `name` has."""
        for read in reads:
            sequence = feeds.get(read.inputs[0]) if read.formal in _RECURRENT else None
            if sequence is not None and np.ndim(sequence):
                return int(np.shape(sequence)[0])
        others = [np.shape(feed) for other, feed in feeds.items() if other != name and np.ndim(feed) > 1]
        return max((max(shape[1:]) for shape in others[:1]), default=1)
