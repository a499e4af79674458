"""ONNX Runtime's causal convolutions, channel by channel, which carry the end of their input from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import widened
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.linear_attention import check_bounds, check_part
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("CausalConvWithState", domain=MICROSOFT, fresh=True)
def causal_conv_with_state(args: Arguments) -> tuple[Array, Array, Array]:
    """Tap by tap, o_t = Σ_j w_j·x_(t − (taps − 1 − j)·dilation) + b, where x has the past before its first element"""
    x, axes = args.input, [args.input.shape[1]]
    if args.channels_last:
        batch, length, *axes = args.input.shape
        x = args.input.reshape(batch, length, math.prod(axes))
        if args.input_channel_offset or args.input_channels:
            end = args.input_channel_offset + args.input_channels if args.input_channels else None
            x = x[..., args.input_channel_offset : end]
            axes = [x.shape[2]]
        x = x.swapaxes(1, 2)
    batch, channels, length = x.shape
    reach = (args.weight.shape[2] - 1) * args.dilation
    kept = args.state_length or reach
    turned = args.channels_last if args.state_channels_last == -1 else args.state_channels_last
    shape = (batch, kept, *axes) if turned else (batch, channels, kept)
    past = np.zeros((batch, channels, kept), x.dtype)
    if args.past_state is not None:
        of_last = args.past_state[-1] if args.state_window else args.past_state
        past = of_last.reshape(batch, kept, channels).swapaxes(1, 2) if turned else of_last
    o = _convolved(widened(x), widened(past), widened(args.weight)[:, 0], args.dilation)
    o = _finished(o, None if args.bias is None else widened(args.bias)[:, None], args.activation)
    whole = np.concatenate((past, x), 2)
    states = np.zeros((max(args.state_window, 1), batch, channels, kept), x.dtype)
    for slot in range(len(states)):
        passed = length - len(states) + slot + 1
        if passed > 0 or not args.state_window:
            states[slot] = whole[:, :, passed : passed + kept]
    present = states.swapaxes(2, 3).reshape(len(states), *shape) if turned else states
    update = np.zeros((batch, args.state_update_capacity, channels), x.dtype)
    update[:, :length] = x.swapaxes(1, 2)[:, : args.state_update_capacity]
    if args.channels_last:
        o = o.swapaxes(1, 2).reshape(batch, length, *axes)
    return o.astype(args.input.dtype), present if args.state_window else present[0], update


@kernel_of_body("VarlenCausalConvWithState", domain=MICROSOFT, fresh=True)
def varlen_causal_conv_with_state(args: Arguments) -> tuple[Array, Array, Array]:
    """The convolution of one request after the other"""
    tokens, channels = args.input.shape
    bounds = check_bounds("cumulative_sequence_length", args.cumulative_sequence_length, tokens)
    batch = len(bounds) - 1
    o, states = np.zeros_like(args.input), np.zeros_like(args.initial_state)
    update = np.zeros((batch, args.state_update_capacity, channels), args.input.dtype)
    for b, (start, end) in enumerate(pairwise(bounds)):
        x = args.input[start:end].T
        whole = np.concatenate((args.initial_state[b], x), 1)
        states[b] = whole[:, end - start :]
        if args.kernel_delta is None or args.previous_mask is None:
            y = _convolved(
                widened(x)[None], widened(args.initial_state[b])[None], widened(args.weight)[:, 0], args.dilation
            )[0]
            y = _finished(y, None if args.bias is None else widened(args.bias)[:, None], args.activation)
            o[start:end] = y.T.astype(args.input.dtype)
        if args.capture_count is not None:
            count = min(max(int(args.capture_count[b]), 0), args.state_update_capacity, end - start)
            update[b, :count] = args.input[start : start + count]
    if args.kernel_delta is not None and args.previous_mask is not None:
        now, then = (args.kernel_delta[:, args.delta_offset + k].repeat(args.group_size, 1) for k in (0, 1))
        before = np.empty_like(args.input)
        before[1:] = args.input[:-1]
        for b in np.flatnonzero(np.diff(bounds)).tolist():
            before[bounds[b]] = args.initial_state[b, :, 0]
        o = (now + args.weight[:, 0, 1]) * args.input + (then + args.weight[:, 0, 0]) * before * args.previous_mask
    return o, states, update


@kernel_of_body("ConvStateReplay", domain=MICROSOFT, fresh=True)
def conv_state_replay(args: Arguments, *, _output_types: Sequence[np.dtype | None], _wide: bool) -> Array:
    """The history shifted to the left by as many places as there are inputs appended"""
    source_at, destination_at, capture_at, batch, channels, width, capacity, kept = args.metadata.tolist()
    if min(args.metadata) < 0 or channels < 1 or kept > capacity:
        raise ValueError(
            f"metadata is {args.metadata.tolist()}: no number may be below 0, there is a channel, "
            f"and kept_count is at most capacity"
        )
    [declared] = _output_types
    if _wide and declared is None and (source_at or destination_at or capture_at):
        raise ValueError(
            "offsets count bytes of the declared type, and where everything is computed in double destination_out needs one"
        )
    size = (declared or args.source_backing.dtype).itemsize
    history = _part("source", args.source_backing, source_at, size, (batch, channels, width))
    inputs = _part("capture", args.capture_backing, capture_at, size, (batch, capacity, channels))
    whole = np.concatenate((history, inputs[:, :kept].swapaxes(1, 2)), 2)
    result = np.array(args.destination_backing)
    _part("destination", result, destination_at, size, (batch, channels, width))[...] = whole[..., kept:]
    return result


def _part(name: str, backing: Array, offset: int, size: int, shape: tuple[int, ...]) -> Array:
    """The elements of a backing tensor from an offset in bytes on."""
    if offset % size:
        raise ValueError(f"{name}_offset_bytes is {offset}; it is a multiple of {size}, the size of an element")
    return check_part(name, backing, offset // size, shape)


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
