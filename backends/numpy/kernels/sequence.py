"""Sequences are lists of arrays; an optional is its element, or None."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import onnx

from refgrad.backends.numpy.kernels.operands import check_axis
from refgrad.backends.numpy.memory import OBJECT, Rounds, need
from refgrad.backends.numpy.plan import PlannedGraph
from refgrad.backends.numpy.registry import kernel

Sequence = list[np.ndarray]


def _position(position: np.ndarray, low: int, high: int) -> int:
    index = int(position.item())
    if not low <= index <= high:
        raise ValueError(f"position {index} is not in [{low}, {high}]")
    return index


@kernel("SequenceEmpty")
def sequence_empty(*, dtype: int = onnx.TensorProto.FLOAT) -> tuple[Sequence]:
    return ([],)


@kernel("SequenceConstruct")
def sequence_construct(*inputs: np.ndarray) -> tuple[Sequence]:
    for x in inputs:
        _same_type(inputs[0], x)
    return (list(inputs),)


@kernel("SequenceInsert")
def sequence_insert(
    input_sequence: Sequence, tensor: np.ndarray, position: np.ndarray | None = None
) -> tuple[Sequence]:
    if input_sequence:
        _same_type(input_sequence[0], tensor)
    result = input_sequence.copy()
    size = len(result)
    result.insert(size if position is None else _position(position, -size, size), tensor)
    return (result,)


def _same_type(x: np.ndarray, y: np.ndarray) -> None:
    if x.dtype != y.dtype:
        raise ValueError(f"a sequence of {x.dtype} cannot hold {y.dtype}")


@kernel("SequenceAt")
def sequence_at(input_sequence: Sequence, position: np.ndarray) -> np.ndarray:
    size = len(input_sequence)
    return input_sequence[_position(position, -size, size - 1)]


@kernel("SequenceErase")
def sequence_erase(input_sequence: Sequence, position: np.ndarray | None = None) -> tuple[Sequence]:
    result = input_sequence.copy()
    size = len(result)
    if not size:
        raise ValueError("the sequence is empty")
    del result[-1 if position is None else _position(position, -size, size - 1)]
    return (result,)


@kernel("SequenceLength", fresh=True)
def sequence_length(input_sequence: Sequence) -> np.ndarray:
    return np.array(len(input_sequence), np.int64)


@kernel("SplitToSequence")
def split_to_sequence(
    input: np.ndarray, split: np.ndarray | None = None, *, axis: int, keepdims: int
) -> tuple[Sequence]:
    """Pieces along `axis`: of the sizes in `split`, of one size except the last, or of size 1: only these heed `keepdims`."""
    axis = check_axis(axis, input.ndim)
    size = input.shape[axis]
    step = 1 if split is None or split.size != 1 else max(int(split.item()), 1)
    need(2 * OBJECT * (size // step + 1 if split is None or split.size == 1 else split.size))
    if split is None and not keepdims:
        return (
            list(np.moveaxis(input, axis, 0))
            if input.ndim > 1
            else [input[i : i + 1].reshape(()) for i in range(size)],
        )
    if split is None or split.ndim == 0:
        step = 1 if split is None else int(split)
        if step < 1:
            raise ValueError(f"split is {step}, which is not positive")
        bounds = [*range(0, size, step), size]
    else:
        sizes = split.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != size:
            raise ValueError(f"split {sizes} does not divide axis {axis}, which has {size} elements")
        bounds = [0, *accumulate(sizes)]
    before = (slice(None),) * axis
    return ([input[(*before, slice(*ends))] for ends in pairwise(bounds)],)


@kernel("ConcatFromSequence", fresh=True)
def concat_from_sequence(input_sequence: Sequence, *, axis: int, new_axis: int) -> np.ndarray:
    if not input_sequence:
        raise ValueError("the sequence is empty")
    need(sum(x.nbytes for x in input_sequence))
    return np.stack(input_sequence, axis) if new_axis else np.concatenate(input_sequence, axis)


@kernel("SequenceMap")
def sequence_map(
    input_sequence: Sequence, *additional_inputs: Any, body: PlannedGraph, _outer: Mapping[str, Any] | None = None
) -> tuple[Sequence, ...]:
    """The body for each element of the sequences in turn; a tensor among the inputs is the same for all of them."""
    inputs = [input_sequence, *additional_inputs]
    sizes = [len(x) for x in inputs if isinstance(x, list)]
    if len(set(sizes)) > 1:
        raise ValueError(f"the sequences have {sizes} elements; all must have as many")
    columns = [x if isinstance(x, list) else [x] * len(input_sequence) for x in inputs]
    if len(body.inputs) != len(inputs):
        raise ValueError(f"the body takes {len(body.inputs)} inputs and is given {len(inputs)}")
    rows = []
    with Rounds() as rounds:
        for row in zip(*columns, strict=True):
            rows.append(body(*row, outer=_outer))
            rounds.turn((), rows[-1])
    return tuple([row[place] for row in rows] for place in range(len(body.outputs)))


@kernel("Optional")
def optional(input: Any = None, *, type: onnx.TypeProto | None = None) -> tuple[Any]:
    return (input,)


@kernel("OptionalGetElement")
def optional_get_element(input: Any) -> tuple[Any]:
    if input is None:
        raise ValueError("the optional is empty")
    return (input,)


@kernel("OptionalHasElement", fresh=True)
def optional_has_element(input: Any = None) -> np.ndarray:
    return np.array(input is not None)
