"""Strategies of RNN, GRU and LSTM."""

from __future__ import annotations

from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.cases.recurrent import ACTIVATIONS, GATES, OUTPUTS
from refgrad.conformance.strategies.drawing import Drawing, strategy

_PLAIN = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_WITHOUT_DEFAULTS = ("Affine", "ScaledTanh")


@strategy("RNN", "GRU", "LSTM", oldest=14)
def recurrent(d: Drawing) -> Case:
    """Every direction, layout, activation and clip, with every optional input present or absent."""
    op, layout = d.op_type, d.flag()
    time, batch, size, hidden = d.integer(1, 3), d.integer(1, 2), d.integer(1, 2), d.integer(1, 2)
    if d.rarely():
        time, batch = d.pick((0, batch), (time, 0))
    direction = d.pick(None, "forward", "reverse", "bidirectional")
    directions, rows = 1 + (direction == "bidirectional"), GATES[op] * hidden
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    lengths = d.optional(lambda: d.integers((batch,), 0, time, "int32"))
    inputs = [
        d.normal((batch, time, size) if layout else (time, batch, size), 0.7),
        d.normal((directions, rows, size), 0.7),
        d.normal((directions, rows, hidden), 0.7),
        d.optional(lambda: d.normal((directions, 2 * rows), 0.7)),
        lengths,
        d.optional(lambda: d.normal(state, 0.7)),
    ]
    attributes: dict[str, Any] = {"direction": direction, "layout": 1 if layout else d.pick(None, 0)}
    if op == "GRU":
        attributes["linear_before_reset"] = d.pick(None, 0, 1)
    if op == "LSTM":
        inputs += [
            d.optional(lambda: d.normal(state, 0.7)),
            d.optional(lambda: d.normal((directions, 3 * hidden), 0.7)),
        ]
        attributes["input_forget"] = d.pick(None, 0, 1)
    fixed = ["W", "R"] if lengths is None else ["W", "R", "sequence_lens"]
    attributes |= _activations(d, directions)
    return d.case(
        *inputs, fixed=fixed, outputs=OUTPUTS[op], hidden_size=hidden, clip=d.pick(None, None, 0.5, 50.0), **attributes
    )


def _activations(d: Drawing, directions: int) -> dict[str, Any]:
    """No attributes, or one activation per place of each direction; with parameters for all, or with the defaults."""
    if not d.flag():
        return {}
    places = _PLAIN[d.op_type] * directions
    given = d.flag()
    known = ACTIVATIONS if given else [name for name in ACTIVATIONS if name not in _WITHOUT_DEFAULTS]
    names = [plain if d.flag() else d.pick(*known) for plain in places]
    parameters = [f"activation_{which}" for which in ("alpha", "beta")] if given else []
    return {"activations": names} | {name: [d.pick(0.5, 0.3, 0.8, -0.4) for _ in names] for name in parameters}
