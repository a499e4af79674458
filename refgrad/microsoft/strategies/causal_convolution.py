"""Strategies of ONNX Runtime's causal convolutions, which carry the end of their input from call to call."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("CausalConvWithState", domain=MICROSOFT)
def causal_conv_with_state(d: Drawing) -> Case:
    """Both layouts, with and without a bias, a past, a window of states and the extended attributes."""
    batch, length, taps, dilation = d.integer(1, 2), d.integer(1, 4), d.integer(1, 3), d.integer(1, 2)
    form = d.pick("first", "last", "window", "extended")
    channels, turned = d.integer(1, 3), form in ("last", "extended")
    axes, kept = ([channels, d.integer(1, 2)] if form == "last" else [channels]), (taps - 1) * dilation
    window = d.integer(1, 3) if form == "window" else 0
    settings: dict[str, Any] = {"dilation": dilation, "activation": d.pick(None, "none", "silu", "swish")}
    if form == "extended":
        offset, rest = d.integer(0, 2), d.integer(0, 2)
        settings |= {"input_channel_offset": offset, "input_channels": channels if rest else d.pick(0, channels)}
        axes = [offset + channels + rest]
        kept += d.integer(0, 2) if kept else 0
        settings |= {"state_length": kept, "state_channels_last": d.pick(None, 0, 1)}
        settings["state_update_capacity"] = d.integer(0, 3)
    elif window:
        settings["state_window"] = window
    x = d.floats((batch, length, *axes) if turned else (batch, *axes, length))
    states = [channels] if form == "extended" else axes
    of_state = turned if settings.get("state_channels_last") is None else bool(settings["state_channels_last"])
    shape = (*([window] if window else []), batch, *([kept, *states] if of_state else [*states, kept]))
    count = int(np.prod(states))
    inputs = d.floats((count, 1, taps)), d.optional(lambda: d.floats((count,))), d.optional(lambda: d.floats(shape))
    settings["channels_last"] = 1 if turned else d.pick(None, 0)
    return d.case(x, *inputs, outputs=3 if settings.get("state_update_capacity") else 2, **settings)


@strategy("VarlenCausalConvWithState", domain=MICROSOFT)
def varlen_causal_conv_with_state(d: Drawing) -> Case:
    """Requests of any length, with and without a bias, what the first tokens are, and weights of each token."""
    batch, tokens, groups, each = d.integer(1, 3), d.integer(3, 5), d.integer(1, 2), d.integer(1, 2)
    channels, dynamic = groups * each, d.flag()
    taps, dilation = (2, 1) if dynamic else (d.integer(1, 3), d.integer(1, 2))
    ends = sorted(d.integer(0, tokens) for _ in range(batch - 1))
    inputs: list[np.ndarray | None] = [d.floats((tokens, channels)), d.floats((channels, 1, taps))]
    inputs.append(np.array([0, *ends, tokens], np.int32))
    inputs.append(None if dynamic else d.optional(lambda: d.floats((channels,))))
    inputs.append(d.floats((batch, channels, (taps - 1) * dilation)))
    capacity = d.pick(0, 1, 3)
    inputs.append(d.integers((batch,), 0, 4, np.int32) if capacity else None)
    settings: dict[str, Any] = {"state_update_capacity": capacity or d.pick(None, 0), "dilation": dilation}
    if dynamic:
        projected = d.integer(2, 3)
        inputs += [d.floats((tokens, projected, groups)), d.floats((tokens, 1))]
        settings |= {"group_size": each, "delta_offset": d.integer(0, projected - 2)}
    else:
        settings["activation"] = d.pick(None, "silu", "swish")
    return d.case(*inputs, outputs=3 if capacity else 2, **settings)


@strategy("ConvStateReplay", domain=MICROSOFT)
def conv_state_replay(d: Drawing) -> Case:
    """Histories longer and shorter than the appended part, anywhere in their tensors."""
    batch, channels, width, capacity = d.integer(1, 2), d.integer(1, 2), d.integer(0, 3), d.integer(0, 3)
    sizes = batch * channels * width, batch * channels * width, batch * channels * capacity
    source, destination, capture = (d.floats((n + d.integer(0, 1),)) for n in sizes)
    metadata = [0, 0, 0, batch, channels, width, capacity, d.integer(0, capacity)]
    return d.case(source, capture, destination, np.array(metadata))
