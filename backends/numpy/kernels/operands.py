"""What kernels ask of their inputs: the type to compute in, and axes and indices that exist."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Whether all are in 0..size − 1. Read as unsigned numbers, those below 0 are the greatest."""
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
