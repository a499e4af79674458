"""Cases of ONNX Runtime's Fourier transforms and products of complex numbers."""

from __future__ import annotations

from collections.abc import Iterator

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer


def cases() -> Iterator[Case]:
    """Signals in a row, in a table and none; products that broadcast."""
    floats = drawer(9)
    shape: tuple[int, ...]
    for shapes in SHAPES:
        for shape in ((6,), (2, 3, 4), (0, 4)):
            yield case("Rfft", floats(*shape), shapes=shapes, signal_ndim=1, normalized=0, onesided=1)
        for shape in ((4, 2), (2, 3, 2, 2), (0, 3, 2)):
            yield case("Irfft", floats(*shape), shapes=shapes, signal_ndim=1, normalized=0, onesided=1)
        for name in ("ComplexMul", "ComplexMulConj"):
            yield case(name, floats(2), floats(2), shapes=shapes)
            yield case(name, floats(2, 3, 2), floats(2, 3, 2), shapes=shapes)
            yield case(name, floats(3, 2), floats(2, 1, 2), shapes=shapes)
            yield case(name, floats(0, 2), floats(1, 2), shapes=shapes)
