"""Attention and rotary embedding."""

from __future__ import annotations

from typing import Any

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template(1.2, 23)
def _attention(s: GraphScope) -> None:
    batch, heads, queries, keys, size = 1, s.rng.choice((1, 2)), s.rng.choice((1, 2, 3)), s.rng.choice((2, 3)), 2
    groups = heads if s.chance(0.7) else 1
    given: dict[str, Any] = {}
    if s.chance(0.5):
        q, k, v = (
            s.like((batch, heads, queries, size)),
            s.like((batch, groups, keys, size)),
            s.like((batch, groups, keys, size)),
        )
    else:
        given |= {"q_num_heads": heads, "kv_num_heads": groups}
        q, k, v = (s.like((batch, n, h * size)) for n, h in ((queries, heads), (keys, groups), (keys, groups)))
    mask = s.like((queries, keys)) if s.chance(0.4) else None
    s.add(
        "Attention",
        q,
        k,
        v,
        mask,
        is_causal=s.rng.choice((None, 1)),
        scale=s.rng.choice((None, 0.6)),
        softcap=s.rng.choice((None, None, 2.0)),
        **given,
    )


@template(0.6, 23)
def _rotary(s: GraphScope) -> None:
    x = s.like((1, 2, 3, 4))
    half = 2
    s.add("RotaryEmbedding", x, s.like((1, 3, half)), s.like((1, 3, half)), interleaved=s.rng.choice((None, 1)))
