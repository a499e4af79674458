"""ONNX Runtime's LSTM with attention."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.kernels.recurrent import directions_of
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("AttnLSTM", domain=MICROSOFT, in_float32=True, fresh=True)
def attn_lstm(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    P: Array | None = None,
    QW: Array | None = None,
    MW: Array | None = None,
    V: Array | None = None,
    M: Array | None = None,
    memory_seq_lens: Array | None = None,
    AW: Array | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Array, Array, Array]:
    """One sequence after the other, step by step"""
    if QW is None or MW is None or V is None or M is None:
        raise ValueError("QW, MW, V and M are needed: without them there is nothing to attend to")
    for name, x, rank in (
        ("X", X, 3),
        ("W", W, 3),
        ("R", R, 3),
        ("QW", QW, 3),
        ("MW", MW, 3),
        ("V", V, 2),
        ("M", M, 3),
    ):
        if x.ndim != rank:
            raise ValueError(f"{name} has rank {x.ndim}; rank {rank} is needed")
    ways = directions_of(("Sigmoid", "Tanh", "Tanh"), direction, activations, activation_alpha, activation_beta, clip)
    (length, batch, width), hidden, (_, steps, depth) = X.shape, R.shape[2], M.shape
    count, each = len(ways), V.shape[1]
    if hidden_size is not None and hidden_size != hidden:
        raise ValueError(f"hidden_size is {hidden_size}, and R {list(R.shape)} has {hidden} hidden units")
    of_a = depth if AW is None else AW.shape[-1]
    for name, given, needed in (
        ("W", W, (count, 4 * hidden, width + of_a)),
        ("R", R, (count, 4 * hidden, hidden)),
        ("B", B, (count, 8 * hidden)),
        ("sequence_lens", sequence_lens, (batch,)),
        ("initial_h", initial_h, (count, batch, hidden)),
        ("initial_c", initial_c, (count, batch, hidden)),
        ("P", P, (count, 3 * hidden)),
        ("QW", QW, (count, hidden, each)),
        ("MW", MW, (count, depth, each)),
        ("V", V, (count, each)),
        ("M", M, (batch, steps, depth)),
        ("memory_seq_lens", memory_seq_lens, (batch,)),
        ("AW", AW, (count, depth + hidden, of_a)),
    ):
        if given is not None:
            check_shape(name, given.shape, needed)
    lengths, seen = (
        _lengths("sequence_lens", sequence_lens, batch, length),
        _lengths("memory_seq_lens", memory_seq_lens, batch, steps),
    )
    Y = np.zeros((length, count, batch, hidden), X.dtype)
    Y_h, Y_c = np.zeros((count, batch, hidden), X.dtype), np.zeros((count, batch, hidden), X.dtype)
    for way, (backward, (f, g, h)) in enumerate(ways):
        bias = 0 if B is None else B[way, : 4 * hidden] + B[way, 4 * hidden :]
        peep_i, peep_o, peep_f = np.zeros((3, hidden), X.dtype) if P is None else P[way].reshape(3, hidden)
        for n in range(batch):
            values = M[n, : seen[n]]
            keys = values @ MW[way]
            H = np.zeros(hidden, X.dtype) if initial_h is None else initial_h[way, n]
            C = np.zeros(hidden, X.dtype) if initial_c is None else initial_c[way, n]
            a = np.zeros(of_a, X.dtype)
            for t in range(lengths[n])[:: -1 if backward else 1]:
                z = W[way] @ np.concatenate((X[t, n], a)) + R[way] @ H + bias
                i, o, forget, c = np.split(z, 4)
                i = f(i + peep_i * C)
                C = (1 - i if input_forget else f(forget + peep_f * C)) * C + i * g(c)
                H = f(o + peep_o * C) * h(C)
                score = np.einsum("sa,a->s", np.tanh(keys + H @ QW[way]), V[way])
                weights = np.exp(score - score.max())
                context = weights / weights.sum() @ values
                a = context if AW is None else np.concatenate((H, context)) @ AW[way]
                Y[t, way, n] = H
            Y_h[way, n], Y_c[way, n] = H, C
    return Y, Y_h, Y_c


def _lengths(name: str, given: Array | None, batch: int, most: int) -> Array:
    if given is None:
        return np.full(batch, most)
    if ((given < 1) | (given > most)).any():
        raise ValueError(f"{name} is {given.tolist()}; its numbers are from 1 to {most}")
    return given
