"""What is emitted for sequences and optionals: element by element, with SequenceMap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.graph import element_type, type_of

if TYPE_CHECKING:
    from refgrad.emit import Emitter


@dataclass
class Sparse:
    """Emitted sequences that are zero in one place: their sum with another needs no zeros."""

    placed: dict[str, tuple[str, str]] = field(default_factory=dict)  # zero elsewhere: the place, and what is there
    widened: dict[str, tuple[str, str, str | None]] = field(
        default_factory=dict
    )  # zero there: the place, the rest, and
    # where SequenceInsert puts an element into the rest


def sequence_type(kind: int) -> TypeProto:
    """A sequence of tensors of any shape."""
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(kind, None))


def full_like(op: Emitter, value: str, number: float) -> str:
    """`number` wherever the adjoint of a sequence or an optional has an element; that of an empty optional has none."""
    kind = op.container(value)
    if kind is not None and kind.HasField("sequence_type"):
        return each(op, lambda element: op.full(op.Shape(element), number, like=element), value)

    def held() -> list[str]:
        element: str = op.OptionalGetElement(value)
        op.describe(element, like=value)
        return [op.full_like(element, number)]

    branches = {"then_branch": op.subgraph(held), "else_branch": op.subgraph(lambda: [nothing_like(op, value)])}
    return str(op.If(op.OptionalHasElement(value), **branches))


def nothing_like(op: Emitter, optional: str) -> str:
    """The adjoint of an empty optional: a sequence, or a tensor, without elements."""
    kind = op.type(optional)
    if op.is_sequence(optional):
        return op.hold(op.SequenceEmpty(dtype=kind), sequence_type(kind))
    rank = len(type_of(ValueInfoProto(type=op.adjoint_proto(optional)))[1] or ())
    zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(kind)))
    return str(op.ConstantOfShape([0] * rank, value=zero))


def each(op: Emitter, function: Callable[..., str], *inputs: str) -> str:
    """The sequence of what `function` makes of every element; `inputs` are sequences of one length."""
    body = op.subgraph(lambda *elements: [function(*elements)], *inputs)
    return op.hold(op.SequenceMap(*inputs, body=body), sequence_type(element_type(body.output[0].type)))


def replace(op: Emitter, sequence: str, position: str, tensor: str) -> str:
    """`sequence` with `tensor` at `position`, which may be negative."""
    longer = op.SequenceInsert(sequence, tensor, position)
    return str(op.SequenceErase(longer, shift(op, position, 0, 1)))


def shift(op: Emitter, position: str, negative: str | int, other: str | int) -> str:
    """A position in a sequence to which `negative` or `other` is added, by its sign."""
    known = op.constant(position)
    if known is not None and isinstance(added := negative if known < 0 else other, int):
        return op.const(np.asarray(known + added, np.int64))
    position = op.as_type(position, TensorProto.INT64)
    return str(op.Where(op.Less(position, 0), *(op.Add(position, added) for added in (negative, other))))


def total(op: Emitter, parts: Sequence[str]) -> str:
    """The sum of sequences, element by element."""
    dense = [part for part in parts if part not in op.sparse.placed]
    placed = [op.sparse.placed[part] for part in parts if part in op.sparse.placed]
    if not dense:
        dense = [parts[0]]
        del placed[0]
    for k, part in enumerate(dense):
        place, rest, at = op.sparse.widened.get(part, ("", "", None))
        filling = next((one for one in placed if _is_same(op, one[0], place)), None)
        if filling is not None:
            placed.remove(filling)
            dense[k] = op.SequenceInsert(rest, filling[1], at)
    made = dense[0] if len(dense) == 1 else each(op, lambda *elements: str(op.Sum(*elements)), *dense)
    for position, adjoint in placed:
        made = replace(op, made, position, op.Add(op.SequenceAt(made, position), adjoint))
    return made


def _is_same(op: Emitter, position: str, other: str) -> bool:
    """Whether two positions are known to be one: the same value, or equal constants."""
    known, too = op.constant(position), op.constant(other)
    return position == other or (known is not None and too is not None and bool(known == too))
