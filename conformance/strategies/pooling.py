"""Strategies of the poolings. Where a maximum is taken, all elements differ, so no window has two maxima."""

from __future__ import annotations

from math import prod

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy
from refgrad.conformance.strategies.windows import batch, rank_of_image, windows


@strategy("MaxPool", kinks=True)
def max_pool(d: Drawing) -> Case:
    """Every attribute, and the indices as a second output."""
    over = windows(d, rank_of_image(d), pooling=True)
    x = d.distinct((batch(d), d.integer(1, 2), *over.image))
    order, ceil = d.optional(lambda: d.integer(0, 1)), d.optional(lambda: d.integer(0, 1))
    return d.case(x, outputs=d.integer(1, 2), storage_order=order, ceil_mode=ceil, **over.attributes(d))


@strategy("AveragePool")
def average_pool(d: Drawing) -> Case:
    """Every attribute; dilations since opset 19."""
    over = windows(d, rank_of_image(d), pooling=True, dilated=d.opset >= 19)
    attributes = over.attributes(d) | ({} if d.opset >= 19 else {"dilations": None})
    count, ceil = d.optional(lambda: d.integer(0, 1)), d.optional(lambda: d.integer(0, 1))
    x = d.floats((batch(d), d.integer(1, 2), *over.image))
    return d.case(x, count_include_pad=count, ceil_mode=ceil, **attributes)


@strategy("LpPool", kinks=True)
def lp_pool(d: Drawing) -> Case:
    """Every attribute; dilations and ceil_mode since opset 18. No element is 0."""
    newer = d.opset >= 18
    over = windows(d, rank_of_image(d), pooling=True, dilated=newer)
    attributes = over.attributes(d) | ({} if newer else {"dilations": None})
    ceil = d.optional(lambda: d.integer(0, 1)) if newer else None
    x = d.floats((batch(d), d.integer(1, 2), *over.image), avoid=[0])
    return d.case(x, p=_power(d), ceil_mode=ceil, **attributes)


@strategy("GlobalAveragePool")
def global_average_pool(d: Drawing) -> Case:
    """Images of any rank."""
    return d.case(d.floats(_images(d)))


@strategy("GlobalMaxPool", kinks=True)
def global_max_pool(d: Drawing) -> Case:
    """Images of any rank."""
    return d.case(d.distinct(_images(d)))


@strategy("GlobalLpPool", kinks=True)
def global_lp_pool(d: Drawing) -> Case:
    """Images of any rank. No element is 0."""
    return d.case(d.floats(_images(d), avoid=[0]), p=_power(d))


@strategy("MaxUnpool")
def max_unpool(d: Drawing) -> Case:
    """Indices that differ, or repeat as with windows that overlap; the shape that the attributes give, or a larger one."""
    rank = rank_of_image(d)
    axes = [_unpooled(d) for _ in range(rank)]
    image, kernel, strides, begins, ends, sizes = (list(part) for part in zip(*axes, strict=True))
    x = (d.integer(1, 2), d.integer(1, 2), *image)
    count, places = prod(x), x[0] * x[1] * prod(sizes)
    if count <= places and not d.flag():
        indices = np.array(d.permutation(places)[:count], np.int64).reshape(x)
    else:
        indices = d.integers(x, 0, places - 1)
    larger = d.optional(lambda: np.array([*x[:2], *(n + d.integer(0, 2) for n in sizes)], np.int64))
    return d.case(
        *(d.floats(x), indices, larger),
        fixed=["I"] if larger is None else ["I", "output_shape"],
        kernel_shape=kernel,
        strides=None if set(strides) == {1} else strides,
        pads=begins + ends if any(begins + ends) else None,
    )


def _unpooled(d: Drawing) -> tuple[int, ...]:
    """Size, kernel, stride, pads before and behind, and size of the result along one axis."""
    n, k, stride = d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    begin, end = (d.integer(0, (k - 1) // 2) for _ in range(2))
    return n, k, stride, begin, end, (n - 1) * stride + k - begin - end


def _images(d: Drawing) -> Shape:
    """A batch, channels, and one to three axes of at least one element."""
    return (batch(d), d.integer(1, 3), *d.shape(1, 3, size=3, elements=12, empty=False))


def _power(d: Drawing) -> int | None:
    return d.pick(None, 1, 2, 3)
