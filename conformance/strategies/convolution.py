"""Strategies of the convolutions."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.windows import batch, rank_of_image, windows


@strategy("Conv")
def conv(d: Drawing) -> Case:
    """Groups, strides, dilations, pads or auto_pad, with and without kernel_shape and bias."""
    over = windows(d, rank_of_image(d))
    group, channels, filters = groups(d)
    x, w = d.floats((batch(d), group * channels, *over.image)), d.floats((group * filters, channels, *over.kernel))
    bias = d.optional(lambda: d.floats(w.shape[:1]))
    fixed = ["W"] if bias is None else ["W", "B"]
    return d.case(
        *(x, w, bias),
        fixed=fixed,
        group=group_or_absent(d, group),
        **over.attributes(d, d.shapes == "unknown" or d.flag()),
    )


@strategy("ConvTranspose")
def conv_transpose(d: Drawing) -> Case:
    """As Conv; pads as given, by auto_pad or by the size of the result; with output_padding."""
    rank = rank_of_image(d)
    group, channels, filters = groups(d)
    how = d.pick("pads", "pads", "output_shape", "SAME_UPPER", "SAME_LOWER", "VALID")
    axes = [transposed_axis(d, rank, how) for _ in range(rank)]
    image, kernel, strides, dilations, output_padding, begins, ends, results = (
        list(part) for part in zip(*axes, strict=True)
    )
    sizes: dict[str, Any] = {"strides": strides, "dilations": dilations, "output_padding": output_padding}
    if how == "pads":
        sizes["pads"] = begins + ends
    elif how == "output_shape":
        sizes |= {"output_shape": results, "auto_pad": d.pick(None, "SAME_UPPER", "SAME_LOWER", "VALID")}
    else:
        sizes["auto_pad"] = how
    if d.shapes == "unknown" or d.flag():
        sizes["kernel_shape"] = kernel
    x, w = d.floats((batch(d), group * channels, *image)), d.floats((group * channels, filters, *kernel))
    bias = d.optional(lambda: d.floats((group * filters,)))
    fixed = ["W"] if bias is None else ["W", "B"]
    return d.case(x, w, bias, fixed=fixed, group=group_or_absent(d, group), **sizes)


def transposed_axis(d: Drawing, rank: int, how: str) -> tuple[int, ...]:
    """Size, kernel, stride, dilation, output_padding, pads before and behind, and size of the result along one axis."""
    n, k = d.integer(1, 3 if rank < 3 else 2), d.integer(1, 3 if rank < 3 else 2)
    stride, dilation = d.integer(1, 3), d.pick(1, 1, 2, 3)
    added = d.integer(0, max(stride, dilation) - 1)
    full = stride * (n - 1) + added + (k - 1) * dilation + 1
    begin = d.integer(0, min(2, full - 1))
    end = d.integer(0, min(2, full - 1 - begin))
    result = d.integer(max(1, full - 2), full + 2) if how == "output_shape" else full - begin - end
    return n, k, stride, dilation, added, begin, end, result


@strategy("Col2Im", ranked=True)
def col2im(d: Drawing) -> Case:
    """Strides, dilations and pads; the sizes of the image and the block fed or constant."""
    over = windows(d, rank_of_image(d), padding=False)
    shape = (batch(d), d.integer(1, 2) * prod(over.kernel), prod(over.counts))
    sizes = over.attributes(d, kernel=False) | {"auto_pad": None}
    image, block = np.array(over.image, np.int64), np.array(over.kernel, np.int64)
    return d.case(d.floats(shape), image, block, fixed=["image_shape", "block_shape"], **sizes)


def groups(d: Drawing) -> tuple[int, int, int]:
    """How many groups there are, and how many channels and filters each has."""
    return d.pick(1, 1, 2, 3), d.integer(1, 2), d.integer(1, 2)


def group_or_absent(d: Drawing, group: int) -> int | None:
    """The attribute `group`; it may be absent where it is 1."""
    return None if group == 1 and not d.flag() else group
