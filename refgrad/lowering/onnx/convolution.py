"""The adjoints of Conv."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.emit import Emitter
from refgrad.errors import RuleError
from refgrad.lowering.onnx.windows import Windows, lay, make_windows, pad, spatial
from refgrad.registry import lowering

Ints = Sequence[int] | None


@lowering("ConvGrad")
def conv_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    auto_pad: str | None,
    dilations: Ints,
    group: int,
    kernel_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str]:
    """dX = ConvTranspose(dY, W); dW = the correlation of X and dY, batch and channels exchanged; dB = Σ dY."""
    rank = spatial_rank(op, (X, W, dY), kernel_shape, strides, dilations, pads)
    kernel = kernel_shape or spatial(op, W) or W
    windows = make_windows(op, X, dY, kernel, strides, dilations, pads, auto_pad, rank)
    dX = lay(op, dY, W, X, windows, group)
    dW = _weight(op, dY, X, W, kernel, windows, group)
    return dX, dW, op.ReduceSum(dY, [0, *range(2, rank + 2)], keepdims=0)


def spatial_rank(op: Emitter, values: Sequence[str], *attributes: Ints) -> int:
    """The number of spatial axes, by whatever tells it."""
    for attribute in attributes:
        if attribute:
            return len(attribute) // (2 if attribute is attributes[-1] else 1)
    for value in values:
        rank = op.rank(value)
        if rank is not None:
            return rank - 2
    raise RuleError(
        f"The number of spatial axes of {values[0]!r} is unknown: give its shape in the model's value_info, or kernel_shape."
    )


def _weight(op: Emitter, dY: str, X: str, W: str, kernel: Sequence[int] | str, windows: Windows, group: int) -> str:
    """dW[m, c, k] = Σ_{n, o} dY[n, m, o] · X[n, c, s·o + d·k]: a Conv over (C/G, G·N, I) with the kernel (M, N, O).

    In it strides and dilations have changed places. The end of X that no window reached would give more than k elements.
    """
    swap = [1, 0, *range(2, windows.rank + 2)]
    X = pad(op, X, windows)
    pads, rest = windows.pads, windows.rest
    if rest is None:
        beyond = [s - 1 for s in windows.strides]
    else:
        cut = [min(max(r, 0), e) for r, e in zip(rest, pads[windows.rank :], strict=True)]
        beyond = [r - c for r, c in zip(rest, cut, strict=True)]
        pads = [p - c for p, c in zip(pads, [0] * windows.rank + cut, strict=True)]
    dW = op.Conv(
        op.Transpose(X, perm=swap) if group == 1 else _folded(op, X, W, windows.rank, group),
        op.Transpose(dY, perm=swap),
        group=group if group != 1 else None,
        strides=windows.dilations,
        dilations=windows.strides,
        pads=pads,
    )
    if any(b >= d for b, d in zip(beyond, windows.dilations, strict=True)):
        ends = op.Shape(W, start=2) if isinstance(kernel, str) else list(kernel)
        dW = op.Slice(dW, [0] * windows.rank, ends, list(range(2, windows.rank + 2)))
    return str(op.Transpose(dW, perm=swap))


def _folded(op: Emitter, X: str, W: str, rank: int, group: int) -> str:
    """(N, G·C/G, I...) to (C/G, G·N, I...)"""
    shape, size = op.shape(W), spatial(op, X)
    channels = shape[1] if shape is not None else None
    if size is None or not isinstance(channels, int):
        tail = op.Shape(X, start=2)
        apart = op.Concat([0, group], op.Shape(W, start=1, end=2), tail, axis=0)
        together = op.Concat([0, -1], tail, axis=0)
    else:
        apart, together = op.const([0, group, channels, *size]), op.const([0, -1, *size])
    exchanged = op.Transpose(op.Reshape(X, apart), perm=[2, 1, 0, *range(3, rank + 3)])
    return str(op.Reshape(exchanged, together))
