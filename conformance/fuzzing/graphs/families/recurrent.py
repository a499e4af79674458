"""Recurrent operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template()
def _recurrent(s: GraphScope) -> None:
    op, gates = s.rng.choice((("RNN", 1), ("GRU", 3), ("LSTM", 4)))
    steps, batch, size, hidden = (s.rng.choice((1, 2, 3)) for _ in range(4))
    x = s.pick(3, 3, filled=True) if s.chance(0.4) else s.like((steps, batch, size))
    steps, batch, size = x.shape
    direction = s.rng.choice((None, "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    w, r = s.like((ways, gates * hidden, size)), s.like((ways, gates * hidden, hidden))
    b = s.like((ways, 2 * gates * hidden)) if s.chance(0.6) else None
    lengths = s.leaf(np.array([s.rng.randint(1, steps) for _ in range(batch)], np.int32)) if s.chance(0.3) else None
    h = s.like((ways, batch, hidden)) if s.chance(0.5) else None
    given: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    more: list[Any] = []
    if op == "LSTM":
        more = [
            s.like((ways, batch, hidden)) if s.chance(0.5) else None,
            s.like((ways, 3 * hidden)) if s.chance(0.3) else None,
        ]
        given["input_forget"] = s.rng.choice((None, None, 1))
    if op == "GRU":
        given["linear_before_reset"] = s.rng.choice((None, 1))
    if s.chance(0.2):
        given["activations"] = {
            "RNN": ["Sigmoid"],
            "GRU": ["Sigmoid", "Sigmoid"],
            "LSTM": ["Sigmoid", "Tanh", "Sigmoid"],
        }[op] * ways
    outputs = 3 if op == "LSTM" else 2
    named = [s.chance(0.7) for _ in range(outputs)]
    if not any(named):
        named[0] = True
    while not named[-1]:
        named.pop()
    s.add_all(op, s.calm(x), w, r, b, lengths, h, *more, outputs=len(named), named=named, **given)
