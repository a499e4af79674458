"""Reading an image between its pixels: GridSample, DeformConv, and the poolings of regions of interest."""

from __future__ import annotations

from typing import Any

from refgrad.builder.op import Emitter
from refgrad.tables.registry import rule


@rule("GridSample")
def grid_sample(op: Emitter, d_Y: str, X: str, grid: str, **attributes: Any) -> tuple[str, str]:
    """dX = Σ weight·dY at the pixels that were read; dgrid = Σ dY·X·(the slope of the weight), 0 in mode "nearest"

    A point that the padding moved to the border has slope 0; for one that it reflected the slope changes its sign. With
    "cubic" and "border" a point outside is interpolated among the pixels of the border, as in torch and ONNX Runtime.
    """
    return op.grad.GridSampleGrad(d_Y, X, grid, **attributes)


@rule("DeformConv")
def deform_conv(
    op: Emitter, d_Y: str, X: str, W: str, offset: str, mask: str | None, **attributes: Any
) -> tuple[str, str, str, str, str | None]:
    """Y = W·(mask·V) + B: dW = dY·(mask·V)ᵀ, dmask = Σ_c V·(Wᵀ·dY), dB = Σ dY; dX and doffset = dV = mask·(Wᵀ·dY) read back

    V has the values between the pixels of X at the elements of the windows, each moved by its offset. dV goes to the
    pixels by the weights that they were read with, and to the offset by the slopes of these weights.
    """
    return op.grad.DeformConvGrad(d_Y, X, W, offset, mask, **attributes)


@rule("RoiAlign", wrt=["X", "rois"])
def roi_align(op: Emitter, d_Y: str, X: str, rois: str, batch_indices: str, **attributes: Any) -> tuple[str, str]:
    """Y = A·X·Bᵀ, the weights of the samples along each axis: dX = Aᵀ·dY·B, dA = dY·B·Xᵀ, dB = dYᵀ·A·X; drois by dA and dB

    With mode "max" each dY goes to the weighted pixel that won. The number of samples is piecewise constant, also with
    sampling_ratio 0.
    """
    return op.grad.RoiAlignGrad(d_Y, X, rois, batch_indices, **attributes)


@rule("MaxRoiPool", wrt=["X"])
def max_roi_pool(op: Emitter, d_Y: str, X: str, rois: str, **attributes: Any) -> str:
    """dX = dY added at the first largest pixel of each bin; the result is piecewise constant in the regions"""
    d_X: str = op.grad.MaxRoiPoolGrad(d_Y, X, rois, **attributes)
    return d_X
