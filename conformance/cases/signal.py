"""Cases of Fourier transforms: real and complex signals, whole and one-sided, as long as the signal or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.shape import numbers

FORMS: tuple[tuple[int, dict[str, int]], ...] = (  # how many parts the signal has, and the attributes
    (1, {}),
    (2, {}),
    (1, {"inverse": 1}),
    (2, {"inverse": 1}),
    (1, {"onesided": 1}),
    (2, {"inverse": 1, "onesided": 1}),
)


def cases() -> Iterator[Case]:
    """Every form, with the length and the axis absent, constant and fed."""
    for shapes in SHAPES:
        for parts, form in FORMS:
            for length in (None, 4, 7):
                n = None if length is None else np.array(length)
                yield _dft((2, 5, parts), n, shapes, axis=1, opset=17, **form)
                yield _dft((2, 5, parts), n, shapes, constant=["dft_length"] if length else (), opset=20, **form)
            for axis, fixed in ((0, []), (-2, ["axis"]), (1, ["axis", "dft_length"])):
                n = None if "dft_length" not in fixed else np.array(3, np.int32)
                yield _dft((4, 3, 2, parts), n, shapes, at=axis, constant=fixed, opset=20, **form)
        for onesided in (0, 1):
            yield from _stft(shapes, 1, onesided)
        yield from _stft(shapes, 2, 0)


def _dft(
    dims: tuple[int, ...], length: np.ndarray | None, shapes: str, at: int | None = None, **arguments: Any
) -> Case:
    where = () if at is None else (np.array(at),)
    return node_case("DFT", numbers(*dims), length, *where, shapes=shapes, **arguments)


def _stft(shapes: str, parts: int, onesided: int) -> Iterator[Case]:
    window = (1 + numbers(4)).astype(np.float32)
    for step, given, length, fixed in (
        (2, None, 5, ["frame_step", "frame_length"]),
        (3, window, None, ["frame_step"]),
        (1, window, 4, []),
        (5, window, 4, ["frame_step", "window"]),
        (1, None, None, []),
    ):
        yield node_case(
            "STFT",
            numbers(2, 11, parts),
            np.array(step),
            given,
            None if length is None else np.array(length),
            constant=fixed,
            opset=17 if length else 20,
            shapes=shapes,
            onesided=onesided,
        )
