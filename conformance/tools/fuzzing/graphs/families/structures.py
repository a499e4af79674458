"""Random control flow: branches with different ranks, unknown ranks, and states that grow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import helper

from refgrad.conformance.tools.fuzzing.graphs.families.control_flow import structure
from refgrad.conformance.tools.fuzzing.graphs.growing import BOOL, INT64, GraphScope, GraphValue, MismatchError
from refgrad.conformance.tools.fuzzing.graphs.templates import template


@template(1.5)
@structure
def _branches_of_other_rank(s: GraphScope) -> None:
    """An If like torch's `if dim: squeeze`; or the branches flatten, unsqueeze, or return another size."""
    x = s.pick(1, 3, filled=True)
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    change = s.rng.choice(("Squeeze", "Squeeze", "Unsqueeze", "Reshape", "ReduceSum"))
    if change == "Squeeze" and not ones:
        x = s.add("Unsqueeze", x, s.leaf(np.array([0]), moves=False))
        ones = [0]
    hidden = s.rng.choice((0.0, 1.0))
    graphs = []
    for changes in (True, False):
        inner = GraphScope(s.world, s)
        value = x
        if s.chance(0.5):
            inner.grow(1)
            value = inner.like(x.shape)
        if changes:
            value = _changed(inner, value, change, ones)
        if value not in inner.values or value.name in {i.name for i in inner.initializers}:
            value = inner.add(s.rng.choice(("Identity", "Sin", "Tanh")), value)
        graphs.append(inner.graph([value], "changed" if changes else "same", hidden))
    if s.chance(0.5):
        graphs.reverse()
    if s.chance(0.3):
        size = s.add("Gather", s.add("Shape", x, kind=INT64), s.leaf(np.array(0), moves=False), kind=INT64)
        test = s.add("Equal", size, s.leaf(np.array(s.rng.choice((1, 2))), moves=False), kind=BOOL)
    else:
        test = s.leaf(np.array(s.chance(0.5)))
    y = s.add("If", test, kind=s.world.kind, then_branch=graphs[0], else_branch=graphs[1])
    if s.chance(0.7):  # torch's next operators know which branch was traced
        y = s.add(s.rng.choice(("Sin", "Tanh", "Neg")), y)
        if s.chance(0.4):
            s.add("Reshape", y, s.ints(x.shape if y.array.size == x.array.size else y.shape))
        elif s.chance(0.5):
            s.add("ReduceSum", y, keepdims=0)


def _changed(inner: GraphScope, value: GraphValue, change: str, ones: list[int]) -> GraphValue:
    match change:
        case "Squeeze":
            return inner.add("Squeeze", value, inner.leaf(np.array([inner.rng.choice(ones)]), moves=False))
        case "Unsqueeze":
            return inner.add("Unsqueeze", value, inner.leaf(np.array([0]), moves=False))
        case "ReduceSum":
            return inner.add("ReduceSum", value, keepdims=0)
    return inner.add("Reshape", value, inner.leaf(np.array([math.prod(value.shape)]), moves=False))


@template(1.0)
def _of_unknown_rank(s: GraphScope) -> None:
    """A Reshape to a shape that is fed, of which nobody knows how many numbers it has."""
    home = list(s.scopes)[-1]
    if home.is_function:
        raise MismatchError("a function has no inputs of its own")
    x = s.pick(0, 3)
    shape = np.array(s.rng.choice((x.shape, (x.array.size,), (1, *x.shape))), np.int64)
    name = s.world.fresh()
    home.inputs.append(helper.make_tensor_value_info(name, INT64, [None]))
    home.values.append(GraphValue(name, shape, INT64))
    s.world.feeds[name] = shape
    s.add("Reshape", x, home.values[-1])


@template(0.08)
@structure
def _growing_state(s: GraphScope) -> None:
    """A Loop whose state gets longer, or one axis more, with each step: refgrad refuses it."""
    x = s.pick(1, 2, filled=True)
    body = GraphScope(s.world, s)
    formals: list[Any] = []
    for like, kind in ((np.array(0), INT64), (np.array(True), BOOL), (x.array, x.kind)):
        value = GraphValue(s.world.fresh(), like, kind)
        body.inputs.append(helper.make_tensor_value_info(value.name, kind, None if np.ndim(like) else []))
        body.values.append(value)
        formals.append(value)
    going = body.add("Identity", formals[1], kind=BOOL)
    moved = body.add("Sin", formals[2])
    if s.chance(0.5):
        grown = body.add("Concat", moved, formals[2], axis=0)
    else:
        grown = body.add("Unsqueeze", moved, body.leaf(np.array([0]), moves=False))
    graph = body.graph([going, grown], "grows", 1.0)
    s.add("Loop", s.leaf(np.array(1)), None, x, kind=s.world.kind, body=graph)
