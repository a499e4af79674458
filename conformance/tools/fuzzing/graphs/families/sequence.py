"""Sequences and optionals."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.tools.fuzzing.graphs.growing import (
    OPTIONAL,
    GraphScope,
)
from refgrad.conformance.tools.fuzzing.graphs.templates import template


@template(1.2)
def _sequences(s: GraphScope) -> None:
    x = s.pick(1, 3, filled=True)
    axis = s.rng.randrange(x.rank)
    match s.rng.randrange(4):
        case 0:
            sequence = s.add("SequenceConstruct", x, *(s.like(x.shape) for _ in range(s.rng.randint(0, 2))))
        case 1:
            sequence = s.add("SplitToSequence", x, axis=axis, keepdims=s.rng.choice((None, 0)))
        case 2:
            size = x.shape[axis]
            cut = s.rng.randint(0, size)
            sequence = s.add("SplitToSequence", x, s.ints([cut, size - cut]), axis=axis)
        case _:
            sequence = s.add("SequenceEmpty", dtype=s.world.kind, kind=s.world.kind)
            sequence = s.add("SequenceInsert", sequence, x)
            sequence = s.add("SequenceInsert", sequence, s.like(x.shape), s.leaf(np.array(0)))
    if s.chance(0.3):
        sequence = s.add("SequenceInsert", sequence, s.like(np.shape(sequence.array[0])))
    if s.chance(0.2) and len(sequence.array) > 1:
        sequence = s.add("SequenceErase", sequence, s.leaf(np.array(s.rng.choice((0, -1)))) if s.chance(0.7) else None)
    if s.chance(0.5):
        s.add("SequenceAt", sequence, s.leaf(np.array(s.rng.randrange(-len(sequence.array), len(sequence.array)))))
    else:
        item = np.shape(sequence.array[0])
        s.add(
            "ConcatFromSequence",
            sequence,
            axis=s.rng.randrange(max(len(item), 1)) if item else 0,
            new_axis=1 if not item else s.rng.choice((None, 1)),
        )


@template(0.4, 15)
def _optionals(s: GraphScope) -> None:
    x = s.pick()
    s.add("OptionalGetElement", s.add("Optional", x, kind=OPTIONAL), kind=s.world.kind)
