"""Strategies of ONNX Runtime's poolings."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.conformance.strategies.windows import batch, rank_of_image, windows
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("MaxpoolWithMask", domain=MICROSOFT, kinks=True)
def maxpool_with_mask(d: Drawing) -> Case:
    """Every attribute, with masks that leave rows, parts of rows or nothing of a window."""
    over = windows(d, rank_of_image(d), pooling=True, dilated=False)
    x = d.distinct((batch(d), d.integer(1, 2), *over.image))
    mask = d.integers((1, 1, *over.image), 0, 2, np.int32)
    order = d.optional(lambda: d.integer(0, 1))
    attributes = over.attributes(d) | {"dilations": None}
    return d.case(x, mask, fixed=["M"], storage_order=order, **attributes)
