"""Strategies of ONNX Runtime's LSTMs with attention and with quantized weights."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.microsoft.strategies.qlinear import case, middle
from refgrad.protos.domains import MICROSOFT


@strategy("AttnLSTM", domain=MICROSOFT)
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


@strategy("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(d: Drawing) -> Case:
    """One step of whole numbers from −100 to 155, which are their own bytes except for the zero point."""
    kind, direction = d.pick(np.uint8, np.int8), d.pick(None, "reverse", "bidirectional")
    batch, inputs, hidden, count = d.integer(1, 2), d.integer(2, 3), d.integer(2, 3), 1 + (direction == "bidirectional")

    def whole(*shape: int) -> np.ndarray:
        values = d.integers(shape, -100, 155).astype(np.float32)
        values.reshape(len(values), -1)[:, :2] = -100, 155
        return values

    columns = (count, 4 * hidden) if d.flag() else (count,)
    zero = np.full(columns, middle(kind), kind)
    weights = (d.integers((count, rows, 4 * hidden), -3, 3) + middle(kind) for rows in (inputs, hidden))
    given = [
        d.optional(lambda: d.normal((count, 8 * hidden))),
        d.optional(lambda: np.ones(batch, np.int32)),
        whole(count, batch, hidden),
        d.optional(lambda: d.normal((count, batch, hidden))),
        d.optional(lambda: d.normal((count, 3 * hidden))),
    ]
    scales = [np.asarray(0.002 + 0.001 * np.abs(d.normal(columns)), np.float32) for _ in range(2)]
    layers = (layer.astype(kind) for layer in weights)
    return case(
        d,
        *(whole(1, batch, inputs), *layers, *given, scales[0], zero, scales[1], zero),
        direction=direction,
        hidden_size=hidden,
        input_forget=d.pick(None, 1),
        outputs=3,
    )
