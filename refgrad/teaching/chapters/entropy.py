"""Chapter 4: of softmax with cross entropy remains a subtraction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from refgrad.extend import Emitter
from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake, halves

SKELETON = '''\
"""Chapter 4: loss = -mean(log(softmax(scores)[right class])). Write dscores."""

from refgrad.extend import rule


@rule("CrossEntropy", domain="course")
def cross_entropy(op, d_loss, scores, target):
    """The derivative of the loss by the scores, of shape (N, C). The target is True at the right class of each row.

    d_loss is a scalar. Useful: op.Sub, op.Mul, op.Div.
    """
    p = op.Softmax(scores, axis=-1)
    t = op.CastLike(target, scores)  # 1 at the right class, 0 elsewhere
    N = op.CastLike(op.Shape(scores, start=0, end=1), scores)  # how many rows
    raise NotImplementedError("write dscores")
    return dscores
'''


def _kernel(scores: np.ndarray, target: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return np.asarray(-(logs * target).sum(1).mean())


def _forward(scores: np.ndarray, target: np.ndarray) -> Any:
    rest = [np.log(np.exp(row - row[np.real(right) > 0][0]).sum()) for row, right in zip(scores, target, strict=True)]
    return np.asarray(sum(rest) / len(rest))


def _solution(op: Emitter, d_loss: str, scores: str, target: str) -> str:
    """Dscores = (softmax(scores) − target)/N·dloss."""
    p = op.Softmax(scores, axis=-1)
    t = op.CastLike(target, scores)
    N = op.CastLike(op.Shape(scores, start=0, end=1), scores)
    return str(op.Mul(op.Div(op.Sub(p, t), N), d_loss))


def _points() -> list[ExercisePoint]:
    rng = np.random.default_rng(5)

    def at(rows: int, classes: int) -> ExercisePoint:
        right = rng.integers(0, classes, rows)
        target = np.arange(classes) == right[:, None]
        return ExercisePoint({"scores": halves(rng, rows, classes), "target": target}, halves(rng))

    return [at(*size) for size in [(1, 2), (2, 2), (1, 3), (2, 3), (3, 2), (3, 4), (2, 1)]]


def _p(p: SimpleNamespace, axis: int = 1) -> Any:
    powers = np.exp(p.scores)
    return powers / powers.sum(axis, keepdims=True)


def _n(p: SimpleNamespace) -> int:
    return int(p.scores.shape[0])


_MISTAKES = (
    Mistake(
        "scores",
        "The division by N is missing: the loss is a mean over the rows.",
        lambda p: (_p(p) - p.target) * p.d_loss,
    ),
    Mistake(
        "scores",
        "The sign is wrong: more score at the right class makes the loss smaller.",
        lambda p: (p.target - _p(p)) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "The sign is wrong, and the division by N is missing.",
        lambda p: (p.target - _p(p)) * p.d_loss,
    ),
    Mistake(
        "scores",
        "The softmax's sum term is missing: each score is in the sum that divides all of them, which gives p.",
        lambda p: -p.target / _n(p) * p.d_loss,
    ),
    Mistake("scores", "The softmax's sum term and the division by N are missing.", lambda p: -p.target * p.d_loss),
    Mistake("scores", "The target is missing: yours is the sum term alone.", lambda p: _p(p) / _n(p) * p.d_loss),
    Mistake("scores", "The target and the division by N are missing.", lambda p: _p(p) * p.d_loss),
    Mistake(
        "scores",
        "Yours stops at the probabilities: −t/p is the derivative by p. From p to the scores goes the derivative of softmax.",
        lambda p: -p.target / _p(p) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "Yours stops at the probabilities, −t/p, and the division by N is missing. From p to the scores goes "
        "the derivative of softmax.",
        lambda p: -p.target / _p(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "Only the diagonal of softmax's Jacobian: the right class's probability depends on the other scores too.",
        lambda p: -p.target * (1 - _p(p)) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "Only the diagonal of softmax's Jacobian, and the division by N is missing.",
        lambda p: -p.target * (1 - _p(p)) * p.d_loss,
    ),
    Mistake(
        "scores",
        "Yours goes through softmax once more: the derivative of softmax is in it twice.",
        lambda p: _p(p) * (_p(p) - p.target) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "Yours divides by the number of classes, and the mean is over the N rows.",
        lambda p: (_p(p) - p.target) / p.scores.shape[1] * p.d_loss,
    ),
    Mistake(
        "scores",
        "Yours divides by the number of elements, and the mean is over the N rows.",
        lambda p: (_p(p) - p.target) / p.scores.size * p.d_loss,
    ),
    Mistake("scores", "Yours divides by N twice.", lambda p: (_p(p) - p.target) / _n(p) ** 2 * p.d_loss),
    Mistake(
        "scores",
        "The softmax goes over the rows, axis 0. Each row is a sample: it goes over the classes, axis 1.",
        lambda p: (_p(p, 0) - p.target) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "The exponentials are not divided by their sum: softmax is exp(scores)/Σ exp(scores).",
        lambda p: (np.exp(p.scores) - p.target) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "The softmax is missing: yours subtracts the target from the scores.",
        lambda p: (p.scores - p.target) / _n(p) * p.d_loss,
    ),
    Mistake(
        "scores",
        "Yours has a sigmoid for each class, and the loss has a softmax over them.",
        lambda p: (1 / (1 + np.exp(-p.scores)) - p.target) / _n(p) * p.d_loss,
    ),
    Mistake("scores", "Yours has log p in the place of p.", lambda p: (np.log(_p(p)) - p.target) / _n(p) * p.d_loss),
)

CHAPTER = Chapter(
    number=4,
    title="Softmax with cross entropy",
    page="docs/course/4_cross_entropy.md",
    operator="CrossEntropy",
    derivative="dscores = (softmax(scores) − target)/N·dloss",
    formula="loss = −mean(log(softmax(scores)[target]))",
    inputs={"scores": 2, "target": 2},
    floats=("scores",),
    output="loss",
    rank=0,
    attributes={},
    skeleton=SKELETON,
    kernel=_kernel,
    forward=_forward,
    solution=_solution,
    points=_points(),
    mistakes=_MISTAKES,
)
