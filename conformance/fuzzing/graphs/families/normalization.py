"""Normalizations."""

from __future__ import annotations

from refgrad.conformance.fuzzing.graphs.growing import (
    FLOAT,
    GraphScope,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import axis_of, template


@template()
def _batch_normalization(s: GraphScope) -> None:
    x = s.pick(2, 4, filled=True)
    c = x.shape[1]
    scale, bias, mean = (s.like((c,)) for _ in range(3))
    var = s.positive(s.like((c,)))
    epsilon = s.rng.choice((None, 0.1))
    if s.opset >= 14 and s.chance(0.3):
        # ONNX Runtime writes the running mean and variance over those that are given: nothing else may read them.
        mean, var = s.add("Neg", mean, hidden=True), s.add("Add", var, s.number(0.5), hidden=True)
        s.add_all("BatchNormalization", x, scale, bias, mean, var, outputs=3, training_mode=1, epsilon=0.1)
    else:
        s.add("BatchNormalization", x, scale, bias, mean, var, epsilon=epsilon)


@template()
def _instance_normalization(s: GraphScope) -> None:
    x = s.pick(3, 4, filled=True)
    s.add("InstanceNormalization", x, s.like(x.shape[1:2]), s.like(x.shape[1:2]), epsilon=0.1)


@template(1.5, 17)
def _layer_normalization(s: GraphScope) -> None:
    x = s.pick(1, 4, filled=True)
    axis = axis_of(s, x.rank)
    shape = x.shape[axis % x.rank :]
    scale = s.like(shape)
    bias = s.like(shape) if s.chance(0.6) else None
    s.add("LayerNormalization", x, scale, bias, axis=axis, epsilon=0.05)


@template(1, 23)
def _rms_normalization(s: GraphScope) -> None:
    x = s.pick(1, 4, filled=True)
    axis = axis_of(s, x.rank)
    s.add("RMSNormalization", x, s.like(x.shape[axis % x.rank :]), axis=axis, epsilon=0.05)


@template(1, 21)
def _group_normalization(s: GraphScope) -> None:
    x = s.pick(3, 4, filled=True)
    groups = s.rng.choice([g for g in (1, 2, 4) if x.shape[1] % g == 0])
    per = (x.shape[1],) if s.opset >= 21 else (groups,)
    s.add("GroupNormalization", x, s.like(per), s.like(per), num_groups=groups, epsilon=0.1)


@template(0.6)
def _mean_variance(s: GraphScope) -> None:
    if s.world.kind != FLOAT:
        raise MisfitError("its body adds a float32")
    x = s.pick(4, 4, filled=True) if s.chance(0.5) else s.pick(2, 3, filled=True)
    axes = [0, 2, 3] if x.rank == 4 and s.chance(0.5) else list(range(x.rank))
    s.add("MeanVarianceNormalization", x, axes=axes)


@template(0.6)
def _lp_normalization(s: GraphScope) -> None:
    x = s.pick(1, filled=True)
    s.add("LpNormalization", s.positive(x) if s.chance(0.5) else x, axis=axis_of(s, x.rank), p=s.rng.choice((1, 2)))


@template(0.6)
def _lrn(s: GraphScope) -> None:
    x = s.pick(3, 4, filled=True)
    s.add("LRN", x, size=s.rng.choice((1, 2, 3)), alpha=s.rng.choice((0.1, None)), bias=s.rng.choice((None, 2.0)))
