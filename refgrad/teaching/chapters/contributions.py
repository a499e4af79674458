"""Chapter 1: x is read twice, so it gets two contributions, and they add."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.extend import Emitter
from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake, halves

SKELETON = '''\
"""Chapter 1: z = x·y + x, element by element. Write dx and dy."""

from refgrad.extend import rule


@rule("MulAdd", domain="course")
def mul_add(op, d_z, x, y):
    """The derivative of z = x·y + x: returns dx and dy.

    d_z, x and y are names of tensors of one shape, not arrays. A method of op adds a node to the gradient and returns
    the name of its result: op.Mul(a, b), op.Add(a, b), op.Sub(a, b), op.Neg(a). A number may stand for a tensor.
    """
    raise NotImplementedError("write dx and dy")
    return dx, dy
'''


def _kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(x * y + x)


def _forward(x: np.ndarray, y: np.ndarray) -> Any:
    return x * (y + 1)


def _solution(op: Emitter, d_z: str, x: str, y: str) -> tuple[str, str]:
    """Dx = dz·y + dz, dy = dz·x."""
    return op.Add(op.Mul(d_z, y), d_z), op.Mul(d_z, x)


def _points() -> list[ExercisePoint]:
    rng = np.random.default_rng(1)
    pencil = ExercisePoint(
        {"x": np.array([2], np.float32), "y": np.array([3], np.float32)},
        np.array([5], np.float32),
    )
    sizes = [(2,), (3,), (0,)]
    return [pencil, *(ExercisePoint({"x": halves(rng, *s), "y": halves(rng, *s)}, halves(rng, *s)) for s in sizes)]


_TWICE = "z = x·y + x reads x twice, and each place that reads it contributes to dx"
_MISTAKES = (
    Mistake(
        "x",
        f"Only one contribution: {_TWICE}. Yours is the product's, dz·y; the sum's is missing.",
        lambda p: p.d_z * p.y,
    ),
    Mistake(
        "x", f"Only one contribution: {_TWICE}. Yours is the sum's, dz; the product's is missing.", lambda p: p.d_z
    ),
    Mistake("x", f"The contributions add: {_TWICE}. Yours multiplies them.", lambda p: p.d_z * p.y * p.d_z),
    Mistake("x", f"The contributions add: {_TWICE}. Yours subtracts them.", lambda p: p.d_z * p.y - p.d_z),
    Mistake("x", f"The contributions add: {_TWICE}. Yours subtracts them.", lambda p: p.d_z - p.d_z * p.y),
    Mistake(
        "x", f"The contributions add: {_TWICE}. Yours is their mean, a factor of ½.", lambda p: p.d_z * (p.y + 1) / 2
    ),
    Mistake(
        "x",
        "The derivative of x·y by x is y, and yours has x in its place.",
        lambda p: p.d_z * (p.x + 1),
    ),
    Mistake(
        "x",
        "The cotangent dz is missing from the sum's contribution: it is dz·1, and yours adds 1.",
        lambda p: p.d_z * p.y + 1,
    ),
    Mistake(
        "x",
        "The cotangent dz is missing from the product's contribution: it is dz·y, and yours adds y.",
        lambda p: p.y + p.d_z,
    ),
    Mistake(
        "x", "The chain rule multiplies by the cotangent once. Yours multiplies twice.", lambda p: p.d_z**2 * (p.y + 1)
    ),
    Mistake("x", "Yours is dy: the two cotangents may be in the wrong order. Return dx, dy.", lambda p: p.d_z * p.x),
    Mistake("y", "The derivative of x·y by y is x, and yours has y in its place.", lambda p: p.d_z * p.y),
    Mistake(
        "y",
        "One contribution too many: z = x·y + x reads y once, in the product. The + x does not depend on y.",
        lambda p: p.d_z * p.x + p.d_z,
    ),
    Mistake("y", "The factor x is missing: the derivative of x·y by y is x.", lambda p: p.d_z),
    Mistake(
        "y", "Yours is dx: the two cotangents may be in the wrong order. Return dx, dy.", lambda p: p.d_z * (p.y + 1)
    ),
    Mistake("y", "The chain rule multiplies by the cotangent: dz·x, and yours adds them.", lambda p: p.d_z + p.x),
)

CHAPTER = Chapter(
    number=1,
    title="z = x·x, and why contributions add",
    page="docs/course/1_contributions.md",
    operator="MulAdd",
    derivative="dx = dz·y + dz, dy = dz·x",
    formula="z = x·y + x",
    inputs={"x": 1, "y": 1},
    floats=("x", "y"),
    output="z",
    rank=1,
    attributes={},
    skeleton=SKELETON,
    kernel=_kernel,
    forward=_forward,
    solution=_solution,
    points=_points(),
    mistakes=_MISTAKES,
)
