"""If, Loop and Scan: their subgraphs are plans, run with the outer values that they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from refgrad.backends.base import Value
from refgrad.backends.numpy.memory import Rounds
from refgrad.backends.numpy.plan import PlannedGraph
from refgrad.backends.numpy.registry import kernel

Outer = Mapping[str, Any] | None

_ENOUGH: ContextVar[int | None] = ContextVar("_ENOUGH", default=None)


@contextmanager
def bounded_loops(iterations: int) -> Iterator[None]:
    """No Loop may go round more often than so here: with inputs that nobody chose it may never end."""
    token = _ENOUGH.set(iterations)
    try:
        yield
    finally:
        _ENOUGH.reset(token)


def _check(body: PlannedGraph, inputs: int, outputs: int) -> None:
    """Refuse a body that does not take what it is given, or gives too little."""
    if len(body.inputs) != inputs:
        raise ValueError(f"the body takes {len(body.inputs)} inputs {list(body.inputs)} and is given {inputs}")
    if len(body.outputs) < outputs:
        raise ValueError(
            f"the body gives {len(body.outputs)} outputs {list(body.outputs)}, at least {outputs} are needed"
        )


@kernel("If")
def if_(
    cond: np.ndarray,
    *,
    then_branch: PlannedGraph,
    else_branch: PlannedGraph,
    _wanted: tuple[bool, ...],
    _outer: Outer = None,
) -> tuple[Any, ...]:
    for name, branch in (("then_branch", then_branch), ("else_branch", else_branch)):
        if branch.inputs or len(branch.outputs) != len(_wanted):
            raise ValueError(
                f"{name} takes {list(branch.inputs)} and gives {list(branch.outputs)}; "
                f"it must take nothing and give {len(_wanted)} outputs"
            )
    return (then_branch if cond.item() else else_branch)(outer=_outer)


@kernel("Loop")
def loop(
    M: np.ndarray | None, cond: np.ndarray | None, *carried: Any, body: PlannedGraph, _outer: Outer = None
) -> tuple[Any, ...]:
    trips = None if M is None else M.item()
    going = True if cond is None else bool(cond.item())
    state = list(carried)
    _check(body, 2 + len(state), 1 + len(state))
    rows: list[list[Any]] = [[] for _ in body.outputs[1 + len(state) :]]
    iteration, enough = 0, _ENOUGH.get()
    with Rounds(state) as rounds:
        while going and (trips is None or iteration < trips):
            if iteration == enough:
                raise ValueError(f"the loop still goes on after {enough} iterations")
            proceed, *results = body(np.array(iteration, np.int64), np.array(going), *state, outer=_outer)
            going = bool(proceed.item())
            state, made = results[: len(state)], results[len(state) :]
            rounds.turn(state, made)
            for row, result in zip(rows, made, strict=True):
                row.append(result)
            iteration += 1
        rounds.reserve(sum(x.nbytes for row in rows for x in row))
        declared = body.declared[1 + len(state) :]
        return (*state, *(_stacked(row, value, 0) for row, value in zip(rows, declared, strict=True)))


def _refuse_number(scanned: int, inputs: int) -> None:
    if not 0 < scanned <= inputs:
        raise ValueError(f"num_scan_inputs is {scanned}, and the node has {inputs} inputs")


@kernel("Scan", since=9)
def scan(
    *inputs: Any,
    body: PlannedGraph,
    num_scan_inputs: int,
    scan_input_axes: list[int] | None = None,
    scan_input_directions: list[int] | None = None,
    scan_output_axes: list[int] | None = None,
    scan_output_directions: list[int] | None = None,
    _outer: Outer = None,
) -> tuple[Any, ...]:
    _refuse_number(num_scan_inputs, len(inputs))
    state: Sequence[Any] = inputs[: len(inputs) - num_scan_inputs]
    _check(body, len(inputs), len(state))
    axes = scan_input_axes or [0] * num_scan_inputs
    sequences = [_in_front(x, axis) for x, axis in zip(inputs[len(state) :], axes, strict=True)]
    lengths = [len(x) for x in sequences]
    if len(set(lengths)) != 1:
        raise ValueError(f"the scan inputs have {lengths} elements along their axes; all must have the same length")
    backwards = scan_input_directions or [0] * num_scan_inputs
    sequences = [x[::-1] if flip else x for x, flip in zip(sequences, backwards, strict=True)]
    declared = body.declared[len(state) :]
    flips = scan_output_directions or [0] * len(declared)
    at = scan_output_axes or [0] * len(declared)
    outputs: list[np.ndarray] = []
    places: list[np.ndarray] = []  # the outputs with the axis of the steps in front
    with Rounds(state) as rounds:
        for index in range(lengths[0]):
            results = body(*state, *[x[index, ...] for x in sequences], outer=_outer)
            state, rows = results[: len(state)], results[len(state) :]
            rounds.turn(state)
            if not outputs:
                rounds.reserve(sum(lengths[0] * row.nbytes for row in rows))
                outputs = [_room(np.asarray(row), lengths[0], axis) for row, axis in zip(rows, at, strict=True)]
                rounds.turn(state, outputs)
                places = [
                    _in_front(x, axis)[:: -1 if flip else 1] for x, axis, flip in zip(outputs, at, flips, strict=True)
                ]
            for place, row in zip(places, rows, strict=True):
                if place.shape[1:] != row.shape:
                    raise ValueError(
                        f"a scan output has shape {row.shape} in step {index} and {place.shape[1:]} in the one before"
                    )
                place[index, ...] = row
    if not outputs:
        outputs = [_stacked([], value, axis) for value, axis in zip(declared, at, strict=True)]
    return (*state, *outputs)


def _in_front(x: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(x, axis, 0) if axis else x


def _room(row: np.ndarray, length: int, axis: int) -> np.ndarray:
    """An array for `length` rows like `row`, side by side along `axis`."""
    shape = list(row.shape)
    shape.insert(axis if axis >= 0 else axis + row.ndim + 1, length)
    return np.empty(shape, row.dtype)


@kernel("Scan", since=8)
def scan_8(
    sequence_lens: np.ndarray | None,
    *inputs: np.ndarray,
    body: PlannedGraph,
    num_scan_inputs: int,
    directions: list[int] | None = None,
    _outer: Outer = None,
) -> tuple[Any, ...]:
    """Scan with a batch axis: states (batch, ...), sequences (batch, length, ...), zeros after a shorter one."""
    _refuse_number(num_scan_inputs, len(inputs))
    states = len(inputs) - num_scan_inputs
    length = inputs[states].shape[1]
    lengths = [length] * len(inputs[0]) if sequence_lens is None else sequence_lens.tolist()
    batch = []
    for row, size in enumerate(lengths):
        elements = [x[row, ...] for x in inputs[:states]] + [x[row, :size] for x in inputs[states:]]
        results = scan(
            *elements, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions, _outer=_outer
        )
        padded = [np.pad(y, [(0, length - size)] + [(0, 0)] * (y.ndim - 1)) for y in results[states:]]
        batch.append([*results[:states], *padded])
    return tuple(np.stack(column) for column in zip(*batch, strict=True))


def _stacked(row: list[Any], value: Value, axis: int) -> np.ndarray:
    """Stack the scan outputs of all iterations; without any, give the body's declared shape with zeros for the rest."""
    if row:
        return np.stack(row, axis)
    dims = [dim if isinstance(dim, int) else 0 for dim in value.shape or ()]
    dims.insert(axis if axis >= 0 else axis + len(dims) + 1, 0)
    return np.empty(dims, value.dtype)
