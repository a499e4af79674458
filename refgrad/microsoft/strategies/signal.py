"""Strategies of ONNX Runtime's Fourier transforms and products of complex numbers."""

from __future__ import annotations

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("Rfft", domain=MICROSOFT)
def rfft(d: Drawing) -> Case:
    """Signals of an even length."""
    return d.case(d.floats((*d.shape(most=2), 2 * d.integer(1, 4))), signal_ndim=d.pick(None, 1))


@strategy("Irfft", domain=MICROSOFT)
def irfft(d: Drawing) -> Case:
    """Two bins or more, whatever the imaginary parts of the first and the last are."""
    return d.case(d.floats((*d.shape(most=2), d.integer(2, 4), 2)), signal_ndim=1)


@strategy("ComplexMul", "ComplexMulConj", domain=MICROSOFT)
def complex_mul(d: Drawing) -> Case:
    """Shapes that broadcast."""
    a, b = d.broadcasting(2, 2)
    return d.case(d.floats((*a, 2)), d.floats((*b, 2)))
