"""Cases of the operators that move elements without changing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

NEWEST = 21  # the last opset that every runtime under test knows


def cases() -> Iterator[Case]:
    """Every attribute and optional input, on static, symbolic and unknown shapes, with constant and fed shape inputs."""
    for shapes in SHAPES:
        yield from _reshaping(shapes)
        yield from _joining(shapes)
        yield from _repeating(shapes)
        yield from _slicing(shapes)
        yield from _padding(shapes)
        yield from _moving(shapes)


def numbers(*shape: int) -> np.ndarray:
    """Float32 numbers of the given shape, the same in every run."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    """An int64 tensor of one axis."""
    return np.array(values, dtype=np.int64)


def _case(op_type: str, *inputs: np.ndarray | None, opset: int = NEWEST, **arguments: Any) -> Case:
    return node_case(op_type, *inputs, opset=opset, **arguments)


def _fed_and_constant(
    op_type: str, *inputs: np.ndarray | None, names: tuple[str, ...], **arguments: Any
) -> Iterator[Case]:
    """Two cases: the integer inputs called `names` are fed, and are initializers."""
    yield _case(op_type, *inputs, **arguments)
    yield _case(op_type, *inputs, constant=names, **arguments)


def _reshaping(shapes: str) -> Iterator[Case]:
    for x, to in (
        (numbers(2, 6), ints(3, -1)),
        (numbers(2, 6), ints(0, 2, 3)),
        (numbers(1), ints()),
        (numbers(0, 3), ints(0, 5)),
    ):
        allowzero = int(x.size == 0)
        yield from _fed_and_constant("Reshape", x, to, names=("shape",), shapes=shapes, allowzero=allowzero)
    for axis in (-1, 0, 2, 3):
        yield _case("Flatten", numbers(2, 3, 4), axis=axis, shapes=shapes)
    yield _case("Flatten", numbers(), axis=0, shapes=shapes)
    yield _case("Squeeze", numbers(1, 2, 1), shapes=shapes)
    for axes in (ints(0), ints(-1, 0)):
        yield from _fed_and_constant("Squeeze", numbers(1, 2, 1), axes, names=("axes",), shapes=shapes)
    for axes in (ints(0), ints(-1, 0), ints(1, 2)):
        yield from _fed_and_constant("Unsqueeze", numbers(2, 3), axes, names=("axes",), shapes=shapes)
    yield _case("Unsqueeze", numbers(), ints(0), shapes=shapes)


def _joining(shapes: str) -> Iterator[Case]:
    for axis in (1, -2):
        yield _case("Concat", numbers(2, 3, 2), numbers(2, 1, 2), numbers(2, 0, 2), axis=axis, shapes=shapes)
    yield _case("Concat", numbers(2, 3), axis=0, shapes=shapes)
    yield _case("Concat", numbers(2, 3), 1 - numbers(2, 1), 2 * numbers(2, 2), axis=1, shapes=shapes)
    yield _case("Concat", numbers(3), numbers(2), axis=-1, shapes=shapes, opset=16)
    for axis in (0, -2):
        yield from _fed_and_constant(
            "Split", numbers(5, 3), ints(2, 0, 3), names=("split",), axis=axis, outputs=3, shapes=shapes
        )
    yield _case("Split", numbers(4, 3), outputs=2, shapes=shapes, opset=16)
    yield _case("Split", numbers(5, 3), axis=0, outputs=3, num_outputs=3, shapes=shapes)
    yield _case("Split", numbers(5, 3), axis=1, outputs=1, num_outputs=1, shapes=shapes)


def _repeating(shapes: str) -> Iterator[Case]:
    for x, to in (
        (numbers(1, 3), ints(2, 3)),
        (numbers(3, 1), ints(2, 1, 4)),
        (numbers(2, 3), ints(1, 1)),
        (numbers(), ints(2, 2)),
        (numbers(1, 3), ints(0, 3)),
        (numbers(2, 1), ints(2, 1)),
    ):
        yield from _fed_and_constant("Expand", x, to, names=("shape",), shapes=shapes)
    for x, repeats in (
        (numbers(2, 3), ints(2, 1)),
        (numbers(2, 3), ints(2, 3)),
        (numbers(2, 3, 2), ints(1, 3, 1)),
        (numbers(2, 3), ints(1, 1)),
        (numbers(2, 3), ints(0, 2)),
        (numbers(0, 3), ints(2, 2)),
        (numbers(), ints()),
    ):
        yield from _fed_and_constant("Tile", x, repeats, names=("repeats",), shapes=shapes)


def _slicing(shapes: str) -> Iterator[Case]:
    names = ("starts", "ends", "axes", "steps")
    most = np.iinfo(np.int64).max
    for starts, ends, axes, steps in (
        (ints(1), ints(4), ints(0), ints(1)),
        (ints(0, -3), ints(4, most), ints(0, 1), ints(1, 1)),
        (ints(-2, 1), ints(most, 2), ints(-1, 0), ints(1, 1)),
        (ints(0), ints(-1), ints(1), ints(1)),
        (ints(1), ints(most), ints(1), ints(1)),
        (ints(9, -2), ints(most, most), ints(0, 1), ints(1, 1)),
        (ints(-9), ints(3), ints(0), ints(1)),
        (ints(7), ints(9), ints(0), ints(1)),
        (ints(3), ints(1), ints(0), ints(1)),
        (ints(1), ints(5), ints(0), ints(2)),
        (ints(0, 1), ints(most, most), ints(1, 0), ints(2, 3)),
        (ints(4), ints(9), ints(0), ints(7)),
        (ints(most), ints(-most), ints(0), ints(-1)),
        (ints(-1, -2), ints(-most, -most), ints(1, 0), ints(-2, -3)),
        (ints(3, 0), ints(0, 5), ints(1, 0), ints(-2, 2)),
        (ints(4), ints(4), ints(0), ints(-2)),
        (ints(-9), ints(-9), ints(0), ints(-1)),
    ):
        for constant in (names, names[2:], ()):
            yield _case("Slice", numbers(5, 6), starts, ends, axes, steps, constant=constant, shapes=shapes)
        yield _case("Slice", numbers(5, 6), starts, ends, axes, steps, constant=names, shapes=shapes, opset=16)
        for some in (names[:3], names[::2], ()):
            if all(steps == 1):
                yield _case("Slice", numbers(5, 6), starts, ends, axes, constant=some, shapes=shapes)
    for x in (numbers(5, 6), numbers(0, 6)):
        yield from _fed_and_constant("Slice", x, ints(1, 2), ints(4, 5), names=names[:2], shapes=shapes)
    as_int32 = [v.astype(np.int32) for v in (ints(1), ints(4), ints(-1), ints(1))]
    yield from _fed_and_constant("Slice", numbers(2, 5), *as_int32, names=names, shapes=shapes)


def _padding(shapes: str) -> Iterator[Case]:
    value = np.array(0.5, np.float32)
    for x, pads in (
        (numbers(3, 4), ints(1, 0, 2, 3)),
        (numbers(3, 4), ints(1, -1, -2, 3)),
        (numbers(0, 4), ints(1, 0, 2, 3)),
        (numbers(), ints()),
    ):
        yield from _fed_and_constant("Pad", x, pads, value, names=("pads",), shapes=shapes)
        yield _case("Pad", x, pads, constant=["pads"], shapes=shapes, opset=16)
    for mode in ("constant", "reflect", "edge", "wrap"):
        first = 19 if mode == "wrap" else 18
        yield from _fed_and_constant(
            "Pad",
            numbers(3, 4, 3),
            ints(1, 2, 2, 1),
            None,
            ints(-1, 1),
            names=("pads", "axes"),
            mode=mode,
            opset=first,
            shapes=shapes,
        )
        if mode != "constant":
            yield from _fed_and_constant(
                "Pad", numbers(3, 4), ints(2, 0, 1, 3), names=("pads",), mode=mode, shapes=shapes
            )
    for sizes, axes in ((ints(6, 2), None), (ints(5, 5), None), (ints(3), [1]), (ints(7, 2), [-1, 0]), (ints(0), [0])):
        yield from _fed_and_constant("CenterCropPad", numbers(4, 5), sizes, names=("shape",), axes=axes, shapes=shapes)


def _moving(shapes: str) -> Iterator[Case]:
    for perm in ([2, 0, 1], [0, 2, 1], None):
        yield _case("Transpose", numbers(2, 3, 4), perm=perm, shapes=shapes)
    for upper in (0, 1):
        yield _case("Trilu", numbers(3, 4), upper=upper, shapes=shapes)
        for k in (-1, 1, 9):
            diagonal = np.array(k, np.int64)
            yield from _fed_and_constant("Trilu", numbers(2, 3, 4), diagonal, names=("k",), upper=upper, shapes=shapes)
    yield _case("ReverseSequence", numbers(4, 3, 2), ints(1, 4, 3), shapes=shapes)
    yield _case("ReverseSequence", numbers(3, 4), ints(1, 4, 3), batch_axis=0, time_axis=1, shapes=shapes)
    for mode in ("DCR", "CRD"):
        yield _case("DepthToSpace", numbers(2, 8, 2, 3), blocksize=2, mode=mode, shapes=shapes)
        yield _case("DepthToSpace", numbers(2, 8, 2, 3), blocksize=2, mode=mode, shapes=shapes, opset=28)
        yield _case("SpaceToDepth", numbers(2, 2, 4, 6), blocksize=2, mode=mode, shapes=shapes, opset=28)
    yield _case("SpaceToDepth", numbers(2, 2, 4, 6), blocksize=2, shapes=shapes)
    for start, limit, delta in ((0.5, 3.2, 0.5), (3.0, -1.1, -1.0), (1.0, 0.5, 1.0)):
        yield _case("Range", *(np.array(v, np.float32) for v in (start, limit, delta)), shapes=shapes)
