"""Strategies of the normalizations. Each epsilon is so large that differences converge even where all numbers are equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy


@strategy("BatchNormalization")
def batch_normalization(d: Drawing) -> Case:
    """With given statistics and, since opset 14, with the statistics of the batch."""
    training = d.opset >= 14 and d.flag()
    shape = _channels(d, 0, 2, empty=not training)
    x, scale, bias, mean = (d.floats(of) for of in (shape, *[shape[1:2]] * 3))
    variance = d.floats(shape[1:2], 0.5, 2)
    fixed = ["scale", "B", "input_mean", "input_var"]
    settings: dict[str, Any] = {"epsilon": _epsilon(d), "momentum": d.pick(None, 0.7, 0.0)}
    if training:
        settings |= {"training_mode": 1, "outputs": 3}
    return d.case(x, scale, bias, mean, variance, fixed=fixed, **settings)


@strategy("InstanceNormalization")
def instance_normalization(d: Drawing) -> Case:
    """Images of any rank."""
    shape = _channels(d, 1, 3)
    x, scale, bias = (d.floats(of) for of in (shape, shape[1:2], shape[1:2]))
    return d.case(x, scale, bias, fixed=["scale", "B"], epsilon=_epsilon(d))


@strategy("GroupNormalization", oldest=21)
def group_normalization(d: Drawing) -> Case:
    """Groups of one or two channels, of images of any rank."""
    groups, each = d.integer(1, 3), d.integer(1, 2)
    shape = (_batch(d), groups * each, *d.shape(0, 2, size=3, elements=9, empty=False))
    x, scale, bias = (d.floats(of) for of in (shape, *[shape[1:2]] * 2))
    return d.case(x, scale, bias, fixed=["scale", "bias"], num_groups=groups, epsilon=_epsilon(d))


@strategy("LayerNormalization")
def layer_normalization(d: Drawing) -> Case:
    """Any axis, a scale and a bias that broadcast, statistics as further outputs."""
    shape, axis = _rows(d)
    rows = shape[axis or -1 :] if axis != 0 else shape
    bias = d.optional(lambda: d.floats(_narrower(d, rows)))
    fixed = ["Scale"] if bias is None else ["Scale", "B"]
    inputs = d.floats(shape), d.floats(_narrower(d, rows)), bias
    return d.case(*inputs, fixed=fixed, outputs=d.integer(1, 3), axis=axis, epsilon=_epsilon(d))


@strategy("RMSNormalization")
def rms_normalization(d: Drawing) -> Case:
    """Any axis, and a scale that broadcasts."""
    shape, axis = _rows(d)
    rows = shape[axis or -1 :] if axis != 0 else shape
    x, scale = d.floats(shape), d.floats(_narrower(d, rows))
    return d.case(x, scale, fixed=["scale"], axis=axis, epsilon=_epsilon(d))


@strategy("MeanVarianceNormalization")
def mean_variance_normalization(d: Drawing) -> Case:
    """Any axes; by default all except the channels. There is no epsilon, so no two numbers are equal."""
    if d.flag():
        shape = d.shape(1, 4, empty=False)
        axes: list[int] | None = d.axes(len(shape), least=1)
    else:
        shape, axes = _channels(d, 2, 2, empty=False), None
    return d.case(d.distinct(shape), axes=axes)


@strategy("LpNormalization", kinks=True)
def lp_normalization(d: Drawing) -> Case:
    """Either norm along any axis. No element is 0."""
    shape = d.shape(1, empty=False)
    axis = d.optional(lambda: d.axis(len(shape)))
    return d.case(d.floats(shape, avoid=[0]), p=d.pick(None, 1, 2), axis=axis)


@strategy("LRN")
def lrn(d: Drawing) -> Case:
    """Odd and even sizes; every attribute."""
    settings: dict[str, Any] = {
        "alpha": d.pick(None, 0.3, 2.0),
        "beta": d.pick(None, 0.6, 1.0),
        "bias": d.pick(None, 1.5),
    }
    return d.case(d.floats(_channels(d, 0, 2)), size=d.integer(1, 4), **settings)


def _batch(d: Drawing) -> int:
    return 0 if d.rarely() else d.integer(1, 3)


def _channels(d: Drawing, least: int, most: int, empty: bool = True) -> Shape:
    """A batch, channels, and `least` to `most` axes."""
    first = _batch(d) if empty else d.integer(1, 3)
    return (first, d.integer(1, 3), *d.shape(least, most, size=3, elements=9, empty=False))


def _rows(d: Drawing) -> tuple[Shape, int | None]:
    """A shape, and the first of the normalized axes, or None for the last axis alone."""
    shape = d.shape(1, 4, size=3, empty=False)
    axis = d.optional(lambda: d.axis(len(shape)))
    rows = len(shape) - 1 if axis is None else axis % len(shape)
    if rows and d.rarely():
        shape = (0, *shape[1:])
    return shape, axis


def _narrower(d: Drawing, rows: Shape) -> Shape:
    """The shape itself, or one that broadcasts to it."""
    return rows if not d.flag() else d.broadcast_to(rows)


def _epsilon(d: Drawing) -> float:
    return float(np.float32(d.pick(0.1, 1.0, 0.01)))
