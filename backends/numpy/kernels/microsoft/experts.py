"""ONNX Runtime's mixtures of experts, and what routes tokens to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import gelu, sigmoid
from refgrad.backends.numpy.kernels.operands import check_shape, widened
from refgrad.backends.numpy.registry import kernel
from refgrad.errors import choices
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


@kernel("MoE", domain=MICROSOFT, in_float32=True, fresh=True)
def moe(
    input: Array,
    router_probs: Array,
    fc1_experts_weights: Array,
    fc1_experts_bias: Array | None,
    fc2_experts_weights: Array,
    fc2_experts_bias: Array | None = None,
    fc3_experts_weights: Array | None = None,
    fc3_experts_bias: Array | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
) -> Array:
    """Token by token, the sum of its k experts times their weights"""
    activation = _Activation(
        activation_type,
        swiglu_fusion,
        activation_alpha,
        activation_beta,
        swiglu_limit,
        swiglu_limit_after_activation,
    )
    layers = (
        (fc1_experts_weights, fc1_experts_bias),
        (fc2_experts_weights, fc2_experts_bias),
        (fc3_experts_weights, fc3_experts_bias),
    )
    routing = _routed(router_probs, k, normalize_routing_weights, use_sparse_mixer, None)
    return _mixed(input, router_probs, routing, layers, activation)


@kernel("QMoE", domain=MICROSOFT, in_float32=True, fresh=True)
def qmoe(
    input: Array,
    router_probs: Array,
    fc1_experts_weights: Array,
    fc1_scales: Array | None,
    fc1_experts_bias: Array | None,
    fc2_experts_weights: Array,
    fc2_scales: Array | None = None,
    fc2_experts_bias: Array | None = None,
    fc3_experts_weights: Array | None = None,
    fc3_scales: Array | None = None,
    fc3_experts_bias: Array | None = None,
    fc1_zero_points: Array | None = None,
    fc2_zero_points: Array | None = None,
    fc3_zero_points: Array | None = None,
    router_weights: Array | None = None,
    *,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
) -> Array:
    """MoE with weights of integers, which are dequantized first"""
    if quant_type != "int" or weights_prepacked not in (-1, 0):
        raise ValueError(
            f"quant_type={quant_type!r} with weights_prepacked={weights_prepacked} is not supported; "
            "there is 'int' with -1 or 0, the weights in rows"
        )
    block = block_size or 0
    if block and (block < 16 or block & (block - 1)):
        raise ValueError(f"block_size={block} is not valid; a block has 16 weights or 32, 64, 128, ...")
    activation = _Activation(
        activation_type,
        swiglu_fusion,
        activation_alpha,
        activation_beta,
        swiglu_limit,
        swiglu_limit_after_activation,
    )
    layers = []
    for name, codes, scales, zero_points, bias, bits in (
        ("fc1", fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_experts_bias, fc1_expert_weight_bits),
        ("fc2", fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_experts_bias, fc2_expert_weight_bits),
        ("fc3", fc3_experts_weights, fc3_scales, fc3_zero_points, fc3_experts_bias, fc3_expert_weight_bits),
    ):
        weights = None
        if codes is not None:
            width = expert_weight_bits if bits is None else bits
            weights = _dequantized(name, codes, scales, zero_points, width, block)
        layers.append((weights, bias))
    routing = _routed(router_probs, k, normalize_routing_weights, use_sparse_mixer, router_weights)
    return _mixed(input, router_probs, routing, (layers[0], layers[1], layers[2]), activation)


def _dequantized(
    name: str, codes: Array, scales: Array | None, zero_points: Array | None, bits: int, block: int
) -> Array:
    """(codes − zero_points)·scales, by rows or by blocks of them"""
    if bits not in (2, 4, 8):
        raise ValueError(f"{name}_expert_weight_bits is {bits}; there are 2, 4 and 8")
    if scales is None:
        raise ValueError(f"{name}_scales is left out; weights of integers need it")
    if codes.dtype != np.uint8 or codes.ndim != 3:
        raise ValueError(f"{name}_experts_weights is {codes.dtype}{list(codes.shape)}; uint8 of three axes is needed")
    experts, rows, _ = codes.shape
    numbers = _unpacked(codes, bits)
    columns = numbers.shape[2]
    if block and columns % block:
        raise ValueError(f"{name}_experts_weights has rows of {columns}, which blocks of {block} do not divide")
    grouped = (experts, rows, columns // block) if block else (experts, rows)
    check_shape(f"{name}_scales", scales.shape, grouped)
    offsets: Array | int = 1 << (bits - 1)
    if zero_points is not None:
        check_shape(f"{name}_zero_points", zero_points.shape, (*grouped[:-1], -(-grouped[-1] * bits // 8)))
        offsets = np.repeat(
            _unpacked(zero_points, bits)[..., : grouped[-1]].reshape(experts, rows, -1), block or columns, 2
        )
    return np.asarray((numbers - offsets) * np.repeat(scales.reshape(experts, rows, -1), block or columns, 2))


def _unpacked(packed: Array, bits: int) -> Array:
    """The numbers of so many bits along the last axis of bytes, the lowest bit first."""
    each = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    return np.asarray(each.astype(np.int32) @ (1 << np.arange(bits, dtype=np.int32)))


def _routed(logits: Array, k: int, normalize: int, sparse: int, values: Array | None) -> tuple[Array, Array]:
    """The experts that each token chooses, of equal ones the first, and their weights."""
    if logits.ndim != 2:
        raise ValueError(f"router_probs has rank {logits.ndim}; (tokens, experts) is needed")
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"k={k}: a token chooses 1 to {experts} of the {experts} experts")
    if sparse and (k != 2 or normalize or values is not None):
        raise ValueError(
            f"use_sparse_mixer=1 with k={k} and normalize_routing_weights={normalize}: "
            "the sparse mixer chooses 2 experts, and its weights are neither normalized nor given"
        )
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    if sparse:
        shares = [_sparsely_mixed(*row) for row in zip(logits, chosen, strict=True)]
        return chosen, np.array(shares, logits.dtype).reshape(chosen.shape)
    if values is None:
        values = np.exp(logits - logits.max(1, keepdims=True))
        weights = np.take_along_axis(values, chosen, 1)
        return chosen, weights / (weights if normalize else values).sum(1, keepdims=True)
    check_shape("router_weights", values.shape, logits.shape)
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
    input: Array,
    logits: Array,
    routing: tuple[Array, Array],
    layers: tuple[Layer, Layer, Layer],
    activation: _Activation,
) -> Array:
    """For each token the sum of what its experts make of it, times their weights."""
    if input.ndim not in (2, 3):
        raise ValueError(f"input has rank {input.ndim}; (tokens, hidden) or (batch, sequence, hidden) is needed")
    tokens = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    experts, hidden = logits.shape[1], tokens.shape[1]
    check_shape("router_probs", logits.shape, (len(tokens), experts))
    activation.check(layers[2][0] is not None)
    second = layers[1][0]
    assert second is not None
    if second.ndim != 3 or not second.shape[2]:
        raise ValueError(
            f"fc2_experts_weights has the shape {list(second.shape)}; (experts, hidden, units) is needed, units positive"
        )
    units = second.shape[2]
    sizes = (activation.fused * units, hidden), (hidden, units), (units, hidden)
    for number, ((matrices, bias), size) in enumerate(zip(layers, sizes, strict=True), 1):
        if matrices is not None:
            check_shape(f"fc{number}_experts_weights", matrices.shape, (experts, *size))
        if bias is not None:
            check_shape(f"fc{number}_experts_bias", bias.shape, (experts, size[0]))

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

    @property
    def fused(self) -> int:
        """How many numbers of FC1 a hidden unit is made of."""
        return 2 if self.kind in _GATED and self.fusion else 1

    def check(self, separate: bool) -> None:
        """Refuse an activation or a fusion that is not known; `separate`: FC3 is given."""
        known = (*_PLAIN, *_GATED)
        if self.kind not in known:
            raise ValueError(f"activation_type={self.kind!r} is not known; there are {choices(known)}")
        if self.fusion not in (0, 1, 2):
            raise ValueError(f"swiglu_fusion={self.fusion} is not known; there are 0, 1 and 2")
        if self.after and self.kind != "swiglu":
            raise ValueError(f"swiglu_limit_after_activation=1 needs activation_type='swiglu', and not {self.kind!r}")
        apart = self.kind == "swiglu" and not self.fusion
        if self.kind in _GATED and (separate != apart or (self.kind == "geglu" and not self.fusion)):
            raise ValueError(
                f"activation_type={self.kind!r} with swiglu_fusion={self.fusion} and fc3_experts_weights "
                f"{'given' if separate else 'left out'}: the second product is in FC1 (swiglu_fusion=1 or 2), "
                "or in FC3 (swiglu alone, swiglu_fusion=0)"
            )

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


@kernel("MoEGroupRouter", domain=MICROSOFT, fresh=True)
def moe_group_router(
    logits: Array,
    expert_bias: Array,
    projection_weight: Array | None = None,
    *,
    group_topk: int = 2,
    n_group: int = 1,
    router_sentinel: float = -10000.0,
    top_k: int,
    topk_group: int = 1,
    _wanted: tuple[bool, ...],
) -> tuple[Array | None, ...]:
    """Token by token, the logarithms of the scores of the experts that are chosen; or all scores, with the bias and without"""
    legacy, *full = (*_wanted, False, False)[:3]
    if full[0] != full[1] or legacy == full[0]:
        raise ValueError(f"the outputs are router_probs, or selection_scores and router_weights; wanted are {_wanted}")
    if logits.ndim < 2:
        raise ValueError(f"logits has rank {logits.ndim}; (..., experts) is needed")
    rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1]).astype(expert_bias.dtype)
    if projection_weight is not None:
        if legacy or logits.ndim != 2 or not rows.shape[1] or rows.shape[1] % 256:
            raise ValueError(
                f"logits of the shape {list(logits.shape)} cannot be projected: (tokens, a multiple of 256) is needed, "
                "and the outputs selection_scores and router_weights"
            )
        check_shape("projection_weight", projection_weight.shape, (len(expert_bias), rows.shape[1]))
        rows = rows @ projection_weight.T.astype(expert_bias.dtype)
    experts = rows.shape[1]
    check_shape("expert_bias", expert_bias.shape, (experts,))
    if (
        n_group < 1
        or experts % n_group
        or group_topk < 1
        or not 1 <= topk_group <= n_group
        or not 1 <= top_k <= experts
    ):
        raise ValueError(
            f"{experts} experts do not fit n_group={n_group}, topk_group={topk_group}, group_topk={group_topk} and "
            f"top_k={top_k}: the groups divide the experts, topk_group is 1 to n_group, top_k is 1 to {experts}"
        )
    scores = sigmoid(rows)
    if not legacy:
        if n_group > 1:
            raise ValueError(f"selection_scores and router_weights need one group, and n_group is {n_group}")
        return None, scores + expert_bias, scores
    y = np.full(rows.shape, router_sentinel, logits.dtype)
    size = experts // n_group
    for token, score in enumerate(scores):
        ranks = (score + expert_bias).reshape(n_group, size)
        totals = [np.sort(group)[::-1][:group_topk].sum() for group in ranks]
        best = np.argsort(-np.array(totals), kind="stable")[:topk_group]
        within = [group * size + k for group in sorted(best) for k in range(size)]
        chosen = sorted(within, key=lambda expert: -ranks.flat[expert])[:top_k]
        y[token, chosen] = np.log(np.maximum(score[chosen], 1e-20))
    return y, None, None


@kernel("SwiGLU", domain=MICROSOFT, fresh=True)
def swiglu(
    gate: Array,
    up: Array | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    round_activation: int = 0,
) -> Array:
    """The clamped activation of two halves, in one tensor or in two"""
    if up is None:
        if not gate.ndim or gate.shape[-1] % 2:
            raise ValueError(f"gate has the shape {list(gate.shape)}; without up its last axis has two halves")
        gate, up = gate[..., : gate.shape[-1] // 2], gate[..., gate.shape[-1] // 2 :]
    check_shape("up", up.shape, gate.shape)
    kind = gate.dtype.type if round_activation else None
    y = clamped_swiglu(
        *(widened(gate), widened(up), activation_alpha, activation_beta), limit if limit > 0 else None, rounded=kind
    )
    return y.astype(gate.dtype, copy=False)


@kernel("RouterGateUpProj", domain=MICROSOFT, fresh=True)
def router_gate_up_proj(
    X: Array,
    W: Array,
    *,
    activation: str = "swiglu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    router_size: int,
) -> tuple[Array, Array]:
    """The router's logits, and the activation of the gate and the up half behind them"""
    if activation != "swiglu":
        raise ValueError(f"activation {activation!r} is not known; there is 'swiglu'")
    if (
        W.ndim != 2
        or X.shape[-1:] != W.shape[:1]
        or not 0 <= router_size <= W.shape[1]
        or (W.shape[1] - router_size) % 2
    ):
        raise ValueError(
            f"X {list(X.shape)} and W {list(W.shape)} do not fit router_size={router_size}: "
            "(..., K) and (K, router_size + 2 * inter) are needed"
        )
    y = np.einsum("...k,kn->...n", widened(X), widened(W)).astype(X.dtype, copy=False)
    options: dict[str, Any] = {"activation_alpha": activation_alpha, "activation_beta": activation_beta, "limit": limit}
    return y[..., :router_size].copy(), swiglu(y[..., router_size:], **options)
