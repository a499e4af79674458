"""ONNX Runtime's mixtures of experts, and what routes tokens to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from refgrad.backends.numpy.kernels.activation import gelu, sigmoid
from refgrad.backends.numpy.kernels.operands import check_shape
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
    return np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)


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
        return matrices[expert] @ x if bias is None else matrices[expert] @ x + bias[expert]

    y = np.zeros_like(tokens)
    for t, x in enumerate(tokens):
        for expert, weight in zip(*(part[t] for part in routing), strict=True):
            linear = None if layers[2][0] is None else product(3, expert, x)
            y[t] += weight * product(2, expert, activation(product(1, expert, x), linear))
    return y.reshape(input.shape)


@dataclass(frozen=True)
class _Activation:
    """The hidden units, of the result of FC1 and that of FC3, which may be in one."""

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
        """Refuse what there is not; `separate`: FC3 is given."""
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


def clamped_swiglu(gate: Array, linear: Array, alpha: float, beta: float, limit: float | None, after: int = 0) -> Array:
    """G·σ(α·G)·(L + β), where the limit clamps G, or `after` it the first product, from above, and L on both sides"""
    top = math.inf if limit is None else limit
    gate = gate if after else np.minimum(gate, top)
    activated = gate * sigmoid(np.asarray(alpha * gate))
    return np.asarray((np.minimum(activated, top) if after else activated) * (np.clip(linear, -top, top) + beta))
