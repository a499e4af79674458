"""Cases of the operators that read or write elements by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.shape import NEWEST, ints, numbers


def cases() -> Iterator[Case]:
    """Duplicate, negative, scalar, consecutive and no indices, fed and constant, on every axis."""
    for shapes in SHAPES:
        yield from _gathering(shapes)
        yield from _scattering(shapes)
        yield from _selecting(shapes)


def _case(op_type: str, *inputs: np.ndarray | None, opset: int = NEWEST, **arguments: Any) -> Case:
    return node_case(op_type, *inputs, opset=opset, **arguments)


def _gathering(shapes: str) -> Iterator[Case]:
    single = np.array(-1, np.int64)
    for constant in ((), ("indices",)):
        for name, indices in {
            "last": single,
            "first": np.array(0, np.int64),
            "one": ints(-1),
            "run": ints(1, 2),
            "negative run": ints(-3, -2),
            "around": ints(-1, 0),
            "duplicates": ints(2, 0, 2),
            "matrix": ints([2, 0, 2], [1, -1, -2]),
            "none": ints(),
            "int32": ints(2, 0, 2).astype(np.int32),
        }.items():
            for axis in (0, 1, -1):
                title = f"Gather-{name}-{axis}-{'constant' if constant else 'fed'}-{shapes}"
                yield _case(
                    "Gather", numbers(4, 3, 5), indices, axis=axis, constant=constant, shapes=shapes, name=title
                )
        yield _case("Gather", numbers(4), single, constant=constant, shapes=shapes)
        yield _case("Gather", numbers(4, 0), ints(1, 1), constant=constant, shapes=shapes)
        for axis in (0, 1, -1):
            indices = ints([1, 1, -2], [0, 1, 1])
            yield _case("GatherElements", numbers(4, 3), indices, axis=axis, constant=constant, shapes=shapes)
        yield _case("GatherElements", numbers(4, 3), np.zeros((0, 3), np.int64), constant=constant, shapes=shapes)
        for x, tuples, batch_dims in (
            (numbers(4, 3), ints([1], [-1], [1]), 0),
            (numbers(4, 3), ints([1, -1], [1, 2], [1, -1]), 0),
            (numbers(4, 3, 2), ints([[1, -1], [1, 2], [1, -1]]), 0),
            (numbers(2, 4, 3), ints([[1], [1]], [[2], [-1]]), 1),
            (numbers(2, 4, 3), ints([[1, 0], [1, -1]], [[2, 1], [2, 1]]), 1),
            (numbers(2, 2, 4), ints([[1], [1]], [[2], [-1]]), 2),
            (numbers(4, 0), ints([1], [1]), 0),
            (numbers(4, 3), np.zeros((0, 1), np.int64), 0),
        ):
            yield _case("GatherND", x, tuples, batch_dims=batch_dims, constant=constant, shapes=shapes)


def _scattering(shapes: str) -> Iterator[Case]:
    distinct, repeated = ints([1, 0, -1]), ints([1, 1, 2], [1, 0, -2], [-3, 0, 2])
    rows, repeated_rows = ints([1], [-1]), ints([1], [1], [-1])
    for reduction in ("none", "add", "mul", "max", "min"):
        opset = 18 if reduction in ("max", "min") else 16
        options: dict[str, Any] = {"reduction": reduction, "opset": opset, "shapes": shapes}
        yield _case("ScatterElements", numbers(4, 3), distinct, 1.5 * numbers(1, 3), axis=-2, **options)
        yield _case("ScatterElements", numbers(4, 3), distinct, 1.5 * numbers(1, 3), axis=1, **options)
        yield _case("ScatterND", numbers(4, 3), rows, 1.5 * numbers(2, 3), **options)
        yield _case("ScatterND", numbers(4, 3), ints([[1, -1], [0, 0]]), 1.5 * numbers(1, 2), **options)
        yield _case("ScatterND", numbers(4, 3), np.zeros((0, 1), np.int64), numbers(0, 3), **options)
        if reduction != "none":
            yield _case("ScatterElements", numbers(4, 3), repeated, 1.5 * numbers(3, 3)[::-1], **options)
            yield _case("ScatterND", numbers(4, 3), repeated_rows, 1.5 * numbers(3, 3)[::-1], **options)
    with_zeros = numbers(3, 3)
    with_zeros[1:, 0] = with_zeros[0, 1] = 0
    yield _case("ScatterElements", numbers(4, 3), np.ones((3, 3), np.int64), with_zeros, reduction="mul", shapes=shapes)
    yield _case("ScatterND", numbers(4, 3), ints([1], [1], [1]), with_zeros, reduction="mul", shapes=shapes)


def _selecting(shapes: str) -> Iterator[Case]:
    few, many = np.array([True, False, True]), np.arange(12) % 3 == 1
    for axis, condition in ((0, few), (1, few), (-2, few), (None, many), (None, few), (0, np.array([False]))):
        for constant in ((), ("condition",)):
            yield _case("Compress", numbers(4, 3), condition, axis=axis, constant=constant, shapes=shapes)
    yield _case("Compress", numbers(2, 4, 3), few, axis=1, shapes=shapes)
    for axis in (None, 0, 1, -1):
        for order in (0, 1):
            for count in (1, 2, 4):
                yield _case("Unique", numbers(3, 4), axis=axis, sorted=order, outputs=count, shapes=shapes)
    yield _case("Unique", numbers(2, 4, 3), axis=1, outputs=2, shapes=shapes)
    for constant in ((), ("K",)):
        for axis, largest, order, count in ((-1, 1, 1, 3), (0, 0, 1, 2), (1, 1, 0, 1)):
            options: dict[str, Any] = {
                "axis": axis,
                "largest": largest,
                "sorted": order,
                "outputs": 2,
                "shapes": shapes,
            }
            yield _case("TopK", numbers(4, 5), ints(count), constant=constant, **options)
        yield _case("TopK", numbers(4, 5), ints(0), constant=constant, outputs=2, shapes=shapes)
    for axis in (-1, 0, 1):
        yield _case("OneHot", ints(1, -1, 9, 2), ints(4), numbers(2), axis=axis, shapes=shapes)
    yield _case(
        "OneHot", ints([1, -1], [0, 2]), ints(4), np.full(2, 0.5, np.float32), constant=["depth"], shapes=shapes
    )
