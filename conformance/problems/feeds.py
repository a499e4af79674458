"""Feeds: random arrays of the declared types, and arrays from .npz files."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from refgrad.backends.base import Value, check_feeds
from refgrad.conformance.case import is_float
from refgrad.errors import FeedError, abridged, choices, did_you_mean
from refgrad.notices import notice
from refgrad.planning.sizes import axis_name
from refgrad.protos.arrays import read_arrays
from refgrad.protos.memory import allowed
from refgrad.ranges import checked

_DRAWN = 8  # bytes of a number that is drawn, before it is cast
SIZE = 4  # of a dimension that is not declared

# Where float inputs are drawn from, in this order until every output is finite: anywhere; where Log, Sqrt, Pow, Acos and
# Atanh are defined; where Acosh is.
DOMAINS = ("normal distribution", "between 0 and 1", "above 1")


def widened(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The feeds with every float tensor, also in a sequence, in float64."""
    return {name: _wide(value) for name, value in feeds.items()}


def _wide(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide(element) for element in value]
    return value.astype(np.float64) if is_float(value) else value


def random_feeds(
    inputs: Sequence[Value],
    *,
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    domain: str = DOMAINS[0],
    max_memory: int | None = None,
) -> dict[str, np.ndarray]:
    """A random feed for every input without a default, the same for the same seed.

    A symbolic dimension has its number of elements in `sizes`, as has one without a name, which is called `x[0]` by its input
    and axis; the others have `size`. A tensor of unknown rank has one axis. Floats are drawn from `domain`; integers are 0 or
    1, which every index, mask and class label may be; strings are "a".

    :param max_memory: how many bytes all feeds may have together; by default what `memory.at_most` says.
    :raises FeedError: an input that is no tensor, or has no declared type; a symbol in `sizes` that no input has; feeds that
        are larger than `max_memory`.
    """
    check_sizes(inputs, seed, size, sizes)
    max_memory = allowed(max_memory)
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    held = 0
    for value in inputs:
        if value.has_default:
            continue
        dims = (None,) if value.shape is None else value.shape
        shape = tuple(
            d if isinstance(d, int) else _given(sizes or {}, value, axis, size) for axis, d in enumerate(dims)
        )
        count, itemsize = math.prod(shape), _DRAWN if value.dtype is None else value.dtype.itemsize
        needed = held + count * (_DRAWN + itemsize)  # it is cast after it is drawn
        held += count * itemsize
        if max_memory is not None and needed > max_memory:
            raise FeedError(
                f"Input {value} takes the feeds to {needed} bytes, drawn at random, and max_memory is {max_memory}. "
                "Give it more, or choose smaller sizes: sizes={...}."
            )
        try:
            feeds[value.name] = _draw(value, shape, rng, domain)
        except (MemoryError, ValueError) as error:
            raise FeedError(
                f"Input {value} is too large to be drawn at random as {list(shape)}: {error}. "
                "Choose smaller sizes: sizes={...}."
            ) from error
    return feeds


def check_sizes(inputs: Sequence[Value], seed: int, size: int, sizes: Mapping[str, int] | None) -> None:
    """Refuse a seed or a size that is none.

    :raises OptionError: a number outside of its range.
    :raises FeedError: a symbol in `sizes` that no input has.
    """
    checked("seed", seed)
    checked("dim", size, "size")
    for symbol, number in (sizes or {}).items():
        checked("dim", number, f"The size of {symbol!r}")
    known = {dim for value in inputs for dim in value.shape or () if isinstance(dim, str)}
    shapes = {value.name: (None,) if value.shape is None else value.shape for value in inputs}
    axes = {
        axis_name(name, k) for name, dims in shapes.items() for k, dim in enumerate(dims) if not isinstance(dim, int)
    }
    for symbol in sizes or ():
        if symbol not in known and symbol not in axes:
            raise FeedError(
                f"No input has a dimension {symbol!r}.{did_you_mean(symbol, known)} Symbolic ones: {choices(sorted(known))}. "
                "Any axis without a size may be given as 'x[0]'."
            )


def _given(sizes: Mapping[str, int], value: Value, axis: int, size: int) -> int:
    """The size of an axis of an input that has none, by its own name or its symbol; `size` if neither is among `sizes`."""
    symbol = value.shape[axis] if value.shape else None
    return sizes.get(axis_name(value.name, axis), sizes.get(symbol, size) if isinstance(symbol, str) else size)


def _draw(value: Value, shape: tuple[int, ...], rng: np.random.Generator, domain: str) -> np.ndarray:
    if value.dtype is None:
        raise FeedError(f"Input {value} cannot be drawn at random: feed it with feeds={{...}}.")
    if value.dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(value.dtype)
    if value.dtype.kind in "OUS":
        return np.full(shape, "a", dtype=object)
    array: np.ndarray
    if value.dtype.kind == "c":
        array = np.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
    elif domain == DOMAINS[0]:
        array = np.asarray(rng.standard_normal(shape))
    else:
        array = np.asarray(rng.uniform(0.1, 0.9, shape) + (1 if domain == "above 1" else 0))
    return array.astype(value.dtype)


_GRADIENT = "_grad"  # the end of the name of a gradient in a recording


def read_feeds(
    path: str | Path, inputs: Sequence[Value], max_memory: int | None = None, *, some: bool = False
) -> dict[str, Any]:
    """The arrays of an .npz file, checked against the inputs of a model. A recording has gradients too, which are left out.

    :param some: inputs may be missing.
    :param max_memory: how many bytes all arrays may have together; a small file may hold large ones. By default what
        `memory.at_most` says.
    :raises FeedError: no such file, no .npz file, feeds that do not fit the model, or are larger than `max_memory`.
    """
    arrays = read_arrays(path, "Feeds", max_memory)
    declared = {value.name: value for value in inputs}
    left_out = [name for name in arrays if name.endswith(_GRADIENT) and name not in declared]
    if left_out:
        notice(f"{str(path)!r} has gradients, which are no feeds and are left out: {abridged(left_out)}.")
        arrays = {name: array for name, array in arrays.items() if name not in left_out}
    if some:
        inputs = [replace(value, has_default=True) for value in inputs]
    return check_feeds({name: _as_declared(a, declared.get(name)) for name, a in arrays.items()}, inputs)


def _as_declared(array: np.ndarray, value: Value | None) -> np.ndarray:
    """NumPy reads the types that it does not know, bfloat16 and the like, as bytes."""
    if value is not None and value.dtype is not None and array.dtype.kind == "V":
        return array.view(value.dtype) if array.dtype.itemsize == value.dtype.itemsize else array
    return array


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write an .npz file. Unlike `numpy.savez`, a name may be anything; sequences get a number behind their name."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in _arrays(arrays.items()):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _arrays(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in values:
        if isinstance(value, list | tuple):
            yield from _arrays((f"{name}.{position}", item) for position, item in enumerate(value))
        elif value is not None:
            array = np.asarray(value)
            yield name, array.astype(str) if array.dtype == object else array
