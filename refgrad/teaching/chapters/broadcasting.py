"""Chapter 2: a value that every row reads gets a contribution from every row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from refgrad.extend import Emitter
from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake, halves

SKELETON = '''\
"""Chapter 2: Y = max(X, b), where b is a row that broadcasts over the rows of X. Write dX and db."""

from refgrad.extend import rule


@rule("AtLeast", domain="course")
def at_least(op, d_Y, X, b):
    """The derivative of Y = max(X, b): returns dX, of X's shape (N, D), and db, of b's shape (D).

    Where X equals b, either may get the cotangent, or both a share of it; together they get all of it.
    Useful: op.Greater(a, b) is True or False for each element, op.Where(condition, a, b) takes a or b (each may be a
    number, as 0.0), op.ReduceSum(a, [0], keepdims=0) is a.sum(axis=0).
    """
    raise NotImplementedError("write dX and db")
    return dX, db
'''


def _kernel(X: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(X, b))


def _forward(X: np.ndarray, b: np.ndarray) -> Any:
    return np.where(np.real(X) > np.real(b), X, b)


def _solution(op: Emitter, d_Y: str, X: str, b: str) -> tuple[str, str]:
    """DX = dY where X > b, db = dY where X ≤ b, summed over the rows."""
    over = op.Greater(X, b)
    return op.Where(over, d_Y, 0.0), op.ReduceSum(op.Where(over, 0.0, d_Y), [0], keepdims=0)


def _points() -> list[ExercisePoint]:
    rng = np.random.default_rng(3)

    def at(rows: int, columns: int) -> ExercisePoint:
        X = halves(rng, rows, columns)
        b = halves(rng, columns)
        X = np.where(b == X, X + np.float32(0.5), X)  # no ties: they have points of their own
        return ExercisePoint({"X": X, "b": b}, halves(rng, rows, columns))

    def array(*rows: Any) -> np.ndarray:
        return np.array(rows, np.float32)

    pencil = ExercisePoint({"X": array([1], [4]), "b": array(2)}, array([3], [5]))
    both = ExercisePoint({"X": array([1], [1]), "b": array(2)}, array([3], [5]))
    sizes = [(1, 2), (2, 2), (3, 2), (2, 3), (0, 2)]
    tie = ExercisePoint({"X": array([2]), "b": array(2)}, array([5]), together={"X": array([1]), "b": array(1)})
    ties = ExercisePoint(
        {"X": array([2, 3], [1, -1]), "b": array(2, -1)},
        array([5, 7], [-2, 0.5]),
        together={"X": array([1, 1], [1, 1]), "b": array(1, 1)},
    )
    return [pencil, both, *(at(*size) for size in sizes), tie, ties]


def _b(p: SimpleNamespace) -> Any:
    return np.where(p.b < p.X, 0, p.d_Y)


_ROWS = "Y reads b once in every row, and contributions add: db is the sum over the rows, axis 0"
_MISTAKES = (
    Mistake("b", f"The sum over the broadcast axis is missing. {_ROWS}.", _b),
    Mistake("b", f"Yours sums over axis 1, the columns. {_ROWS}.", lambda p: _b(p).sum(1)),
    Mistake("b", f"Yours sums over everything. {_ROWS} alone.", lambda p: _b(p).sum()),
    Mistake("b", f"Yours is the mean over the rows. {_ROWS}, and nothing is divided.", lambda p: _b(p).mean(0)),
    Mistake(
        "b",
        f"Yours has kept the summed axis, as a 1: keepdims=0 takes it away. {_ROWS}.",
        lambda p: _b(p).sum(0, keepdims=True),
    ),
    Mistake("b", f"Only the first row contributes to yours. {_ROWS}.", lambda p: _b(p)[0]),
    Mistake("b", f"Only the last row contributes to yours. {_ROWS}.", lambda p: _b(p)[-1]),
    Mistake("b", f"Yours takes the largest row in place of the sum. {_ROWS}.", lambda p: _b(p).max(0)),
    Mistake("b", "The mask is forgotten: where X is larger, Y does not depend on b.", lambda p: p.d_Y.sum(0)),
    Mistake("b", "The mask is forgotten, and so is the sum over the broadcast axis.", lambda p: p.d_Y),
    Mistake(
        "b",
        "The mask is the wrong way round: yours has the cotangent where X is larger. There Y is X.",
        lambda p: (p.d_Y - _b(p)).sum(0),
    ),
    Mistake("b", "A factor b too many: where Y is b, the derivative of Y by b is 1.", lambda p: (_b(p) * p.b).sum(0)),
    Mistake(
        "b",
        "Sum after the mask, not before: yours masks the sum of the cotangent.",
        lambda p: np.where(p.b < p.X, 0, p.d_Y.sum(0)),
    ),
    Mistake("X", "The mask is forgotten: where b is larger, Y does not depend on X.", lambda p: p.d_Y),
    Mistake("X", "The mask is the wrong way round: yours has the cotangent where b is larger. There Y is b.", _b),
    Mistake("X", "A factor X too many: where Y is X, the derivative of Y by X is 1.", lambda p: (p.d_Y - _b(p)) * p.X),
    Mistake("X", "Yours compares X with 0, and it has to be compared with b.", lambda p: np.where(p.X > 0, p.d_Y, 0)),
    Mistake("X", "X is not summed: each of its elements is read once.", lambda p: (p.d_Y - _b(p)).sum(0)),
)

CHAPTER = Chapter(
    number=2,
    title="Broadcasting, and why its gradient is a sum",
    page="docs/course/2_broadcasting.md",
    operator="AtLeast",
    derivative="dX = dY where X > b, else 0; db = dY where X ≤ b, else 0, summed over the rows",
    formula="Y = max(X, b)",
    inputs={"X": 2, "b": 1},
    floats=("X", "b"),
    output="Y",
    rank=2,
    attributes={},
    skeleton=SKELETON,
    kernel=_kernel,
    forward=_forward,
    solution=_solution,
    points=_points(),
    mistakes=_MISTAKES,
)
