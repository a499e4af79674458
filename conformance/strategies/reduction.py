"""Strategies of the reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy

OF_NOTHING = ("ReduceSum", "ReduceSumSquare", "ReduceProd", "ReduceL1", "ReduceL2")  # finite for no elements


@strategy("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceProd", "ReduceLogSumExp")
def anywhere(d: Drawing) -> Case:
    """Defined everywhere; factors may be 0."""
    shape = _shape(d)
    return _over_axes(d, d.floats(shape))


@strategy("ReduceLogSum")
def of_positive(d: Drawing) -> Case:
    """Of positive numbers."""
    return _over_axes(d, d.floats(_shape(d), 0.125, 4))


@strategy("ReduceL2")
def norm(d: Drawing) -> Case:
    """No element is 0: along an axis of one element the norm is the absolute value."""
    return _over_axes(d, d.floats(_shape(d), avoid=(0,)))


@strategy("ReduceL1", kinks=True)
def sum_of_sizes(d: Drawing) -> Case:
    """No element is 0."""
    return _over_axes(d, d.floats(_shape(d), avoid=(0,)))


@strategy("ReduceMax", "ReduceMin", kinks=True)
def extreme(d: Drawing) -> Case:
    """No two elements tie."""
    return _over_axes(d, d.distinct(_shape(d)))


def _shape(d: Drawing) -> Shape:
    return d.shape(empty=d.op_type in OF_NOTHING)


def _over_axes(d: Drawing, x: np.ndarray) -> Case:
    """Axes absent, as an attribute, constant or fed; no axes mean all or, with noop_with_empty_axes, none."""
    keep: dict[str, Any] = {"keepdims": d.pick(None, 0, 1)}
    if d.opset < (13 if d.op_type == "ReduceSum" else 18):
        return d.case(x, axes=d.optional(lambda: d.axes(x.ndim, 1)) or None, **keep)
    axes = d.optional(lambda: np.array(d.axes(x.ndim), np.int64))
    return d.case(x, axes, noop_with_empty_axes=d.pick(None, 0, 1), fixed=["axes"], **keep)
