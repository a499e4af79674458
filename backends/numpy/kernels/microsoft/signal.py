"""ONNX Runtime's Fourier transforms and products of complex numbers, whose last axis holds the real and the imaginary part."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("Rfft", domain=MICROSOFT, in_float32=True, fresh=True)
def rfft(X: Array, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> Array:
    """The one-sided transform along the last axis"""
    _check(normalized, onesided, signal_ndim)
    if not X.ndim or not X.shape[-1]:
        raise ValueError(f"X has the shape {list(X.shape)}; it needs an axis with an element for a signal")
    bins = np.fft.rfft(X)
    return np.stack((bins.real, bins.imag), -1).astype(X.dtype)


@kernel("Irfft", domain=MICROSOFT, in_float32=True, fresh=True)
def irfft(X: Array, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> Array:
    """The real signal of an even length"""
    _check(normalized, onesided, signal_ndim)
    if X.ndim < 2 or X.shape[-1] != 2 or X.shape[-2] < 2:
        raise ValueError(f"X has the shape {list(X.shape)}; its last axes are two bins or more, and two parts of each")
    return np.fft.irfft(_complex(X)).astype(X.dtype)


@kernel("ComplexMul", domain=MICROSOFT, in_float32=True, fresh=True)
def complex_mul(A: Array, B: Array) -> Array:
    """The product of complex numbers"""
    return _parts(_complex(A) * _complex(B), A.dtype)


@kernel("ComplexMulConj", domain=MICROSOFT, in_float32=True, fresh=True)
def complex_mul_conj(A: Array, B: Array) -> Array:
    """The product of complex numbers and conjugates"""
    return _parts(_complex(A) * _complex(B).conj(), A.dtype)


def _complex(x: Array) -> Array:
    if not x.ndim or x.shape[-1] != 2:
        raise ValueError(f"a complex number has 2 parts in the last axis; there is the shape {list(x.shape)}")
    return x[..., 0] + 1j * x[..., 1]


def _parts(x: Array, dtype: np.dtype) -> Array:
    return np.stack((x.real, x.imag), -1).astype(dtype)


def _check(normalized: int, onesided: int, signal_ndim: int) -> None:
    for name, given, needed in (
        ("normalized", normalized, 0),
        ("onesided", onesided, 1),
        ("signal_ndim", signal_ndim, 1),
    ):
        if given != needed:
            raise ValueError(f"{name}={given} is not supported; there is {name}={needed}")
