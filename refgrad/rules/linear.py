"""Matrix products."""

from __future__ import annotations

from refgrad.errors import RuleError
from refgrad.formulas.indexing import END, along, positions
from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import rule


@rule("MatMul")
def matmul(op: Emitter, d_Y: str, A: str, B: str) -> tuple[str, str]:
    """dA = dY·Bᵀ, dB = Aᵀ·dY, each summed over the axes along which its operand was broadcast"""
    a, b = op.rank(A), op.rank(B)
    if 0 in (a, b):
        raise RuleError(f"{A if a == 0 else B!r} is a scalar, and MatMul takes none. Use Mul.")
    if b == 2:
        return op.grad.MatrixGrad(d_Y, A, B)
    if b == 1:
        d_B = op.MatMul(op.Reshape(d_Y, [-1]), op.Flatten(A, axis=-1))
        return op.Mul(op.Unsqueeze(d_Y, [-1]), B), d_B
    if a is None or b is None:
        return _of_unknown_rank(op, d_Y, A, B)
    if a == 1:
        products = op.MatMul(B, op.Unsqueeze(d_Y, [-1]))
        d_A = op.ReduceSum(products, [*range(b - 2), b - 1], keepdims=0)
        return d_A, op.Mul(op.Unsqueeze(A, [1]), op.Unsqueeze(d_Y, [-2]))
    d_A = op.grad.FusedMatMul(d_Y, B, transA=0, transB=1)
    d_B = op.grad.FusedMatMul(A, d_Y, transA=1, transB=0)
    d_A, d_B = _with_batch(op, d_A, A, d_Y), _with_batch(op, d_B, B, d_Y)
    return op.grad.BatchGradient(d_A, A, (A, d_A)), op.grad.BatchGradient(d_B, B, (d_B, B))


def _with_batch(op: Emitter, adjoint: str, operand: str, d_Y: str) -> str:
    """`adjoint`, which is known to have the batch axes of the product and the last two axes of `operand`."""
    shape, full = op.shape(operand), op.shape(d_Y)
    if shape is not None and full is not None:
        op.assume(adjoint, (*full[:-2], *shape[-2:]))
    return adjoint


def _of_unknown_rank(op: Emitter, d_Y: str, A: str, B: str) -> tuple[str, str]:
    """At run time, give vectors the axis of size 1 that MatMul gave them, and both operands the same rank."""
    a, b, y = op.Shape(A), op.Shape(B), op.Shape(d_Y)
    rank_a, rank_b = op.Shape(a), op.Shape(b)
    rank = op.Max(rank_a, rank_b, [2])
    rows = op.Concat(op.full(op.Sub(rank, rank_a), 1, like=a), a, axis=0)
    columns = op.Slice(op.Concat(b, [1], axis=0), [0], op.Max(rank_b, [2]), [0])
    columns = op.Concat(op.full(op.Sub(rank, op.Shape(columns)), 1, like=b), columns, axis=0)
    batch = op.Slice(y, [0], op.Sub(rank, [2]), [0])
    m, n = op.Slice(rows, [-2], [-1], [0]), op.Slice(columns, [-1], [END], [0])
    d_Y = op.Reshape(d_Y, op.Concat(batch, m, n, axis=0), allowzero=1)
    matrices = op.Reshape(A, rows, allowzero=1), op.Reshape(B, columns, allowzero=1)
    d_A = op.grad.FusedMatMul(d_Y, matrices[1], transA=0, transB=1)
    d_B = op.grad.FusedMatMul(matrices[0], d_Y, transA=1, transB=0)
    d_A, d_B = (op.grad.BatchGradient(d, x, (x, d)) for d, x in zip((d_A, d_B), matrices, strict=True))
    return op.reshape_like(d_A, A), op.reshape_like(d_B, B)


@rule("Gemm")
def gemm(
    op: Emitter, d_Y: str, A: str, B: str, C: str | None, alpha: float, beta: float, transA: int, transB: int
) -> tuple[str, str, str | None]:
    """dA' = α·dY·B'ᵀ, dB' = α·A'ᵀ·dY, dC = β·dY summed over the axes along which C was broadcast"""
    factor = None if alpha == 1 else alpha
    left, right = (B, d_Y) if transA else (d_Y, B)
    d_A = op.Gemm(left, right, alpha=factor, beta=0.0, transA=transA and transB, transB=transA or not transB)
    left, right = (d_Y, A) if transB else (A, d_Y)
    d_B = op.Gemm(left, right, alpha=factor, beta=0.0, transA=transB or not transA, transB=transB and transA)
    if C is None or beta == 0:
        return d_A, d_B, None
    d_C = op.grad.BroadcastGradient(d_Y, C, (C, d_Y))
    return d_A, d_B, d_C if beta == 1 else op.Mul(d_C, beta)


@rule("Det")
def det(op: Emitter, d_Y: str, X: str) -> str:
    """dX = dY·C, where the cofactor C_ij is the determinant of X with its row i replaced by the unit vector e_j

    It exists for singular matrices too, with derivatives of every order. It takes M² determinants of M×M matrices: for
    hundreds of rows that is much memory, M⁴ numbers for each matrix.
    """
    numbers = positions(op, X, -1)
    unit = op.Equal(op.Unsqueeze(numbers, [1]), numbers)
    units = op.as_type(op.Unsqueeze(unit, [0, 2]), op.type(X))
    cofactors = op.Det(op.Where(op.Unsqueeze(unit, [1, 3]), units, op.Unsqueeze(X, [-4, -3])))
    return op.Mul(op.Unsqueeze(d_Y, [-2, -1]), cofactors)


@rule("Einsum")
def einsum(op: Emitter, d_Output: str, Inputs: list[str], equation: str) -> tuple[list[str]]:
    """dXₖ = Einsum of dY and the other operands, where the subscripts of Y and of Xₖ change places

    An axis that only X has was summed over: dX repeats along it. For a letter that X has twice, the diagonal was taken:
    dX is 0 outside it.
    """
    terms, output = _subscripts(equation)
    stretched = _stretched(op, Inputs, terms)
    operands = [op.Squeeze(X, axes) if axes else X for X, axes in zip(Inputs, stretched, strict=True)]
    terms = [_without(term, axes) for term, axes in zip(terms, stretched, strict=True)]
    adjoints = []
    for k, (X, term) in enumerate(zip(operands, terms, strict=True)):
        read = [output, *(t for j, t in enumerate(terms) if j != k)]
        if "..." not in term and any("..." in t for t in read):
            # Axes that X does not have: ONNX Runtime wants them in the result, which is then summed over them.
            term = f"...{term}"
        lost = [letter for letter in term if letter != "." and not any(letter in t for t in read)]
        target = "".join(c for n, c in enumerate(term) if c == "." or (c not in lost and c not in term[:n]))
        others = (name for j, name in enumerate(operands) if j != k)
        adjoint = op.Einsum(d_Output, *others, equation=f"{','.join(read)}->{target}")
        missing = [n for n, c in enumerate(term) if c != "." and (c in lost or c in term[:n])]
        if missing:
            adjoint = op.Unsqueeze(adjoint, [_axis(term, n) for n in missing])
        if lost:
            adjoint = op.Expand(adjoint, op.shape_of(X))
        for n, letter in enumerate(term):
            if letter != "." and letter in term[:n]:
                adjoint = _on_diagonal(op, adjoint, X, _axis(term, term.index(letter)), _axis(term, n))
        if "..." in term:  # the other operands may be longer there
            adjoint = op.grad.BroadcastGradient(adjoint, X, (X, adjoint))
        adjoints.append(op.Unsqueeze(adjoint, stretched[k]) if stretched[k] else adjoint)
    return (adjoints,)


def _stretched(op: Emitter, operands: list[str], terms: list[str]) -> list[list[int]]:
    """The axes of size 1 of each operand that runtimes repeat, because another one has more elements along that letter."""
    short: list[dict[str, list[int]]] = []  # of each operand: its axes of size 1, by letter
    longer: dict[str, set[int]] = {}  # by letter: the operands that have, or may have, another size along it
    for k, (name, term) in enumerate(zip(operands, terms, strict=True)):
        shape = op.shape(name)
        short.append({letter: [] for letter in term.replace("...", "")})
        for n, letter in enumerate(term):
            if letter == ".":
                continue
            axis = _axis(term, n)
            if shape is not None and shape[axis] == 1:
                short[k][letter].append(axis)
            else:
                longer.setdefault(letter, set()).add(k)
    return [
        [axis for letter, axes in own.items() if longer.get(letter, set()) - {k} for axis in axes]
        for k, own in enumerate(short)
    ]


def _without(term: str, axes: list[int]) -> str:
    return "".join(c for n, c in enumerate(term) if c == "." or _axis(term, n) not in axes)


def _on_diagonal(op: Emitter, adjoint: str, X: str, first: int, second: int) -> str:
    """`adjoint` repeated along the axis `second` of X, which has size 1 in it, and 0 where the two axes differ."""
    numbers = positions(op, X, first)
    return op.Where(op.Equal(along(op, numbers, X, first), along(op, numbers, X, second)), adjoint, 0.0)


def _subscripts(equation: str) -> tuple[list[str], str]:
    """The terms of the operands and of the output. Without an arrow the output has what occurs once, in alphabetical order."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(left) - {".", ","} if left.count(c) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), output


def _axis(term: str, place: int) -> int:
    """The axis of the letter at `place`, counted from the end if "..." stands before it."""
    before = term[:place]
    return place - len(term) if "..." in before else place
