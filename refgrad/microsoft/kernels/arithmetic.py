"""ONNX Runtime's sums and mixes of streams."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("BiasAdd", domain=MICROSOFT, in_float32=True, fresh=True)
def bias_add(args: Arguments) -> Array:
    """The sum of the three; the bias is as long as the last axis"""
    if args.X.ndim != 3:
        raise ValueError(f"X has rank {args.X.ndim}; (N, S, C) is needed")
    check_shape("bias", args.bias.shape, args.X.shape[-1:])
    check_shape("skip", args.skip.shape, args.X.shape)
    return np.asarray(args.skip + (args.X + args.bias))


@kernel_of_body("GatedAdd", domain=MICROSOFT, fresh=True)
def gated_add(args: Arguments) -> Array:
    """X + Y·gate, the product rounded; with gate_weight the gate of a row is σ of a projection, rounded in each step"""
    gate = args.gate
    kind = args.X.dtype
    if not args.X.ndim:
        raise ValueError("X has rank 0; (..., C) is needed")
    check_shape("Y", args.Y.shape, args.X.shape)
    check_shape("gate", gate.shape, (*args.X.shape[:-1], 1 if args.gate_weight is None else gate.shape[-1]))
    if args.gate_weight is not None:
        check_shape("gate_weight", args.gate_weight.shape, (gate.shape[-1], 1))
        projected = np.asarray(np.einsum("...k,kn->...n", widened(gate), widened(args.gate_weight)), kind)
        gate = np.asarray(sigmoid(widened(projected)), kind)
    product = np.asarray(widened(args.Y) * widened(gate), kind)
    return np.asarray(widened(args.X) + widened(product), kind)


@kernel_of_body("HyperConnectionPreMix", domain=MICROSOFT, fresh=True)
def hyper_connection_pre_mix(args: Arguments) -> Array:
    """The sum of the branches, each times its gates"""
    x = by_branch(args.streams, args.num_branches)
    gates = widened(args.pre_mix).astype(x.dtype, copy=False)
    allowed = [x.shape[:-1], (*x.shape[:-1], 1), x.shape, *([args.streams.shape] if args.num_branches else [])]
    _check_any("pre_mix", args.pre_mix.shape, allowed)
    gates = gates.reshape(*x.shape[:-1], -1 if gates.size else 1)
    y = sum((x[..., c, :] * gates[..., c, :] for c in range(x.shape[-2])), np.zeros_like(x[..., 0, :]))
    return np.asarray(args.reduction_scale * y, args.streams.dtype)


@kernel_of_body("HyperConnectionPostMix", domain=MICROSOFT, fresh=True)
def hyper_connection_post_mix(args: Arguments) -> Array:
    """Each branch of the mixed streams, plus the block's output times the gates of the branch"""
    x = by_branch(args.streams, args.num_branches)
    check_shape("block_output", args.block_output.shape, (*x.shape[:-2], x.shape[-1]))
    _check_any("post_mix", args.post_mix.shape, [x.shape[:-1], (*x.shape[:-1], 1), x.shape])
    gates = widened(args.post_mix).astype(x.dtype, copy=False)
    gates = gates if gates.ndim == x.ndim else gates[..., np.newaxis]
    mixed = x
    if args.stream_mix is not None:
        check_shape("stream_mix", args.stream_mix.shape, (*x.shape[:-1], x.shape[-2]))
        mixed = np.einsum("...ck,...ch->...kh", widened(args.stream_mix).astype(x.dtype, copy=False), x)
    y = mixed + np.einsum(
        "...kh,...h->...kh", np.broadcast_to(gates, x.shape), widened(args.block_output).astype(x.dtype)
    )
    return np.asarray(y, args.streams.dtype).reshape(args.streams.shape)


def by_branch(streams: Array, num_branches: int) -> Array:
    """The streams (..., C, H), in the type to compute in; C is `num_branches` where they are flattened."""
    least = 1 if num_branches else 2
    if streams.ndim < least or num_branches < 0 or (num_branches and streams.shape[-1] % num_branches):
        raise ValueError(
            f"the streams have the shape {list(streams.shape)}, which does not fit num_branches={num_branches}: "
            "(..., C, H) with 0, or (..., C * H) with C is needed"
        )
    x = widened(streams)
    return x.reshape(*x.shape[:-1], num_branches, x.shape[-1] // num_branches) if num_branches else x


def _check_any(what: str, given: tuple[int, ...], allowed: list[tuple[int, ...]]) -> None:
    if given not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{what} has the shape {list(given)}; {shapes} is needed")
