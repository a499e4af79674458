"""Cases of ONNX Runtime's sums."""

from __future__ import annotations

from collections.abc import Iterator

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        x = floats(2, 3)
        yield case("ScaledSum", x, floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0)
        yield case("ScaledSum", x, floats(2, 3), floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0, scale_2=3.0)
        yield case("ScaledSum", x, floats(2, 3), floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0)
