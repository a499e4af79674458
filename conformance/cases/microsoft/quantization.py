"""Cases of ONNX Runtime's quantizations."""

from __future__ import annotations

from collections.abc import Iterator

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import array, case, scalar


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        x = array([[-4.1, -0.62, 0.31], [0.87, 1.44, 9.3]])  # clipped at both ends, never halfway between two steps
        scale, zero_point = scalar(0.5), scalar(3.0)
        yield case("FakeQuant", x, scale, zero_point, shapes=shapes, quant_min=0, quant_max=7, outputs=2)
        yield case("FakeQuant", x, array([0.5]), array([3.0]), shapes=shapes, quant_max=15)
