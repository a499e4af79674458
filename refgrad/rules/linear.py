"""Matrix products."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.errors import RuleError
from refgrad.formulas.indexing import END, along, positions
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
    d_A, d_B = _with_shape(op, d_A, A, d_Y), _with_shape(op, d_B, B, d_Y)
    return op.grad.BatchGradient(d_A, A, (A, d_A)), op.grad.BatchGradient(d_B, B, (d_B, B))


def _with_shape(op: Emitter, adjoint: str, operand: str, d_Y: str) -> str:
    """`adjoint`. Its shape is known from now on: the batch axes of the product, and the last two axes of `operand`."""
    operand_shape, product_shape = op.shape(operand), op.shape(d_Y)
    if operand_shape is not None and product_shape is not None:
        op.assume(adjoint, (*product_shape[:-2], *operand_shape[-2:]))
    return adjoint


def _of_unknown_rank(op: Emitter, d_Y: str, A: str, B: str) -> tuple[str, str]:
    """The gradients of operands whose ranks are known only at run time.

    `full_a` and `full_b` are the shapes that MatMul gives its operands: vectors become matrices, and both get the same rank.
    """
    shape_a, shape_b, shape_y = op.Shape(A), op.Shape(B), op.Shape(d_Y)
    rank_a, rank_b = op.Shape(shape_a), op.Shape(shape_b)
    rank = op.Max(rank_a, rank_b, [2])
    full_a = op.Concat(op.full(op.Sub(rank, rank_a), 1, like=shape_a), shape_a, axis=0)
    matrix_b = op.Slice(op.Concat(shape_b, [1], axis=0), [0], op.Max(rank_b, [2]), [0])
    full_b = op.Concat(op.full(op.Sub(rank, op.Shape(matrix_b)), 1, like=shape_b), matrix_b, axis=0)
    batch = op.Slice(shape_y, [0], op.Sub(rank, [2]), [0])
    m, n = op.Slice(full_a, [-2], [-1], [0]), op.Slice(full_b, [-1], [END], [0])
    d_Y = op.Reshape(d_Y, op.Concat(batch, m, n, axis=0), allowzero=1)
    matrices = op.Reshape(A, full_a, allowzero=1), op.Reshape(B, full_b, allowzero=1)
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

    This formula holds for singular matrices too, and has derivatives of every order. It takes the determinants of M² matrices
    for each M×M matrix, so it needs memory for M⁴ numbers.
    """
    indices = positions(op, X, -1)
    is_diagonal = op.Equal(op.Unsqueeze(indices, [1]), indices)
    identity = op.as_type(op.Unsqueeze(is_diagonal, [0, 2]), op.type(X))
    cofactors = op.Det(op.Where(op.Unsqueeze(is_diagonal, [1, 3]), identity, op.Unsqueeze(X, [-4, -3])))
    return op.Mul(op.Unsqueeze(d_Y, [-2, -1]), cofactors)


@rule("Einsum")
def einsum(op: Emitter, d_Output: str, Inputs: list[str], equation: str) -> tuple[list[str]]:
    """dXₖ = Einsum of dY and the other operands, with the subscripts of Y and Xₖ exchanged

    If only X has a letter, Einsum sums over its axis, so dX repeats along it. If X has a letter twice, Einsum reads the
    diagonal, so dX is 0 outside of it.
    """
    terms, output = _subscripts(equation)
    broadcast = _broadcast_axes(op, Inputs, terms)
    operands = [op.Squeeze(X, axes) if axes else X for X, axes in zip(Inputs, broadcast, strict=True)]
    terms = [_without(term, axes) for term, axes in zip(terms, broadcast, strict=True)]
    adjoints = []
    for k, (X, term) in enumerate(zip(operands, terms, strict=True)):
        other_terms = [output, *(t for j, t in enumerate(terms) if j != k)]
        if "..." not in term and any("..." in t for t in other_terms):
            # ONNX Runtime demands the broadcast axes in the result. X lacks them: BroadcastGradient sums over them below.
            term = f"...{term}"
        summed = [letter for letter in term if letter != "." and not any(letter in t for t in other_terms)]
        target = "".join(c for n, c in enumerate(term) if c == "." or (c not in summed and c not in term[:n]))
        others = (name for j, name in enumerate(operands) if j != k)
        adjoint = op.Einsum(d_Output, *others, equation=f"{','.join(other_terms)}->{target}")
        absent = [n for n, c in enumerate(term) if c != "." and (c in summed or c in term[:n])]
        if absent:
            adjoint = op.Unsqueeze(adjoint, [_axis(term, n) for n in absent])
        if summed:
            adjoint = op.Expand(adjoint, op.shape_of(X))
        for n, letter in enumerate(term):
            if letter != "." and letter in term[:n]:
                adjoint = _on_diagonal(op, adjoint, X, _axis(term, term.index(letter)), _axis(term, n))
        if "..." in term:  # X may be broadcast along these axes
            adjoint = op.grad.BroadcastGradient(adjoint, X, (X, adjoint))
        adjoints.append(op.Unsqueeze(adjoint, broadcast[k]) if broadcast[k] else adjoint)
    return (adjoints,)


def _broadcast_axes(op: Emitter, operands: list[str], terms: list[str]) -> list[list[int]]:
    """The axes of size 1 of each operand that runtimes broadcast, because another operand is longer along the same letter."""
    size_one: list[dict[str, list[int]]] = []  # per operand: its axes of size 1, by letter
    longer: dict[str, set[int]] = {}  # by letter: the operands whose size along it is not 1, or not known
    for k, (name, term) in enumerate(zip(operands, terms, strict=True)):
        shape = op.shape(name)
        size_one.append({letter: [] for letter in term.replace("...", "")})
        for n, letter in enumerate(term):
            if letter == ".":
                continue
            axis = _axis(term, n)
            if shape is not None and shape[axis] == 1:
                size_one[k][letter].append(axis)
            else:
                longer.setdefault(letter, set()).add(k)
    return [
        [axis for letter, axes in by_letter.items() if longer.get(letter, set()) - {k} for axis in axes]
        for k, by_letter in enumerate(size_one)
    ]


def _without(term: str, axes: list[int]) -> str:
    """The term without the letters of `axes`."""
    return "".join(c for n, c in enumerate(term) if c == "." or _axis(term, n) not in axes)


def _on_diagonal(op: Emitter, adjoint: str, X: str, first: int, second: int) -> str:
    """`adjoint` on the diagonal of the axes `first` and `second` of X, and 0 elsewhere.

    The axis `second` of `adjoint` has size 1. Where repeats it.
    """
    indices = positions(op, X, first)
    return op.Where(op.Equal(along(op, indices, X, first), along(op, indices, X, second)), adjoint, 0.0)


def _subscripts(equation: str) -> tuple[list[str], str]:
    """The terms of the operands, and the term of the output.

    Without an arrow, the output has the letters that occur once, in alphabetical order.
    """
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(left) - {".", ","} if left.count(c) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), output


def _axis(term: str, position: int) -> int:
    """The axis of the letter at `position`, counted from the end if "..." stands before it."""
    return position - len(term) if "..." in term[:position] else position
