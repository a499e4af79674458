"""How the elements of an array lie in memory, as NumPy has it: which operations give a view, and which have to copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_AXES = 64  # of an array of NumPy


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A shape, and how many elements lie between two neighbours along each axis."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """True if the elements follow one another in the order of the axes."""
        return self.reshaped(()) is not None if not self.shape else self._runs_from(1)

    def _runs_from(self, step: int) -> bool:
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def transposed(self, perm: Sequence[int]) -> MemoryLayout:
        """The axes in another order."""
        return MemoryLayout(tuple(self.shape[k] for k in perm), tuple(self.strides[k] for k in perm))

    def broadcast(self, shape: tuple[int, ...]) -> MemoryLayout:
        """Repeated along new axes and axes of size 1."""
        added = len(shape) - len(self.shape)
        strides = [0] * added + [
            0 if mine == 1 and size != 1 else stride
            for mine, size, stride in zip(self.shape, shape[added:], self.strides, strict=True)
        ]
        return MemoryLayout(shape, tuple(strides))

    def reshaped(self, shape: tuple[int, ...]) -> MemoryLayout | None:
        """The same elements in another shape; None where that needs a copy. It is what NumPy's `reshape` does."""
        if math.prod(shape) != math.prod(self.shape):
            return None  # the model contradicts itself
        if not math.prod(self.shape):
            return contiguous(shape)
        old = [(size, stride) for size, stride in zip(self.shape, self.strides, strict=True) if size != 1]
        strides: list[int] = []
        i = 0
        new = [size for size in shape if size != 1]
        j = 0
        while i < len(old) and j < len(new):
            last, end = i + 1, j + 1
            mine, wanted = old[i][0], new[j]
            while mine != wanted:
                if mine < wanted:
                    mine, last = mine * old[last][0], last + 1
                else:
                    wanted, end = wanted * new[end], end + 1
            for k in range(i, last - 1):
                if old[k][1] != old[k + 1][0] * old[k + 1][1]:
                    return None
            step = old[last - 1][1]
            part: list[int] = []
            for size in reversed(new[j:end]):
                part.insert(0, step)
                step *= size
            strides += part
            i, j = last, end
        pending = iter(strides)
        return MemoryLayout(shape, tuple(0 if size == 1 else next(pending) for size in shape))


def contiguous(shape: tuple[int, ...]) -> MemoryLayout:
    """A new array in the order of its axes."""
    strides, step = [0] * len(shape), 1
    for k in reversed(range(len(shape))):
        strides[k] = step
        step *= max(shape[k], 1)
    return MemoryLayout(shape, tuple(strides))


def merged(shape: tuple[int, ...], layouts: Sequence[MemoryLayout]) -> MemoryLayout:
    """A new array whose axes lie in memory as the axes of the operands do; where operands disagree, in the order of the axes.

    It is how NumPy lays out results in order "K" (`npyiter_find_best_axis_ordering`). An array of more axes than NumPy has is
    in their order.
    """
    if len(shape) > _MOST_AXES:
        return contiguous(shape)
    operands = [layout.broadcast(shape).strides for layout in layouts if len(layout.shape) <= len(shape)]
    axes: list[int] = []  # the fastest first
    for axis in reversed(range(len(shape))):
        place = len(axes)
        for position in reversed(range(len(axes))):
            swap = _goes_before(axis, axes[position], operands, shape)
            if swap is not None:
                if not swap:
                    break
                place = position
        axes.insert(place, axis)
    strides, step = [0] * len(shape), 1
    for axis in axes:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return MemoryLayout(shape, tuple(strides))


def _goes_before(axis: int, other: int, operands: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> bool | None:
    """True if an axis lies closer in memory than another one behind it; None where no operand tells."""
    found = None
    for strides in operands:
        mine, its = (0 if shape[k] == 1 else strides[k] for k in (axis, other))
        if mine and its:
            if its <= mine:
                found = False
            elif found is None:
                found = True
    return found
