"""If, Loop, Scan and SequenceMap: their subgraphs are plans, run with the outer values that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from refgrad.backends.base import Value
from refgrad.backends.numpy.plan import Plan
from refgrad.backends.numpy.registry import kernel

Outer = Mapping[str, Any] | None


@kernel("If")
def if_(cond: np.ndarray, *, then_branch: Plan, else_branch: Plan, _outer: Outer = None) -> tuple[Any, ...]:
    return (then_branch if cond.item() else else_branch)(outer=_outer)


@kernel("Loop")
def loop(
    M: np.ndarray | None, cond: np.ndarray | None, *carried: Any, body: Plan, _outer: Outer = None
) -> tuple[Any, ...]:
    trips = None if M is None else M.item()
    going = True if cond is None else bool(cond.item())
    state = list(carried)
    rows: list[list[Any]] = [[] for _ in body.outputs[1 + len(state) :]]
    iteration = 0
    while going and (trips is None or iteration < trips):
        proceed, *results = body(np.array(iteration, np.int64), np.array(going), *state, outer=_outer)
        going = bool(proceed.item())
        for row, result in zip(rows, results[len(state) :], strict=True):
            row.append(result)
        state = results[: len(state)]
        iteration += 1
    declared = body.declared[1 + len(state) :]
    return (*state, *(_stacked(row, value, 0) for row, value in zip(rows, declared, strict=True)))


@kernel("Scan", since=9)
def scan(
    *inputs: Any,
    body: Plan,
    num_scan_inputs: int,
    scan_input_axes: list[int] | None = None,
    scan_input_directions: list[int] | None = None,
    scan_output_axes: list[int] | None = None,
    scan_output_directions: list[int] | None = None,
    _outer: Outer = None,
) -> tuple[Any, ...]:
    state = list(inputs[: len(inputs) - num_scan_inputs])
    axes = scan_input_axes or [0] * num_scan_inputs
    sequences = [np.moveaxis(x, axis, 0) for x, axis in zip(inputs[len(state) :], axes, strict=True)]
    backwards = scan_input_directions or [0] * num_scan_inputs
    sequences = [x[::-1] if flip else x for x, flip in zip(sequences, backwards, strict=True)]
    rows: list[list[Any]] = [[] for _ in body.outputs[len(state) :]]
    for elements in zip(*sequences, strict=True):
        results = body(*state, *map(np.asarray, elements), outer=_outer)
        for row, result in zip(rows, results[len(state) :], strict=True):
            row.append(result)
        state = results[: len(state)]
    flips = scan_output_directions or [0] * len(rows)
    declared = body.declared[len(state) :]
    outputs = [
        _stacked(row[::-1] if flip else row, value, axis)
        for row, flip, value, axis in zip(rows, flips, declared, scan_output_axes or [0] * len(rows), strict=True)
    ]
    return (*state, *outputs)


@kernel("Scan", since=8)
def scan_8(
    sequence_lens: np.ndarray | None,
    *inputs: np.ndarray,
    body: Plan,
    num_scan_inputs: int,
    directions: list[int] | None = None,
    _outer: Outer = None,
) -> tuple[Any, ...]:
    """Scan with a batch axis: states (batch, ...), sequences (batch, length, ...), zeros after a shorter one."""
    states = len(inputs) - num_scan_inputs
    length = inputs[states].shape[1]
    lengths = [length] * len(inputs[0]) if sequence_lens is None else sequence_lens.tolist()
    batch = []
    for row, size in enumerate(lengths):
        elements = [x[row] for x in inputs[:states]] + [x[row, :size] for x in inputs[states:]]
        results = scan(
            *elements, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions, _outer=_outer
        )
        padded = [np.pad(y, [(0, length - size)] + [(0, 0)] * (y.ndim - 1)) for y in results[states:]]
        batch.append([*results[:states], *padded])
    return tuple(np.stack(column) for column in zip(*batch, strict=True))


@kernel("SequenceMap")
def sequence_map(
    input_sequence: list[Any], *additional_inputs: Any, body: Plan, _outer: Outer = None
) -> tuple[list[Any], ...]:
    """The body for each element of the sequences in turn; a tensor among the inputs is the same for all of them."""
    inputs = [input_sequence, *additional_inputs]
    sizes = [len(x) for x in inputs if isinstance(x, list)]
    if len(set(sizes)) > 1:
        raise ValueError(f"the sequences have {sizes} elements")
    columns = [x if isinstance(x, list) else [x] * len(input_sequence) for x in inputs]
    rows = [_call(body, row, _outer) for row in zip(*columns, strict=True)]
    return tuple([row[place] for row in rows] for place in range(len(body.outputs)))


def _stacked(row: list[Any], value: Value, axis: int) -> np.ndarray:
    """Stack the scan outputs of all iterations; without any, give the body's declared shape with zeros for the rest."""
    if row:
        return np.stack(row, axis)
    dims = [dim if isinstance(dim, int) else 0 for dim in value.shape or ()]
    dims.insert(axis if axis >= 0 else axis + len(dims) + 1, 0)
    return np.empty(dims, value.dtype)
