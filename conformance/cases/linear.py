"""Cases of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

NEWEST = 21  # the last opset that every runtime under test knows

MATMUL = (
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 2, 2, 3), (3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (1, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((1, 2, 3), (4, 5, 3, 2)),
    ((1, 1, 3), (1, 3, 1)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((3,), (2, 5, 3, 4)),
    ((0, 3), (3, 4)),
    ((2, 0), (0, 4)),
    ((2, 2, 0), (0, 4)),
    ((0, 2, 3), (3, 4)),
)
EINSUM: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("ij,jk->ik", ((2, 3), (3, 4))),
    ("ij,jk", ((2, 3), (3, 4))),
    ("bij, bjk -> bik", ((2, 2, 3), (2, 3, 4))),
    ("ij->ji", ((2, 3),)),
    ("ij->i", ((2, 3),)),
    ("ij->", ((2, 3),)),
    ("i,j->ij", ((2,), (3,))),
    ("i,i", ((2,), (2,))),
    ("ijk,kl,l->ij", ((2, 3, 4), (4, 2), (2,))),
    ("...ij,...jk->...ik", ((5, 2, 3), (1, 3, 4))),
    ("...ij,jk->...ik", ((5, 2, 3), (3, 4))),
    ("...ij,jkl->...ik", ((5, 2, 3), (3, 4, 2))),
    ("...ij,jk...", ((5, 2, 3), (3, 4, 1))),
    ("a...b->a...", ((2, 3, 4, 5),)),
    ("ii->i", ((3, 3),)),
    ("ii", ((3, 3),)),
    ("iji->j", ((3, 2, 3),)),
    ("iii->i", ((3, 3, 3),)),
    ("iijj->ij", ((2, 2, 3, 3),)),
    ("...ii->...", ((4, 3, 3),)),
    ("ii...->i...", ((3, 3, 2, 4),)),
    ("i...i->...", ((3, 2, 3),)),
    ("ii,ij->j", ((3, 3), (3, 2))),
    (",i->i", ((), (3,))),
    ("->", ((),)),
    ("ij,kl->il", ((2, 3), (4, 2))),
    (" bA , Ab ", ((2, 3), (3, 2))),
    ("...a,...b->...ab", ((1, 2), (3, 1))),
    ("ij,jk->ik", ((2, 0), (0, 3))),
    ("ii->i", ((0, 0),)),
)


def cases() -> Iterator[Case]:
    """Every rank and broadcast of MatMul, every attribute and shape of C of Gemm, forms of Einsum."""
    for shapes in SHAPES:
        for a, b in MATMUL:
            yield node_case("MatMul", numbers(*a), numbers(*b), opset=NEWEST, shapes=shapes)
        for trans_a, trans_b in product((0, 1), repeat=2):
            for c in (None, (), (4,), (1,), (2, 4), (2, 1), (1, 4)):
                yield gemm(trans_a, trans_b, c, shapes)
                yield gemm(trans_a, trans_b, c, shapes, alpha=0.5, beta=2.0)
        yield gemm(0, 1, (4,), shapes, beta=0.0)
        yield node_case("Gemm", numbers(0, 3), numbers(3, 4), numbers(4), opset=NEWEST, shapes=shapes)
        for equation, operands in EINSUM:
            arrays = (numbers(*operand) for operand in operands)
            yield node_case("Einsum", *arrays, equation=equation, opset=NEWEST, shapes=shapes)
    # Runtimes repeat an axis of size 1 along its letter, although the specification does not say so.
    for equation, operands in (
        ("ij,ij->i", ((1, 3), (2, 3))),
        ("ij,j", ((2, 3), (1,))),
        ("ij,...j->...", ((1, 3), (2, 1))),
    ):
        arrays = (numbers(*operand) for operand in operands)
        yield node_case("Einsum", *arrays, equation=equation, opset=NEWEST)
    for shapes in SHAPES:
        for x in ((2, 2), (3, 3), (2, 1, 4, 4), (1, 1), (0, 0), (0, 2, 2)):
            yield node_case("Det", numbers(*x), opset=22, shapes=shapes)
        yield node_case(
            "Det", numbers(4, 3)[:3, :2] @ numbers(2, 3), opset=22, shapes=shapes, name=f"Det-singular-{shapes}"
        )
    yield node_case("MatMul", numbers(2, 5, 3), numbers(3, 4), constant=("B",), opset=16)


def in_double() -> Iterator[Case]:
    """MatMul in double, for dialect "ort" only.

    The optimizer of the training wheel fuses a Transpose and a MatMul to a FusedMatMul, which has no kernel for double.
    """
    for shapes in SHAPES:
        for a, b in (*MATMUL[:6], *MATMUL[9:13], ((2, 1, 2, 3), (5, 3, 4)), ((2, 3), (4, 5, 3, 2))):
            arrays = (numbers(*shape).astype(np.float64) for shape in (a, b))
            sizes = ",".join("x".join(map(str, shape)) for shape in (a, b))
            yield node_case("MatMul", *arrays, opset=NEWEST, shapes=shapes, name=f"MatMul-double-{sizes}-{shapes}")


def gemm(
    trans_a: int,
    trans_b: int,
    c: tuple[int, ...] | None,
    shapes: str,
    dtype: np.dtype = np.dtype(np.float32),  # noqa: B008
    **factors: float,
) -> Case:
    """A Gemm of a (2, 3) and a (3, 4) matrix, each given transposed where `trans_a` or `trans_b` says so."""
    wanted = [(3, 2) if trans_a else (2, 3), (4, 3) if trans_b else (3, 4), *([] if c is None else [c])]
    arrays = (numbers(*shape).astype(dtype) for shape in wanted)
    attributes: dict[str, Any] = {"transA": int(trans_a), "transB": int(trans_b), **factors}
    return node_case("Gemm", *arrays, opset=NEWEST, shapes=shapes, **attributes)


def numbers(*shape: int) -> np.ndarray:
    """Float32 numbers of the given shape, the same in every run."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)
