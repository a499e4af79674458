"""Reductions, sums and products along an axis, and what chooses along one."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import axes_of, axis_of, template


@template(4)
def _reduction(s: GraphScope) -> None:
    op = s.rng.choice(
        (
            "ReduceSum",
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceSumSquare",
        )
    )
    x = s.pick(0, 4)
    if op == "ReduceLogSum":
        x = s.positive(x)
    if op == "ReduceL2":
        x = s.positive(x) if s.chance(0.5) else x
    keep = s.rng.choice((None, 0, 1))
    if not x.rank or s.chance(0.2):
        y = s.add(op, x, keepdims=keep)
    else:
        axes = axes_of(s, x.rank)
        as_input = s.opset >= 18 or op == "ReduceSum"
        if as_input:
            noop = s.rng.choice((None, 1)) if s.chance(0.2) else None
            given = s.ints(axes) if s.chance(0.9) else None
            y = s.add(op, x, given, keepdims=keep, noop_with_empty_axes=noop)
        else:
            y = s.add(op, x, axes=axes, keepdims=keep)
    if op == "ReduceL2" and y.array.size and np.min(y.real) < 0.1:
        raise MisfitError("a root near 0")


@template()
def _cumulative(s: GraphScope) -> None:
    x = s.pick(1)
    axis = s.leaf(np.array(axis_of(s, x.rank), s.rng.choice((np.int64, np.int32))))
    s.add("CumSum", x, axis, exclusive=s.rng.choice((None, 1)), reverse=s.rng.choice((None, 1)))


@template()
def _topk(s: GraphScope) -> None:
    x = s.pick(1, filled=True)
    axis = axis_of(s, x.rank)
    k = s.rng.randint(1, x.shape[axis])
    _values, _ = s.add_all(
        "TopK", x, s.ints([k]), outputs=2, axis=axis, largest=s.rng.choice((None, 0)), named=[True, True]
    )
    if s.chance(0.3):
        s.add("GatherElements", s.like(x.shape), _, axis=axis)


@template(0.5)
def _arg(s: GraphScope) -> None:
    x = s.pick(1, filled=True)
    axis = axis_of(s, x.rank)
    found = s.add(s.rng.choice(("ArgMax", "ArgMin")), x, axis=axis, keepdims=1)
    s.add("GatherElements", s.like(x.shape), found, axis=axis)


@template(0.4)
def _einsum_trace(s: GraphScope) -> None:
    x = s.pick(2, 3, lambda v: v.shape[-1] == v.shape[-2])
    s.add("Einsum", x, equation="ii->i" if x.rank == 2 else "bii->b")


@template(0.4, 26)
def _cumulative_product(s: GraphScope) -> None:
    x = s.pick(1)
    s.add("CumProd", x, s.leaf(np.array(s.rng.randrange(x.rank))), exclusive=s.rng.choice((None, 1)))
