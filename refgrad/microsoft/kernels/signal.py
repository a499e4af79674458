"""ONNX Runtime's Fourier transforms and products of complex numbers, whose last axis holds the real and the imaginary part."""

from __future__ import annotations

import numpy as np

from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("Rfft", domain=MICROSOFT, in_float32=True, fresh=True)
def rfft(args: Arguments) -> Array:
    """The one-sided transform along the last axis"""
    if not args.X.ndim or not args.X.shape[-1]:
        raise ValueError(f"X has the shape {list(args.X.shape)}; it needs an axis with an element for a signal")
    bins = np.fft.rfft(args.X)
    return np.stack((bins.real, bins.imag), -1).astype(args.X.dtype)


@kernel_of_body("Irfft", domain=MICROSOFT, in_float32=True, fresh=True)
def irfft(args: Arguments) -> Array:
    """The real signal of an even length"""
    if args.X.ndim < 2 or args.X.shape[-1] != 2 or args.X.shape[-2] < 2:
        raise ValueError(
            f"X has the shape {list(args.X.shape)}; its last axes are two bins or more, and two parts of each"
        )
    return np.fft.irfft(_complex(args.X)).astype(args.X.dtype)


@kernel_of_body("ComplexMul", domain=MICROSOFT, in_float32=True, fresh=True)
def complex_mul(args: Arguments) -> Array:
    """The product of complex numbers"""
    return _parts(_complex(args.A) * _complex(args.B), args.A.dtype)


@kernel_of_body("ComplexMulConj", domain=MICROSOFT, in_float32=True, fresh=True)
def complex_mul_conj(args: Arguments) -> Array:
    """The product of complex numbers and conjugates"""
    return _parts(_complex(args.A) * _complex(args.B).conj(), args.A.dtype)


def _complex(x: Array) -> Array:
    if not x.ndim or x.shape[-1] != 2:
        raise ValueError(f"a complex number has 2 parts in the last axis; there is the shape {list(x.shape)}")
    return x[..., 0] + 1j * x[..., 1]


def _parts(x: Array, dtype: np.dtype) -> Array:
    return np.stack((x.real, x.imag), -1).astype(dtype)
