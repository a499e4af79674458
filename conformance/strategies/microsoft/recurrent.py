"""Strategies of ONNX Runtime's LSTM with attention."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named


@strategy(*named("AttnLSTM"))
def attn_lstm(d: Drawing) -> Case:
    """Every direction, with and without a bias, lengths, states to begin with, peepholes and an attention layer."""
    length, batch, width, hidden, steps, depth, each = (d.integer(1, 2) for _ in range(7))
    direction = d.pick(None, "forward", "reverse", "bidirectional")
    count, layer = 2 if direction == "bidirectional" else 1, d.optional(lambda: d.integer(1, 3))
    return d.case(
        d.normal((length, batch, width)),
        d.normal((count, 4 * hidden, width + (layer or depth))),
        d.normal((count, 4 * hidden, hidden)),
        d.optional(lambda: d.normal((count, 8 * hidden))),
        d.optional(lambda: d.integers((batch,), 1, length, np.int32)),
        d.optional(lambda: d.normal((count, batch, hidden))),
        d.optional(lambda: d.normal((count, batch, hidden))),
        d.optional(lambda: d.normal((count, 3 * hidden))),
        d.normal((count, hidden, each)),
        d.normal((count, depth, each)),
        d.normal((count, each)),
        d.normal((batch, steps, depth)),
        d.optional(lambda: d.integers((batch,), 1, steps, np.int32)),
        None if layer is None else d.normal((count, depth + hidden, layer)),
        direction=direction,
        hidden_size=hidden,
        input_forget=d.pick(None, 0, 1),
        outputs=d.integer(1, 3),
    )
