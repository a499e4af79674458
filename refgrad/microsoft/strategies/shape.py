"""Strategies of ONNX Runtime's operators that move elements."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.conformance.strategies.shape import padding
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("ConcatTraining", domain=MICROSOFT)
def concat_training(d: Drawing) -> Case:
    """One to three tensors along any axis, with their lengths as a further output."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.axis(len(shape))
    place = axis % len(shape)
    parts = [(*shape[:place], d.integer(0, 2), *shape[place + 1 :]) for _ in range(d.integer(1, 3))]
    return d.case(*(d.floats(part) for part in parts), axis=axis, outputs=d.integer(1, 2))


@strategy("SampleOp", domain=MICROSOFT)
def sample_op(d: Drawing) -> Case:
    """Of any shape."""
    return d.case(d.floats(d.shape()))


@strategy("ExpandDims", domain=MICROSOFT)
def expand_dims(d: Drawing) -> Case:
    """An axis anywhere."""
    shape = d.shape()
    axis = np.array(d.axis(len(shape) + 1), np.int32)
    return d.case(d.floats(shape), axis.reshape(d.pick((), (1,))), fixed=["axis"])


@strategy("Pad", domain=MICROSOFT)
def pad(d: Drawing) -> Case:
    """Every mode, with negative pads too, in one row or as a matrix."""
    shape = d.shape(elements=24, empty=False)
    mode = d.pick("constant", "edge", "reflect")
    before = [padding(d, mode, size) for size in shape]
    after = [padding(d, mode, size + min(0, first)) for size, first in zip(shape, before, strict=True)]
    pads = np.array([*before, *after], np.int64)
    value = d.optional(lambda: d.scalar(0.5).reshape(d.pick((), (1,)))) if mode == "constant" else None
    rows = pads.reshape(d.pick((-1,), (1, -1)))
    return d.case(d.floats(shape), rows, value, mode=None if mode == "constant" else mode, fixed=["pads"])


@strategy("Range", domain=MICROSOFT)
def range_(d: Drawing) -> Case:
    """As Range; the step left out too, and each number with an axis or without."""
    start, delta = d.floats(()), d.pick(1.0, 0.5, -1.0, -0.25)
    step = None if delta == 1 and d.flag() else d.scalar(delta)
    limit = d.scalar(float(start) + (d.integer(-1, 5) + 0.5) * delta)
    numbers = [None if x is None else x.reshape(d.pick((), (1,))) for x in (start, limit, step)]
    return d.case(*numbers, fixed=["limit"])


@strategy("UnfoldTensor", domain=MICROSOFT, ranked=True)
def unfold_tensor(d: Drawing) -> Case:
    """Slices along any axis, which overlap or leave something out."""
    shape = d.shape(1, 3, empty=False)
    axis = d.axis(len(shape))
    return d.case(d.floats(shape), dim=axis, size=d.integer(1, shape[axis]), step=d.pick(None, 1, 2, 3))
