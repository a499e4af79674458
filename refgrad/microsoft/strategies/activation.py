"""Strategies of ONNX Runtime's activations."""

from __future__ import annotations

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("Gelu", "QuickGelu", domain=MICROSOFT)
def gelu(d: Drawing) -> Case:
    """Of any shape; QuickGelu with any factor."""
    alpha = d.optional(d.factor) if d.op_type == "QuickGelu" else None
    return d.case(d.floats(d.shape()), alpha=alpha)


@strategy("FastGelu", "BiasGelu", domain=MICROSOFT)
def gelu_of_sum(d: Drawing) -> Case:
    """With a bias as long as the last axis; FastGelu without one too."""
    shape = d.shape(1)
    bias = d.floats(shape[-1:]) if d.op_type == "BiasGelu" or d.flag() else None
    return d.case(d.floats(shape), bias)


@strategy("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(d: Drawing) -> Case:
    """A bias that broadcasts along the last of the axes before `axis`, or along the first."""
    shape = d.shape(2, 4, size=3, empty=False)
    axis = d.pick(*range(1, len(shape)))
    inner = d.flag()
    ones = (1,) * d.integer(1, axis)  # the axes before `axis` along which the bias is repeated
    left = (*shape[: axis - len(ones)], *ones) if inner else ones
    bias = d.floats((*left, *shape[len(left) :]))
    return d.case(d.floats(shape), bias, axis=axis if axis != 1 or d.flag() else None, is_inner_broadcast=int(inner))


@strategy("BitmaskDropout", domain=MICROSOFT)
def bitmask_dropout(d: Drawing) -> Case:
    """Outside of training, so nothing is random; with and without a ratio."""
    ratio = d.optional(lambda: d.scalar(0.25))
    return d.case(d.floats(d.shape()), ratio, fixed=[] if ratio is None else ["ratio"], outputs=d.integer(1, 2))


@strategy("BiasDropout", "BitmaskBiasDropout", domain=MICROSOFT)
def bias_dropout(d: Drawing) -> Case:
    """Outside of training, so nothing is random; with and without a residual and a ratio."""
    shape = d.shape(1)
    residual = d.optional(lambda: d.floats(shape))
    ratio = d.optional(lambda: d.scalar(0.25))
    fixed = [] if ratio is None else ["ratio"]
    return d.case(d.floats(shape), d.floats(shape[-1:]), residual, ratio, fixed=fixed, outputs=d.integer(1, 2))


@strategy("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(d: Drawing) -> Case:
    """Any width."""
    shape = (d.integer(1, 2), d.integer(1, 2), 2 * d.integer(1, 2))
    return d.case(d.floats(shape), d.floats(shape[-1:]))


@strategy("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(d: Drawing) -> Case:
    """With the scale as an input or as an attribute."""
    scale = d.optional(lambda: d.floats(d.pick((), (1,))))
    return d.case(d.floats(d.shape()), scale, alpha=d.optional(d.factor))
