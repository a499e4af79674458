"""Arrays without data: with them a plan is run, and kernels that make views, to know what memory a run takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from refgrad.backends.numpy.layout import MemoryLayout, contiguous, merged


class AbstractArray:
    """An array without data: its element type, its shape, how its elements lie in memory, and whose memory it has.

    It has what kernels ask of an array that they view. `base` is the array whose memory it views, None for an array that
    has memory of its own.
    """

    __slots__ = ("base", "dtype", "layout", "nbytes", "shape", "size")
    flat = ()  # no data, and so no strings

    def __init__(self, layout: MemoryLayout, dtype: np.dtype[Any], base: AbstractArray | None = None) -> None:
        self.layout = layout
        self.dtype = dtype
        self.base = base
        self.shape = layout.shape
        self.size = math.prod(layout.shape)
        self.nbytes = self.size * dtype.itemsize

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes between two neighbours along each axis."""
        return tuple(stride * self.itemsize for stride in self.layout.strides)

    @property
    def flags(self) -> AbstractArray:
        """The array itself, which has the two flags that kernels ask for."""
        return self

    @property
    def c_contiguous(self) -> bool:
        """True if the elements follow one another in the order of the axes."""
        return self.layout.is_contiguous

    @property
    def f_contiguous(self) -> bool:
        """True if the elements follow one another in the reverse order of the axes."""
        return self.T.layout.is_contiguous

    @property
    def T(self) -> AbstractArray:  # noqa: N802  (NumPy's name)
        """A view with the axes in the reverse order."""
        return self.transpose()

    def copy(self) -> AbstractArray:
        """A new array in the order of the axes."""
        return AbstractArray(contiguous(self.shape), self.dtype)

    def reshape(self, *shape: Any) -> AbstractArray:
        """The elements in another shape, one size of which may be -1: a view, or a copy where NumPy needs one."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        known = math.prod(n for n in sizes if n != -1)
        if -1 in sizes and known:
            sizes = tuple(self.size // known if n == -1 else n for n in sizes)
        if math.prod(sizes) != self.size:
            raise ValueError(f"cannot reshape {list(self.shape)} into {list(sizes)}")
        layout = self.layout.reshaped(sizes)
        return AbstractArray(contiguous(sizes), self.dtype) if layout is None else self._view(layout)

    def transpose(self, perm: Sequence[int] | None = None) -> AbstractArray:
        """A view with the axes in another order."""
        return self._view(self.layout.transposed(range(self.ndim)[::-1] if perm is None else perm))

    def squeeze(self, axis: Iterable[int] | None = None) -> AbstractArray:
        """A view without these axes of size 1; by default without any."""
        over = range(self.ndim) if axis is None else {place % self.ndim for place in axis}
        return self.reshape([n for place, n in enumerate(self.shape) if n != 1 or place not in over])

    def broadcast_to(self, shape: Sequence[int]) -> AbstractArray:
        """A view repeated along new axes and axes of size 1."""
        return self._view(self.layout.broadcast(tuple(shape)))

    def __getitem__(self, slices: tuple[slice, ...]) -> AbstractArray:
        """A view of the part in these slices, one for each of the first axes."""
        shape, strides = list(self.shape), list(self.layout.strides)
        for axis, piece in enumerate(slices):
            part = range(shape[axis])[piece]
            shape[axis] = len(part)
            strides[axis] *= part.step
        return self._view(MemoryLayout(tuple(shape), tuple(strides)))

    def __array_function__(self, function: Callable[..., Any], _: Any, args: Sequence[Any], options: Any) -> Any:
        """NumPy's function of the name of a method."""
        return getattr(self, function.__name__)(*args[1:], **options)

    def _view(self, layout: MemoryLayout) -> AbstractArray:
        return AbstractArray(layout, self.dtype, self if self.base is None else self.base)


def without_data(shape: tuple[int, ...], dtype: np.dtype[Any], operands: Iterable[AbstractArray] = ()) -> AbstractArray:
    """A new array, in the order of its axes or in the order in which NumPy lays out a result of `operands`."""
    layouts = [x.layout for x in operands]
    return AbstractArray(merged(shape, layouts) if layouts else contiguous(shape), dtype)
