"""If, Loop, Scan, SequenceMap, and calls of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper

from refgrad.conformance.tools.fuzzing.graphs.functions import call, define
from refgrad.conformance.tools.fuzzing.graphs.growing import (
    BOOL,
    INT64,
    GraphScope,
    GraphValue,
)
from refgrad.conformance.tools.fuzzing.graphs.templates import template


def structure(function: Callable[[GraphScope], Any]) -> Callable[[GraphScope], Any]:
    """Mark a template whose nodes have graphs of their own."""
    function.structure = True  # type: ignore[attr-defined]
    return function


def _inner(s: GraphScope) -> GraphScope:
    return GraphScope(s.world, s)


def _few(s: GraphScope) -> int:
    return s.rng.choice((1, 1, 2, 3))


@template(2.5)
@structure
def _branches(s: GraphScope) -> None:
    hidden = s.rng.choice((0.0, 0.5, 1.0))
    then, other = _inner(s), _inner(s)
    then.grow(_few(s))
    count = s.rng.choice((1, 1, 2))
    results = []
    for _ in range(count):
        found = [v for v in then.values if v.is_float and v.kind == s.world.kind and v not in results]
        results.append(s.rng.choice(found) if found else then.add("Identity", s.pick()))
    results = [
        v if v in then.values and v.name not in {i.name for i in then.initializers} else then.add("Identity", v)
        for v in results
    ]
    other.grow(_few(s))
    others: list[GraphValue] = []
    for value in results:
        like = other.shaped(value.shape)
        if like not in other.values or like in others or like.name in {i.name for i in other.initializers}:
            like = other.add("Identity", like)
        others.append(like)
    if s.chance(0.2):  # one value is returned twice, by both branches or by one
        k = s.rng.randrange(count)
        like = then.add("Sin", results[k]) if s.chance(0.5) else results[k]
        results.append(like)
        others.append(others[k] if like is results[k] or s.chance(0.5) else other.add("Neg", others[k]))
        count += 1
    choice = s.rng.random() < 0.5
    graphs: dict[str, Any] = {
        "then_branch": then.graph(results, "then", hidden),
        "else_branch": other.graph(others, "else", hidden),
    }
    if not choice:
        graphs = {"then_branch": graphs["else_branch"], "else_branch": graphs["then_branch"]}
    if s.chance(0.4):
        test = s.add("Less", s.add("ReduceSum", s.pick(), keepdims=0), s.number(0.3), kind=BOOL)
    else:
        test = s.leaf(np.array(s.chance(0.5)))
    s.add_all("If", test, outputs=count, kind=s.world.kind, named=s.named(count), **graphs)


def _formal(scope: GraphScope, like: Any, kind: int, hidden: float) -> GraphValue:
    value = GraphValue(scope.world.fresh(), like, kind)
    scope.inputs.append(scope.info(value, hidden))
    scope.values.append(value)
    return value


def _settled(body: GraphScope, value: GraphValue, shape: tuple[int, ...], taken: list[GraphValue]) -> GraphValue:
    """A value of the body, of a shape, that no other output is, and of no large size."""
    found = value if value.shape == shape else body.shaped(shape)
    if found.array.size and np.max(np.abs(found.real)) > 2:
        found = body.add("Tanh", found)
    names = _given(body)
    if found not in body.values or found in taken or found.name in names:
        found = body.add(s_choice(body, ("Identity", "Sin", "Tanh")), found)
    return found


def _given(body: GraphScope) -> set[str]:
    return {*(i.name for i in body.initializers), *(i.name for i in body.inputs)}


def s_choice(scope: GraphScope, names: tuple[str, ...]) -> str:
    """One of some names."""
    return scope.rng.choice(names)


def _result(body: GraphScope, taken: list[GraphValue]) -> GraphValue:
    """A float of the body for a scan output."""
    names = _given(body)
    found = [
        v for v in body.values if v.is_float and v.kind == body.world.kind and v not in taken and v.name not in names
    ]
    return body.rng.choice(found) if found else body.add("Identity", body.pick())


@template(2)
@structure
def _loop(s: GraphScope) -> None:
    hidden = s.rng.choice((0.0, 0.5, 1.0))
    states = [s.pick(0, 3) for _ in range(s.rng.choice((0, 1, 1, 2)))]
    body = _inner(s)
    step = _formal(body, np.array(0), INT64, 0.0)
    going = _formal(body, np.array(True), BOOL, 0.0)
    formals = [_formal(body, state.array, state.kind, hidden) for state in states]
    if s.chance(0.3):
        body.add("Mul", body.pick(), body.add("Cast", step, kind=s.world.kind, to=s.world.kind))
    body.grow(_few(s))
    taken: list[GraphValue] = []
    for formal in formals:
        own = [
            v
            for v in body.values
            if v.is_float and v.shape == formal.shape and v.kind == formal.kind and v is not formal
        ]
        taken.append(_settled(body, own[-1] if own else formal, formal.shape, taken))
    scans: list[GraphValue] = []
    for _ in range(s.rng.choice((0, 1, 2)) if states else s.rng.choice((1, 2))):
        scans.append(_result(body, [*taken, *scans]))
    if s.chance(0.2):  # a value is returned twice, or an input of the body is returned
        scans.append(s.rng.choice([*taken, *scans, *formals]))
    match s.rng.randrange(3):
        case 0:
            again = body.add("Identity", going, kind=BOOL)
        case 1:
            again = body.add("Less", step, body.leaf(np.array(s.rng.choice((0, 1, 2)))), kind=BOOL)
        case _:
            again = body.add("Less", body.add("ReduceSum", body.pick(), keepdims=0), body.number(0.3), kind=BOOL)
    graph = body.graph([again, *taken, *scans], "loop", hidden)
    count = s.rng.choice((1, 2, 3)) if scans or s.chance(0.9) else 0
    most = s.leaf(np.array(count)) if s.chance(0.9) else None
    first = s.leaf(np.array(True)) if s.chance(0.5) else None
    total = len(taken) + len(scans)
    s.add_all("Loop", most, first, *states, outputs=total, kind=s.world.kind, named=s.named(total), body=graph)


@template(2)
@structure
def _scan(s: GraphScope) -> None:
    hidden = s.rng.choice((0.0, 0.5, 1.0))
    states = [s.pick(0, 3) for _ in range(s.rng.choice((0, 1, 1, 2)))]
    x = s.pick(1, 3, filled=True)
    axes = [s.rng.randrange(x.rank)]
    read = [x]
    if s.chance(0.4):
        found = s.floats(lambda v: x.shape[axes[0]] in v.shape)
        other = s.rng.choice(found) if found and s.chance(0.7) else s.uniform((x.shape[axes[0]], *s.world.sizes(1)))
        axes.append(s.rng.choice([k for k, d in enumerate(other.shape) if d == x.shape[axes[0]]]))
        read.append(other)
    back = [int(s.chance(0.3)) for _ in read]
    body = _inner(s)
    formals = [_formal(body, state.array, state.kind, hidden) for state in states]
    slices = [
        _formal(body, np.moveaxis(v.array, axis, 0)[:: -1 if b else 1][0], v.kind, hidden)
        for v, axis, b in zip(read, axes, back, strict=True)
    ]
    if states and s.chance(0.7):
        state = formals[0]
        piece = slices[0]
        body.add(s.rng.choice(("Add", "Mul")), state, body.add("ReduceSum", piece, keepdims=0))
    body.grow(_few(s))
    taken: list[GraphValue] = []
    for formal in formals:
        own = [
            v
            for v in body.values
            if v.is_float and v.shape == formal.shape and v.kind == formal.kind and v is not formal
        ]
        taken.append(_settled(body, own[-1] if own else formal, formal.shape, taken))
    scans: list[GraphValue] = []
    for _ in range(s.rng.choice((0, 1, 2)) if states else s.rng.choice((1, 2))):
        scans.append(_result(body, [*taken, *scans]))
    if s.chance(0.2):  # a value is returned twice, or an input of the body is returned
        scans.append(s.rng.choice([*taken, *scans, *formals]))
    graph = body.graph([*taken, *scans], "scan", hidden)
    given: dict[str, Any] = {}
    if any(axes) or s.chance(0.3):
        given["scan_input_axes"] = [a - v.rank if s.chance(0.2) else a for a, v in zip(axes, read, strict=True)]
    if any(back) or s.chance(0.3):
        given["scan_input_directions"] = back
    if scans and s.chance(0.4):
        given["scan_output_axes"] = [s.rng.randint(0, v.rank) for v in scans]
    if scans and s.chance(0.4):
        given["scan_output_directions"] = [int(s.chance(0.5)) for _ in scans]
    total = len(taken) + len(scans)
    given["num_scan_inputs"] = len(read)
    s.add_all("Scan", *states, *read, outputs=total, kind=s.world.kind, named=s.named(total), body=graph, **given)


@template(2)
@structure
def _function(s: GraphScope) -> None:
    """A call of a local function: one that is there, or a new one."""
    if s.world.functions and s.chance(0.6):
        call(s, s.rng.choice(s.world.functions))
    else:
        call(s, define(s))


@template(0.6)
@structure
def _sequence_loop(s: GraphScope) -> None:
    """A Loop whose state is a sequence that grows."""
    x = s.pick(0, 3, filled=True)
    start = s.add("SequenceEmpty", dtype=s.world.kind, kind=s.world.kind)
    if s.chance(0.5):
        start = s.add("SequenceInsert", start, x)
    body = _inner(s)
    step = _formal(body, np.array(0), INT64, 0.0)
    going = _formal(body, np.array(True), BOOL, 0.0)
    name = s.world.fresh()
    held = helper.make_tensor_sequence_value_info(name, s.world.kind, None)
    body.inputs.append(held)
    state = GraphValue(name, start.array, s.world.kind)
    body.values.append(state)
    body.grow(_few(s))
    item = body.shaped(x.shape)
    if body.chance(0.5):
        item = body.add("Mul", item, body.add("Cast", step, kind=s.world.kind, to=s.world.kind))
    grown = body.add("SequenceInsert", state, body.calm(item))
    again = body.add("Identity", going, kind=BOOL)
    results = [body.info(again), helper.make_tensor_sequence_value_info(grown.name, s.world.kind, None)]
    graph = helper.make_graph(body.nodes, "loop", body.inputs, results, body.initializers)
    made = s.add("Loop", s.leaf(np.array(s.rng.choice((1, 2, 3)))), None, start, kind=s.world.kind, body=graph)
    s.add("ConcatFromSequence", made, axis=0, new_axis=1)


@template(0.6, 17)
@structure
def _sequence_map(s: GraphScope) -> None:
    x = s.pick(1, 3, filled=True)
    sequence = s.add("SplitToSequence", x, axis=s.rng.randrange(x.rank))
    body = _inner(s)
    item = _formal(body, sequence.array[0], s.world.kind, 1.0)
    more, formal = [], []
    if s.chance(0.5):
        more = [s.like(np.shape(sequence.array[0]))]
        formal = [_formal(body, more[0].array, s.world.kind, 0.5)]
    body.add("Mul", item, formal[0] if formal else item)
    body.grow(_few(s))
    result = _result(body, [])
    made = s.add("SequenceMap", sequence, *more, kind=s.world.kind, body=body.graph([result], "map", 1.0))
    s.add("SequenceAt", made, s.leaf(np.array(s.rng.randrange(len(made.array)))))


@template(1.0)
@structure
def _run_time_branch(s: GraphScope) -> None:
    """Branches whose results have several shapes, and sizes that a branch chooses."""
    x = s.pick(1, 3, filled=True)
    size = x.shape[0]
    if s.chance(0.5):
        cut = [s.rng.randint(0, size) for _ in range(2)]
        branches = []
        for k in range(2):
            inner = _inner(s)
            sizes = inner.leaf(np.array([cut[k], size - cut[k]]), moves=False)
            branches.append(inner.graph([inner.add("Identity", sizes)], f"sizes{k}", s.rng.choice((0.0, 1.0))))
        chosen = s.add("If", s.leaf(np.array(s.chance(0.5))), then_branch=branches[0], else_branch=branches[1])
        s.add_all("Split", x, chosen, outputs=2, axis=0)
        return
    branches = []
    for k in range(2):
        inner = _inner(s)
        begin = inner.leaf(np.array([0]), moves=False)
        end = inner.leaf(np.array([s.rng.randint(1, size)]), moves=False)
        result = inner.add("Slice", inner.add(s.rng.choice(("Sin", "Neg", "Identity")), x), begin, end)
        branches.append(inner.graph([result], f"part{k}", s.rng.choice((0.0, 1.0))))
    s.add("If", s.leaf(np.array(s.chance(0.5))), kind=s.world.kind, then_branch=branches[0], else_branch=branches[1])
