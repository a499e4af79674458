"""Strategies of ONNX Runtime's mixtures of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("MoE", domain=MICROSOFT)
def moe(d: Drawing) -> Case:
    """Every activation with FC3 apart, in FC1 and absent; biases or not; tokens packed or in sequences; no two logits tie."""
    experts, units, hidden = d.integer(2, 4), d.integer(1, 3), d.integer(1, 3)
    shape = d.pick((d.integer(1, 3),), (d.integer(1, 2), d.integer(1, 2)))
    tokens = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    kind = d.pick("relu", "gelu", "silu", "swiglu", "identity", "relu2", "geglu")
    fusion = d.integer(1, 2) if kind == "geglu" or (kind == "swiglu" and d.flag()) else 0
    separate = not fusion and (kind == "swiglu" or d.flag())
    rows = {"fc1": units * (2 if fusion else 1), "fc2": hidden, "fc3": units}
    columns = {"fc1": hidden, "fc2": units, "fc3": hidden}
    layers: list[np.ndarray | None] = []
    for name in ("fc1", "fc2", *(("fc3",) if separate else ())):
        layers.append(d.normal((experts, rows[name], columns[name])))
        layers.append(d.normal((experts, rows[name])) if d.flag() else None)
    sparse = d.rarely()
    limited: dict[str, Any] = {"swiglu_limit": d.pick(None, 0.5)} if kind == "swiglu" else {}
    if limited:
        limited["swiglu_limit_after_activation"] = d.pick(None, 1)
        limited |= {"activation_alpha": d.pick(None, 0.5), "activation_beta": d.pick(None, 1.0)}
    return d.case(
        d.normal((*shape, hidden)),
        d.distinct((tokens, experts)),
        *layers,
        activation_type=kind,
        k=2 if sparse else d.integer(1, experts),
        normalize_routing_weights=None if sparse else d.pick(None, 1),
        use_sparse_mixer=1 if sparse else None,
        swiglu_fusion=fusion or None,
        **limited,
    )


@strategy("QMoE", domain=MICROSOFT)
def qmoe(d: Drawing) -> Case:
    """Every number of bits, by rows and by blocks, with zero points or without; the weights of the experts given or not."""
    experts, block = d.integer(1, 3), d.pick(0, 16)
    units, hidden = (16, 16) if block else (4, 4)
    rows = {"fc1": units, "fc2": hidden, "fc3": units}
    columns = {"fc1": hidden, "fc2": units, "fc3": hidden}
    bits = d.pick(4, 8, 2)
    named = ["fc1", "fc2", *(("fc3",) if d.flag() else ())]
    layers: list[np.ndarray | None] = [None] * 9
    points: list[np.ndarray | None] = [None] * 3
    for place, name in enumerate(named):
        groups = (rows[name], columns[name] // block) if block else (rows[name],)
        layers[3 * place] = d.integers((experts, rows[name], columns[name] * bits // 8), 0, 255, np.uint8)
        layers[3 * place + 1] = d.floats((experts, *groups), 0.125, 0.5)
        layers[3 * place + 2] = d.normal((experts, rows[name])) if d.flag() else None
        if d.flag():
            points[place] = d.integers((experts, *groups[:-1], -(-groups[-1] * bits // 8)), 0, 255, np.uint8)
    tokens = d.integer(1, 3)
    weights = d.optional(lambda: d.floats((tokens, experts), 0.5, 2))
    return d.case(
        d.normal((tokens, hidden)),
        d.distinct((tokens, experts)),
        *layers,
        *points,
        weights,
        activation_type=d.pick(None, "silu", "identity"),
        block_size=block or None,
        expert_weight_bits=None if bits == 4 else bits,
        k=d.integer(1, experts),
        normalize_routing_weights=d.pick(None, 1),
        weights_prepacked=d.pick(None, 0),
    )


@strategy("MoEGroupRouter", domain=MICROSOFT)
def moe_group_router(d: Drawing) -> Case:
    """One group or several, as many as there are or fewer; no two scores tie, with the bias or without."""
    groups, size = d.integer(1, 3), d.integer(1, 3)
    experts = groups * size
    tokens = d.integer(1, 3)
    return d.case(
        d.distinct((tokens, experts)),
        (np.arange(experts) % 5 / 64).astype(np.float32),
        top_k=d.integer(1, experts),
        n_group=groups,
        topk_group=d.integer(1, groups),
        group_topk=d.integer(1, 3),
        router_sentinel=d.pick(None, -3.0),
    )


@strategy("SwiGLU", domain=MICROSOFT)
def swiglu(d: Drawing) -> Case:
    """Both halves in one tensor or in two, with a limit that no number is at."""
    shape = d.shape(1, size=3)
    apart = d.flag()
    gate = d.floats(shape if apart else (*shape[:-1], 2 * shape[-1]), avoid=(1.0, -1.0))
    up = d.floats(shape, avoid=(1.0, -1.0)) if apart else None
    return d.case(gate, up, **_gate(d))


@strategy("RouterGateUpProj", domain=MICROSOFT)
def router_gate_up_proj(d: Drawing) -> Case:
    """Any number of logits and of hidden units."""
    shape, router, units = d.shape(1, 3, size=3), d.integer(0, 2), d.integer(1, 2)
    x, weight = d.normal(shape), d.normal((shape[-1], router + 2 * units))
    return d.case(x, weight, router_size=router, outputs=2, **_gate(d))


def _gate(d: Drawing) -> dict[str, Any]:
    return {
        "activation_alpha": d.pick(None, 0.5, 2.0),
        "activation_beta": d.pick(None, 1.0, -0.5),
        "limit": d.pick(None, 1.0),
    }
