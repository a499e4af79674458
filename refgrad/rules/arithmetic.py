"""Elementwise arithmetic. The sweep sums each adjoint over the axes along which its input was broadcast."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import rule


@rule("Add", broadcast=True)
def add(op: Emitter, d_C: str) -> tuple[str, str]:
    """DA = dC, dB = dC"""
    return d_C, d_C


@rule("Sub", broadcast=True)
def sub(op: Emitter, d_C: str) -> tuple[str, str]:
    """DA = dC, dB = −dC"""
    return d_C, op.Neg(d_C)


@rule("Mul", broadcast=True)
def mul(op: Emitter, d_C: str, A: str, B: str) -> tuple[str, str]:
    """DA = dC·B, dB = dC·A"""
    return op.Mul(d_C, B), op.Mul(d_C, A)


@rule("Div", broadcast=True)
def div(op: Emitter, d_C: str, B: str, C: str) -> tuple[str, str]:
    """DA = dC/B, dB = −dA·C"""
    d_A = op.Div(d_C, B)
    return d_A, op.Neg(op.Mul(d_A, C))
