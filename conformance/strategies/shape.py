"""Strategies of the operators that move elements without changing them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy

MOST = np.iinfo(np.int64).max


@strategy("Reshape")
def reshape(d: Drawing) -> Case:
    """The same elements over any number of axes; one size may be -1, and 0 copies one unless `allowzero` is set."""
    shape = d.shape()
    allowzero = int(d.opset >= 14 and d.flag())
    target = list(shape) if prod(shape) == 0 else _regrouped(d, prod(shape))
    if prod(shape):
        if target and d.flag():
            target[d.integer(0, len(target) - 1)] = -1
        if not allowzero:
            target = [0 if shape[k : k + 1] == (n,) and d.flag() else n for k, n in enumerate(target)]
    return d.case(
        d.floats(shape), np.array(target, np.int64), fixed=["shape"], allowzero=allowzero if d.opset >= 14 else None
    )


@strategy("Flatten")
def flatten(d: Drawing) -> Case:
    """Split before any axis, or after the last."""
    shape = d.shape()
    return d.case(d.floats(shape), axis=d.pick(None, *range(len(shape) + 1), *range(-len(shape), 0)) if shape else 0)


@strategy("Squeeze")
def squeeze(d: Drawing) -> Case:
    """Some axes of size 1, or all of them where none is named."""
    shape = list(d.shape(0, 3))
    for _ in range(d.integer(0, 2)):
        shape.insert(d.integer(0, len(shape)), 1)
    ones = [axis for axis, n in enumerate(shape) if n == 1]
    axes = d.optional(lambda: _some(d, ones, len(shape))) if ones else None
    return d.case(d.floats(tuple(shape)), axes, fixed=["axes"])


@strategy("Unsqueeze")
def unsqueeze(d: Drawing) -> Case:
    """One new axis or two, anywhere."""
    shape = d.shape(0, 3)
    new = d.integer(1, 2)
    return d.case(d.floats(shape), np.array(d.axes(len(shape) + new, new, new), np.int64), fixed=["axes"])


@strategy("Transpose")
def transpose(d: Drawing) -> Case:
    """Every permutation, and the default."""
    shape = d.shape()
    return d.case(d.floats(shape), perm=d.optional(lambda: d.permutation(len(shape))) or None)


@strategy("Concat")
def concat(d: Drawing) -> Case:
    """One operand to four, some of them empty."""
    shape = d.shape(1)
    axis = d.axis(len(shape))
    sizes = [d.integer(0, 3) for _ in range(d.integer(1, 4))]
    return d.case(*(d.floats(_resized(shape, axis, size)) for size in sizes), axis=axis)


@strategy("Split")
def split(d: Drawing) -> Case:
    """Sizes fed or constant, or equal parts by the number of outputs; since opset 18 the last part may be smaller."""
    shape = d.shape(1, elements=16)
    axis = d.axis(len(shape))
    count = d.integer(1, 4)
    named: dict[str, Any] = {"axis": None if axis == 0 and d.flag() else axis, "outputs": count}
    if d.flag():
        sizes = np.array([d.integer(0, 3) for _ in range(count)], np.int64)
        return d.case(d.floats(_resized(shape, axis, int(sizes.sum()))), sizes, fixed=["split"], **named)
    if d.opset < 18:
        return d.case(d.floats(_resized(shape, axis, count * d.integer(1, 2))), **named)
    part = d.integer(1, 2)
    size = part * count - (d.integer(0, part - 1) if count > 1 else 0)
    return d.case(d.floats(_resized(shape, axis, size)), num_outputs=count, **named)


@strategy("Expand")
def expand(d: Drawing) -> Case:
    """To a larger shape, or to one that itself broadcasts to the shape of x."""
    shape, target = d.broadcasting()
    return d.case(d.floats(shape), np.array(target, np.int64), fixed=["shape"])


@strategy("Tile")
def tile(d: Drawing) -> Case:
    """Zero to three copies along every axis."""
    shape = d.shape(elements=16)
    repeats = [d.pick(1, 2, 3, 0) for _ in shape]
    return d.case(d.floats(shape), np.array(repeats, np.int64), fixed=["repeats"])


@strategy("Slice")
def slice_(d: Drawing) -> Case:
    """Bounds in and out of range, counted from either end, steps of either sign; axes and steps may be absent."""
    shape = d.shape(1)
    axes = d.optional(lambda: d.axes(len(shape), 1))
    count = d.integer(1, len(shape)) if axes is None else len(axes)
    bounds = (0, 1, 2, 3, -1, -2, 5, -5, MOST, -MOST)
    starts, ends = ([d.pick(*bounds) for _ in range(count)] for _ in range(2))
    steps = d.optional(lambda: [d.pick(1, 2, 3, -1, -2) for _ in range(count)])
    small = abs(np.array([*starts, *ends])).max(initial=0) < MOST
    kind = d.pick(np.int64, np.int32) if small else np.int64
    given = (None if values is None else np.array(values, kind) for values in (starts, ends, axes, steps))
    return d.case(d.floats(shape), *given, fixed=["starts", "ends", "axes", "steps"])


@strategy("Pad")
def pad(d: Drawing) -> Case:
    """Every mode; "constant" with negative pads too. Since opset 18 along some axes only."""
    shape = d.shape(elements=24, empty=False)
    mode = d.pick("constant", "edge", "reflect", *(["wrap"] if d.opset >= 19 else []))
    axes = d.axes(len(shape)) if d.opset >= 18 and d.flag() else None
    sizes = [shape[axis] for axis in (range(len(shape)) if axes is None else axes)]
    before = [padding(d, mode, size) for size in sizes]
    after = [padding(d, mode, size + min(0, first)) for size, first in zip(sizes, before, strict=True)]
    value = d.optional(lambda: d.scalar(0.5)) if mode == "constant" else None
    return d.case(
        d.floats(shape),
        np.array([*before, *after], np.int64),
        value,
        None if axes is None else np.array(axes, np.int64),
        fixed=["pads", "constant_value", "axes"],
        mode=d.pick(None, mode) if mode == "constant" else mode,
    )


@strategy("CenterCropPad")
def center_crop_pad(d: Drawing) -> Case:
    """Smaller and larger along every axis, or along some."""
    shape = d.shape(1, empty=False)
    axes = d.optional(lambda: d.axes(len(shape), 1))
    sizes = [d.integer(0, 6) for _ in axes or shape]
    return d.case(d.floats(shape), np.array(sizes, d.pick(np.int64, np.int32)), axes=axes, fixed=["shape"])


@strategy("Trilu", "com.microsoft.Trilu")
def trilu(d: Drawing) -> Case:
    """Either triangle, from diagonals inside and outside of the matrix."""
    shape = d.shape(2)
    k = d.optional(lambda: d.scalar(d.pick(0, 1, -1, 2, -2, 9, -9), np.int64))
    return d.case(d.floats(shape), k, upper=d.pick(None, 0, 1), fixed=["k"])


@strategy("ReverseSequence")
def reverse_sequence(d: Drawing) -> Case:
    """Sequences of any length in either layout."""
    shape = d.shape(2, empty=False)
    axes: dict[str, Any] = d.pick({}, {"batch_axis": 1, "time_axis": 0}, {"batch_axis": 0, "time_axis": 1})
    batch = axes.get("batch_axis", 1)
    lengths = d.integers((shape[batch],), 1, shape[1 - batch])
    return d.case(d.floats(shape), lengths, fixed=["sequence_lens"], **axes)


@strategy("DepthToSpace", "SpaceToDepth")
def blocks(d: Drawing) -> Case:
    """Blocks of one element to three; either order of the depth where the opset has it."""
    size = d.integer(1, 3)
    n, c, h, w = d.shape(4, 4, size=2)
    depth = d.op_type == "DepthToSpace"
    mode = d.pick(None, "DCR", "CRD") if depth or d.opset >= 28 else None
    shape = (n, c * size**2, h, w) if depth else (n, c, h * size, w * size)
    return d.case(d.floats(shape), blocksize=size, mode=mode)


@strategy("Range")
def range_(d: Drawing) -> Case:
    """Rising, falling and empty; the limit is half a step away from where the count changes."""
    start, delta = d.floats(()), d.pick(1.0, 0.5, -1.0, -0.25)
    limit = float(start) + (d.integer(-1, 5) + 0.5) * delta
    return d.case(start, d.scalar(limit), d.scalar(delta), fixed=["limit", d.pick("start", "delta")])


def _regrouped(d: Drawing, count: int) -> list[int]:
    """Sizes, ones among them, whose product is `count`."""
    sizes = [1] * d.integer(1 if count > 1 else 0, 4)
    for factor in (2, 3, 5, 7):
        while count % factor == 0:
            sizes[d.integer(0, len(sizes) - 1)] *= factor
            count //= factor
    return sizes


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    sizes = list(shape)
    sizes[axis] = size
    return tuple(sizes)


def _some(d: Drawing, axes: list[int], rank: int) -> np.ndarray:
    """Some of the axes, in any order, some counted from the right."""
    chosen = [axes[k] for k in d.axes(len(axes), 1)]
    return np.array([axis - rank if d.flag() else axis for axis in chosen], np.int64)


def padding(d: Drawing, mode: str, size: int) -> int:
    """A pad that the mode allows at one end of an axis."""
    if mode == "constant":
        return d.integer(-size, 2) if d.flag() else d.integer(0, 2)
    return d.integer(0, min(2, {"edge": 2, "reflect": size - 1, "wrap": size}[mode]))
