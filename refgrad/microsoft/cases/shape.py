"""Cases of ONNX Runtime's operators that move elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, drawer, scalar


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        for axis in (0, 1, -1):
            parts = [floats(*(size if k == axis % 3 else n for k, n in enumerate((2, 3, 4)))) for size in (1, 2)]
            yield case("ConcatTraining", *parts, shapes=shapes, axis=axis, outputs=2)
        for diagonal in (None, 1, -2):
            k = None if diagonal is None else np.array(diagonal)
            for upper in (1, 0):
                yield case("Trilu", floats(2, 3, 4), k, shapes=shapes, upper=upper)
        for x in (floats(2, 3), floats(), floats(0, 2)):
            yield case("SampleOp", x, shapes=shapes)
            yield case("ExpandDims", x, np.array(-1, np.int32), shapes=shapes)
        for axis in (0, 1, 2, -2):
            yield case("ExpandDims", floats(2, 3), np.array(axis, np.int32), shapes=shapes, constant=["axis"])
        yield case("ExpandDims", floats(2, 3), np.array([1], np.int32), shapes=shapes)
        yield from _pads(shapes)
        yield from _ranges(shapes)
        if shapes != "unknown":
            yield case("UnfoldTensor", floats(2, 5, 3), shapes=shapes, dim=1, size=2, step=2)
            yield case("UnfoldTensor", floats(5), shapes=shapes, size=3)
            yield case("UnfoldTensor", floats(0, 4), shapes=shapes, dim=-1, size=2)


def _pads(shapes: str) -> Iterator[Case]:
    floats = drawer(4)
    for pads in ([0, 2, 1, 0], [-1, 1, 0, -1]):
        for given in (np.array(pads), np.array([pads])):
            yield case("Pad", floats(3, 4), given, shapes=shapes)
        for value in (scalar(0.3), array([0.3])):
            yield case("Pad", floats(3, 4), np.array(pads), value, shapes=shapes)
        for mode in ("reflect", "edge"):
            yield case("Pad", floats(3, 4), np.array(pads), shapes=shapes, mode=mode, constant=["pads"])
    yield case("Pad", floats(2), np.array([1, 1]), scalar(0.3), shapes=shapes, mode="edge", wrt=["data"])
    yield case("Pad", floats(0, 2), np.array([1, 0, 0, 1]), scalar(0.3), shapes=shapes)
    yield case("Pad", floats(), np.zeros(0, np.int64), shapes=shapes)


def _ranges(shapes: str) -> Iterator[Case]:
    for start, limit, delta in ((1.0, 3.4, 0.5), (2.0, -1.2, -0.75), (1.0, 0.4, 0.25)):
        yield case("Range", scalar(start), scalar(limit), scalar(delta), shapes=shapes)
        yield case("Range", array([start]), array([limit]), array([delta]), shapes=shapes)
    yield case("Range", scalar(0.5), scalar(3.0), shapes=shapes)
