"""Strategies of ONNX Runtime's normalizations.

Each epsilon is so large that differences converge even where all numbers are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(d: Drawing) -> Case:
    """Every optional input; a skip that broadcasts; the sum as a further output."""
    shape = _tokens(d)
    simple = d.op_type == "SkipSimplifiedLayerNormalization"
    skip = d.pick(shape, shape[1:], (1, *shape[1:]))
    gamma = d.floats(shape[-1:])
    beta = [] if simple else [d.optional(lambda: d.floats(shape[-1:]))]
    bias = d.optional(lambda: d.floats(shape[-1:]))
    outputs = d.pick(1, 4) if not simple else 1
    return d.case(d.floats(shape), d.floats(skip), gamma, *beta, bias, outputs=outputs, epsilon=_epsilon(d))


@strategy("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_normalization(d: Drawing) -> Case:
    """Over any of the last axes, with the factor as a further output."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.optional(lambda: d.axis(len(shape)))
    scale = shape[-1:] if axis is None else shape[axis % len(shape) :]
    return d.case(d.floats(shape), d.floats(scale), axis=axis, outputs=d.integer(1, 2), epsilon=_epsilon(d))


def group_norm(d: Drawing) -> Case:
    """Channels first or last, with swish and without; a skip as large as the image, or one number per channel."""
    count, each = d.integer(1, 2), d.integer(1, 2)
    batch, channels, image = d.integer(1, 2), count * each, (d.integer(1, 3), d.integer(1, 2))
    skipped = d.op_type == "SkipGroupNorm"
    last = d.pick(None, 1, *(() if skipped else (0,)))
    shape = (batch, channels, *image) if last == 0 else (batch, *image, channels)
    further: list[np.ndarray | None] = []
    if skipped:
        skips = [shape, (batch, channels), (batch, 1, 1, channels)]
        further = [d.floats(d.pick(*skips)), d.optional(lambda: d.floats((channels,)))]
    x, gamma, beta = (d.floats(of) for of in (shape, (channels,), (channels,)))
    outputs = d.integer(1, 2) if skipped else 1
    settings: dict[str, Any] = {
        "activation": d.integer(0, 1),
        "groups": count,
        "channels_last": last,
        "epsilon": _epsilon(d),
    }
    return d.case(x, gamma, beta, *further, outputs=outputs, **settings)


strategy("GroupNorm", domain=MICROSOFT)(group_norm)
strategy("SkipGroupNorm", domain=MICROSOFT, ranked=True)(group_norm)


@strategy("BatchNormInternal", domain=MICROSOFT)
def batch_norm_internal(d: Drawing) -> Case:
    """With the statistics of the batch, and with given ones."""
    shape = (d.integer(1, 3), d.integer(1, 3), *d.shape(0, 2, size=3, empty=False))
    training = d.pick(None, 1, 0)
    parts = [d.floats(of) for of in (shape, *[shape[1:2]] * 3)]
    outputs = 1 if training == 0 else d.pick(1, 5)
    settings: dict[str, Any] = {"training_mode": training, "momentum": d.pick(None, 0.7), "epsilon": _epsilon(d)}
    return d.case(*parts, d.floats(shape[1:2], 0.5, 2), outputs=outputs, **settings)


@strategy("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(d: Drawing) -> Case:
    """With and without segments, a mask and positions; the sum as a further output."""
    batch, length, width = _tokens(d)
    sizes = d.integer(1, 4), d.integer(length, 5), d.integer(1, 2)
    tables = [d.floats((rows, width)) for rows in sizes]
    words, places, segments = (d.integers((batch, length), 0, rows - 1, np.int32) for rows in sizes)
    segmented = d.flag()
    return d.case(
        words,
        segments if segmented else None,
        *tables[:2],
        tables[2] if segmented else None,
        *(d.floats((width,)), d.floats((width,))),
        d.optional(lambda: d.integers((batch, length), 0, 1, np.int32)),
        places if d.flag() else None,
        outputs=d.integer(2, 3),
        epsilon=_epsilon(d),
    )


def _tokens(d: Drawing) -> Shape:
    """Sequences of vectors."""
    return d.integer(1, 2), d.integer(1, 3), d.integer(1, 4)


def _epsilon(d: Drawing) -> float:
    return float(np.float32(d.pick(0.1, 1.0, 0.01)))


@strategy("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(d: Drawing) -> Case:
    """One run of elements in the last axis, or several."""
    shape, width = d.shape(0, 2, size=2), d.integer(1, 3)
    whole = (*shape, width * d.integer(1, 2))
    activation = d.pick(None, "sigmoid", "swish")
    return d.case(d.floats(whole), d.floats((width,)), d.floats(whole), activation=activation, epsilon=_epsilon(d))


@strategy("BranchwiseRMSNorm", domain=MICROSOFT)
def branchwise_rms_norm(d: Drawing) -> Case:
    """Grouped and flattened, with a scale of any shape or none."""
    lead, branches, width = d.shape(0, 2, size=2, empty=False), d.integer(1, 3), d.integer(1, 3)
    flat = d.flag()
    scale = d.pick(None, (width,), (branches, width), (branches * width,))
    return d.case(
        d.floats((*lead, branches * width) if flat else (*lead, branches, width)),
        None if scale is None else d.floats(scale),
        num_branches=branches if flat else None,
        epsilon=_epsilon(d),
    )


@strategy("EngramGate", domain=MICROSOFT)
def engram_gate(d: Drawing) -> Case:
    """The keys and queries and their scales are of one sign each, so that no product of them is near 0."""
    shape = (*_tokens(d)[:2], d.integer(1, 2), d.integer(1, 3))
    key, query = (d.pick(1, -1) * d.floats(shape, 0.5, 2) for _ in range(2))
    scales = [d.floats(shape[2:], 0.5, 2) for _ in range(2)]
    normed = d.flag()
    return d.case(
        *(key, query, d.floats((*shape[:2], shape[3]))),
        *scales,
        d.floats(shape[2:]) if normed else None,
        outputs=2 if normed else 1,
        epsilon=_epsilon(d),
    )


@strategy("HyperConnectionLowRankMix", domain=MICROSOFT)
def hyper_connection_low_rank_mix(d: Drawing) -> Case:
    """With the output of the block before and without."""
    lead, branches, width, rank = d.shape(0, 2, size=2, empty=False), d.integer(1, 2), d.integer(1, 3), d.integer(1, 2)
    flat = branches * width
    before = d.flag()
    settings: dict[str, Any] = {
        "gate_div": d.pick(None, 2.0),
        "gate_mul": d.pick(None, 0.5),
        "reduction_scale": d.pick(None, 0.5),
        "silu_alpha": d.pick(None, 2.0),
        "epsilon": _epsilon(d),
    }
    return d.case(
        *(d.normal((*lead, flat)), d.normal((flat,)), d.normal((flat, rank)), d.normal((rank, flat))),
        d.normal((flat, branches)),
        d.normal((*lead, width)) if before else None,
        d.normal((*lead, branches)) if before else None,
        num_branches=branches,
        outputs=d.integer(2, 3),
        **settings,
    )
