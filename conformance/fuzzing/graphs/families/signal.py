"""The Fourier transform."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template(0.5, 17)
def _fourier(s: GraphScope) -> None:
    x = s.like((1, s.rng.choice((3, 4)), 1))
    if s.opset >= 20:
        s.add("DFT", x, None, s.leaf(np.array(1)), onesided=s.rng.choice((None, 1)))
    else:
        s.add("DFT", x, axis=1, onesided=s.rng.choice((None, 1)))
