"""Fourier transforms. They are linear, and symmetric: the adjoint of T is conj∘T∘conj.

The last axis of a signal holds its real part, or its real and its imaginary part. The adjoint of a real signal is the
real part of the adjoint of a complex one.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import along, pad, up_to
from refgrad.tables.registry import rule


@rule("DFT", wrt=["input"])
def dft(
    op: Emitter,
    d_output: str,
    input: str,
    dft_length: str | None,
    axis: str | None,
    inverse: int,
    onesided: int,
) -> str:
    """dx = conj(T(conj dy)), T the same transform, cut or filled up with zeros to the length of x

    One-sided, dy is 0 where the output was cut. The inverse has dx = c/N·DFT(dy): c is 2 for every bin that stands for
    two, which are all but the first and, where N is even, the last.
    """
    axis = axis or op.const(np.array(-2))
    if inverse and onesided:
        length = _size(op, d_output, axis)
        bins = op.Mul(_transform(op, d_output, axis, onesided=1), _weights(op, length, d_output, axis))
        return _fitted(op, _described(op, bins, d_output, axis, length, onesided=1), input, axis)
    length = _number(op, dft_length) if dft_length else _size(op, input, axis)
    cut = _filled(op, d_output, length, axis) if onesided else d_output
    bins = _conjugate(op, _transform(op, _conjugate(op, cut), axis, inverse=inverse))
    return _fitted(op, _described(op, bins, d_output, axis, length), input, axis)


@rule("STFT", wrt=["signal", "window"])
def stft(
    op: Emitter,
    d_output: str,
    signal: str,
    frame_step: str,
    window: str | None,
    frame_length: str | None,
    onesided: int,
) -> tuple[str, str | None]:
    """dframe = conj(DFT(conj dy)); dsignal = window·dframe added where the frame was; dwindow = Σ frame·dframe"""
    if frame_length:
        length = _number(op, frame_length)
    else:
        length = _size(op, window, _axis(op, 0)) if window else _size(op, signal, _axis(op, 1))
    cut = _filled(op, d_output, length, _axis(op, 2)) if onesided else d_output
    frames = _conjugate(op, _transform(op, _conjugate(op, cut), _axis(op, 2)))
    parts = (op.shape(signal) or (None,))[-1]
    if parts != 2:
        frames = op.Slice(frames, [0], [1] if parts == 1 else op.Shape(signal, start=2), [3])
    first = op.Mul(_count(op, _size(op, d_output, _axis(op, 1))), _number(op, frame_step))
    places = op.Add(op.Unsqueeze(first, [1]), _count(op, length))
    weighed = op.Mul(frames, op.Unsqueeze(window, [1])) if window else frames
    d_signal = op.grad.GatherGrad(op.shape_of(signal), places, weighed, axis=1)
    if not window:
        return d_signal, None
    return d_signal, op.ReduceSum(op.Mul(frames, op.Gather(signal, places, axis=1)), [0, 1, 3], keepdims=0)


def _transform(op: Emitter, x: str, axis: str, inverse: int = 0, onesided: int = 0) -> str:
    """DFT, whose axis is an attribute before opset 20."""
    attributes = {"inverse": inverse or None, "onesided": onesided or None}
    if op.opset >= 20:
        return op.DFT(x, None, axis, **attributes)
    known = op.constant(axis)
    assert known is not None
    return op.DFT(x, None, axis=known.item(), **attributes)


def _filled(op: Emitter, bins: str, length: str, axis: str) -> str:
    """`bins` with zeros up to `length` along the axis: onnx infers a wrong shape for a DFT whose length is not a constant."""
    shape, place, wanted = op.shape(bins), op.constant(axis), op.constant(length)
    if shape is not None and place is not None and wanted is not None:
        has = shape[place.item()]
        if isinstance(has, int):
            return pad(op, bins, len(shape), {place.item() % len(shape): (0, wanted.item() - has)})
    rank = op.length(op.Shape(bins))
    here = op.Equal(op.Range(0, rank, 1), op.Mod(axis, rank))
    missing = op.Mul(op.Cast(here, to=TensorProto.INT64), op.Sub(length, _size(op, bins, axis)))
    return op.Pad(bins, op.Concat(op.full(op.Shape(missing), 0, like=missing), missing, axis=0))


def _conjugate(op: Emitter, x: str) -> str:
    return op.Mul(x, op.const([1, -1], like=x))


def _weights(op: Emitter, length: str, like: str, axis: str) -> str:
    """1/N for the first bin and for the one at N/2, 2/N for the others, along the axis."""
    bins = op.Range(0, op.Add(op.Div(length, 2), 1), 1)
    single = op.Or(op.Equal(bins, 0), op.Equal(op.Mul(bins, 2), length))
    counts = op.Where(single, op.const(1.0, like=like), op.const(2.0, like=like))
    return along(op, op.Div(counts, op.Cast(length, to=op.type(like))), like, axis)


def _described(op: Emitter, bins: str, d_output: str, axis: str, length: str, onesided: int = 0) -> str:
    """`bins`, with the known shape recorded: the shape of dy, except for `axis` and the last axis."""
    shape, place, known = op.shape(d_output), op.constant(axis), op.constant(length)
    if shape is not None and place is not None:
        sizes = [*shape[:-1], 2]
        sizes[place.item()] = None if known is None else known.item() // 2 + 1 if onesided else known.item()
        op.assume(bins, tuple(sizes))
    return bins


def _fitted(op: Emitter, d: str, x: str, axis: str) -> str:
    """`d` cut or filled up with zeros to the shape of `x` along the axis; for a real signal the imaginary parts are cut."""
    shape, has, known = op.shape(x), op.shape(d), op.constant(axis)
    if shape is not None and has is not None and known is not None:
        sizes = {k % len(shape): (has[k], shape[k]) for k in (known.item(), -1)}
        missing = {k: (0, n - m) for k, (m, n) in sizes.items() if isinstance(m, int) and isinstance(n, int)}
        if len(missing) == len(sizes):
            return pad(op, d, len(shape), missing)
    full = op.shape_of(x)
    return op.Pad(d, op.Concat(op.full(op.Shape(full), 0, like=full), op.Sub(full, op.Shape(d)), axis=0))


def _axis(op: Emitter, axis: int) -> str:
    return op.const(np.array(axis))


def _number(op: Emitter, value: str) -> str:
    """An integer input as a scalar of int64."""
    known = op.constant(value)
    return op.Squeeze(op.as_type(value, TensorProto.INT64)) if known is None else op.const(np.array(known.item()))


def _count(op: Emitter, length: str) -> str:
    """0, 1, ... up to `length`."""
    known = op.constant(length)
    return op.Range(0, length, 1) if known is None else up_to(op, known.item())


def _size(op: Emitter, value: str, axis: str) -> str:
    """The size of `value` along an axis, as a scalar of int64."""
    shape, known = op.shape(value), op.constant(axis)
    size = None if shape is None or known is None else shape[known.item()]
    return op.const(np.array(size)) if isinstance(size, int) else op.Gather(op.shape_of(value), axis, axis=0)
