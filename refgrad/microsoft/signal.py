"""ONNX Runtime's Fourier transforms and products of complex numbers, whose last axis holds the real and the imaginary part."""

from __future__ import annotations

import numpy as np

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.tables.definitions import UnsupportedFormError, operator


@operator("Rfft", "Y")
def rfft(op: FunctionEmitter, X: str, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> str:
    """The first ⌊n/2⌋ + 1 bins of the discrete Fourier transform along the last axis"""
    _check(op, normalized, onesided, signal_ndim)
    length, lead = op.Shape(X, start=-1), op.Shape(X, end=-1)
    rows = op.Reshape(op.wide(X), op.Concat(op.ReduceProd(lead, keepdims=1), length, [1], axis=0), allowzero=1)
    bins = _transform(op, rows, onesided=1)
    sizes = op.Concat(lead, op.Shape(bins, start=1), axis=0)
    return str(op.CastLike(op.Reshape(bins, sizes, allowzero=1), X))


@operator("Irfft", "Y")
def irfft(op: FunctionEmitter, X: str, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> str:
    """The real signal of even length n = 2·(bins − 1) whose transform begins with these bins: Rfft undone"""
    _check(op, normalized, onesided, signal_ndim)
    count, lead = op.Shape(X, start=-2, end=-1), op.Shape(X, end=-2)
    rows = op.Reshape(op.wide(X), op.Concat(op.ReduceProd(lead, keepdims=1), count, [2], axis=0), allowzero=1)
    mirrored = op.Slice(rows, op.Sub(count, [2]), [0], [1], [-1])
    conjugate = op.Mul(mirrored, op.CastLike(op.const(np.array([1.0, -1.0], np.float32)), rows))
    signal = op.Slice(_transform(op, op.Concat(rows, conjugate, axis=1), inverse=1), [0], [1], [2])
    sizes = op.Concat(lead, op.Shape(signal, start=1, end=2), axis=0)
    return str(op.CastLike(op.Reshape(signal, sizes, allowzero=1), X))


@operator("ComplexMul", "C")
def complex_mul(op: FunctionEmitter, A: str, B: str) -> str:
    """A·B of complex numbers"""
    return _product(op, A, B, conjugated=False)


@operator("ComplexMulConj", "C")
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


def _check(op: FunctionEmitter, normalized: int, onesided: int, signal_ndim: int) -> None:
    for name, given, needed in (
        ("normalized", normalized, 0),
        ("onesided", onesided, 1),
        ("signal_ndim", signal_ndim, 1),
    ):
        if given != needed:
            raise UnsupportedFormError(f"{name}={given} is not covered; there is {name}={needed}")
    if op.opset < 17:
        raise UnsupportedFormError(f"its body needs DFT, which opset {op.opset} has not; convert the model to opset 17")
