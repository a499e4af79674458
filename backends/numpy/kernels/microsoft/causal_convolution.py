"""ONNX Runtime's causal convolutions, channel by channel, which carry the end of their input from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.microsoft.linear_attention import (
    check_bounds,
    check_choice,
    check_part,
    check_range,
    check_rank,
)
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("CausalConvWithState", domain=MICROSOFT, fresh=True)
def causal_conv_with_state(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    past_state: Array | None = None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    input_channel_offset: int = 0,
    input_channels: int = 0,
    ndim: int = 1,
    state_channels_last: int = -1,
    state_length: int = 0,
    state_update_capacity: int = 0,
    state_window: int = 0,
) -> tuple[Array, Array, Array]:
    """Tap by tap, o_t = Σ_j w_j·x_(t − (taps − 1 − j)·dilation) + b, where x has the past before its first element"""
    if ndim != 1:
        raise ValueError(
            f"ndim={ndim} is not supported: the operator does not say how it pads the axes before the last"
        )
    for name, flag, known in (
        ("channels_last", channels_last, (0, 1)),
        ("state_channels_last", state_channels_last, (-1, 0, 1)),
    ):
        if flag not in known:
            raise ValueError(f"{name}={flag} is not known; there are {', '.join(map(str, known))}")
    check_range("state_window", state_window)
    extended = (
        input_channel_offset or input_channels or state_channels_last != -1 or state_length or state_update_capacity
    )
    if extended and (state_window or not channels_last):
        raise ValueError(
            "input_channel_offset, input_channels, state_channels_last, state_length and state_update_capacity need "
            "channels_last=1 and state_window=0"
        )
    if not channels_last or extended:
        check_rank(3, input=input)
    elif input.ndim < 3:
        raise ValueError(f"input has rank {input.ndim}; with channels_last it has rank 3 or more")
    if channels_last:
        batch, length, *axes = input.shape
        x = input.reshape(batch, length, math.prod(axes))
        if input_channel_offset < 0 or input_channels < 0 or input_channel_offset + input_channels > x.shape[2]:
            raise ValueError(
                f"input_channel_offset={input_channel_offset} and input_channels={input_channels} leave the "
                f"{x.shape[2]} channels of the input"
            )
        if input_channel_offset or input_channels:
            x = x[..., input_channel_offset : input_channel_offset + input_channels if input_channels else None]
            axes = [x.shape[2]]
        x = x.swapaxes(1, 2)
    else:
        x, axes = input, [input.shape[1]]
    batch, channels, length = x.shape
    taps = _check(weight, bias, channels, activation, dilation, state_update_capacity)
    reach = (taps - 1) * dilation
    if state_length and state_length < reach:
        raise ValueError(f"state_length={state_length} does not cover the {reach} elements that are read")
    kept = state_length or reach
    turned = channels_last if state_channels_last == -1 else state_channels_last
    shape = (batch, kept, *axes) if turned else (batch, channels, kept)
    past = np.zeros((batch, channels, kept), x.dtype)
    if past_state is not None:
        check_shape("past_state", past_state.shape, (*([state_window] if state_window else []), *shape))
        of_last = past_state[-1] if state_window else past_state
        past = of_last.reshape(batch, kept, channels).swapaxes(1, 2) if turned else of_last
    o = _convolved(widened(x), widened(past), widened(weight)[:, 0], dilation)
    o = _finished(o, None if bias is None else widened(bias)[:, None], activation)
    whole = np.concatenate((past, x), 2)
    states = np.zeros((max(state_window, 1), batch, channels, kept), x.dtype)
    for slot in range(len(states)):
        passed = length - len(states) + slot + 1
        if passed > 0 or not state_window:
            states[slot] = whole[:, :, passed : passed + kept]
    present = states.swapaxes(2, 3).reshape(len(states), *shape) if turned else states
    update = np.zeros((batch, state_update_capacity, channels), x.dtype)
    update[:, :length] = x.swapaxes(1, 2)[:, :state_update_capacity]
    if channels_last:
        o = o.swapaxes(1, 2).reshape(batch, length, *axes)
    return o.astype(input.dtype), present if state_window else present[0], update


@kernel("VarlenCausalConvWithState", domain=MICROSOFT, fresh=True)
def varlen_causal_conv_with_state(
    input: Array,
    weight: Array,
    cumulative_sequence_length: Array,
    bias: Array | None,
    initial_state: Array,
    capture_count: Array | None = None,
    kernel_delta: Array | None = None,
    previous_mask: Array | None = None,
    *,
    activation: str = "none",
    delta_offset: int = 0,
    dilation: int = 1,
    group_size: int = 1,
    state_update_capacity: int = 0,
) -> tuple[Array, Array, Array]:
    """The convolution of one request after the other"""
    check_rank(2, input=input)
    tokens, channels = input.shape
    taps = _check(weight, bias, channels, activation, dilation, state_update_capacity)
    bounds = check_bounds("cumulative_sequence_length", cumulative_sequence_length, tokens)
    batch, kept = len(bounds) - 1, (taps - 1) * dilation
    check_shape("initial_state", initial_state.shape, (batch, channels, kept))
    if (capture_count is None) != (state_update_capacity == 0):
        raise ValueError("capture_count is needed exactly where state_update_capacity is above 0")
    if capture_count is not None:
        check_shape("capture_count", capture_count.shape, (batch,))
    if (kernel_delta is None) != (previous_mask is None):
        raise ValueError("kernel_delta and previous_mask are both needed, or neither of them")
    if kernel_delta is None and (group_size != 1 or delta_offset):
        raise ValueError("group_size and delta_offset need kernel_delta")
    o, states = np.zeros_like(input), np.zeros_like(initial_state)
    update = np.zeros((batch, state_update_capacity, channels), input.dtype)
    for b, (start, end) in enumerate(pairwise(bounds)):
        x = input[start:end].T
        whole = np.concatenate((initial_state[b], x), 1)
        states[b] = whole[:, end - start :]
        if kernel_delta is None or previous_mask is None:
            y = _convolved(widened(x)[None], widened(initial_state[b])[None], widened(weight)[:, 0], dilation)[0]
            y = _finished(y, None if bias is None else widened(bias)[:, None], activation)
            o[start:end] = y.T.astype(input.dtype)
        if capture_count is not None:
            count = min(max(int(capture_count[b]), 0), state_update_capacity, end - start)
            update[b, :count] = input[start : start + count]
    if kernel_delta is not None and previous_mask is not None:
        if taps != 2 or dilation != 1 or bias is not None or activation != "none":
            raise ValueError("kernel_delta needs 2 taps, and no bias, activation or dilation")
        if group_size < 1 or channels % group_size:
            raise ValueError(f"group_size={group_size} does not divide {channels} channels")
        check_rank(3, kernel_delta=kernel_delta)
        check_shape("kernel_delta", kernel_delta.shape, (tokens, kernel_delta.shape[1], channels // group_size))
        check_shape("previous_mask", previous_mask.shape, (tokens, 1))
        if not 0 <= delta_offset < kernel_delta.shape[1] - 1:
            raise ValueError(
                f"delta_offset={delta_offset} and the next one are not among the {kernel_delta.shape[1]} projected taps"
            )
        now, then = (kernel_delta[:, delta_offset + k].repeat(group_size, 1) for k in (0, 1))
        before = np.empty_like(input)
        before[1:] = input[:-1]
        for b in np.flatnonzero(np.diff(bounds)).tolist():
            before[bounds[b]] = initial_state[b, :, 0]
        o = (now + weight[:, 0, 1]) * input + (then + weight[:, 0, 0]) * before * previous_mask
    return o, states, update


@kernel("ConvStateReplay", domain=MICROSOFT, fresh=True)
def conv_state_replay(
    source_backing: Array,
    capture_backing: Array,
    destination_backing: Array,
    metadata: Array,
    *,
    _output_types: Sequence[np.dtype | None] = (None,),
    _wide: bool = False,
) -> Array:
    """The history shifted to the left by as many places as there are inputs appended"""
    check_rank(
        1, source_backing=source_backing, capture_backing=capture_backing, destination_backing=destination_backing
    )
    check_shape("metadata", metadata.shape, (8,))
    source_at, destination_at, capture_at, batch, channels, width, capacity, kept = metadata.tolist()
    if min(metadata) < 0 or channels < 1 or kept > capacity:
        raise ValueError(
            f"metadata is {metadata.tolist()}: no number may be below 0, there is a channel, and kept_count is at most capacity"
        )
    [declared] = _output_types
    if _wide and declared is None and (source_at or destination_at or capture_at):
        raise ValueError(
            "offsets count bytes of the declared type, and where everything is computed in double destination_out needs one"
        )
    size = (declared or source_backing.dtype).itemsize
    history = _part("source", source_backing, source_at, size, (batch, channels, width))
    inputs = _part("capture", capture_backing, capture_at, size, (batch, capacity, channels))
    whole = np.concatenate((history, inputs[:, :kept].swapaxes(1, 2)), 2)
    result = destination_backing.copy()
    _part("destination", result, destination_at, size, (batch, channels, width))[...] = whole[..., kept:]
    return result


def _part(name: str, backing: Array, offset: int, size: int, shape: tuple[int, ...]) -> Array:
    """The elements of a backing tensor from an offset in bytes on."""
    if offset % size:
        raise ValueError(f"{name}_offset_bytes is {offset}; it is a multiple of {size}, the size of an element")
    return check_part(name, backing, offset // size, shape)


def _check(weight: Array, bias: Array | None, channels: int, activation: str, dilation: int, capacity: int) -> int:
    """The number of taps. Raises ValueError where what both convolutions have does not fit."""
    check_choice("activation", activation, ("none", "silu", "swish"))
    check_range("state_update_capacity", capacity)
    if dilation < 1:
        raise ValueError(f"dilation={dilation} is not 1 or more")
    check_rank(3, weight=weight)
    check_shape("weight", weight.shape, (channels, 1, weight.shape[2]))
    if not weight.shape[2]:
        raise ValueError("weight has no tap")
    if bias is not None:
        check_shape("bias", bias.shape, (channels,))
    return int(weight.shape[2])


def _convolved(x: Array, past: Array, weight: Array, dilation: int) -> Array:
    """The sum over the taps, each of which reads that far back; the axes are batch, channel, time."""
    whole, length, taps = np.concatenate((past, x), 2), x.shape[2], weight.shape[1]
    o = np.zeros_like(x)
    for tap in range(taps):
        first = past.shape[2] - (taps - 1 - tap) * dilation
        o += weight[:, tap, None] * whole[:, :, first : first + length]
    return o


def _finished(o: Array, bias: Array | None, activation: str) -> Array:
    o = o if bias is None else o + bias
    return o if activation == "none" else o * sigmoid(o)
