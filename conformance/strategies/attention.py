"""Strategies of attention and of the operators around it in a transformer."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy
from refgrad.model import native


@strategy("Attention")
def attention(d: Drawing) -> Case:
    """Heads apart and packed, shared key heads, masks, caches, windows, a soft cap, and every further output."""
    batch, kv_heads = _batch(d), d.integer(1, 2)
    heads = kv_heads * d.integer(1, 2)
    width, value_width = d.integer(1, 3), d.integer(1, 3)
    queries, keys = d.integer(1, 3), d.integer(1, 3)
    q, k, v = ((batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, value_width))
    packed = d.flag()
    inputs: list[np.ndarray | None] = [d.floats((s[0], s[2], s[1] * s[3]) if packed else s) for s in (q, k, v)]
    cache = d.pick("none", "none", "past", *(["valid"] if d.opset >= 24 else []))
    past = d.integer(1, 2) if cache == "past" else 0
    mask, hiding = _mask(d, (batch, heads, queries, past + keys))
    inputs.append(mask)
    if past:
        inputs += [d.floats((batch, kv_heads, past, size)) for size in (width, value_width)]
    elif cache == "valid":
        inputs += [None, None, d.integers((batch,), 0, keys)]
    sides = ("left_window_size", "right_window_size") if d.opset >= 25 else ()
    limits: dict[str, Any] = {"is_causal": d.pick(None, 0, 1)} | {side: d.pick(None, -1, 0, 1) for side in sides}
    hiding |= cache == "valid" or limits["is_causal"] == 1 or any(limits[side] in (0, 1) for side in sides)
    scores = cache != "valid" and d.flag()
    return d.case(
        *inputs,
        fixed=["attn_mask"] if mask is not None else [],
        outputs=4 if scores else 3 if past else 1,
        q_num_heads=heads if packed else None,
        kv_num_heads=kv_heads if packed else None,
        scale=d.pick(None, 0.5, 2.0),
        softcap=d.pick(None, 0.0, 1.5),
        softmax_precision=d.pick(None, TensorProto.FLOAT, TensorProto.DOUBLE),
        qk_matmul_output_mode=d.pick(None, 0, 3, *(() if hiding else (1, 2))) if scores else None,
        **limits,
    )


def _mask(d: Drawing, scores: Shape) -> tuple[np.ndarray | None, bool]:
    """A mask, and whether it hides keys, whose scores are then −∞.

    The mask is absent, or holds truth values or numbers. It broadcasts to the scores; sometimes it covers fewer keys.
    """
    kind = d.pick("none", "bool", "float")
    if kind == "none":
        return None, False
    axes = scores[-d.integer(1, 4) :]
    shorter = axes[-1] > 1 and d.rarely()
    shape = (*(1 if d.flag() else n for n in axes[:-1]), axes[-1] - shorter)
    return d.bools(shape) if kind == "bool" else d.floats(shape), shorter or kind == "bool"


@strategy("ai.onnx.preview.FlexAttention")
def flex_attention(d: Drawing) -> Case:
    """With and without functions of the scores and of the weights."""
    batch, kv_heads, width, value_width = (d.integer(1, 2) for _ in range(4))
    queries, keys = d.integer(1, 3), d.integer(1, 3)
    q = d.floats((batch, kv_heads * d.integer(1, 2), queries, width))
    k, v = (d.floats((batch, kv_heads, keys, size)) for size in (width, value_width))
    functions: dict[str, Any] = {"score_mod": d.optional(_function), "prob_mod": d.optional(_function)}
    return d.case(q, k, v, scale=d.pick(None, 0.5), **functions)


def _function() -> GraphProto:
    return native.parse_graph("cap (float[B, H, L, S] x) => (float[B, H, L, S] y) { t = Tanh(x) y = Mul(t, x) }")


@strategy("RotaryEmbedding")
def rotary_embedding(d: Drawing) -> Case:
    """Heads apart and packed, pairs side by side and apart, all or part of each head, angles by position or by token."""
    batch, heads, tokens, pairs = _batch(d), d.integer(1, 2), d.integer(1, 3), d.integer(1, 2)
    partial = d.flag()
    width = 2 * pairs + (d.integer(0, 1) * 2 if partial else 0)
    packed = d.flag()
    x = d.floats((batch, tokens, heads * width) if packed else (batch, heads, tokens, width))
    rows = d.optional(lambda: d.integer(1, 4))
    positions = None if rows is None else d.integers((batch, tokens), 0, rows - 1)
    angles = (batch, tokens, pairs) if rows is None else (rows, pairs)
    cos, sin = d.floats(angles), d.floats(angles)
    return d.case(
        *(x, cos, sin, positions),
        fixed=["cos_cache", "sin_cache"],
        interleaved=d.optional(lambda: d.integer(0, 1)),
        num_heads=heads if packed or (d.shapes != "unknown" and d.flag()) else None,
        rotary_embedding_dim=2 * pairs if partial else None,
    )


@strategy("TensorScatter")
def tensor_scatter(d: Drawing) -> Case:
    """A cache of any rank, written along any axis except the first, from any position, sometimes around its end."""
    cache = list(d.shape(1, 3, size=3, elements=12, empty=False))
    axis = d.integer(1, len(cache))
    batch = _batch(d)
    shape = [batch, *cache]
    length = d.integer(0, shape[axis]) if d.rarely() else d.integer(1, shape[axis])
    update = [*shape[:axis], length, *shape[axis + 1 :]]
    circular = d.flag()
    most = shape[axis] - (1 if circular else length)
    first = d.optional(lambda: d.integers((batch,), 0, most))
    named = None if axis == len(shape) - 2 and d.flag() else d.pick(axis, axis - len(shape))
    return d.case(
        *(d.floats(tuple(shape)), d.floats(tuple(update)), first),
        fixed=[] if first is None else ["write_indices"],
        axis=named,
        mode="circular" if circular else d.pick(None, "linear"),
    )


@strategy("LinearAttention")
def linear_attention(d: Drawing) -> Case:
    """Every update rule, with and without a state to start from, in chunks of any length."""
    rule = d.pick("linear", "gated", "delta", "gated_delta")
    batch, kv_heads, tokens = d.integer(1, 2), d.integer(1, 2), d.integer(1, 4)
    heads, width, value_width = kv_heads * d.integer(1, 2), d.integer(1, 2), d.integer(1, 2)
    sizes = heads * width, kv_heads * width, kv_heads * value_width
    past = d.optional(lambda: d.floats((batch, kv_heads, width, value_width)))
    gates, rates = d.pick(kv_heads, kv_heads * width), d.pick(kv_heads, 1)
    return d.case(
        *(d.floats((batch, tokens, size), -1, 1) for size in sizes),
        past,
        d.floats((batch, tokens, gates), -2, 0) if "gated" in rule else None,
        d.floats((batch, tokens, rates), 0, 1) if "delta" in rule else None,
        q_num_heads=heads,
        kv_num_heads=kv_heads,
        outputs=2,
        update_rule=None if rule == "gated_delta" and d.flag() else rule,
        scale=d.pick(None, 0.5),
        chunk_size=d.pick(None, 1, 2, 3),
    )


@strategy("CausalConvWithState")
def causal_conv_with_state(d: Drawing) -> Case:
    """With and without a bias, a state to start from, and an activation."""
    batch, channels, tokens, taps = _batch(d), d.integer(1, 3), d.integer(1, 4), d.integer(1, 4)
    bias = d.optional(lambda: d.floats((channels,)))
    past = d.optional(lambda: d.floats((batch, channels, taps - 1)))
    return d.case(
        *(d.floats((batch, channels, tokens)), d.floats((channels, 1, taps)), bias, past),
        fixed=["weight"] if bias is None else ["weight", "bias"],
        outputs=2,
        activation=d.pick(None, "none", "silu", "swish"),
    )


def _batch(d: Drawing) -> int:
    return 0 if d.rarely() else d.integer(1, 2)
