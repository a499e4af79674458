"""Chapter 3: the gradient of a product with a matrix is the product with the transposed one."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.extend import Emitter
from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake, halves

SKELETON = '''\
"""Chapter 3: Y = A·B, the product of two matrices. Write dA and dB."""

from refgrad.extend import rule


@rule("Product", domain="course")
def product(op, d_Y, A, B):
    """The derivative of Y = A·B: returns dA, of A's shape (M, K), and dB, of B's shape (K, N). d_Y has shape (M, N).

    Useful: op.MatMul(a, b), op.Transpose(a).
    """
    raise NotImplementedError("write dA and dB")
    return dA, dB
'''


def _kernel(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.asarray(A @ B)


def _forward(A: np.ndarray, B: np.ndarray) -> Any:
    return (A[:, :, None] * B[None, :, :]).sum(1)


def _solution(op: Emitter, d_Y: str, A: str, B: str) -> tuple[str, str]:
    """DA = dY·Bᵀ, dB = Aᵀ·dY."""
    return op.MatMul(d_Y, op.Transpose(B)), op.MatMul(op.Transpose(A), d_Y)


def _points() -> list[ExercisePoint]:
    rng = np.random.default_rng(4)
    # The square ones tell a missing transposition from a wrong order: there everything has the right shape.
    sizes = [(1, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 3, 3), (2, 3, 4), (4, 2, 3), (0, 2, 3), (2, 0, 3)]
    return [ExercisePoint({"A": halves(rng, m, k), "B": halves(rng, k, n)}, halves(rng, m, n)) for m, k, n in sizes]


_A = "dY has shape (M, N), B has (K, N), and dA has the shape of A, (M, K)"
_B = "A has shape (M, K), dY has (M, N), and dB has the shape of B, (K, N)"
_MISTAKES = (
    Mistake("A", f"B is not transposed. {_A}.", lambda p: p.d_Y @ p.B),
    Mistake("A", f"The operands are swapped, and B is not transposed. {_A}.", lambda p: p.B @ p.d_Y),
    Mistake("A", f"The operands are swapped: matrices do not commute. {_A}.", lambda p: p.B.T @ p.d_Y),
    Mistake("A", f"Yours is the transpose of dA. {_A}.", lambda p: (p.d_Y @ p.B.T).T),
    Mistake("A", f"dY is transposed, and B is the one that has to be. {_A}.", lambda p: p.d_Y.T @ p.B),
    Mistake("A", f"dY is transposed, and it must not be. {_A}.", lambda p: p.d_Y.T @ p.B.T),
    Mistake("A", "Yours is dB: the two cotangents may be in the wrong order. Return dA, dB.", lambda p: p.A.T @ p.d_Y),
    Mistake("A", f"Yours has A in the place of B. {_A}.", lambda p: p.d_Y @ p.A.T),
    Mistake("A", f"Yours multiplies element by element, and Y is a product of matrices. {_A}.", lambda p: p.d_Y * p.B),
    Mistake(
        "A", f"Yours multiplies element by element, and Y is a product of matrices. {_A}.", lambda p: p.d_Y * p.B.T
    ),
    Mistake("A", f"The factor B is missing. {_A}.", lambda p: p.d_Y),
    Mistake("A", f"The cotangent dY is missing. {_A}.", lambda p: p.B.T),
    Mistake("B", f"A is not transposed. {_B}.", lambda p: p.A @ p.d_Y),
    Mistake("B", f"The operands are swapped, and A is not transposed. {_B}.", lambda p: p.d_Y @ p.A),
    Mistake("B", f"The operands are swapped: matrices do not commute. {_B}.", lambda p: p.d_Y @ p.A.T),
    Mistake("B", f"Yours is the transpose of dB. {_B}.", lambda p: (p.A.T @ p.d_Y).T),
    Mistake("B", f"dY is transposed, and A is the one that has to be. {_B}.", lambda p: p.A @ p.d_Y.T),
    Mistake("B", f"dY is transposed, and it must not be. {_B}.", lambda p: p.A.T @ p.d_Y.T),
    Mistake("B", "Yours is dA: the two cotangents may be in the wrong order. Return dA, dB.", lambda p: p.d_Y @ p.B.T),
    Mistake("B", f"Yours has B in the place of A. {_B}.", lambda p: p.B.T @ p.d_Y),
    Mistake("B", f"Yours multiplies element by element, and Y is a product of matrices. {_B}.", lambda p: p.d_Y * p.A),
    Mistake(
        "B", f"Yours multiplies element by element, and Y is a product of matrices. {_B}.", lambda p: p.d_Y * p.A.T
    ),
    Mistake("B", f"The factor A is missing. {_B}.", lambda p: p.d_Y),
    Mistake("B", f"The cotangent dY is missing. {_B}.", lambda p: p.A.T),
)

CHAPTER = Chapter(
    number=3,
    title="MatMul, and the transposed matrix",
    page="docs/course/3_matmul.md",
    operator="Product",
    formula="Y = A·B",
    derivative="dA = dY·Bᵀ, dB = Aᵀ·dY",
    inputs={"A": 2, "B": 2},
    floats=("A", "B"),
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
