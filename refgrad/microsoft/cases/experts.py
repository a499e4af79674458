"""Cases of ONNX Runtime's mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, drawer

LOGITS = array([[0.3, 1.2, -0.4, 0.8], [1.5, -0.7, 0.9, 0.1], [0.2, 0.6, -0.3, 1.4]])  # no two of a row are close
CLOSE = array(
    [[1.5, 1.48, 0.7, 0.2], [-0.9, 1.0, 1.3, 0.99], [0.4, -0.8, 1.1, -1.3]]
)  # or so close that they are mixed

NEGATIVE = array(
    [[-1.0, -1.015, -2.1, -3.0], [-2.5, -1.5, -1.48, -0.7], [3.0, 2.96, 2.7, 1.1]]
)  # close as such numbers are
BARELY = array([[2.0, 1.9598, 0.5, -1.0], [0.3, -0.5, 1.5, 1.46985], [0.2, 1.4, -0.3, 0.6]])  # by 0.5% not close


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer(3)
    tokens, hidden, units, experts = 3, 4, 2, 4
    for shapes in SHAPES:
        x = floats(tokens, hidden)
        first, second = floats(experts, units, hidden), floats(experts, hidden, units)
        biases = floats(experts, units), floats(experts, hidden)
        third = floats(experts, units, hidden), floats(experts, units)
        both = floats(experts, 2 * units, hidden), floats(experts, 2 * units)
        top: dict[str, Any] = {"k": 2, "normalize_routing_weights": 1, "shapes": shapes}
        yield case("MoE", x, LOGITS, first, None, second, shapes=shapes)
        yield case("MoE", x, LOGITS, first, biases[0], second, biases[1], shapes=shapes, k=3, activation_type="gelu")
        yield case("MoE", x[np.newaxis], LOGITS, first, biases[0], second, None, activation_type="silu", **top)
        yield case("MoE", x, CLOSE, first, None, second, biases[1], shapes=shapes, k=2, use_sparse_mixer=1)
        yield case("MoE", x, LOGITS, *both, second, biases[1], activation_type="swiglu", swiglu_fusion=1, **top)
        if shapes != "static":
            continue
        yield case("MoE", x, NEGATIVE, first, None, second, biases[1], k=2, use_sparse_mixer=1)
        yield case("MoE", x, BARELY, first, None, second, None, k=2, use_sparse_mixer=1, wrt=("input",))
        for kind in ("identity", "relu2"):
            yield case("MoE", x, LOGITS, first, biases[0], second, None, activation_type=kind, **top)
        for kind in ("relu", "silu"):
            yield case("MoE", x, LOGITS, first, None, second, None, *third, activation_type=kind, **top)
        yield case("MoE", x, LOGITS, first, biases[0], second, None, third[0], activation_type="gelu", **top)
        limited: dict[str, Any] = {"activation_alpha": 1.7, "activation_beta": 0.5, "swiglu_limit": 0.25}
        for fusion in (1, 2):
            yield case("MoE", x, LOGITS, *both, second, None, activation_type="geglu", swiglu_fusion=fusion, **top)
            gated: dict[str, Any] = {"activation_type": "swiglu", "swiglu_fusion": fusion}
            yield case("MoE", x, LOGITS, both[0], None, second, None, **gated, **limited, **top)
            yield case(
                "MoE", x, LOGITS, *both, second, None, swiglu_limit_after_activation=1, **gated, **limited, **top
            )
        yield case("MoE", x, LOGITS, first, None, second, None, *third, activation_type="swiglu", **limited, **top)
        yield case("MoE", floats(0, hidden), floats(0, experts), first, None, second)
    for shapes in SHAPES:
        yield from _quantized(floats, shapes)
        yield from _routers(shapes)
        yield from _gated(floats, shapes)


def _quantized(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    """Cases of QMoE: of every number of bits, by rows and by blocks, with zero points and without."""
    random = np.random.default_rng(5)
    experts = 3
    first: tuple[np.ndarray | None, ...]
    second: tuple[np.ndarray | None, ...]
    points: tuple[np.ndarray, ...]
    third: tuple[np.ndarray | None, ...]

    def codes(*shape: int, bits: int = 4) -> np.ndarray:
        """Bytes. With 8 bits they are as near to each other as numbers of 4 bits, for the sake of differences."""
        low, high = (120, 136) if bits == 8 else (0, 256)
        return random.integers(low, high, shape).astype(np.uint8)

    def scales(*shape: int) -> np.ndarray:
        return np.asarray(0.02 + 0.04 * np.abs(floats(*shape)), np.float32)

    logits = LOGITS[:2, :experts]
    top: dict[str, Any] = {"k": 2, "normalize_routing_weights": 1, "shapes": shapes}
    for bits in (4, 8, 2) if shapes == "static" else (4,):
        few: dict[str, Any] = top | ({} if bits == 4 else {"expert_weight_bits": bits})
        per = 8 // bits
        x, rows = floats(2, 8), scales(experts, 4)
        bytes_ = codes(experts, 4, 8 // per, bits=bits), codes(experts, 8, 4 // per, bits=bits)
        narrow = codes(experts, -(-4 * bits // 8), bits=bits), codes(experts, -(-8 * bits // 8), bits=bits)
        first, second = (bytes_[0], rows, None), (bytes_[1], scales(experts, 8), None)
        yield case("QMoE", x, logits, *first, *second, **few)
        yield case("QMoE", x, logits, *first, *second, None, None, None, *narrow, activation_type="gelu", **few)
        x, bias = floats(1, 2, 32), floats(experts, 32)
        blocks = codes(experts, 16, 32 // per, bits=bits), scales(experts, 16, 2), None
        back = codes(experts, 32, 16 // per, bits=bits), scales(experts, 32, 1), bias
        points = codes(experts, 16, -(-2 * bits // 8), bits=bits), codes(experts, 32, 1, bits=bits)
        yield case("QMoE", x, logits, *blocks, *back, activation_type="silu", block_size=16, **few)
        yield case(
            *("QMoE", x, logits, *blocks, *back, None, None, None, *points),
            **few | {"activation_type": "identity", "block_size": 16},
        )
    x = floats(2, 8)
    first, second = (
        (codes(experts, 4, 4), scales(experts, 4), floats(experts, 4)),
        (codes(experts, 8, 2), scales(experts, 8)),
    )
    given = np.abs(floats(2, experts))
    absent = [None] * 7
    yield case("QMoE", x, logits, *first, *second, *absent, given, activation_type="silu", **top)
    if shapes != "static":
        return
    gated: dict[str, Any] = {"activation_type": "swiglu", "activation_alpha": 1.7, "activation_beta": 0.5}
    yield case("QMoE", x, logits, *first, *second, *absent, given, activation_type="silu", k=2, weights_prepacked=0)
    yield case("QMoE", x, logits, *first, *second, activation_type="relu2", k=2, accuracy_level=4)
    mixed: dict[str, Any] = {"fc1_expert_weight_bits": 4, "fc2_expert_weight_bits": 4, "expert_weight_bits": 8}
    third = codes(experts, 4, 8, bits=8), scales(experts, 4), floats(experts, 4), None, None, codes(experts, 4, bits=8)
    yield case("QMoE", x, logits, *first, *second, None, *third, **gated, **mixed, **top)
    mixed = {"fc3_expert_weight_bits": 8, "swiglu_limit": 1.5}
    yield case("QMoE", x, logits, *first, *second, None, *third, **gated, **mixed, **top)
    both = codes(experts, 8, 4), scales(experts, 8), floats(experts, 8)
    for fusion in (1, 2):
        for after in (0, 1):
            limited: dict[str, Any] = {"swiglu_limit": 0.3, "swiglu_limit_after_activation": after}
            yield case("QMoE", x, logits, *both, *second, swiglu_fusion=fusion, **gated, **limited, **top)
        yield case("QMoE", x, logits, *both, *second, activation_type="geglu", swiglu_fusion=fusion, **top)
    for close in (CLOSE[:2], NEGATIVE[::2]):
        yield case("QMoE", x, close[:, :experts], *first, *second, k=2, use_sparse_mixer=1)
    yield case("QMoE", x, BARELY[:2, :experts], *first, *second, k=2, use_sparse_mixer=1, wrt=("input",))
    constant = [f"fc{layer}_{part}" for layer in (1, 2, 3) for part in ("experts_weights", "zero_points")]
    points = codes(experts, 2), codes(experts, 4), codes(experts, 2)
    third = codes(experts, 4, 4), scales(experts, 4), None
    without = array([[0.5, -0.5, 0.2], [0.3, 0.1, 0.4]])  # the weights of the first token's experts add up to 0
    settings: dict[str, Any] = {"activation_type": "silu", "k": 2, "normalize_routing_weights": 1}
    settings |= {"constant": constant, "wrt": ("input", "fc1_scales", "fc1_experts_bias", "fc2_scales", "fc3_scales")}
    yield case("QMoE", x, logits, *first, *second, None, *third, *points, without, **settings)
    yield case("QMoE", x, logits, *first, *second, None, *third, *points, activation_type="silu", k=2)
    yield case("QMoE", floats(0, 8), floats(0, experts), *first, *second)


# Two tokens, eight experts: neither the sums with the bias nor the sums of the groups are close.
SCORES = array([[0.3, 1.9, -0.4, 0.9, -1.6, 0.1, 1.2, -0.8], [-0.6, 0.2, 1.4, -1.1, 0.8, 2.0, -0.2, 0.5]])
BIAS = array([0.05, -0.1, 0.15, 0.0, 0.3, -0.25, 0.1, 0.2])


def _routers(shapes: str) -> Iterator[Case]:
    """Cases of MoEGroupRouter: with one group and with several, and the scores of all experts."""
    router = "MoEGroupRouter"
    yield case(router, SCORES, BIAS, shapes=shapes, top_k=3)
    groups: dict[str, Any] = {"n_group": 4, "topk_group": 2, "router_sentinel": -5.0}
    yield case(router, SCORES[np.newaxis], BIAS, shapes=shapes, top_k=2, **groups)
    yield case(router, SCORES, BIAS, shapes=shapes, top_k=2, outputs=(1, 2))
    if shapes != "static":
        return
    yield case(router, SCORES, BIAS, top_k=3, **groups | {"topk_group": 1, "group_topk": 1})
    yield case(router, SCORES, BIAS, top_k=2, n_group=2, group_topk=9)
    yield case(router, SCORES[:0], BIAS, top_k=1, n_group=2)
    random = np.random.default_rng(0)
    x, weight = ((random.standard_normal((rows, 256)) / 16).astype(np.float32) for rows in (2, 8))
    yield case(router, x, BIAS, weight, top_k=2, outputs=(1, 2))


def _gated(floats: Callable[..., np.ndarray], shapes: str) -> Iterator[Case]:
    """Cases of SwiGLU and RouterGateUpProj: the halves in one and in two, with a limit and without."""
    options: dict[str, Any] = {"activation_alpha": 1.7, "activation_beta": 0.5, "limit": 0.45}
    x, up = floats(2, 3, 4), floats(2, 3, 4)
    yield case("SwiGLU", x, shapes=shapes)
    yield case("SwiGLU", x, up, shapes=shapes, **options)
    yield case("SwiGLU", floats(6), shapes=shapes, round_activation=1, **options)
    yield case("SwiGLU", floats(0, 4), floats(0, 4), shapes=shapes, limit=-1.0)
    yield case("RouterGateUpProj", x, floats(4, 7), shapes=shapes, outputs=2, router_size=3)
    yield case("RouterGateUpProj", floats(2, 4), floats(4, 7), shapes=shapes, outputs=2, router_size=1, **options)
    yield case("RouterGateUpProj", floats(4), floats(4, 7), shapes=shapes, outputs=2, router_size=3, **options)
    yield case("RouterGateUpProj", floats(0, 4), floats(4, 7), shapes=shapes, outputs=2, router_size=3)
