"""ONNX Runtime's kernels for convolutions, each with the condition under which it is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refgrad.builder.op import Emitter
from refgrad.formulas.windows import spatial
from refgrad.lowering.ort.kernels import SINGLE
from refgrad.lowering.ort.windows import SAME, known_pads
from refgrad.tables.registry import lowering

_IMAGES = 4  # axes: batch, channels, height and width


@lowering("ConvGrad", dialect="ort")
def conv_grad(
    op: Emitter, dY: str, X: str, W: str, auto_pad: str, pads: Sequence[int] | None, **attributes: Any
) -> tuple[str, str, str] | None:
    """The kernel takes auto_pad SAME for no pads at all, so it is told them; where the batch is empty the process ends.

    With groups, where there are not two spatial axes, it writes zeros beyond the end of dX, which may be the other gradients.
    """
    if op.type(dY) not in SINGLE or 0 in (op.shape(X) or ()):
        return None
    is_image = _IMAGES in map(op.rank, (X, dY, W)) or len(attributes["kernel_shape"] or ()) == _IMAGES - 2
    if attributes["group"] not in (None, 1) and not is_image:
        return None
    if auto_pad in SAME:
        kernel = attributes["kernel_shape"] or spatial(op, W)
        known = None if kernel is None else known_pads(op, X, dY, kernel, auto_pad, attributes)
        if known is None:
            return None
        auto_pad, pads = known
    attributes |= {"auto_pad": auto_pad, "pads": pads}
    return op.com_microsoft("ConvGrad", dY, X, W, outputs=3, **attributes)
