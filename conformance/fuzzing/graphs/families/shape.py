"""Operators that move, cut, join and repeat."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import axes_of, axis_of, template


@template(2)
def _reshape(s: GraphScope) -> None:
    x = s.pick()
    wanted = _factors(s, x.array.size)
    given: list[int] = list(wanted)
    if x.array.size and s.chance(0.3) and given:
        given[s.rng.randrange(len(given))] = -1
    elif x.rank and given and given[0] == x.shape[0] and x.array.size:
        given[0] = 0
    s.add("Reshape", x, s.ints(given), allowzero=1 if 0 in given and not x.array.size and s.opset >= 14 else None)


def _factors(s: GraphScope, size: int) -> list[int]:
    """A shape of so many elements."""
    made: list[int] = []
    if not size:
        return [0, s.rng.choice((1, 2))]
    while size > 1 and len(made) < 3 and s.chance(0.8):
        found = [d for d in range(2, size + 1) if size % d == 0]
        made.append(s.rng.choice(found))
        size //= made[-1]
    if size > 1:
        made.append(size)
    if s.chance(0.2):
        made.append(1)
    s.rng.shuffle(made)
    return made


@template(1.5)
def _transpose(s: GraphScope) -> None:
    x = s.pick(0, 4)
    perm = list(range(x.rank))
    s.rng.shuffle(perm)
    s.add("Transpose", x, perm=perm if s.chance(0.8) and perm else None)


@template()
def _squeeze(s: GraphScope) -> None:
    x = s.pick(1, fits=lambda v: 1 in v.shape)
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    s.add("Squeeze", x, s.ints(s.rng.sample(ones, s.rng.randint(1, len(ones)))) if s.chance(0.7) else None)


@template()
def _unsqueeze(s: GraphScope) -> None:
    x = s.pick(0, 3)
    s.add("Unsqueeze", x, s.ints([s.rng.randint(0, x.rank)]) if s.chance(0.6) else s.leaf(np.array([0, x.rank + 1])))


@template(0.7)
def _flatten(s: GraphScope) -> None:
    x = s.pick()
    s.add("Flatten", x, axis=s.rng.randint(-x.rank, x.rank))


@template(2)
def _concat(s: GraphScope) -> None:
    x = s.pick(1)
    axis = axis_of(s, x.rank)
    others = []
    for _ in range(s.rng.randint(0, 2)):
        found = s.floats(
            lambda v: (
                v.rank == x.rank
                and all(a == b for k, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if k != axis % x.rank)
            )
        )
        others.append(s.rng.choice(found))
    s.add("Concat", x, *others, axis=axis)


@template(1.5)
def _split(s: GraphScope) -> None:
    x = s.pick(1, filled=True)
    axis = axis_of(s, x.rank)
    size = x.shape[axis]
    count = s.rng.randint(1, min(size, 3))
    if size % count == 0 and s.chance(0.4):
        parts = s.add_all("Split", x, outputs=count, axis=axis, num_outputs=count if s.opset >= 18 else None)
    elif s.opset >= 18 and s.chance(0.3) and (count - 1) * -(-size // count) < size:
        parts = s.add_all("Split", x, outputs=count, axis=axis, num_outputs=count)
    else:
        cuts = sorted(s.rng.randint(0, size) for _ in range(count - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        parts = s.add_all("Split", x, s.ints(sizes), outputs=count, axis=axis)
    del parts


@template(2)
def _slicing(s: GraphScope) -> None:
    x = s.pick(1)
    axes = axes_of(s, x.rank)
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis]
        if s.chance(0.25):
            starts.append(s.rng.choice((-1, size, 2**31)))
            ends.append(s.rng.choice((-(2**31), -size - 1)))
            steps.append(s.rng.choice((-1, -2)))
        else:
            a = s.rng.randint(0, max(size - 1, 0))
            b = s.rng.choice((size, 2**31, s.rng.randint(a, size)))
            starts.append(a - size if s.chance(0.3) and size and a else a)
            ends.append(b)
            steps.append(s.rng.choice((1, 1, 2)))
    as_axes = s.ints(axes) if axes != list(range(x.rank)) or s.chance(0.5) else None
    as_steps = s.ints(steps) if any(step != 1 for step in steps) or s.chance(0.3) else None
    if as_steps is not None and as_axes is None:
        as_axes = s.ints(axes)
    s.add("Slice", x, s.ints(starts), s.ints(ends), as_axes, as_steps)


@template()
def _expand(s: GraphScope) -> None:
    x = s.pick(0, 3)
    wanted = [s.rng.choice((2, 3)) if d == 1 else d for d in x.shape]
    wanted = [d if s.chance(0.8) else 1 for d in wanted]
    if s.chance(0.5):
        wanted = [s.rng.choice((1, 2)), *wanted]
    s.add("Expand", x, s.ints(wanted))


@template()
def _tile(s: GraphScope) -> None:
    x = s.pick(1, 3)
    s.add("Tile", x, s.ints([s.rng.choice((1, 1, 2, 3)) for _ in range(x.rank)]))


@template(1.5)
def _pad(s: GraphScope) -> None:
    x = s.pick(1, 4)
    modes = ["constant", "constant", "reflect", "edge"] + (["wrap"] if s.opset >= 19 else [])
    mode = s.rng.choice(modes)
    low = -1 if mode == "constant" else 0
    pads = [s.rng.randint(low, 2) for _ in range(2 * x.rank)]
    for k, size in enumerate(x.shape):
        for end in (k, k + x.rank):
            most = size - 1 if mode == "reflect" else size if mode == "wrap" else 2
            pads[end] = min(pads[end], most)
        if size + min(pads[k], 0) + min(pads[k + x.rank], 0) < 1 or (not size and mode != "constant"):
            raise MisfitError("nothing is left")
    value = s.uniform(()) if mode == "constant" and s.chance(0.5) else None
    if s.opset >= 18 and s.chance(0.3) and x.rank > 1:
        axes = sorted(s.rng.sample(range(x.rank), s.rng.randint(1, x.rank)))
        pads = [pads[a] for a in axes] + [pads[a + x.rank] for a in axes]
        s.add("Pad", x, s.ints(pads), value, s.ints(axes), mode=mode)
    else:
        s.add("Pad", x, s.ints(pads), value, mode=mode if s.chance(0.7) or mode != "constant" else None)


@template(0.8, 14)
def _trilu(s: GraphScope) -> None:
    x = s.pick(2)
    s.add(
        "Trilu", x, s.leaf(np.array(s.rng.randint(-2, 2))) if s.chance(0.6) else None, upper=s.rng.choice((0, 1, None))
    )


@template(0.8)
def _depth_to_space(s: GraphScope) -> None:
    if s.chance(0.5):
        x = s.like((s.rng.choice((1, 2)), 4, s.rng.choice((1, 2)), 2))
        s.add("DepthToSpace", x, blocksize=2, mode=s.rng.choice((None, "CRD")))
    else:
        s.add("SpaceToDepth", s.like((1, s.rng.choice((1, 2)), 2, 4)), blocksize=2)


@template(0.6)
def _reverse_sequence(s: GraphScope) -> None:
    x = s.pick(2, filled=True)
    time = s.rng.choice((0, 1))
    lengths = [s.rng.randint(1, x.shape[time]) for _ in range(x.shape[1 - time])]
    s.add("ReverseSequence", x, s.ints(lengths), time_axis=time, batch_axis=1 - time)


@template(0.6, 18)
def _center_crop_pad(s: GraphScope) -> None:
    x = s.pick(1, 3, filled=True)
    axes = sorted(s.rng.sample(range(x.rank), s.rng.randint(1, x.rank)))
    s.add("CenterCropPad", x, s.ints([s.rng.randint(1, 4) for _ in axes]), axes=axes)
