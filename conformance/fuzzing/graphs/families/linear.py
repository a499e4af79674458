"""Products of matrices."""

from __future__ import annotations

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template(3)
def _matmul(s: GraphScope) -> None:
    a = s.pick(1, 4)
    n = s.rng.choice((1, 2, 3))
    form = s.rng.randrange(4)
    if form == 0 or a.rank == 1:
        b = s.like((a.shape[-1], n) if s.chance(0.7) else (a.shape[-1],))
    elif form == 1:
        b = s.like((*a.shape[:-2], a.shape[-1], n))
    elif form == 2:
        b = s.like((2, a.shape[-1], n)) if a.rank == 2 else s.like((a.shape[-1], n))
    else:
        b = s.add("Transpose", a, perm=[*range(a.rank - 2), a.rank - 1, a.rank - 2])
    s.add("MatMul", s.calm(a, 10), s.calm(b, 10))


@template(2)
def _gemm(s: GraphScope) -> None:
    a = s.pick(2, 2)
    ta, tb = s.chance(0.4), s.chance(0.4)
    m, k = a.shape[::-1] if ta else a.shape
    n = s.rng.choice((1, 2, 3))
    b = s.like((n, k) if tb else (k, n))
    c = (
        s.broadcasting(
            (m, n), lambda v: v.rank <= 2 and all(x in (1, y) for x, y in zip(reversed(v.shape), (n, m), strict=False))
        )
        if s.chance(0.7)
        else None
    )
    if c is not None and not all(x in (1, y) for x, y in zip(reversed(c.shape), (n, m), strict=False)):
        raise MisfitError("C")
    s.add(
        "Gemm",
        a,
        b,
        c,
        transA=int(ta) or None,
        transB=int(tb) or None,
        alpha=s.rng.choice((None, 0.5)),
        beta=s.rng.choice((None, 1.5)),
    )


@template(2)
def _einsum(s: GraphScope) -> None:
    sizes = dict(zip("abcdij", (s.rng.choice((1, 2, 3)) for _ in range(6)), strict=True))
    equation = s.rng.choice(
        (
            "ij,ja->ia",
            "ij,ij->",
            "ij->ji",
            "bij,bja->bia",
            "ij,j->i",
            "i,j->ij",
            "ij,ja,ab->ib",
            "ij->",
            "bij->bj",
            "ij,ij->ij",
            "ij,ja",
            "bij,aj->bai",
            "i,i",
            "...ij,...ja->...ia",
            "...i->...",
            "ij,jk->ik",
            "abi,aci->abci",
        )
    )
    sizes["k"] = 2
    head = [2] if s.chance(0.5) else []
    x = s.pick(2, 3) if s.chance(0.5) else None
    terms = equation.split("->")[0].split(",")
    operands = []
    for k, term in enumerate(terms):
        if k == 0 and x is not None and x.rank == len(term) and len(set(term)) == len(term) and "." not in term:
            sizes |= dict(zip(term, x.shape, strict=True))
            operands.append(x)
            continue
        shape = [*(head if "..." in term else []), *(sizes[c] for c in term.replace("...", ""))]
        operands.append(s.like(shape))
    s.add("Einsum", *operands, equation=equation)


@template(0.5)
def _determinant(s: GraphScope) -> None:
    x = s.pick(2, 3, lambda v: v.shape[-1] == v.shape[-2] <= 4)
    s.add("Det", s.calm(x))
