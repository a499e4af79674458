"""ONNX Runtime's LSTMs with attention and with quantized weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.quantization import dynamic_quantize_linear
from refgrad.backends.numpy.kernels.recurrent import Directions, directions_of
from refgrad.backends.numpy.memory import need
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("AttnLSTM", domain=MICROSOFT, in_float32=True, fresh=True)
def attn_lstm(args: Arguments) -> tuple[Array, Array, Array]:
    """One sequence after the other, step by step"""
    ways = _ways(args)
    (length, batch, _), hidden, (_, steps, depth) = args.X.shape, args.R.shape[2], args.M.shape
    count, of_a = len(ways), depth if args.AW is None else args.AW.shape[-1]
    lengths, seen = (
        _lengths("sequence_lens", args.sequence_lens, batch, length),
        _lengths("memory_seq_lens", args.memory_seq_lens, batch, steps),
    )
    Y = np.zeros((length, count, batch, hidden), args.X.dtype)
    Y_h, Y_c = np.zeros((count, batch, hidden), args.X.dtype), np.zeros((count, batch, hidden), args.X.dtype)
    for way, (backward, (f, g, h)) in enumerate(ways):
        bias = 0 if args.B is None else args.B[way, : 4 * hidden] + args.B[way, 4 * hidden :]
        peep_i, peep_o, peep_f = (
            np.zeros((3, hidden), args.X.dtype) if args.P is None else args.P[way].reshape(3, hidden)
        )
        for n in range(batch):
            values = args.M[n, : seen[n]]
            keys = values @ args.MW[way]
            H = np.zeros(hidden, args.X.dtype) if args.initial_h is None else args.initial_h[way, n]
            C = np.zeros(hidden, args.X.dtype) if args.initial_c is None else args.initial_c[way, n]
            a = np.zeros(of_a, args.X.dtype)
            for t in range(lengths[n])[:: -1 if backward else 1]:
                z = args.W[way] @ np.concatenate((args.X[t, n], a)) + args.R[way] @ H + bias
                i, o, forget, c = np.split(z, 4)
                i = f(i + peep_i * C)
                C = (1 - i if args.input_forget else f(forget + peep_f * C)) * C + i * g(c)
                H = f(o + peep_o * C) * h(C)
                score = np.einsum("sa,a->s", np.tanh(keys + H @ args.QW[way]), args.V[way])
                weights = np.exp(score - score.max())
                context = weights / weights.sum() @ values
                a = context if args.AW is None else np.concatenate((H, context)) @ args.AW[way]
                Y[t, way, n] = H
            Y_h[way, n], Y_c[way, n] = H, C
    return Y, Y_h, Y_c


def _quantized_lstm_memory(X: Array, W: Array, R: Array, *_: Any, **__: Any) -> None:
    """The weights in double; while one is scaled, twice."""
    need(np.dtype(np.float64).itemsize * max(2 * W.size, W.size + 2 * R.size))


@kernel_of_body("DynamicQuantizeLSTM", domain=MICROSOFT, fresh=True, abstract=_quantized_lstm_memory)
def dynamic_quantize_lstm(args: Arguments) -> tuple[Array, Array, Array]:
    """Step k is the k-th step of every sequence that has one, in the order of its direction; in double

    By their range, a step quantizes the states of its own sequences and of the sequences that the step before ended.
    """
    ways = _ways(args)
    (time, batch, _), hidden, count = args.X.shape, args.R.shape[1], len(ways)
    lengths = _lengths("sequence_lens", args.sequence_lens, batch, time)
    weights = [
        (q - _by_direction(zero)) * _by_direction(scale)
        for q, scale, zero in ((args.W, args.W_scale, args.W_zero_point), (args.R, args.R_scale, args.R_zero_point))
    ]
    Y = np.zeros((time, count, batch, hidden))
    Y_h, Y_c = (
        np.zeros((count, batch, hidden)) if v is None else v.astype(np.float64)
        for v in (args.initial_h, args.initial_c)
    )
    x = _through_bytes(args.X[: lengths.max(initial=0)])
    for way, (backward, (f, g, h)) in enumerate(ways):
        w, r = weights[0][way], weights[1][way]
        bias = 0.0 if args.B is None else args.B[way].reshape(2, -1).sum(0, np.float64)
        peep_i, peep_o, peep_f = np.zeros((3, hidden)) if args.P is None else args.P[way].reshape(3, hidden)
        for k in range(len(x)):
            rows = np.flatnonzero(k < lengths)
            places = lengths[rows] - 1 - k if backward else np.full(len(rows), k)
            read = np.where((k <= lengths)[:, np.newaxis], Y_h[way], 0)
            before = _through_bytes(read.astype(args.X.dtype))[rows]
            C = Y_c[way, rows]
            i, o, forget, c = np.split(x[places, rows] @ w + before @ r + bias, 4, axis=1)
            i = f(i + peep_i * C)
            C = (1 - i if args.input_forget else f(forget + peep_f * C)) * C + i * g(c)
            Y_c[way, rows], Y_h[way, rows] = C, f(o + peep_o * C) * h(C)
            Y[places, way, rows] = Y_h[way, rows]
    return Y.astype(args.X.dtype), Y_h.astype(args.X.dtype), Y_c.astype(args.X.dtype)


def _by_direction(parameter: Array) -> Array:
    """One for each direction or for each of its columns, in double."""
    return parameter.astype(np.float64).reshape(len(parameter), 1, -1)


def _through_bytes(x: Array) -> Array:
    """`x` quantized by its range and dequantized, in double."""
    q, scale, zero = dynamic_quantize_linear(x)
    return np.asarray((q.astype(np.float64) - zero) * scale)


def _ways(args: Arguments) -> Directions:
    """The functions of each direction."""
    return directions_of(
        ("Sigmoid", "Tanh", "Tanh"),
        args.direction,
        args.activations,
        args.activation_alpha,
        args.activation_beta,
        args.clip,
    )


def _lengths(name: str, given: Array | None, batch: int, most: int) -> Array:
    if given is None:
        return np.full(batch, most)
    if ((given < 1) | (given > most)).any():
        raise ValueError(f"{name} is {given.tolist()}; its numbers are from 1 to {most}")
    return given
