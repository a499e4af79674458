"""Strategies of ONNX Runtime's sums."""

from __future__ import annotations

from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("ScaledSum", domain=MICROSOFT)
def scaled_sum(d: Drawing) -> Case:
    """Two or three terms; the factor of the third may be absent."""
    shape = d.shape()
    scales: dict[str, Any] = {"scale_0": d.factor(), "scale_1": d.factor()}
    count = d.integer(2, 3)
    third = d.optional(d.factor) if count == 3 else None
    return d.case(*(d.floats(shape) for _ in range(count)), scale_2=third, **scales)


@strategy("BiasAdd", domain=MICROSOFT)
def bias_add(d: Drawing) -> Case:
    """Any sizes of three axes."""
    shape = d.shape(3, 3, size=3)
    return d.case(d.floats(shape), d.floats(shape[-1:]), d.floats(shape))


@strategy("GatedAdd", domain=MICROSOFT)
def gated_add(d: Drawing) -> Case:
    """With the gate given, and projected."""
    shape, width = d.shape(1, 3), d.integer(1, 3)
    projected = d.flag()
    gate = d.floats((*shape[:-1], width if projected else 1))
    return d.case(d.floats(shape), d.floats(shape), gate, d.floats((width, 1)) if projected else None)


@strategy("HyperConnectionPreMix", domain=MICROSOFT, ranked=True)
def hyper_connection_pre_mix(d: Drawing) -> Case:
    """Grouped and flattened streams, and gates of every shape."""
    lead, branches, width = d.shape(0, 2, size=2, empty=False), d.integer(1, 3), d.integer(1, 3)
    flat = d.flag()
    streams = (*lead, branches * width) if flat else (*lead, branches, width)
    gates = d.pick((branches,), (branches, 1), (branches, width), *([(branches * width,)] if flat else []))
    counted: dict[str, Any] = {"num_branches": branches if flat else None, "reduction_scale": d.pick(None, 0.5)}
    return d.case(d.floats(streams), d.floats((*lead, *gates)), **counted)


@strategy("HyperConnectionPostMix", domain=MICROSOFT, ranked=True)
def hyper_connection_post_mix(d: Drawing) -> Case:
    """Grouped and flattened streams, with a mix of them or without."""
    lead, branches, width = d.shape(0, 2, size=2, empty=False), d.integer(1, 3), d.integer(1, 3)
    flat = d.flag()
    streams = (*lead, branches * width) if flat else (*lead, branches, width)
    gates = d.pick((branches,), (branches, 1), (branches, width))
    return d.case(
        d.floats(streams),
        d.floats((*lead, width)),
        d.floats((*lead, *gates)),
        d.optional(lambda: d.floats((*lead, branches, branches))),
        num_branches=branches if flat else None,
    )
