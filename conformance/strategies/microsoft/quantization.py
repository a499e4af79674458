"""Strategies of ONNX Runtime's quantizations."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named


@strategy(*named("FakeQuant"))
def fake_quant(d: Drawing) -> Case:
    """Numbers an eighth or a quarter of a step from what they round to, clipped at either end or not.

    The zero point is not a whole number, so no number rounds to the point where clipping starts.
    """
    scale, zero_point = d.pick(0.5, 2.0), d.integer(0, 3) + 0.25
    steps = d.integers(d.shape(), -9, 12) + np.float32(0.125) * d.pick(1, -1, 2)
    shape = d.pick((), (1,))
    offset = np.full(shape, zero_point, d.dtype)
    low, high = d.pick((None, None), (0, 7), (-4, 3))
    x = np.asarray(steps * scale).astype(d.dtype)
    return d.case(x, np.full(shape, scale, d.dtype), offset, quant_min=low, quant_max=high, outputs=d.integer(1, 2))
