"""ONNX Runtime's causal convolutions, channel by channel, which carry the end of their input from call to call."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.activation import plus
from refgrad.microsoft.bodies.linear_attention import check_backings, check_captures, check_up_to_8, written
from refgrad.microsoft.declared import Size, check_flags, check_known, check_pairs, check_shape, product, sizes, total
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import Shapes


def _check_weights(shapes: Shapes, args: Arguments, channels: Size) -> Size:
    """Refuse an activation, a dilation and weights that do not fit. Returns the elements that are read before the first one."""
    check_known(args, "activation", "none", "silu", "swish")
    check_up_to_8(args, "state_update_capacity")
    if args.dilation < 1:
        raise UnsupportedFormError(f"dilation={args.dilation} is not 1 or more")
    check_shape(shapes, "weight", args.weight, (channels, 1, None))
    check_shape(shapes, "bias", args.bias, (channels,))
    taps = sizes(shapes, args.weight, 3)[2]
    if taps == 0:
        raise UnsupportedFormError("weight has no tap")
    return product(total(taps, -1), args.dilation)


def _check_with_state(shapes: Shapes, args: Arguments) -> None:
    if args.ndim != 1:
        raise UnsupportedFormError(
            f"ndim={args.ndim} is not covered: the operator does not say how it pads the axes before the last"
        )
    check_flags(args, "channels_last")
    check_up_to_8(args, "state_window")
    check_known(args, "state_channels_last", -1, 0, 1)
    offset, count, kept = args.input_channel_offset, args.input_channels, args.state_length
    extended = offset or count or args.state_channels_last != -1 or kept or args.state_update_capacity
    if extended and (args.state_window or not args.channels_last):
        raise UnsupportedFormError(
            "input_channel_offset, input_channels, state_channels_last, state_length and state_update_capacity need "
            "channels_last=1 and state_window=0"
        )
    rank = shapes.rank(args.input)
    if rank is not None and (rank < 3 or (rank > 3 and (extended or not args.channels_last))):
        raise UnsupportedFormError(f"its input is of rank {rank}; it has 3 axes, or with channels_last=1 alone more")
    batch, *axes = sizes(shapes, args.input, rank or 3)
    axes = axes[1:] if args.channels_last else axes[:1]
    channels = product(*axes) if rank else None
    if min(offset, count) < 0 or (channels is not None and offset + count > channels):
        raise UnsupportedFormError(
            f"input_channel_offset={offset} and input_channels={count} leave the {channels} channels of the input"
        )
    if offset or count:
        channels = count or total(channels, -offset)
        axes = [channels]
    reach = _check_weights(shapes, args, channels)
    if kept and reach is not None and kept < reach:
        raise UnsupportedFormError(f"state_length={kept} does not cover the {reach} elements that are read")
    turned = args.channels_last if args.state_channels_last == -1 else args.state_channels_last
    shape = (batch, kept or reach, *axes) if turned else (batch, channels, kept or reach)
    if rank is not None:
        window = (args.state_window,) if args.state_window else ()
        check_shape(shapes, "past_state", args.past_state, (*window, *shape))


@body(
    "CausalConvWithState",
    "output",
    "present_state",
    optional=["state_update"],
    check=_check_with_state,
    domain=MICROSOFT,
)
def causal_conv_with_state(
    op: FunctionEmitter,
    input: str,
    weight: str,
    bias: str | None = None,
    past_state: str | None = None,
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
) -> tuple[str, str, str]:
    """output_t = activation(Σ_j weight_j·x_(t + j·dilation) + bias) with x = (past_state, input); the end of x"""
    x, axes = input, None
    if input_channel_offset or input_channels:
        end = input_channel_offset + input_channels if input_channels else END
        x = op.Slice(x, [input_channel_offset], [end], [2])
    result = op.Shape(x)
    if channels_last:
        axes = op.Shape(x, start=2)
        x = _channels_first(op, x)
    turned = channels_last if state_channels_last == -1 else state_channels_last
    batch, length, taps = op.Shape(x, end=2), op.Shape(x, start=2), op.Shape(weight, start=2)
    reach = op.Mul(op.Sub(taps, [1]), [dilation])
    kept = op.const([state_length]) if state_length else reach
    if past_state is None:
        past = op.Expand(op.const(0.0, like=x), op.Concat(batch, kept, axis=0))
    else:
        past = past_state
        if state_window:
            past = op.Gather(past, op.const(np.array(state_window - 1)), axis=0)
        past = _channels_first(op, past) if turned else past
    whole = op.Concat(past, x, axis=2)
    seen = op.Slice(whole, op.Sub(kept, reach), [END], [2]) if state_length else whole
    reads = op.Add(op.Unsqueeze(op.up_to(length), [1]), op.Mul(op.up_to(taps), [dilation]))
    windows = op.wide(op.Gather(seen, reads, axis=2))
    z = op.Squeeze(op.MatMul(windows, op.Transpose(op.wide(weight), perm=[0, 2, 1])), [3])
    y = _activated(op, z if bias is None else op.Add(z, op.Unsqueeze(op.wide(bias), [1])), activation)
    update = op.Expand(op.const(0.0, like=x), op.Concat(op.Shape(x, end=1), [0], op.Shape(x, start=1, end=2), axis=0))
    if state_update_capacity:
        more = op.Expand(op.const(0.0, like=x), op.Concat(batch, [state_update_capacity], axis=0))
        first = op.Slice(op.Concat(x, more, axis=2), [0], [state_update_capacity], [2])
        update = op.Transpose(first, perm=[0, 2, 1])
    if state_window:
        passed = op.Add(op.const(np.arange(1 - state_window, 1)), length)
        places = op.Max(op.Add(op.Unsqueeze(passed, [1]), op.up_to(kept)), op.const(0))
        states = op.Where(op.Greater(op.Unsqueeze(passed, [1]), 0), op.Gather(whole, places, axis=2), 0.0)
        present = op.Transpose(states, perm=[2, 0, 1, 3])
    else:
        present = op.Slice(whole, length, [END], [2])
    if turned:
        order = [0, 1, 3, 2] if state_window else [0, 2, 1]
        present = op.Transpose(present, perm=order)
        lead = op.Shape(present, end=-1)
        present = op.Reshape(present, op.Concat(lead, axes, axis=0), allowzero=1) if axes is not None else present
    if channels_last:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1]), result, allowzero=1)
    return op.CastLike(y, input), present, update


def _check_varlen(shapes: Shapes, args: Arguments) -> None:
    check_shape(shapes, "input", args.input, (None, None))
    tokens, channels = sizes(shapes, args.input, 2)
    reach = _check_weights(shapes, args, channels)
    check_captures(args)
    check_pairs(args, "kernel_delta", "previous_mask")
    check_shape(shapes, "cumulative_sequence_length", args.cumulative_sequence_length, (None,))
    batch = total(sizes(shapes, args.cumulative_sequence_length, 1)[0], -1)
    check_shape(shapes, "initial_state", args.initial_state, (batch, channels, reach))
    check_shape(shapes, "capture_count", args.capture_count, (batch,))
    if args.kernel_delta is None:
        if args.group_size != 1 or args.delta_offset:
            raise UnsupportedFormError("group_size and delta_offset need kernel_delta")
        return
    if args.bias is not None or args.activation != "none" or args.dilation != 1 or reach not in (None, 1):
        raise UnsupportedFormError("with kernel_delta it has 2 taps, no bias, no activation and no dilation")
    if args.group_size < 1 or (channels is not None and channels % args.group_size):
        raise UnsupportedFormError(f"group_size={args.group_size} does not divide {channels} channels")
    groups = None if channels is None else channels // args.group_size
    check_shape(shapes, "kernel_delta", args.kernel_delta, (tokens, None, groups))
    check_shape(shapes, "previous_mask", args.previous_mask, (tokens, 1))
    projected = sizes(shapes, args.kernel_delta, 3)[1]
    if args.delta_offset < 0 or (projected is not None and args.delta_offset > projected - 2):
        raise UnsupportedFormError(
            f"delta_offset={args.delta_offset} and the next one are not among the {projected} projected taps"
        )


@body(
    "VarlenCausalConvWithState",
    "output",
    "final_state",
    optional=["state_update"],
    others=("cumulative_sequence_length", "capture_count"),
    check=_check_varlen,
    domain=MICROSOFT,
)
def varlen_causal_conv_with_state(
    op: FunctionEmitter,
    input: str,
    weight: str,
    cumulative_sequence_length: str,
    bias: str | None,
    initial_state: str,
    capture_count: str | None = None,
    kernel_delta: str | None = None,
    previous_mask: str | None = None,
    *,
    activation: str = "none",
    delta_offset: int = 0,
    dilation: int = 1,
    group_size: int = 1,
    state_update_capacity: int = 0,
) -> tuple[str, str, str]:
    """output_t = activation(Σ_j weight_j·x_(t + j·dilation) + bias) with x = (initial_state, input) of each request"""
    offsets = op.Cast(cumulative_sequence_length, to=TensorProto.INT64)
    starts, ends = op.Slice(offsets, [0], [-1], [0]), op.Slice(offsets, [1], [END], [0])
    tokens, taps, kept = op.Shape(input, end=1), op.Shape(weight, start=2), op.Shape(initial_state, start=2)
    channels = op.Shape(input, start=1)
    before = op.Reshape(
        op.Transpose(initial_state, perm=[0, 2, 1]),
        op.Concat(op.Mul(op.Shape(initial_state, end=1), kept), channels, axis=0),
        allowzero=1,
    )
    table = op.Concat(input, before, axis=0)

    def read(request: str, place: str) -> str:
        """The samples at places of requests, counted from the first token; those before it are of the state."""
        earlier = op.Add(op.Add(op.Mul(request, kept), kept), tokens)
        rows = op.Where(op.Less(place, 0), earlier, op.Gather(starts, request))
        return str(op.Gather(table, op.Add(rows, place), axis=0))

    token = op.up_to(tokens)
    passed = op.Cast(op.GreaterOrEqual(op.Unsqueeze(token, [1]), ends), to=TensorProto.INT64)
    request = op.ReduceSum(passed, [1], keepdims=0)
    place = op.Unsqueeze(op.Sub(token, op.Gather(starts, request)), [1])
    back = op.Mul(op.Sub(op.up_to(taps), op.Sub(taps, [1])), [dilation])
    windows = read(op.Unsqueeze(request, [1]), op.Add(place, back))  # token, tap, channel
    if kernel_delta is not None and previous_mask is not None:
        coefficient = [op.Gather(weight, op.const(np.array(tap)), axis=2) for tap in (0, 1)]
        terms = []
        for tap in (0, 1):
            delta = op.Gather(kernel_delta, op.const(np.array(delta_offset + 1 - tap)), axis=1)
            several = op.Expand(op.Unsqueeze(delta, [2]), op.const([1, 1, group_size]))
            factor = op.Add(
                op.Reshape(several, op.Concat(tokens, channels, axis=0), allowzero=1), op.Squeeze(coefficient[tap], [1])
            )
            terms.append(op.Mul(factor, op.Gather(windows, op.const(np.array(tap)), axis=1)))
        y = op.Add(terms[1], op.Mul(terms[0], previous_mask))
    else:
        column = op.Transpose(op.Squeeze(op.wide(weight), [1]), perm=[1, 0])
        z = op.ReduceSum(op.Mul(op.wide(windows), column), [1], keepdims=0)
        y = op.CastLike(_activated(op, plus(op, z, None if bias is None else op.wide(bias)), activation), input)
    each = op.Unsqueeze(op.up_to(op.Shape(starts)), [1])
    lengths = op.Unsqueeze(op.Sub(ends, starts), [1])
    last = read(each, op.Add(lengths, op.Sub(op.up_to(kept), kept)))
    update = op.Expand(op.const(0.0, like=input), op.Concat(op.Shape(starts), [0], channels, axis=0))
    if capture_count is not None:
        first = op.const(np.arange(state_update_capacity))
        count = op.Min(op.Unsqueeze(op.Cast(capture_count, to=TensorProto.INT64), [1]), lengths)
        captured = op.Less(first, count)
        update = op.Where(
            op.Unsqueeze(captured, [2]), read(each, op.Where(captured, first, op.const(np.array(0)))), 0.0
        )
    return y, op.Transpose(last, perm=[0, 2, 1]), update


def _check_replay(shapes: Shapes, args: Arguments) -> None:
    check_backings(shapes, args, "capture_backing", 8)


@body("ConvStateReplay", "destination_out", others=("metadata",), check=_check_replay, domain=MICROSOFT)
def conv_state_replay(
    op: FunctionEmitter, source_backing: str, capture_backing: str, destination_backing: str, metadata: str
) -> str:
    """destination_backing with the end of the history followed by the first captured inputs written into it"""
    size = np.dtype(helper.tensor_dtype_to_np_dtype(op.type(source_backing) or TensorProto.FLOAT)).itemsize
    numbers = [op.Slice(metadata, [k], [k + 1], [0]) for k in range(8)]
    source, destination, capture = (op.Div(offset, [size]) for offset in numbers[:3])
    batch, channels, width, capacity, kept = numbers[3:]
    b = op.Reshape(op.up_to(batch), [-1, 1, 1])
    c = op.Unsqueeze(op.up_to(channels), [1])
    p = op.Add(op.up_to(width), kept)
    old = op.Add(op.Add(op.Mul(op.Add(op.Mul(b, channels), c), width), p), source)
    new = op.Add(op.Add(op.Mul(op.Add(op.Mul(b, capacity), op.Sub(p, width)), channels), c), capture)
    place = op.Where(op.Less(p, width), old, op.Add(new, op.Shape(source_backing)))
    values = op.Gather(op.Concat(source_backing, capture_backing, axis=0), op.Reshape(place, [-1]), axis=0)
    return written(op, destination_backing, destination, values)


def _activated(op: FunctionEmitter, z: str, activation: str) -> str:
    return z if activation == "none" else op.Mul(z, op.Sigmoid(z))


def _channels_first(op: FunctionEmitter, x: str) -> str:
    """(batch, time, channels in one axis or several) to (batch, channel, time)"""
    channels = op.ReduceProd(op.Shape(x, start=2), keepdims=1)
    return op.Transpose(op.Reshape(x, op.Concat(op.Shape(x, end=2), channels, axis=0), allowzero=1), perm=[0, 2, 1])
