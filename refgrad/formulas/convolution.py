"""The gradients of ConvTranspose, and the number of spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refgrad.builder.op import Emitter
from refgrad.errors import RuleError
from refgrad.formulas.windows import spatial

Ints = Sequence[int] | None


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


def conv_transpose_adjoints(
    op: Emitter,
    d_Y: str,
    X: str,
    W: str,
    auto_pad: str,
    dilations: Ints,
    group: int,
    kernel_shape: Ints,
    output_padding: Ints,
    output_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str]:
    """dX = Conv(dY, W), dW = the gradient of this Conv of dY by its kernel for the cotangent X, dB = Σ dY"""
    rank = spatial_rank(op, (X, W, d_Y), kernel_shape, strides, dilations, pads)
    s, d, extra = list(strides or [1] * rank), list(dilations or [1] * rank), list(output_padding or [0] * rank)
    d_B = op.ReduceSum(d_Y, [0, *range(2, rank + 2)], keepdims=0)
    window = {"dilations": dilations, "group": group, "kernel_shape": kernel_shape, "strides": strides}
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") or output_shape is not None:
        found = _pads_by_shape(op, X, W, kernel_shape, s, d, extra, output_shape, auto_pad)
        if found is None:
            return *_padded_at_run_time(op, d_Y, X, W, kernel_shape, s, d, extra, auto_pad, window), d_B
        pads, extra = found
    elif auto_pad == "VALID":
        pads = None
    if any(e >= t for e, t in zip(extra, s, strict=True)):  # so much that more windows fit: cut off what none reached
        begin, end = list(pads or [0] * (2 * rank))[:rank], list(pads or [0] * (2 * rank))[rank:]
        cut = [max(x - e, 0) for x, e in zip(extra, end, strict=True)]
        pads = begin + [max(e - x, 0) for x, e in zip(extra, end, strict=True)]
        if any(cut):
            d_Y = op.Slice(d_Y, [0] * rank, op.Sub(op.Shape(d_Y, start=2), cut), list(range(2, rank + 2)))
    window["pads"] = pads
    d_X = op.Conv(d_Y, W, **window)  # type: ignore[arg-type]  # of many types
    _, d_W, _ = op.grad.ConvGrad(X, d_Y, W, auto_pad="NOTSET", **window)
    return d_X, d_W, d_B


def _pads_by_shape(
    op: Emitter,
    X: str,
    W: str,
    kernel_shape: Ints,
    strides: list[int],
    dilations: list[int],
    output_padding: list[int],
    output_shape: Ints,
    auto_pad: str,
) -> tuple[list[int], list[int]] | None:
    """The pads, and how many elements at the end no window reached; None where only the run tells them.

    total = s·(I − 1) + output_padding + (k − 1)·d + 1 − O, and O = s·I for SAME; the odd element where auto_pad says.
    """
    kernel, size = kernel_shape or spatial(op, W), spatial(op, X)
    if kernel is None or (output_shape is not None and size is None):
        return None
    if output_shape is None or size is None:
        room = [-s for s in strides]
    else:
        room = [s * (n - 1) - o for s, n, o in zip(strides, size, output_shape[-len(strides) :], strict=True)]
    axes = zip(room, output_padding, kernel, dilations, strict=True)
    total = [r + p + (k - 1) * d + 1 for r, p, k, d in axes]
    small = [max(t, 0) // 2 for t in total]
    large = [max(t, 0) - h for t, h in zip(total, small, strict=True)]
    beyond = [p + max(-t, 0) for p, t in zip(output_padding, total, strict=True)]
    return small + large if auto_pad == "SAME_UPPER" else large + small, beyond


def _padded_at_run_time(
    op: Emitter,
    d_Y: str,
    X: str,
    W: str,
    kernel_shape: Ints,
    strides: list[int],
    dilations: list[int],
    output_padding: list[int],
    auto_pad: str,
    window: dict[str, Any],
) -> tuple[str, str]:
    """dX and dW with the pads of `_pads_by_shape` laid around dY before: an attribute cannot hold them."""
    axes = list(range(2, len(strides) + 2))
    begin = [0] * len(strides)
    size = op.Shape(X, start=2)
    kernel = op.Shape(W, start=2) if kernel_shape is None else op.const(list(kernel_shape))
    extent = op.Add(op.Mul(op.Sub(kernel, [1]), dilations), [1])
    reached = op.Add(op.Mul(op.Sub(size, [1]), strides), extent)
    total = op.Max(op.Sub(op.Add(reached, output_padding), op.Shape(d_Y, start=2)), [0])
    small = op.Div(total, [2])
    large = op.Sub(total, small)
    before, after = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    whole = op.Pad(d_Y, op.Concat([0, 0], before, [0, 0], after, axis=0))
    d_X = op.Slice(op.Conv(whole, W, **window), begin, size, axes)
    _, d_W, _ = op.grad.ConvGrad(X, op.Slice(whole, begin, reached, axes), W, auto_pad="NOTSET", pads=None, **window)
    return d_X, d_W
