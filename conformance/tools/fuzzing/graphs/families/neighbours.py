"""Operators with neighbours: casts and their way back, statistics that a runtime may overwrite, places that are read."""

from __future__ import annotations

from refgrad.conformance.tools.fuzzing.graphs.growing import DOUBLE, FLOAT, GraphScope
from refgrad.conformance.tools.fuzzing.graphs.templates import axis_of, template


@template()
def _cast(s: GraphScope) -> None:
    """To another type and back."""
    other = s.rng.choice([kind for kind in (FLOAT, DOUBLE) if kind != s.world.kind])
    x = s.pick()
    wide = s.add("Cast", x, kind=other, to=other)
    moved = s.add(s.rng.choice(("Tanh", "Neg")), wide, kind=other)
    if s.chance(0.3) and s.opset >= 15:
        s.add("CastLike", moved, x, kind=s.world.kind)
    else:
        s.add("Cast", moved, kind=s.world.kind, to=s.world.kind)


@template(0.5)
def _dropout(s: GraphScope) -> None:
    """As in inference: in training it is random."""
    s.add("Dropout", s.pick())


@template()
def _batch_normalization(s: GraphScope) -> None:
    x = s.pick(2, 4, filled=True)
    scale, bias, mean = (s.like(x.shape[1:2]) for _ in range(3))
    var = s.positive(s.like(x.shape[1:2]))
    if s.opset >= 14 and s.chance(0.3):
        # ONNX Runtime writes the running mean and variance over those that are given: nothing else may read them.
        mean, var = s.add("Neg", mean, hidden=True), s.add("Add", var, s.number(0.5), hidden=True)
        s.add_all("BatchNormalization", x, scale, bias, mean, var, outputs=3, training_mode=1, epsilon=0.1)
    else:
        s.add("BatchNormalization", x, scale, bias, mean, var, epsilon=s.rng.choice((None, 0.1)))


@template()
def _at_places(s: GraphScope) -> None:
    """The elements at places that the elements choose."""
    x = s.pick(1, 3, filled=True)
    axis = axis_of(s, x.rank)
    match s.rng.randrange(3):
        case 0:
            where = s.add("NonZero", s.add("Greater", x, s.number(0.02)))
            s.add("GatherND", x, s.add("Transpose", where))
        case 1:
            place = s.add(s.rng.choice(("ArgMax", "ArgMin")), x, axis=axis, keepdims=1)
            s.add("GatherElements", s.like(x.shape), place, axis=axis)
        case _:
            count = s.ints([s.rng.randint(1, x.shape[axis])])
            _, places = s.add_all("TopK", x, count, outputs=2, axis=axis, largest=s.rng.choice((None, 0)))
            s.add("GatherElements", s.like(x.shape), places, axis=axis, kind=s.world.kind)
