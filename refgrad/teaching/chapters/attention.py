"""Chapter 6: the chain through an attention, and the gradient of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from refgrad.extend import Emitter
from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake, halves

SKELETON = '''\
"""Chapter 6: Y = P·V with P = softmax(S), where S = scale·Q·Kᵀ where the mask is True and -∞ elsewhere. Write dQ, dK, dV."""

from refgrad.extend import rule


@rule("Attend", domain="course")
def attend(op, d_Y, Q, K, V, mask, *, scale=1.0):
    """The derivative of Y = softmax(where(mask, scale·Q·Kᵀ, -∞))·V: returns dQ, dK and dV.

    Q has shape (M, D), K (N, D), V (N, E), mask and S (M, N), d_Y (M, E). scale is a number. Written in operators of ONNX,
    a rule can be differentiated again. Useful: op.MatMul, op.Transpose, op.Mul, op.Sub, op.Softmax(S, axis=-1),
    op.Where(mask, S, float("-inf")), op.ReduceSum(a, [1], keepdims=1).
    """
    raise NotImplementedError("write dQ, dK and dV")
    return dQ, dK, dV
'''


def _kernel(Q: np.ndarray, K: np.ndarray, V: np.ndarray, mask: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
    S = np.where(mask, Q.dtype.type(scale) * (Q @ K.T), -np.inf)
    powers = np.exp(S - S.max(1, keepdims=True))
    return np.asarray((powers / powers.sum(1, keepdims=True)) @ V, Q.dtype)


def _forward(Q: np.ndarray, K: np.ndarray, V: np.ndarray, mask: np.ndarray, scale: float = 1.0) -> Any:
    rows = []
    for query, seen in zip(Q, np.real(mask) > 0, strict=True):
        powers = np.exp(scale * (K[seen] * query).sum(1))
        rows.append((powers[:, None] * V[seen]).sum(0) / powers.sum())
    return np.stack(rows) if rows else np.zeros((0, V.shape[1]), V.dtype)


def _solution(op: Emitter, d_Y: str, Q: str, K: str, V: str, mask: str, *, scale: float = 1.0) -> tuple[str, str, str]:
    """With dP = dY·Vᵀ and dS = P·(dP − Σ P·dP): dQ = scale·dS·K, dK = scale·dSᵀ·Q, dV = Pᵀ·dY."""
    S = op.Mul(op.MatMul(Q, op.Transpose(K)), scale)
    P = op.Softmax(op.Where(mask, S, float("-inf")), axis=-1)
    dP = op.MatMul(d_Y, op.Transpose(V))
    dS = op.Mul(op.Mul(P, op.Sub(dP, op.ReduceSum(op.Mul(P, dP), [1], keepdims=1))), scale)
    return op.MatMul(dS, K), op.MatMul(op.Transpose(dS), Q), op.MatMul(op.Transpose(P), d_Y)


def _points() -> list[ExercisePoint]:
    rng = np.random.default_rng(9)

    def at(M: int, N: int, D: int, E: int, scale: float) -> ExercisePoint:
        mask = rng.random((M, N)) < 0.6
        if N > 2:
            mask[:, 0], mask[:, 1] = False, True  # every row sees a key, and not all
        mask[np.arange(M), rng.integers(0, N, M)] = True
        mask[:1, :2] |= N == 2  # a row that sees one key alone has no derivative by Q
        V = np.asarray(rng.permuted(np.tile(np.arange(-N, N, 2) / 2 + 0.5, (E, 1)), axis=1).T, np.float32)  # all differ
        arrays = {"Q": halves(rng, M, D) / 2, "K": halves(rng, N, D), "V": V, "mask": mask}
        return ExercisePoint(arrays, halves(rng, M, E), {"scale": scale})

    sizes = [(1, 2, 1, 1), (2, 2, 1, 1), (1, 3, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (3, 4, 2, 3), (0, 2, 1, 1)]
    made = [at(*size, 0.5) for size in sizes]
    seen = np.array([[True, True]])
    pencil = ExercisePoint(
        {
            "Q": np.array([[1]], np.float32),
            "K": np.array([[1], [-1]], np.float32),
            "V": np.array([[2], [3]], np.float32),
            "mask": seen,
        },
        np.array([[4]], np.float32),
        {"scale": 0.5},
    )
    return [pencil, *made]


def _softmax(S: np.ndarray, axis: int = 1) -> np.ndarray:
    powers = np.exp(S - S.max(axis, keepdims=True, initial=-1e300))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


def _weights(
    p: SimpleNamespace, masked: bool = True, scaled: bool = True, axis: int = 1, hidden: float = -np.inf
) -> np.ndarray:
    S = (p.scale if scaled else 1) * p.Q @ p.K.T
    return _softmax(np.where(p.mask, S, hidden) if masked else S, axis)


def _through(p: SimpleNamespace, P: np.ndarray, total: Callable[[np.ndarray, np.ndarray], Any]) -> np.ndarray:
    """The derivative by S: P·(dP − total(P, dP))."""
    dP = p.d_Y @ p.V.T
    return np.asarray(P * (dP - total(P, dP)))


def _dot(P: np.ndarray, dP: np.ndarray) -> Any:
    return (P * dP).sum(1, keepdims=True)


def _by_scores(p: SimpleNamespace, **how: Any) -> np.ndarray:
    return _through(p, _weights(p, **how), _dot)


_NO_MASK = "The mask is forgotten: P has to be computed with it, as the operator does."
_NO_SCALE = "The scale is forgotten in S: P is not the P of the operator."
_NO_FACTOR = "The scale is forgotten: S has it as a factor, so dQ and dK have it, too."
_NO_SUM = "The softmax's sum term is missing: each score is in the sum that divides its whole row."
_AXIS = "The sum of softmax goes over the keys, axis 1, and yours goes over axis 0."
_PLAIN_SUM = "The sum term is Σ P·dP, and yours is Σ dP."
_MEAN = "The sum term is Σ P·dP, and yours is the mean of P·dP."
_KEPT = "The sum term is a column: without keepdims=1 it is a row, and broadcasting takes it from the wrong elements."
_ZERO = "Where the mask is False, yours sets S to 0, and e⁰ is 1: the key gets weight. With −∞ it gets 0."
_SKIPPED = "The derivative of softmax is missing: yours goes on with dP in the place of dS."


def _on_both(hint: str, dS: Callable[[SimpleNamespace], Any]) -> tuple[Mistake, Mistake]:
    """The mistake as dQ shows it, and as dK shows it."""
    return Mistake("Q", hint, lambda p: p.scale * dS(p) @ p.K), Mistake("K", hint, lambda p: p.scale * dS(p).T @ p.Q)


_MISTAKES = (
    *_on_both(_NO_MASK, lambda p: _by_scores(p, masked=False)),
    *_on_both(_NO_SCALE, lambda p: _by_scores(p, scaled=False)),
    *_on_both(_NO_FACTOR, lambda p: _by_scores(p) / p.scale),
    *_on_both(f"{_NO_FACTOR} It is forgotten in S, too.", lambda p: _by_scores(p, scaled=False) / p.scale),
    *_on_both("The scale is a factor of dQ and dK once, and yours has it twice.", lambda p: _by_scores(p) * p.scale),
    *_on_both(_NO_SUM, lambda p: _through(p, _weights(p), lambda P, dP: 0)),
    *_on_both(
        "The softmax's sum term and the mask are missing.",
        lambda p: _through(p, _weights(p, masked=False), lambda P, dP: 0),
    ),
    *_on_both(_AXIS, lambda p: _through(p, _weights(p), lambda P, dP: (P * dP).sum(0, keepdims=True))),
    *_on_both(_AXIS, lambda p: _by_scores(p, axis=0)),
    *_on_both(_AXIS, lambda p: _through(p, _weights(p, axis=0), lambda P, dP: (P * dP).sum(0, keepdims=True))),
    *_on_both(_KEPT, lambda p: _through(p, _weights(p), lambda P, dP: (P * dP).sum(1))),
    *_on_both(_ZERO, lambda p: _by_scores(p, hidden=0.0)),
    *_on_both(_PLAIN_SUM, lambda p: _through(p, _weights(p), lambda P, dP: dP.sum(1, keepdims=True))),
    *_on_both(_MEAN, lambda p: _through(p, _weights(p), lambda P, dP: (P * dP).mean(1, keepdims=True))),
    *_on_both(
        "Only the diagonal of softmax's Jacobian: dS is P·(1 − P)·dP in yours.",
        lambda p: _through(p, _weights(p), lambda P, dP: P * dP),
    ),
    *_on_both(
        "The sign of the sum term of dS is wrong.",
        lambda p: _through(p, _weights(p), lambda P, dP: -_dot(P, dP)),
    ),
    *_on_both("The factor P of dS is missing.", lambda p: p.d_Y @ p.V.T - _dot(_weights(p), p.d_Y @ p.V.T)),
    *_on_both(_SKIPPED, lambda p: p.d_Y @ p.V.T),
    *_on_both(
        "V is not transposed in dP: look at the shapes.",
        lambda p: _weights(p) * (p.d_Y @ p.V - _dot(_weights(p), p.d_Y @ p.V)),
    ),
    Mistake(
        "Q",
        "Yours is dK: the cotangents may be in the wrong order. Return dQ, dK, dV.",
        lambda p: p.scale * _by_scores(p).T @ p.Q,
    ),
    Mistake("Q", "Yours has dSᵀ, which belongs to dK.", lambda p: p.scale * _by_scores(p).T @ p.K),
    Mistake("Q", "Yours has Q in the place of K.", lambda p: p.scale * _by_scores(p) @ p.Q),
    Mistake(
        "Q",
        "K is transposed, and it must not be: in S it is transposed already.",
        lambda p: p.scale * _by_scores(p) @ p.K.T,
    ),
    Mistake(
        "K",
        "Yours is dQ: the cotangents may be in the wrong order. Return dQ, dK, dV.",
        lambda p: p.scale * _by_scores(p) @ p.K,
    ),
    Mistake("K", "dS is not transposed: look at the shapes.", lambda p: p.scale * _by_scores(p) @ p.Q),
    Mistake("K", "Yours is the transpose of dK.", lambda p: p.scale * p.Q.T @ _by_scores(p)),
    Mistake("K", "Yours has K in the place of Q.", lambda p: p.scale * _by_scores(p).T @ p.K),
    Mistake("V", "P is not transposed: look at the shapes.", lambda p: _weights(p) @ p.d_Y),
    Mistake("V", _NO_MASK, lambda p: _weights(p, masked=False).T @ p.d_Y),
    Mistake("V", _ZERO, lambda p: _weights(p, hidden=0.0).T @ p.d_Y),
    Mistake("V", _NO_SCALE, lambda p: _weights(p, scaled=False).T @ p.d_Y),
    Mistake(
        "V", f"{_NO_MASK} The scale is forgotten, too.", lambda p: _weights(p, masked=False, scaled=False).T @ p.d_Y
    ),
    Mistake("V", _AXIS, lambda p: _weights(p, axis=0).T @ p.d_Y),
    Mistake("V", "Yours has S in the place of P: the softmax is missing.", lambda p: (p.scale * p.Q @ p.K.T).T @ p.d_Y),
    Mistake("V", "Yours is the transpose of dV.", lambda p: p.d_Y.T @ _weights(p)),
    Mistake(
        "V",
        "Yours has the scale as a factor, and V is not scaled.",
        lambda p: p.scale * _weights(p).T @ p.d_Y,
    ),
    Mistake("V", "The factor P of dV is missing.", lambda p: p.d_Y),
)

CHAPTER = Chapter(
    number=6,
    title="Attention, and the gradient of a gradient",
    page="docs/course/6_attention.md",
    operator="Attend",
    derivative="dP = dY·Vᵀ, dS = P·(dP − Σ P·dP), dQ = scale·dS·K, dK = scale·dSᵀ·Q, dV = Pᵀ·dY",
    formula="Y = softmax(where(mask, scale·Q·Kᵀ, −∞))·V",
    inputs={"Q": 2, "K": 2, "V": 2, "mask": 2},
    floats=("Q", "K", "V"),
    output="Y",
    rank=2,
    attributes={"scale": 1.0},
    skeleton=SKELETON,
    kernel=_kernel,
    forward=_forward,
    solution=_solution,
    points=_points(),
    mistakes=_MISTAKES,
    second=True,
)
