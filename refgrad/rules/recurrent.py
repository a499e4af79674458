"""Recurrent operators: the cotangents from the gates of every step, which the forward operator does not return."""

from __future__ import annotations

from typing import Any

from refgrad.builder.op import Emitter
from refgrad.tables.registry import rule


@rule("RNN")
def rnn(
    op: Emitter,
    d_Y: str | None,
    d_Y_h: str | None,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    Y: str,
    layout: int,
    **attributes: Any,
) -> tuple[str | None, ...]:
    """H = f(a), a = X·Wᵀ + H₋₁·Rᵀ + b: da = dH·f'(a), dH₋₁ = da·R, dX = da·W, dW = Σ daᵀ·X, dR = Σ daᵀ·H₋₁, db = Σ da"""
    if _has_no_step(op, X, layout):
        return _zeros(op, X, W, R, B, initial_h)
    X, d_Y_h, initial_h = _time_first(op, layout, X, d_Y_h, initial_h)
    Y, d_Y = _steps_first(op, layout, Y, d_Y)
    dX, dW, dR, dB, dH0 = op.grad.RNNGrad(X, W, R, B, sequence_lens, initial_h, Y, d_Y, d_Y_h, **attributes)
    dX, dH0 = _time_first(op, layout, dX, dH0)
    return dX, dW, dR, dB, dH0


@rule("GRU")
def gru(
    op: Emitter,
    d_Y: str | None,
    d_Y_h: str | None,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    Y: str,
    layout: int,
    **attributes: Any,
) -> tuple[str | None, ...]:
    """H = (1 − z)·h + z·H₋₁: da_z = dH·(H₋₁ − h)·f'(a_z), da_h = dH·(1 − z)·g'(a_h), and on to r and H₋₁ by the chain rule"""
    if _has_no_step(op, X, layout):
        return _zeros(op, X, W, R, B, initial_h)
    X, d_Y_h, initial_h = _time_first(op, layout, X, d_Y_h, initial_h)
    Y, d_Y = _steps_first(op, layout, Y, d_Y)
    given = X, W, R, B, sequence_lens, initial_h, Y
    zrh, arguments = op.grad.GRUGates(*given, layout=layout, **attributes)
    dX, dW, dR, dB, dH0 = op.grad.GRUGrad(*given, zrh, d_Y, d_Y_h, arguments, **attributes)
    dX, dH0 = _time_first(op, layout, dX, dH0)
    return dX, dW, dR, dB, dH0


@rule("LSTM")
def lstm(
    op: Emitter,
    d_Y: str | None,
    d_Y_h: str | None,
    d_Y_c: str | None,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    P: str | None,
    Y: str,
    layout: int,
    **attributes: Any,
) -> tuple[str | None, ...]:
    """H = o·h(C), C = f·C₋₁ + i·c: da_o = dH·h(C)·f'(a_o); e = dC + dH·o·h'(C) + da_o·P_o gives da_i = e·c·f'(a_i),
    da_f = e·C₋₁·f'(a_f), da_c = e·i·g'(a_c), dC₋₁ = e·f + da_i·P_i + da_f·P_f; dH₋₁ = da·R
    """
    if _has_no_step(op, X, layout):
        return _zeros(op, X, W, R, B, initial_h, initial_c, P)
    X, d_Y_h, d_Y_c, *starts = _time_first(op, layout, X, d_Y_h, d_Y_c, initial_h, initial_c)
    Y, d_Y = _steps_first(op, layout, Y, d_Y)
    CAll, iofc, arguments = op.grad.LSTMGates(X, W, R, B, sequence_lens, *starts, P, Y, layout=layout, **attributes)
    dX, dW, dR, dB, dH0, dC0, dP = op.grad.LSTMGrad(
        X, W, R, sequence_lens, *starts, Y, CAll, iofc, d_Y, d_Y_h, d_Y_c, P, arguments, **attributes
    )
    dX, dH0, dC0 = _time_first(op, layout, dX, dH0, dC0)
    return dX, dW, dR, dB, dH0, dC0, dP


def _has_no_step(op: Emitter, X: str, layout: int) -> bool:
    shape = op.shape(X)
    return shape is not None and shape[layout] == 0


def _zeros(op: Emitter, *values: str | None) -> tuple[str | None, ...]:
    """The results where there is no step: 0, whatever the inputs are."""
    return tuple(op.zeros_like(value) if value else None for value in values)


def _time_first(op: Emitter, layout: int, *values: str | None) -> Any:
    """X and states, or their cotangents, from one layout to the other: in layout 1 the batch is the first axis."""
    return tuple(_permuted(op, value, [1, 0, 2]) if layout and value else value for value in values)


def _steps_first(op: Emitter, layout: int, *values: str | None) -> Any:
    """Y and its cotangent (time, direction, batch, hidden); in layout 1 they are (batch, time, direction, hidden)."""
    return tuple(_permuted(op, value, [1, 2, 0, 3]) if layout and value else value for value in values)


def _permuted(op: Emitter, value: str, perm: list[int]) -> str:
    result = op.Transpose(value, perm=perm)
    shape = op.shape(value)
    if shape is not None:
        op.assume(result, tuple(shape[axis] for axis in perm))
    return result
