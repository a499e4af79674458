"""Checks of the inputs of kernels, and the type to compute in: axes and indices have to exist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from refgrad.backends.numpy.registry import SIXTEEN_BIT, broadcasts

_UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def wide_type(dtype: np.dtype) -> np.dtype:
    """The type to compute in: float32 for a 16-bit float, else `dtype` itself."""
    return np.dtype(np.float32) if dtype in SIXTEEN_BIT else dtype


def widened(x: np.ndarray) -> np.ndarray:
    """`x` in the type to compute in."""
    return x.astype(np.float32) if x.dtype in SIXTEEN_BIT else x


def check_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front. Raises ValueError where a tensor of that rank has no such axis."""
    if not -rank <= axis < rank:
        allowed = f"an axis is in {-rank}..{rank - 1}" if rank else "it has no axes"
        raise ValueError(f"axis {axis} of a tensor of rank {rank}: {allowed}")
    return axis + rank if axis < 0 else axis


def check_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """`axes` counted from the front. Raises ValueError for one that does not exist or is there twice."""
    return _from_the_front(tuple(axes), rank)


@lru_cache(maxsize=256)
def _from_the_front(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    found = tuple(check_axis(axis, rank) for axis in axes)
    if len(set(found)) < len(found):
        raise ValueError(f"the axes {list(axes)} name one of the {rank} axes twice")
    return found


def check_indices(indices: np.ndarray, size: int, what: str = "indices", lowest: int | None = None) -> np.ndarray:
    """`indices` counted from the front; those below 0 count from the end.

    Raises IndexError for one outside `lowest` (by default −size) to size − 1.
    """
    if _inside(indices, size):
        return indices
    if lowest is None:
        wrapped = np.where(indices < 0, indices + size, indices)
        if _inside(wrapped, size):
            return wrapped
    low = -size if lowest is None else lowest
    worst = indices.min() if indices.min() < low else indices.max()
    raise IndexError(f"{what} contain {worst}, which is out of bounds for {size} elements: {low}..{size - 1}")


def _inside(indices: np.ndarray, size: int) -> bool:
    """True if all are in 0..size − 1. Read as unsigned numbers, those below 0 are the greatest."""
    if not indices.size:
        return True
    unsigned = _UNSIGNED.get(indices.dtype)
    if unsigned is None:
        return bool(indices.min() >= 0 and indices.max() < size)
    return bool(0 <= indices.item(indices.view(unsigned).argmax()) < size)


def check_shape(what: str, given: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Raise ValueError where an input does not have the shape that it needs."""
    if given != needed:
        raise ValueError(f"{what} has the shape {list(given)}; {list(needed)} is needed")


def check_expands(what: str, given: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Raise ValueError where an input cannot be broadcast to a shape as it is."""
    if not broadcasts(given, to):
        raise ValueError(f"{what} has the shape {list(given)}, which does not broadcast to {list(to)}")


_FEW, _MANY = 4096, 10_000  # elements of an array and of a sum: between them BLAS adds faster, with one thread
_BLAS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))


def summed(x: np.ndarray, axes: tuple[int, ...] | None, keepdims: bool = False) -> np.ndarray:
    """The sum over `axes` (None: all) in the type of `x`. A sum over the last axes is a product with ones, with BLAS.

    BLAS adds several running sums side by side, as NumPy's pairwise sum does.
    """
    last = _last_axes(x, axes)
    if not last:
        return np.asarray(x.sum(axes, dtype=x.dtype, keepdims=keepdims))
    rows = _pieces(x, last)
    total = np.vecdot(rows, _ones(rows.shape[-1], x.dtype))
    return _rest_summed(total, x, axes, last, keepdims)


def squares_summed(x: np.ndarray, axes: tuple[int, ...] | None, keepdims: bool = False) -> np.ndarray:
    """The sum of squares over `axes` (None: all) in the type of `x`."""
    last = _last_axes(x, axes)
    if not last:
        return summed(x * x, axes, keepdims)
    rows = _pieces(x, last)
    return _rest_summed(np.vecdot(rows, rows), x, axes, last, keepdims)


def mean(x: np.ndarray, axes: tuple[int, ...], keepdims: bool = False) -> np.ndarray:
    """The mean over `axes`; NaN if there are no elements."""
    return np.asarray(summed(x, axes, keepdims) / _count(x, axes))


def mean_square(x: np.ndarray, axes: tuple[int, ...], keepdims: bool = False) -> np.ndarray:
    """The mean of the squares over `axes`; NaN if there are no elements."""
    return np.asarray(squares_summed(x, axes, keepdims) / _count(x, axes))


def _count(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.asarray(math.prod(x.shape[axis] for axis in axes), x.dtype)


def _last_axes(x: np.ndarray, axes: tuple[int, ...] | None) -> int:
    """How many of the last axes are among `axes`, where a sum over them is for BLAS; else 0."""
    if x.dtype not in _BLAS or x.size < _FEW or not x.flags.c_contiguous:
        return 0
    over = range(x.ndim) if axes is None else {axis % x.ndim for axis in axes}
    last = 0
    while last < x.ndim and x.ndim - 1 - last in over:
        last += 1
    return last if _piece(math.prod(x.shape[x.ndim - last :])) > 1 else 0


def _piece(n: int) -> int:
    """The largest part of `n` elements, all parts being equal, that is short enough; 1 where there is none nearby."""
    parts = -(-n // _MANY)
    return next((n // k for k in range(parts, 2 * parts + 1) if n % k == 0), 1) if n else 0


def _pieces(x: np.ndarray, last: int) -> np.ndarray:
    """`x` as (its other axes..., parts, elements of a part)"""
    n = math.prod(x.shape[x.ndim - last :])
    return x.reshape(*x.shape[: x.ndim - last], n // _piece(n), _piece(n))


def _rest_summed(
    total: np.ndarray, x: np.ndarray, axes: tuple[int, ...] | None, last: int, keepdims: bool
) -> np.ndarray:
    """The sums of parts, (axes except the last..., parts), added up over the parts and the other `axes`."""
    over = range(x.ndim) if axes is None else {axis % x.ndim for axis in axes}
    rest = tuple(axis for axis in over if axis < x.ndim - last)
    shape = [1 if axis in over else n for axis, n in enumerate(x.shape) if keepdims or axis not in over]
    return np.asarray(total.sum((*rest, total.ndim - 1), dtype=x.dtype)).reshape(shape)


@lru_cache(maxsize=64)
def _ones(n: int, dtype: np.dtype) -> np.ndarray:
    ones = np.ones(n, dtype)
    ones.flags.writeable = False
    return ones
