"""Strategies of ONNX Runtime's readings of an image between its pixels."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("GridSample", domain=MICROSOFT)
def grid_sample(d: Drawing) -> Case:
    """Every mode and padding."""
    batch, channels, height, width = (d.integer(1, 3) for _ in range(4))
    out = d.integer(1, 2), d.integer(1, 3)
    return d.case(
        d.floats((batch, channels, height, width)),
        d.normal((batch, *out, 2), 0.6),
        mode=d.pick(None, "bilinear", "nearest", "bicubic"),
        padding_mode=d.pick(None, "zeros", "border", "reflection"),
        align_corners=d.pick(None, 0, 1),
    )


@strategy("CropAndResize", domain=MICROSOFT)
def crop_and_resize(d: Drawing) -> Case:
    """Boxes of any size, partly outside the image."""
    batch, channels, height, width, count = (d.integer(1, 3) for _ in range(5))
    return d.case(
        d.floats((batch, channels, height, width)),
        d.normal((count, 4), 0.4) + d.scalar(0.5),
        d.integers((count,), 0, batch - 1, np.int32),
        d.integers((2,), 1, 3, np.int32),
        fixed=("batch_indices", "crop_size"),
        mode=d.pick(None, "bilinear", "nearest"),
        extrapolation_value=d.pick(None, -1.5),
    )
