"""The sliding windows that convolutions and poolings share, and the blocks in which they are computed.

Symbols: N batch, G groups, C channels of a group, M rows of a matrix that the columns meet, K = Πk elements of a window,
O = Πo windows; the axes of an array are (N, channels, spatial...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from refgrad.backends.numpy.memory import need

WORKSPACE = 2**21  # bytes that a block works with: what a cache holds
_ENOUGH = 256  # columns with which a matrix product runs at full speed


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over the last axes of an array of spatial size `size`, one number per spatial axis in each field."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    count: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """How far one window reaches, holes included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def blocks(self, X: np.ndarray, rows: int) -> tuple[Block, ...]:
        """Cut the windows over X (N, G, C, spatial...) into blocks whose columns fit WORKSPACE.

        A block has all channels, unless a product would have too few columns then. If an image has few windows, the windows of
        several images are put side by side. `rows` is M, the other size of the product.
        """
        images, group, channels = X.shape[:3]
        return _cut(self, images, group, channels, rows, WORKSPACE // X.itemsize, _ENOUGH)

    def first_block(self, X: np.ndarray, rows: int) -> Block | None:
        """The first of the blocks, which no other exceeds; None without any."""
        images, group, channels = X.shape[:3]
        return next(_blocks(self, images, group, channels, rows, WORKSPACE // X.itemsize, _ENOUGH), None)

    def positions(self, tap: Sequence[int]) -> list[np.ndarray]:
        """For each spatial axis the unpadded coordinate that `tap` meets in each window."""
        axes = zip(tap, self.dilations, self.begin, self.count, self.strides, strict=True)
        return [np.arange(o) * s + t * d - b for t, d, b, o, s in axes]


@lru_cache(maxsize=256)
def _cut(over: Windows, images: int, group: int, channels: int, rows: int, room: int, enough: int) -> tuple[Block, ...]:
    """All blocks; small convolutions take as long to cut as to compute."""
    return tuple(_blocks(over, images, group, channels, rows, room, enough))


def _blocks(
    over: Windows, images: int, group: int, channels: int, rows: int, room: int, enough: int
) -> Iterator[Block]:
    """Do what `Windows.blocks` does, for `room` elements."""
    elements, windows = math.prod(over.kernel), math.prod(over.count)
    if not images * group * channels * elements * windows:
        return
    tensors = images * group * (channels * math.prod(over.size) + rows * windows)
    room = min(room, max(room * 5 // 8, tensors))  # less for small tensors: the run needs little memory besides
    length = max(room // (elements * channels), min(enough, room // elements), 1)
    together = min(images, max(length // windows, 1))
    shape: list[int] = []
    for o in reversed(over.count):
        shape.insert(0, min(o, max(length // math.prod(shape), 1)))
    columns = together * math.prod(shape) * elements
    some = min(channels, max(room // columns, 1))
    groups = min(group, max(room // (columns * channels), 1))
    # A row of ten elements takes as long to copy into the columns as one to lay it across the images and back.
    short = over.count[-1] * (channels + rows) < 10 * channels * elements
    along_window = _run(over.kernel[-1], over.dilations[-1]) > _run(over.count[-1] * together, over.strides[-1])
    merged = together > 1 and (short or along_window)
    for image, *start in product(range(0, images, together), *map(range, [0] * len(shape), over.count, shape)):
        stop = [min(a + n, o) for a, n, o in zip(start, shape, over.count, strict=True)]
        for g, c in product(range(0, group, groups), range(0, channels, some)):
            yield Block(
                over,
                slice(image, min(image + together, images)),
                slice(g, min(g + groups, group)),
                slice(c, min(c + some, channels)),
                tuple(start),
                tuple(stop),
                merged,
                along_window,
            )


@dataclass(frozen=True)
class Block:
    """The windows from `start` to `stop` over some images, groups and channels of an array (N, G, C, spatial...).

    Its columns are a matrix for each image and group, (n, G, C·K, O·r) with r = 1; or one for all images, with n = 1 and r
    images, if `merged`. In memory the elements of a window follow one another if `along_window`, else the windows do.
    """

    windows: Windows
    images: slice
    groups: slice
    channels: slice
    start: tuple[int, ...]
    stop: tuple[int, ...]
    merged: bool
    along_window: bool

    @cached_property
    def count(self) -> tuple[int, ...]:
        """How many windows there are along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def reach(self) -> tuple[int, ...]:
        """How far these windows reach along each axis."""
        return self._region[0]

    @cached_property
    def elements(self) -> slice:
        """The rows of the columns that belong to the block's channels, among the rows of all channels."""
        size = math.prod(self.windows.kernel)
        return slice(self.channels.start * size, self.channels.stop * size)

    @property
    def is_first(self) -> bool:
        """True if no block before this one has its channels."""
        return not self.images.start and not any(self.start)

    def of(self, Y: np.ndarray) -> np.ndarray:
        """Return the part of Y (N, G, M, windows...) that belongs to these windows, a view."""
        return Y[(self.images, self.groups, slice(None), *map(slice, self.start, self.stop))]

    def rows(self, Y: np.ndarray) -> np.ndarray:
        """Return the part of Y (N, G, M, windows...) that belongs to these windows, as matrices (n, G, M, O·r)."""
        y = self._images_last(self.of(Y))
        return _for_blas(y.reshape(*y.shape[:3], -1))

    def put(self, Y: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        """Set Y (N, G, M, windows...) at these windows to left·right, added to what the channels of the blocks before gave."""
        if not self.merged and not self.channels.start:  # then the windows follow one another in Y
            flat = Y.reshape(*Y.shape[:3], -1)[self.images, self.groups, :, self._piece]
            np.matmul(left, right, out=flat)
            return
        target = self._images_last(self.of(Y))
        y = np.matmul(left, right).reshape(target.shape)
        if self.channels.start:
            target += y
        else:
            target[...] = y

    def seen(self, X: np.ndarray, outside: float = 0, batch_last: bool = False) -> np.ndarray:
        """Return the part of X (N, G, C, spatial...) that these windows reach over, `outside` where that is not X.

        The result is a view where all of it is X, except with `batch_last`: the axes are (G, C, spatial..., n) in memory.
        """
        reach, inside, lies = self._region
        x = X[(self.images, self.groups, self.channels, *inside)]
        at: tuple[Any, ...] = (slice(None), slice(None), slice(None), *lies)
        shape = (*x.shape[:3], *reach)
        if batch_last:
            x, at, shape = x.transpose(*range(1, x.ndim), 0), (*at[1:], slice(None)), (*shape[1:], shape[0])
        if x.shape == shape:
            return np.ascontiguousarray(x) if batch_last else x
        need(math.prod(shape) * x.itemsize)
        padded = np.full(shape, outside, x.dtype) if outside else np.zeros(shape, x.dtype)
        padded[at] = x
        return padded

    def lay(self, x: np.ndarray, X: np.ndarray) -> None:
        """Add x (n, G, C, what `seen` gives...) to X (N, G, C, spatial...): the adjoint of `seen`."""
        _, inside, lies = self._region
        X[(self.images, self.groups, self.channels, *inside)] += x[(slice(None), slice(None), slice(None), *lies)]

    def columns(self, X: np.ndarray) -> np.ndarray:
        """Return what these windows see of X (N, G, C, spatial...) as matrices (n, G, C·K, O·r), 0 outside X."""
        batch_last = self.merged and not self.along_window and math.prod(self.windows.kernel) > 1
        x = self.seen(X, 0, batch_last)
        x = x[np.newaxis] if batch_last else self._images_last(x)
        rank = len(self.start)
        shape = (*x.shape[:3], *self.windows.kernel, *self.count, x.shape[-1])
        windows = _strided(x, shape, self._strides(x))
        if not self.along_window:
            return _for_blas(windows.reshape(*shape[:2], math.prod(shape[2 : 3 + rank]), -1))
        ahead = (0, 1, *range(3 + rank, len(shape)), *range(2, 3 + rank))
        matrix = windows.transpose(ahead).reshape(*shape[:2], -1, math.prod(shape[2 : 3 + rank]))
        return _for_blas(matrix).swapaxes(2, 3)

    def product(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """left·right (n, G, C·K, O·r), in memory in the order of the columns."""
        columns: np.ndarray
        if left.shape[-1] == 1:  # BLAS is slow at it
            columns = left * right
        elif self.along_window:
            columns = np.matmul(right.swapaxes(2, 3), left.swapaxes(-1, -2)).swapaxes(2, 3)
        else:
            columns = np.matmul(left, right)
        return columns

    def fold(self, columns: np.ndarray, X: np.ndarray) -> None:
        """Add `columns` (n, G, C·K, O·r) to X (N, G, C, spatial...) where the windows see it: the adjoint of `columns`."""
        reach, inside, lies = self._region
        target = self._images_last(X[(self.images, self.groups, self.channels, *inside)])
        n, g, c, r = *target.shape[:3], target.shape[-1]
        kernel, count = self.windows.kernel, self.count
        folded = target
        if target.shape != (n, g, c, *reach, r) or (r > 1 and math.prod(kernel) > 1):
            need(n * g * c * math.prod(reach) * r * X.itemsize)
            folded = np.zeros((n, g, c, *reach, r), X.dtype)
        steps, holes, extent = self.windows.strides, self.windows.dilations, self.windows.extent
        windows = columns.reshape(n, g, c, *kernel, *count, r)
        at: tuple[Any, ...]
        of: tuple[Any, ...]
        every = (slice(None),) * (3 + len(kernel))
        if all(s >= e or o == 1 for s, e, o in zip(steps, extent, count, strict=True)):  # no two windows overlap
            apart = as_strided(folded, windows.shape, self._strides(folded))
            apart += windows
        elif max(steps) > 1 and min(count) > 1 and folded is not target:
            self._fold_by_phase(windows, folded)
        elif math.prod(kernel) <= math.prod(count):
            for tap in product(*map(range, kernel)):
                axes = zip(tap, holes, count, steps, strict=True)
                at = (..., *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in axes), slice(None))
                of = (*every[:3], *tap)
                folded[at] += windows[of]
        else:
            for window in product(*map(range, count)):
                axes = zip(window, steps, extent, holes, strict=True)
                at = (..., *(slice(o * s, o * s + e, d) for o, s, e, d in axes), slice(None))
                of = (*every, *window)
                folded[at] += windows[of]
        if folded is not target:
            at = (..., *lies, slice(None))
            target += folded[at]

    def _fold_by_phase(self, windows: np.ndarray, folded: np.ndarray) -> None:
        """Do what `fold` does, into the zeros `folded`: elements that are a stride apart lie side by side until the end."""
        steps, every = self.windows.strides, (slice(None),) * (len(self.count) + 1)
        apart = [-(-size // s) for size, s in zip(folded.shape[3:-1], steps, strict=True)]
        need(math.prod((*folded.shape[:3], *steps, *apart, folded.shape[-1])) * folded.itemsize)
        phases = np.zeros((*folded.shape[:3], *steps, *apart, folded.shape[-1]), folded.dtype)
        at: tuple[Any, ...]
        of: tuple[Any, ...]
        for tap in product(*map(range, self.windows.kernel)):
            places = [divmod(t * d, s) for t, d, s in zip(tap, self.windows.dilations, steps, strict=True)]
            ahead = (slice(q, q + o) for (q, _), o in zip(places, self.count, strict=True))
            at, of = (..., *(phase for _, phase in places), *ahead, slice(None)), (..., *tap, *every)
            phases[at] += windows[of]
        for phase in product(*map(range, steps)):
            at = (..., *(slice(p, None, s) for p, s in zip(phase, steps, strict=True)), slice(None))
            of = (..., *phase, *map(slice, folded[at].shape[3:-1]), slice(None))
            folded[at] = phases[of]

    def _images_last(self, x: np.ndarray) -> np.ndarray:
        """(images, G, C, ...) as (n, G, C, ..., r)"""
        view: np.ndarray = x.transpose(*range(1, x.ndim), 0)[np.newaxis] if self.merged else x[..., np.newaxis]
        return view

    def _strides(self, x: np.ndarray) -> tuple[int, ...]:
        """How far apart in memory the elements of the windows over x (n, G, C, spatial..., r) lie: n, G, C, k..., o..., r."""
        between, (dilations, steps) = x.strides, (self.windows.dilations, self.windows.strides)
        inside = (b * d for b, d in zip(between[3:-1], dilations, strict=True))
        apart = (b * s for b, s in zip(between[3:-1], steps, strict=True))
        return (*between[:3], *inside, *apart, between[-1])

    @cached_property
    def _piece(self) -> slice:
        """The windows, numbered in their order, where they follow one another."""
        first = int(np.ravel_multi_index(self.start, self.windows.count))
        return slice(first, first + math.prod(self.count))

    @cached_property
    def _region(self) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]:
        """How far these windows reach, the part of the array inside that, and where it lies in it."""
        reach, inside, lies = [], [], []
        w = self.windows
        for axis, (a, b) in enumerate(zip(self.start, self.stop, strict=True)):
            low = a * w.strides[axis] - w.begin[axis]
            high = (b - 1) * w.strides[axis] + w.extent[axis] - w.begin[axis]
            first = min(max(low, 0), w.size[axis])
            last = max(min(high, w.size[axis]), first)
            reach.append(high - low)
            inside.append(slice(first, last))
            lies.append(slice(first - low, last - low))
        return tuple(reach), tuple(inside), tuple(lies)


def _run(elements: int, step: int) -> int:
    """How many contiguous elements at a time are as fast to copy as `elements` that lie `step` apart."""
    return elements if step == 1 else min(elements, 8)


def _strided(x: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """`as_strided` to read from; five times as fast where x lies in one piece."""
    if x.flags.c_contiguous:
        return np.ndarray(shape, x.dtype, x, 0, strides)
    return as_strided(x, shape, strides, writeable=False)


def _for_blas(matrices: np.ndarray) -> np.ndarray:
    """`matrices` themselves if their rows are contiguous and apart, else a copy."""
    *_, between, inside = matrices.strides
    if inside == matrices.itemsize and between >= inside * matrices.shape[-1]:
        return matrices
    return np.ascontiguousarray(matrices)


def make_windows(
    size: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Windows:
    """Windows from the attributes of a convolution or pooling; ONNX's formulas for the pads and the counts.

    With `ceil_mode` a window that would start in the padding at the end is left out.
    """
    steps, holes, around = tuple(strides or ()), tuple(dilations or ()), tuple(pads or ())
    return _make_windows(tuple(size), tuple(kernel), steps, holes, around, auto_pad, ceil_mode)


_PADDINGS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", "")  # "" is NOTSET to ONNX Runtime


@lru_cache(maxsize=256)
def _make_windows(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
    auto_pad: str,
    ceil_mode: int,
) -> Windows:
    rank = len(size)
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    for what, values in (("kernel", kernel), ("strides", strides), ("dilations", dilations)):
        if len(values) != rank or min(values, default=1) < 1:
            raise ValueError(f"{what} {list(values)}: {rank} positive numbers are needed, one for each spatial axis")
    if pads and len(pads) != 2 * rank:
        raise ValueError(f"pads {list(pads)}: {2 * rank} numbers are needed; negative ones cut")
    if auto_pad not in _PADDINGS:
        raise ValueError(f"auto_pad is {auto_pad!r}; there are {', '.join(filter(None, _PADDINGS))}")
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        count = [-(-n // s) for n, s in zip(size, strides, strict=True)]
        total = [max((o - 1) * s + x - n, 0) for o, s, x, n in zip(count, strides, extent, size, strict=True)]
        begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
        end = [t - b for t, b in zip(total, begin, strict=True)]
    else:
        begin, end = [0] * rank, [0] * rank
        if auto_pad in ("NOTSET", "") and pads:
            begin, end = list(pads[:rank]), list(pads[rank:])
        count = []
        for n, b, e, x, s in zip(size, begin, end, extent, strides, strict=True):
            room = n + b + e - x
            windows = (-(-room // s) if ceil_mode else room // s) + 1
            if ceil_mode and (windows - 1) * s >= n + b:
                windows -= 1
            if windows < 0:
                raise ValueError(f"a window of {x} elements does not fit into {n} and the pads {b} and {e}")
            count.append(windows)
    fields = (size, kernel, strides, dilations, begin, end, count)
    return Windows(*(tuple(map(int, field)) for field in fields))
