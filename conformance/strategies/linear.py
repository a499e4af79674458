"""Strategies of matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy

LETTERS = "ijkl"


@strategy("MatMul")
def matmul(d: Drawing) -> Case:
    """Vectors, matrices and batches that broadcast; rarely without rows, columns or anything to sum over."""
    m, k, n = (0 if d.rarely() else d.integer(1, 3) for _ in range(3))
    left, right = d.broadcasting(most=2)
    a = (k,) if d.flag() else (*left, m, k)
    b = (k,) if d.flag() else (*right, k, n)
    return d.case(d.floats(a), d.floats(b), fixed=[d.pick("A", "B")])


@strategy("Gemm")
def gemm(d: Drawing) -> Case:
    """Either operand transposed, any factor, and a C that is absent or broadcasts."""
    m, k, n = (0 if d.rarely() else d.integer(1, 4) for _ in range(3))
    trans_a, trans_b = d.pick(None, 0, 1), d.pick(None, 0, 1)
    a = d.floats((k, m) if trans_a else (m, k))
    b = d.floats((n, k) if trans_b else (k, n))
    c = d.optional(lambda: d.floats(d.broadcast_to((m, n))))
    factors: dict[str, Any] = {name: d.optional(d.factor) for name in ("alpha", "beta")}
    return d.case(a, b, c, fixed=["C", d.pick("A", "B")], transA=trans_a, transB=trans_b, **factors)


@strategy("Det")
def det(d: Drawing) -> Case:
    """Matrices and batches of them, singular ones too."""
    n = 0 if d.rarely() else d.integer(1, 3)
    return d.case(d.floats((*d.shape(0, 2, size=2), n, n)))


@strategy("Einsum")
def einsum(d: Drawing) -> Case:
    """One operand to three, with diagonals, sums, broadcast axes, and the output named or not."""
    sizes = dict(zip(LETTERS, (d.integer(1, 3) for _ in LETTERS), strict=True))
    batch = d.optional(lambda: d.shape(0, 2, size=3))
    terms, operands = [], []
    for k in range(d.integer(1, 3)):
        letters = [d.pick(*LETTERS) for _ in range(d.integer(0, 3))]
        shape = tuple(sizes[letter] for letter in letters)
        if batch is not None and (k == 0 or d.flag()):
            place = d.integer(0, len(letters))
            letters.insert(place, "...")
            repeated = batch if k == 0 else tuple(d.pick(n, 1) for n in batch)
            shape = (*shape[:place], *repeated, *shape[place:])
        terms.append("".join(letters))
        operands.append(_small(d, shape))
    equation = ("," if d.flag() else ", ").join(terms)
    if d.flag():
        known = sorted({letter for term in terms for letter in term.replace(".", "")})
        output = [known[k] for k in d.permutation(len(known))[: d.integer(0, len(known))]]
        if batch is not None:
            output.insert(d.integer(0, len(output)), "...")
        equation += "->" + "".join(output)
    return d.case(*operands, equation=equation)


def _small(d: Drawing, shape: Shape) -> np.ndarray:
    """Whole numbers: many are multiplied and added up."""
    return d.integers(shape, -2, 2).astype(d.dtype)
