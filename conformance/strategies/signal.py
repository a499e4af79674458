"""Strategies of the Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy


@strategy("DFT")
def dft(d: Drawing) -> Case:
    """DFTs of real and complex signals along any axis except the last: whole, one-sided, cut or padded."""
    parts, onesided, inverse = d.pick((1, 0, 0), (2, 0, 0), (1, 0, 1), (2, 0, 1), (1, 1, 0), (2, 1, 1))
    signal = d.shape(2, 3, size=4, elements=24, empty=False)
    if inverse and onesided:  # the result has 2·(n − 1) samples
        signal = tuple(n + 1 for n in signal)
    x = d.floats((*signal, parts))
    length = d.optional(lambda: np.array(d.integer(1, 6), d.pick(np.int64, np.int32)))
    sides: dict[str, Any] = {
        name: 1 if on else d.pick(None, 0) for name, on in (("onesided", onesided), ("inverse", inverse))
    }
    fixed = [] if length is None else ["dft_length"]
    first = len(signal) - 1
    if d.opset < 20:
        return d.case(x, length, fixed=fixed, axis=d.pick(None, *range(len(signal))), **sides)
    axis = d.optional(lambda: np.array(d.pick(*range(len(signal)), *range(-1 - first, -1)), np.int64))
    return d.case(x, length, axis, fixed=fixed if axis is None else [*fixed, "axis"], **sides)


@strategy("STFT")
def stft(d: Drawing) -> Case:
    """Of real and complex signals, in frames that overlap or do not, with and without a window."""
    parts = d.integer(1, 2)
    length, step = d.integer(1, 5), d.integer(1, 3)
    samples = length + d.integer(0, 5)
    window = d.optional(lambda: d.floats((length,)))
    given = window is None or d.flag()
    if window is None and d.rarely():
        given, length = False, samples
    kind = d.pick(np.int64, np.int32)
    fixed = ["frame_step", *(["window"] if window is not None else []), *(["frame_length"] if given else [])]
    return d.case(
        d.floats((d.integer(1, 2), samples, parts)),
        np.array(step, kind),
        window,
        np.array(length, kind) if given else None,
        fixed=fixed,
        onesided=0 if parts == 2 else d.pick(None, 0, 1),
    )
