"""Cases of ONNX Runtime's operators that move elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer


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
