"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.emit import Emitter
from refgrad.registry import rule

Ints = Sequence[int] | None


@rule("Conv")
def conv(
    op: Emitter,
    d_Y: str,
    X: str,
    W: str,
    auto_pad: str,
    dilations: Ints,
    group: int,
    kernel_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str]:
    """dX = dY convolved with W turned round, dW = the correlation of X and dY, dB = Σ dY"""
    d_X, d_W, d_B = op.grad.ConvGrad(
        d_Y,
        X,
        W,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return d_X, d_W, d_B
