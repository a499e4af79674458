"""ONNX Runtime's Fourier transforms and products of complex numbers, whose last axis holds the real and the imaginary part."""

from __future__ import annotations

import numpy as np

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import Shapes


def _check(shapes: Shapes, args: Arguments) -> None:
    for name, needed in (("normalized", 0), ("onesided", 1), ("signal_ndim", 1)):
        if (given := getattr(args, name)) != needed:
            raise UnsupportedFormError(f"{name}={given} is not covered; there is {name}={needed}")


@body("Rfft", "Y", check=_check, domain=MICROSOFT)
def rfft(op: FunctionEmitter, X: str, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> str:
    """The first ⌊n/2⌋ + 1 bins of the discrete Fourier transform along the last axis"""
    _check_opset(op)
    length, lead = op.Shape(X, start=-1), op.Shape(X, end=-1)
    rows = op.Reshape(op.wide(X), op.Concat(op.ReduceProd(lead, keepdims=1), length, [1], axis=0), allowzero=1)
    bins = _transform(op, rows, onesided=1)
    sizes = op.Concat(lead, op.Shape(bins, start=1), axis=0)
    return str(op.CastLike(op.Reshape(bins, sizes, allowzero=1), X))


@body("Irfft", "Y", check=_check, domain=MICROSOFT)
def irfft(op: FunctionEmitter, X: str, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> str:
    """The real signal of even length n = 2·(bins − 1) whose transform begins with these bins: Rfft undone"""
    _check_opset(op)
    count, lead = op.Shape(X, start=-2, end=-1), op.Shape(X, end=-2)
    rows = op.Reshape(op.wide(X), op.Concat(op.ReduceProd(lead, keepdims=1), count, [2], axis=0), allowzero=1)
    mirrored = op.Slice(rows, op.Sub(count, [2]), [0], [1], [-1])
    conjugate = op.Mul(mirrored, op.CastLike(op.const(np.array([1.0, -1.0], np.float32)), rows))
    signal = op.Slice(_transform(op, op.Concat(rows, conjugate, axis=1), inverse=1), [0], [1], [2])
    sizes = op.Concat(lead, op.Shape(signal, start=1, end=2), axis=0)
    return str(op.CastLike(op.Reshape(signal, sizes, allowzero=1), X))


@body("ComplexMul", "C", domain=MICROSOFT)
def complex_mul(op: FunctionEmitter, A: str, B: str) -> str:
    """A·B of complex numbers"""
    return _product(op, A, B, conjugated=False)


@body("ComplexMulConj", "C", domain=MICROSOFT)
def complex_mul_conj(op: FunctionEmitter, A: str, B: str) -> str:
    """A·conj(B) of complex numbers"""
    return _product(op, A, B, conjugated=True)


def _product(op: FunctionEmitter, A: str, B: str, *, conjugated: bool) -> str:
    (a, b), (c, d) = ([op.Slice(x, [part], [part + 1], [-1]) for part in (0, 1)] for x in (A, B))
    d = op.Neg(d) if conjugated else d
    real, imaginary = op.Sub(op.Mul(a, c), op.Mul(b, d)), op.Add(op.Mul(a, d), op.Mul(b, c))
    return str(op.Concat(real, imaginary, axis=-1))


def _transform(op: FunctionEmitter, rows: str, **attributes: int) -> str:
    """The transform along the second of three axes"""
    if op.opset >= 20:
        return str(op.DFT(rows, None, op.const(np.array(1)), **attributes))
    return str(op.DFT(rows, axis=1, **attributes))


def _check_opset(op: FunctionEmitter) -> None:
    if op.opset < 17:
        raise UnsupportedFormError(f"its body needs DFT, which opset {op.opset} has not; convert the model to opset 17")
