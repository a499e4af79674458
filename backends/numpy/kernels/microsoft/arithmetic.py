"""ONNX Runtime's sums and mixes of streams."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("BiasAdd", domain=MICROSOFT, in_float32=True, fresh=True)
def bias_add(X: Array, bias: Array, skip: Array) -> Array:
    """The sum of the three; the bias is as long as the last axis"""
    if X.ndim != 3:
        raise ValueError(f"X has rank {X.ndim}; (N, S, C) is needed")
    check_shape("bias", bias.shape, X.shape[-1:])
    check_shape("skip", skip.shape, X.shape)
    return np.asarray(skip + (X + bias))


@kernel("GatedAdd", domain=MICROSOFT, fresh=True)
def gated_add(X: Array, Y: Array, gate: Array, gate_weight: Array | None = None) -> Array:
    """X + Y·gate, the product rounded; with gate_weight the gate of a row is σ of a projection, rounded in each step"""
    kind = X.dtype
    if not X.ndim:
        raise ValueError("X has rank 0; (..., C) is needed")
    check_shape("Y", Y.shape, X.shape)
    check_shape("gate", gate.shape, (*X.shape[:-1], 1 if gate_weight is None else gate.shape[-1]))
    if gate_weight is not None:
        check_shape("gate_weight", gate_weight.shape, (gate.shape[-1], 1))
        projected = np.asarray(np.einsum("...k,kn->...n", widened(gate), widened(gate_weight)), kind)
        gate = np.asarray(sigmoid(widened(projected)), kind)
    product = np.asarray(widened(Y) * widened(gate), kind)
    return np.asarray(widened(X) + widened(product), kind)


@kernel("HyperConnectionPreMix", domain=MICROSOFT, fresh=True)
def hyper_connection_pre_mix(
    streams: Array, pre_mix: Array, *, num_branches: int = 0, reduction_scale: float = 1.0
) -> Array:
    """The sum of the branches, each times its gates"""
    x = by_branch(streams, num_branches)
    gates = widened(pre_mix).astype(x.dtype, copy=False)
    allowed = [x.shape[:-1], (*x.shape[:-1], 1), x.shape, *([streams.shape] if num_branches else [])]
    _check_any("pre_mix", pre_mix.shape, allowed)
    gates = gates.reshape(*x.shape[:-1], -1 if gates.size else 1)
    y = sum((x[..., c, :] * gates[..., c, :] for c in range(x.shape[-2])), np.zeros_like(x[..., 0, :]))
    return np.asarray(reduction_scale * y, streams.dtype)


@kernel("HyperConnectionPostMix", domain=MICROSOFT, fresh=True)
def hyper_connection_post_mix(
    streams: Array, block_output: Array, post_mix: Array, stream_mix: Array | None = None, *, num_branches: int = 0
) -> Array:
    """Each branch of the mixed streams, plus the block's output times the gates of the branch"""
    x = by_branch(streams, num_branches)
    check_shape("block_output", block_output.shape, (*x.shape[:-2], x.shape[-1]))
    _check_any("post_mix", post_mix.shape, [x.shape[:-1], (*x.shape[:-1], 1), x.shape])
    gates = widened(post_mix).astype(x.dtype, copy=False)
    gates = gates if gates.ndim == x.ndim else gates[..., np.newaxis]
    mixed = x
    if stream_mix is not None:
        check_shape("stream_mix", stream_mix.shape, (*x.shape[:-1], x.shape[-2]))
        mixed = np.einsum("...ck,...ch->...kh", widened(stream_mix).astype(x.dtype, copy=False), x)
    y = mixed + np.einsum("...kh,...h->...kh", np.broadcast_to(gates, x.shape), widened(block_output).astype(x.dtype))
    return np.asarray(y, streams.dtype).reshape(streams.shape)


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
