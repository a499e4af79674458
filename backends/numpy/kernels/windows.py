"""The sliding windows that convolutions and poolings share.

Symbols: N batch, C channels, K = Πk elements of a window, O = Πo windows; axes are (N, C, spatial...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided


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
    def padded(self) -> tuple[int, ...]:
        """The spatial size that the windows walk over; ceil_mode can make it longer than size + pads."""
        axes = zip(self.size, self.begin, self.end, self.count, self.strides, self.extent, strict=True)
        return tuple(max(n + b + e, (o - 1) * s + x) for n, b, e, o, s, x in axes)

    @property
    def extent(self) -> tuple[int, ...]:
        """How far one window reaches, holes included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def pad(self, x: np.ndarray, value: float = 0) -> np.ndarray:
        """`x` with `value` around it; `x` itself where nothing is added."""
        if self.padded == self.size:
            return x
        padded = np.full((*x.shape[: -len(self.size)], *self.padded), value, x.dtype)
        padded[(..., *self._inside())] = x[(..., *self._kept())]
        return padded

    def crop(self, padded: np.ndarray) -> np.ndarray:
        """Return the part of `padded` that is no padding: the adjoint of `pad`."""
        if all(b >= 0 for b in self.begin) and all(e >= 0 for e in self.end):
            return padded[(..., *self._inside())]
        x = np.zeros((*padded.shape[: -len(self.size)], *self.size), padded.dtype)
        x[(..., *self._kept())] = padded[(..., *self._inside())]
        return x

    def _inside(self) -> tuple[Any, ...]:
        """Where the array lies in the padded one. Negative pads cut it."""
        return tuple(
            slice(max(b, 0), max(b, 0) + kept.stop - kept.start)
            for b, kept in zip(self.begin, self._kept(), strict=True)
        )

    def _kept(self) -> tuple[Any, ...]:
        return tuple(slice(max(-b, 0), n - max(-e, 0)) for n, b, e in zip(self.size, self.begin, self.end, strict=True))

    def columns(self, x: np.ndarray, group: int) -> np.ndarray:
        """(N, C, spatial...) to (N, group, C/group·K, O): one column per window."""
        padded = self.pad(x)
        n, c = padded.shape[:2]
        rank = len(self.size)
        spatial = padded.strides[2:]
        view = as_strided(
            padded,
            (n, c, *self.kernel, *self.count),
            (
                *padded.strides[:2],
                *(b * d for b, d in zip(spatial, self.dilations, strict=True)),
                *(b * s for b, s in zip(spatial, self.strides, strict=True)),
            ),
            writeable=False,
        )
        assert view.ndim == 2 + 2 * rank
        return view.reshape(n, group, c // group * math.prod(self.kernel), math.prod(self.count))

    def fold(self, columns: np.ndarray, channels: int) -> np.ndarray:
        """(N, group, C/group·K, O) to (N, C, spatial...), overlapping windows summed: the adjoint of `columns`."""
        n = columns.shape[0]
        windows = columns.reshape(n, channels, *self.kernel, *self.count)
        padded = np.zeros((n, channels, *self.padded), columns.dtype)
        for tap, where in self.taps():
            at: tuple[Any, ...] = (slice(None), slice(None), *tap)
            padded[where] += windows[at]
        return self.crop(padded)

    def taps(self) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
        """For each element of the kernel, the index of what it meets in the padded array over all windows."""
        for tap in product(*map(range, self.kernel)):
            starts = [t * d for t, d in zip(tap, self.dilations, strict=True)]
            yield (
                tap,
                (
                    ...,
                    *(
                        slice(a, a + (o - 1) * s + 1 if o else a, s)
                        for a, o, s in zip(starts, self.count, self.strides, strict=True)
                    ),
                ),
            )

    def positions(self, tap: Sequence[int]) -> list[np.ndarray]:
        """For each spatial axis the unpadded coordinate that `tap` meets in each window."""
        axes = zip(tap, self.dilations, self.begin, self.count, self.strides, strict=True)
        return [np.arange(o) * s + t * d - b for t, d, b, o, s in axes]


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
    rank = len(size)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
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
            count.append(max(windows, 0))
    fields = (size, kernel, strides, dilations, begin, end, count)
    return Windows(*(tuple(map(int, field)) for field in fields))
