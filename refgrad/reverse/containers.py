"""Emission for sequences and optionals: element by element, with SequenceMap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.protos.types import type_of
from refgrad.reverse.basic import BasicEmitter


def sequence_type(kind: int) -> TypeProto:
    """A sequence of tensors of any shape."""
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(kind, None))


def full_like(op: BasicEmitter, value: str, number: float) -> str:
    """`number` wherever the adjoint of `value` has an element; the adjoint of an empty optional has no elements."""
    kind = op.values.containers.get(value)
    if kind is None:
        filled, shape = op.full(op.shape_of(value), number, like=value), op.shape(value)
        if shape is not None:
            op.assume(filled, shape)
    elif kind.HasField("sequence_type"):
        filled = each(op, op.type(value), lambda element: op.full(op.Shape(element), number, like=element), value)
    else:
        then_branch = op.subgraph(lambda: [_full_like_held(op, value, number)])
        else_branch = op.subgraph(lambda: [nothing_like(op, value)])
        filled = op.If(op.OptionalHasElement(value), then_branch=then_branch, else_branch=else_branch)
    op.describe(filled, like=value)
    return filled


def _full_like_held(op: BasicEmitter, value: str, number: float) -> str:
    element = op.OptionalGetElement(value)
    op.describe(element, like=value)
    return full_like(op, element, number)


def nothing_like(op: BasicEmitter, optional: str) -> str:
    """The adjoint of an empty optional: a sequence, or a tensor, without elements."""
    kind = op.type(optional)
    if op.is_sequence(optional):
        return op.values.record(op.SequenceEmpty(dtype=kind), sequence_type(kind))
    rank = len(type_of(ValueInfoProto(type=op.values.adjoint_proto(optional)))[1] or ())
    zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(kind)))
    return op.ConstantOfShape([0] * rank, value=zero)


def for_each(
    op: BasicEmitter, sequences: Sequence[str], kinds: Sequence[int], function: Callable[..., Sequence[str]]
) -> tuple[str, ...]:
    """A sequence of each result that `function` has for the tensors at every place; its elements are of type `kinds`."""
    number = op.SequenceLength(sequences[0])
    going = op.const(np.array(True))
    empty = [op.values.record(op.SequenceEmpty(dtype=int(kind)), sequence_type(kind)) for kind in kinds]

    def body(place: str, again: str, *made: str) -> list[str]:
        results = function(*(op.SequenceAt(sequence, place) for sequence in sequences))
        longer = (op.SequenceInsert(m, r) for m, r in zip(made, results, strict=True))
        return [
            op.Identity(again),
            *(op.values.record(value, sequence_type(k)) for value, k in zip(longer, kinds, strict=True)),
        ]

    graph = op.subgraph(body, op.const(np.array(0)), going, *empty)
    for value_info in (*graph.input[:2], *graph.output[:1]):
        value_info.type.tensor_type.shape.SetInParent()  # scalars
    for value_info, kind in zip(graph.input[2:], kinds, strict=True):
        value_info.type.CopyFrom(sequence_type(kind))
    made = op.emit_all("Loop", "", (number, going, *empty), len(kinds), {"body": graph})
    return tuple(op.values.record(value, sequence_type(kind)) for value, kind in zip(made, kinds, strict=True))


def each(op: BasicEmitter, kind: int, function: Callable[..., str], *inputs: str) -> str:
    """The sequence of what `function` makes of every element; `inputs` are sequences of one length."""
    if op.mapped:
        return for_each(op, inputs, [kind], lambda *elements: [function(*elements)])[0]
    body = op.subgraph(lambda *elements: [function(*elements)], *inputs)
    return op.values.record(op.SequenceMap(*inputs, body=body), sequence_type(kind))


def replace(op: BasicEmitter, sequence: str, position: str, tensor: str) -> str:
    """`sequence` with `tensor` at `position`, which may be negative."""
    rest = op.SequenceErase(sequence, position)
    return op.SequenceInsert(rest, tensor, where_erased(op, rest, position))


def where_erased(op: BasicEmitter, rest: str, position: str) -> str | None:
    """The position at which SequenceInsert puts back into `rest` the element that SequenceErase took; None is the end."""
    known = op.constant(position)
    if known is None:
        return shift(op, position, op.Add(op.SequenceLength(rest), 1), 0)
    return None if known == -1 else shift(op, position, 1, 0)


def shift(op: BasicEmitter, position: str, negative: str | int, other: str | int) -> str:
    """A position in a sequence to which `negative` or `other` is added, by its sign."""
    known = op.constant(position)
    if known is not None and isinstance(added := negative if known < 0 else other, int):
        return op.const(np.asarray(known + added, np.int64))
    position = op.as_type(position, TensorProto.INT64)
    return op.Where(op.Less(position, 0), *(op.Add(position, added) for added in (negative, other)))


def total(op: BasicEmitter, parts: Sequence[str], like: str) -> str:
    """The sum of adjoints of the sequence `like`, element by element."""
    dense = [part for part in parts if part not in op.values.sparse.placed]
    placed = [op.values.sparse.placed[part] for part in parts if part in op.values.sparse.placed]
    if not dense:
        dense = [parts[0]]
        del placed[0]
    for k, part in enumerate(dense):
        place, rest, at = op.values.sparse.widened.get(part, ("", "", None))
        filling = next((one for one in placed if _is_same(op, one[0], place)), None)
        if filling is not None:
            placed.remove(filling)
            dense[k] = op.SequenceInsert(rest, filling[1], at)
    made = dense[0] if len(dense) == 1 else each(op, op.type(like), lambda *xs: op.Sum(*xs), *dense)
    for position, adjoint in placed:
        made = replace(op, made, position, op.Add(op.SequenceAt(made, position), adjoint))
    return made


def _is_same(op: BasicEmitter, position: str, other: str) -> bool:
    """True if two positions are known to be one: the same value, or equal constants."""
    known, too = op.constant(position), op.constant(other)
    return position == other or (known is not None and too is not None and bool(known == too))
