"""Cases of ONNX Runtime's causal convolutions, which carry the end of their input from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer

BATCH, CHANNELS, LENGTH, TAPS = 2, 3, 4, 3


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        yield from _causal(shapes)
        yield from _varlen(shapes)
        floats = drawer(6)
        for kept in (0, 1, 3):
            offsets = (0, 0, 0) if shapes == "unknown" else (8, 16, 24)  # in bytes of the type, which has to be known
            metadata = np.array([*offsets, 2, 3, 2, 3, kept])
            yield case("ConvStateReplay", floats(18), floats(31), floats(22), metadata, shapes=shapes)
    metadata = np.array([16, 8, 8, 2, 3, 2, 3, 3])
    yield case("ConvStateReplay", floats(20), floats(22), floats(16), metadata, constant=["metadata"])
    yield case("ConvStateReplay", floats(0), floats(0), floats(0), np.array([0, 0, 0, 0, 3, 2, 3, 1]))


def _causal(shapes: str) -> Iterator[Case]:
    floats, name = drawer(4), "CausalConvWithState"
    x, weight, bias = floats(BATCH, CHANNELS, LENGTH), floats(CHANNELS, 1, TAPS), floats(CHANNELS)
    last = floats(BATCH, LENGTH, CHANNELS)
    settings: dict[str, Any] = {"outputs": 2, "shapes": shapes}
    yield case(name, x, weight, bias, floats(BATCH, CHANNELS, TAPS - 1), **settings)
    yield case(name, x, weight, dilation=2, **settings)
    yield case(name, x, weight, bias, activation="silu", **settings)
    yield case(name, x, weight, None, floats(BATCH, CHANNELS, 4), activation="swish", dilation=2, ndim=1, **settings)
    yield case(name, x, floats(CHANNELS, 1, 1), bias, floats(BATCH, CHANNELS, 0), **settings)
    yield case(name, last, weight, bias, floats(BATCH, TAPS - 1, CHANNELS), channels_last=1, **settings)
    parts = floats(BATCH, LENGTH, CHANNELS, 2), floats(2 * CHANNELS, 1, TAPS), None, floats(BATCH, 2, CHANNELS, 2)
    yield case(name, *parts, channels_last=1, **settings)
    yield case(name, x, weight, bias, floats(2, BATCH, CHANNELS, 2), state_window=2, **settings)
    yield case(name, last, weight, bias, floats(6, BATCH, 2, CHANNELS), state_window=6, channels_last=1, **settings)
    extended: dict[str, Any] = {"channels_last": 1, **settings}
    yield case(name, last, weight, None, floats(BATCH, 5, CHANNELS), state_length=5, **extended)
    yield case(name, last, weight, None, floats(BATCH, CHANNELS, 2), state_channels_last=0, **extended)
    sliced = floats(BATCH, LENGTH, CHANNELS + 3), weight, bias
    yield case(name, *sliced, input_channel_offset=2, input_channels=CHANNELS, **extended)
    yield case(name, *sliced, input_channel_offset=3, state_channels_last=1, **extended)
    for capacity in (2, 6):
        yield case(name, last, weight, state_update_capacity=capacity, **extended | {"outputs": 3})


def _varlen(shapes: str) -> Iterator[Case]:
    floats, name = drawer(5), "VarlenCausalConvWithState"
    ends, tokens, requests = np.array([0, 1, 4, 6], np.int32), 6, 3
    x, weight, bias = floats(tokens, CHANNELS), floats(CHANNELS, 1, TAPS), floats(CHANNELS)
    settings: dict[str, Any] = {"outputs": 2, "shapes": shapes}
    state = floats(requests, CHANNELS, TAPS - 1)
    yield case(name, x, weight, ends, bias, state, **settings)
    yield case(name, x, weight, ends, None, state, activation="swish", **settings)
    yield case(name, x, weight, ends, bias, floats(requests, CHANNELS, 4), activation="silu", dilation=2, **settings)
    counts = np.array([3, 2, 1], np.int32)
    yield case(name, x, weight, ends, bias, state, counts, state_update_capacity=2, **settings | {"outputs": 3})
    yield case(name, x, weight, ends, bias, state, **settings | {"outputs": 3})
    if shapes == "static":
        constant = ["cumulative_sequence_length", "capture_count"]
        captured = {"state_update_capacity": 2, "constant": constant, "outputs": 3}
        yield case(name, x, weight, ends, bias, state, counts, **settings | captured)
        yield case(name, x[:, :0], weight[:0], ends, bias[:0], state[:, :0], **settings)
    wide = [floats(tokens, 4), floats(4, 1, 2), ends, None, floats(requests, 4, 1)]
    dynamic = floats(tokens, 3, 2), np.array([[1], [0], [1], [0.5], [1], [1]], np.float32)
    yield case(name, *wide, None, *dynamic, group_size=2, delta_offset=1, **settings)
    yield case(name, *wide, counts, *dynamic, group_size=2, state_update_capacity=8, **settings | {"outputs": 3})
