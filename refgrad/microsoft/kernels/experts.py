"""ONNX Runtime's mixtures of experts, and what routes tokens to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import gelu, sigmoid
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Layer = tuple[Array | None, Array | None]  # its weights, which FC3 may lack, and its bias

_JITTER = 0.01  # of the sparse mixer
_PLAIN: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: gelu(x, approximate="tanh"),
    "silu": lambda x: x * sigmoid(x),
    "identity": lambda x: x,
}
_GATED = ("swiglu", "geglu")


@kernel_of_body("MoE", domain=MICROSOFT, in_float32=True, fresh=True)
def moe(args: Arguments) -> Array:
    """Token by token, the sum of its k experts times their weights"""
    layers = (
        (args.fc1_experts_weights, args.fc1_experts_bias),
        (args.fc2_experts_weights, args.fc2_experts_bias),
        (args.fc3_experts_weights, args.fc3_experts_bias),
    )
    return _mixed(args.input, _routed(args, None), layers, _Activation.of_node(args))


@kernel_of_body("QMoE", domain=MICROSOFT, in_float32=True, fresh=True)
def qmoe(args: Arguments) -> Array:
    """MoE with weights of integers, which are dequantized first"""
    layers = [(_dequantized(args, name), getattr(args, f"{name}_experts_bias")) for name in ("fc1", "fc2", "fc3")]
    routing = _routed(args, args.router_weights)
    return _mixed(args.input, routing, (layers[0], layers[1], layers[2]), _Activation.of_node(args))


def _dequantized(args: Arguments, name: str) -> Array | None:
    """(codes − zero_points)·scales, by rows or by blocks of them; None for a product that is left out"""
    codes, scales, zero_points, own = (
        getattr(args, f"{name}_{part}") for part in ("experts_weights", "scales", "zero_points", "expert_weight_bits")
    )
    if codes is None:
        return None
    bits, block = args.expert_weight_bits if own is None else own, args.block_size or 0
    if codes.dtype != np.uint8:
        raise ValueError(f"{name}_experts_weights is {codes.dtype}; uint8 is needed")
    experts, rows, _ = codes.shape
    numbers = _unpacked(codes, bits)
    columns = numbers.shape[2]
    groups = columns // block if block else rows
    offsets: Array | int = 1 << (bits - 1)
    if zero_points is not None:
        offsets = np.repeat(_unpacked(zero_points, bits)[..., :groups].reshape(experts, rows, -1), block or columns, 2)
    return np.asarray((numbers - offsets) * np.repeat(scales.reshape(experts, rows, -1), block or columns, 2))


def _unpacked(packed: Array, bits: int) -> Array:
    """The numbers of so many bits along the last axis of bytes, the lowest bit first."""
    each = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    return np.asarray(each.astype(np.int32) @ (1 << np.arange(bits, dtype=np.int32)))


def _routed(args: Arguments, values: Array | None) -> tuple[Array, Array]:
    """The experts that each token chooses, of equal ones the first, and their weights."""
    logits, normalize = args.router_probs, args.normalize_routing_weights
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : args.k]
    if args.use_sparse_mixer:
        shares = [_sparsely_mixed(*row) for row in zip(logits, chosen, strict=True)]
        return chosen, np.array(shares, logits.dtype).reshape(chosen.shape)
    if values is None:
        values = np.exp(logits - logits.max(1, keepdims=True))
        weights = np.take_along_axis(values, chosen, 1)
        return chosen, weights / (weights if normalize else values).sum(1, keepdims=True)
    weights = np.take_along_axis(values, chosen, 1)
    return chosen, shared(weights) if normalize else weights


def shared(weights: Array, epsilon: float = 0.0) -> Array:
    """Each row divided by its sum plus ε, where that is not 0."""
    total = weights.sum(1, keepdims=True) + epsilon
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total != 0))


def _sparsely_mixed(logits: Array, chosen: Array) -> list[float]:
    """The share of either expert among those whose logits are close to its own; the second without the first"""
    weights = []
    for place, expert in enumerate(chosen):
        largest = logits[expert]
        near = largest - logits <= 2 * _JITTER * np.maximum(np.abs(logits), largest)
        near[chosen[:place]] = False
        weights.append(1 / np.exp(logits[near] - largest).sum())
    return weights


def _mixed(
    input: Array, routing: tuple[Array, Array], layers: tuple[Layer, Layer, Layer], activation: _Activation
) -> Array:
    """For each token the sum of what its experts make of it, times their weights."""
    tokens = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])

    def product(number: int, expert: int, x: Array) -> Array:
        matrices, bias = layers[number - 1]
        assert matrices is not None
        return np.asarray(matrices[expert] @ x if bias is None else matrices[expert] @ x + bias[expert])

    y = np.zeros_like(tokens)
    for t, x in enumerate(tokens):
        for expert, weight in zip(*(part[t] for part in routing), strict=True):
            linear = None if layers[2][0] is None else product(3, expert, x)
            y[t] += weight * product(2, expert, activation(product(1, expert, x), linear))
    return y.reshape(input.shape)


@dataclass(frozen=True)
class _Activation:
    """The hidden units from the results of FC1 and FC3. FC1 may hold both results."""

    kind: str
    fusion: int
    alpha: float
    beta: float
    limit: float | None
    after: int

    @classmethod
    def of_node(cls, args: Arguments) -> _Activation:
        """The activation that the attributes of a node ask for."""
        return cls(
            args.activation_type,
            args.swiglu_fusion,
            args.activation_alpha,
            args.activation_beta,
            args.swiglu_limit,
            args.swiglu_limit_after_activation,
        )

    @property
    def fused(self) -> int:
        """How many numbers of FC1 a hidden unit is made of."""
        return 2 if self.kind in _GATED and self.fusion else 1

    def __call__(self, h: Array, linear: Array | None) -> Array:
        if linear is None and self.fused == 2:
            pairs = h.reshape(-1, 2).T if self.fusion == 1 else h.reshape(2, -1)
            h, linear = pairs[0], pairs[1]
        if self.kind == "swiglu":
            assert linear is not None
            return clamped_swiglu(h, linear, self.alpha, self.beta, self.limit, self.after)
        gate = _PLAIN["gelu" if self.kind == "geglu" else self.kind](h)
        return gate if linear is None else gate * linear


def clamped_swiglu(
    gate: Array,
    linear: Array,
    alpha: float,
    beta: float,
    limit: float | None,
    after: int = 0,
    rounded: Any = None,
) -> Array:
    """G·σ(α·G)·(L + β), where the limit clamps G, or `after` it the first product, from above, and L on both sides

    :param rounded: the type that the first product is rounded to.
    """
    top = math.inf if limit is None else limit
    gate = gate if after else np.minimum(gate, top)
    activated = gate * sigmoid(np.asarray(alpha * gate))
    activated = np.minimum(activated, top) if after else activated
    if rounded is not None:
        activated = activated.astype(rounded).astype(gate.dtype)
    return np.asarray(activated * (np.clip(linear, -top, top) + beta))


@kernel_of_body("MoEGroupRouter", domain=MICROSOFT, fresh=True)
def moe_group_router(args: Arguments, *, _wanted: tuple[bool, ...]) -> tuple[Array | None, ...]:
    """Token by token, the logarithms of the scores of the experts that are chosen; or all scores, with the bias and without"""
    legacy, *full = (*_wanted, False, False)[:3]
    if full[0] != full[1] or legacy == full[0]:
        raise ValueError(f"the outputs are router_probs, or selection_scores and router_weights; wanted are {_wanted}")
    if args.logits.ndim < 2:
        raise ValueError(f"logits has rank {args.logits.ndim}; (..., experts) is needed")
    rows = args.logits.reshape(math.prod(args.logits.shape[:-1]), args.logits.shape[-1]).astype(args.expert_bias.dtype)
    if args.projection_weight is not None:
        if legacy or args.logits.ndim != 2 or not rows.shape[1] or rows.shape[1] % 256:
            raise ValueError(
                f"logits of the shape {list(args.logits.shape)} cannot be projected: (tokens, a multiple of 256) is needed, "
                "and the outputs selection_scores and router_weights"
            )
        check_shape("projection_weight", args.projection_weight.shape, (len(args.expert_bias), rows.shape[1]))
        rows = rows @ args.projection_weight.T.astype(args.expert_bias.dtype)
    experts = rows.shape[1]
    scores = sigmoid(rows)
    if not legacy:
        if args.n_group > 1:
            raise ValueError(f"selection_scores and router_weights need one group, and n_group is {args.n_group}")
        return None, scores + args.expert_bias, scores
    y = np.full(rows.shape, args.router_sentinel, args.logits.dtype)
    size = experts // args.n_group
    for token, score in enumerate(scores):
        ranks = (score + args.expert_bias).reshape(args.n_group, size)
        totals = [np.sort(group)[::-1][: args.group_topk].sum() for group in ranks]
        best = np.argsort(-np.array(totals), kind="stable")[: args.topk_group]
        within = [group * size + k for group in sorted(best) for k in range(size)]
        chosen = sorted(within, key=lambda expert: -ranks.flat[expert])[: args.top_k]
        y[token, chosen] = np.log(np.maximum(score[chosen], 1e-20))
    return y, None, None


@kernel_of_body("SwiGLU", domain=MICROSOFT, fresh=True)
def swiglu(args: Arguments) -> Array:
    """The clamped activation of two halves, in one tensor or in two"""
    gate, up = args.gate, args.up
    if up is None:
        if not gate.ndim or gate.shape[-1] % 2:
            raise ValueError(f"gate has the shape {list(gate.shape)}; without up its last axis has two halves")
        gate, up = gate[..., : gate.shape[-1] // 2], gate[..., gate.shape[-1] // 2 :]
    check_shape("up", up.shape, gate.shape)
    kind = gate.dtype.type if args.round_activation else None
    y = clamped_swiglu(
        *(widened(gate), widened(up), args.activation_alpha, args.activation_beta),
        args.limit if args.limit > 0 else None,
        rounded=kind,
    )
    return y.astype(gate.dtype, copy=False)


@kernel_of_body("RouterGateUpProj", domain=MICROSOFT, fresh=True)
def router_gate_up_proj(args: Arguments) -> tuple[Array, Array]:
    """The router's logits, and the activation of the gate and the up half behind them"""
    if (
        args.W.ndim != 2
        or args.X.shape[-1:] != args.W.shape[:1]
        or args.router_size > args.W.shape[1]
        or (args.W.shape[1] - args.router_size) % 2
    ):
        raise ValueError(
            f"X {list(args.X.shape)} and W {list(args.W.shape)} do not fit router_size={args.router_size}: "
            "(..., K) and (K, router_size + 2 * inter) are needed"
        )
    y = np.einsum("...k,kn->...n", widened(args.X), widened(args.W)).astype(args.X.dtype, copy=False)
    options: dict[str, Any] = {
        "activation_alpha": args.activation_alpha,
        "activation_beta": args.activation_beta,
        "limit": args.limit,
    }
    return y[..., : args.router_size].copy(), swiglu(y[..., args.router_size :], **options)
