"""Strategies of ONNX Runtime's products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape
from refgrad.extend import strategy
from refgrad.microsoft.cases.activation import ACTIVATIONS
from refgrad.protos.domains import MICROSOFT


@strategy("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(d: Drawing) -> Case:
    """With and without a bias."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    return d.case(d.floats((rows, inner)), d.floats((inner, columns)), d.optional(lambda: d.floats((columns,))))


@strategy("FusedMatMul", domain=MICROSOFT)
def fused_matmul(d: Drawing) -> Case:
    """Matrices and stacks of them, each transposed or not, the axis of the stack first or in the middle."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    a, b = _turned((rows, inner), trans_a), _turned((inner, columns), trans_b)
    if d.shapes != "unknown" and d.flag():
        stack = d.integer(1, 3)
        batch_a, batch_b = d.integer(0, 1), d.integer(0, 1)
        a, b = ((m[0], stack, m[1]) if first else (stack, *m) for m, first in ((a, batch_a), (b, batch_b)))
        moved: dict[str, Any] = {"transBatchA": batch_a, "transBatchB": batch_b}
    else:
        stacks = d.broadcasting(2, 2)
        a, b, moved = (*stacks[0], *a), (*stacks[1], *b), {}
    settings: dict[str, Any] = {"transA": trans_a or d.pick(None, 0), "transB": trans_b or d.pick(None, 0)}
    return d.case(d.floats(a), d.floats(b), alpha=d.optional(d.factor), **settings, **moved)


@strategy("TransposeMatMul", domain=MICROSOFT)
def transpose_matmul(d: Drawing) -> Case:
    """Matrices and stacks of them, each transposed or not."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    stacks = d.broadcasting(2, 2)
    a, b = (*stacks[0], *_turned((rows, inner), trans_a)), (*stacks[1], *_turned((inner, columns), trans_b))
    return d.case(d.floats(a), d.floats(b), alpha=d.optional(d.factor), transA=trans_a, transB=trans_b)


def _turned(matrix: Shape, transposed: int) -> Shape:
    return matrix[::-1] if transposed else matrix


@strategy("FusedGemm", domain=MICROSOFT)
def fused_gemm(d: Drawing) -> Case:
    """Every attribute and activation."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    a, b = d.normal(_turned((rows, inner), trans_a)), d.normal(_turned((inner, columns), trans_b))
    c = d.optional(lambda: d.normal(d.broadcast_to((rows, columns))))
    activation, parameters = d.pick(*ACTIVATIONS)
    named: dict[str, Any] = dict(zip(("activation_alpha", "activation_beta"), parameters or (), strict=False))
    factors: dict[str, Any] = {"alpha": d.pick(None, 0.5, -2.0), "beta": d.pick(None, 0.5, -2.0)}
    return d.case(a, b, c, activation=activation, transA=trans_a, transB=trans_b, **factors, **named)


@strategy("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(d: Drawing) -> Case:
    """Every activation, and those along an axis."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    a, b = d.normal(_turned((rows, inner), trans_a)), d.normal(_turned((inner, columns), trans_b))
    activation, parameters = d.pick(*ACTIVATIONS[1:], ("Softmax", None))
    named: dict[str, Any] = dict(zip(("activation_alpha", "activation_beta"), parameters or (), strict=False))
    if activation == "Softmax":
        named["activation_axis"] = d.pick(None, 0, -1)
    return d.case(a, b, activation=activation, transA=trans_a, transB=trans_b, alpha=d.pick(None, 0.5, -2.0), **named)


@strategy("Inverse", domain=MICROSOFT)
def inverse(d: Drawing) -> Case:
    """Matrices that are far from singular, whose rows are in any order."""
    size = d.integer(1, 3)
    unit = np.eye(size)[d.permutation(size)]
    return d.case((d.floats((*d.shape(0, 2, size=2), size, size), -1, 1) + 4 * unit).astype(d.dtype))


@strategy("CDist", domain=MICROSOFT)
def cdist(d: Drawing) -> Case:
    """Points that are never at one place."""
    width = d.integer(1, 4)
    a, b = d.floats((d.integer(1, 3), width), 0, 2), d.floats((d.integer(1, 3), width), -2, -0.25)
    return d.case(a, b, metric=d.pick(None, "sqeuclidean", "euclidean"))
