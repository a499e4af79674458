"""Operators that read and write by index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
    GraphValue,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import axis_of, template


def indices(s: GraphScope, shape: Any, size: int, unique: bool = False) -> GraphValue:
    """Indices below `size`, some counted from the end."""
    if not size and math.prod(shape):
        raise MisfitError("nothing to index")
    array = s.world.numbers.integers(-size, size, tuple(shape)) if size else np.zeros(tuple(shape), np.int64)
    if s.chance(0.5):
        array = np.abs(array) % max(size, 1)
    return s.leaf(array.astype(s.rng.choice((np.int64, np.int64, np.int32))))


@template(2)
def _gather(s: GraphScope) -> None:
    x = s.pick(1)
    axis = axis_of(s, x.rank)
    s.add("Gather", x, indices(s, s.rng.choice(((), (1,), (3,), (2, 2))), x.shape[axis]), axis=axis)


@template()
def _gather_elements(s: GraphScope) -> None:
    x = s.pick(1)
    axis = axis_of(s, x.rank)
    shape = [s.rng.randint(1, max(d, 1)) for d in x.shape]
    shape[axis] = s.rng.choice((1, 2, 5))
    s.add("GatherElements", x, indices(s, shape, x.shape[axis]), axis=axis)


def _tuples(s: GraphScope, shape: tuple[int, ...], head: Any) -> GraphValue:
    """Index tuples into the first axes of a shape."""
    if not math.prod(shape):
        raise MisfitError("nothing to index")
    parts = [s.world.numbers.integers(0, d, tuple(head)) - (d if s.chance(0.2) else 0) for d in shape]
    return s.leaf(np.stack(parts, axis=-1))


@template()
def _gather_nd(s: GraphScope) -> None:
    x = s.pick(1, 4, filled=True)
    batch = s.rng.randint(0, 1) if x.rank > 1 else 0
    last = s.rng.randint(1, x.rank - batch)
    head = [*x.shape[:batch], *s.rng.choice(((2,), (3,), (2, 2)))]
    s.add("GatherND", x, _tuples(s, x.shape[batch : batch + last], head), batch_dims=batch or None)


@template()
def _scatter_elements(s: GraphScope) -> None:
    x = s.pick(1, 3, filled=True)
    axis = axis_of(s, x.rank)
    reductions = [None, "add"] if s.opset >= 16 else [None]
    reduction = s.rng.choice(reductions)
    shape = [s.rng.randint(1, d) for d in x.shape]
    order = np.argsort(s.world.numbers.random(x.shape), axis=axis)
    chosen = order[tuple(slice(0, d) for d in shape)]
    s.add("ScatterElements", x, s.leaf(chosen.astype(np.int64)), s.like(shape), axis=axis, reduction=reduction)


@template()
def _scatter_nd(s: GraphScope) -> None:
    x = s.pick(1, 4, filled=True)
    last = s.rng.randint(1, x.rank)
    reduction = s.rng.choice([None, "add"] if s.opset >= 16 else [None])
    every = list(np.ndindex(*x.shape[:last]))
    count = s.rng.randint(1, len(every))
    chosen = np.array(s.rng.sample(every, min(count, 4)), np.int64)
    s.add("ScatterND", x, s.leaf(chosen), s.like((len(chosen), *x.shape[last:])), reduction=reduction)


@template(0.8)
def _compress(s: GraphScope) -> None:
    x = s.pick(1, filled=True)
    if s.chance(0.3):
        s.add("Compress", x, s.leaf(s.world.numbers.random(x.array.size) < 0.6))
    else:
        axis = axis_of(s, x.rank)
        s.add("Compress", x, s.leaf(s.world.numbers.random(x.shape[axis]) < 0.7), axis=axis)


@template(0.5)
def _one_hot(s: GraphScope) -> None:
    s.add(
        "OneHot",
        indices(s, (s.rng.choice((1, 3)),), 4),
        s.leaf(np.array(4)),
        s.like((2,)),
        axis=s.rng.choice((None, 0)),
        kind=s.world.kind,
    )


@template(0.5)
def _unique(s: GraphScope) -> None:
    x = s.pick(1, 2, filled=True)
    s.add("Unique", x)


@template(0.5)
def _nonzero(s: GraphScope) -> None:
    x = s.pick(1, 3, filled=True)
    where = s.add("NonZero", s.add("Greater", x, s.number(0.02)))
    s.add("GatherND", x, s.add("Transpose", where))
