"""Strategies of ONNX Runtime's attentions."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named


@strategy(*named("MultiHeadAttention"), ranked=True)
def multi_head_attention(d: Drawing) -> Case:
    """Keys and values apart, already projected, and packed; a bias, a mask, an addend and a past."""
    batch, heads, queries, width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    form = d.pick("apart", "projected", "two", "three")
    keys = queries if form == "three" else d.integer(1, 3)
    value_width = d.integer(1, 3) if form == "apart" else width
    past = d.integer(1, 2) if form == "apart" and d.flag() else 0
    inputs: list[np.ndarray | None] = [d.floats((batch, queries, heads * width)), None, None]
    if form == "apart":
        inputs[1:] = (d.floats((batch, keys, heads * size)) for size in (width, value_width))
    elif form == "projected":
        inputs[1:] = (d.floats((batch, heads, keys, width)) for _ in range(2))
    elif form == "two":
        inputs[1] = d.floats((batch, keys, heads, 2, width))
    else:
        inputs[0] = d.floats((batch, queries, heads, 3, width))
    size = heads * (2 * width + value_width)
    inputs.append(d.floats((size,)) if form != "projected" and d.flag() else None)
    inputs += _hidden(d, batch, heads, queries, past + keys)
    if past:
        inputs += [d.floats((batch, heads, past, of)) for of in (width, value_width)]
    outputs = 3 if past or (form == "apart" and d.flag()) else 1
    return d.case(*inputs, num_heads=heads, outputs=outputs, **_settings(d, past + keys >= queries))


@strategy(*named("Attention"), ranked=True)
def attention(d: Drawing) -> Case:
    """Values as wide as the keys or not, with and without a bias, a mask, an addend and a past."""
    batch, heads, length, width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 2)
    past = d.optional(lambda: d.integer(1, 2)) or 0
    value_width = width if past else d.integer(1, 2)
    sizes = [heads * width, heads * width, heads * value_width]
    taken = d.integer(1, 3)
    mask, addend = _hidden(d, batch, heads, length, past + length)
    return d.case(
        d.floats((batch, length, taken)),
        d.floats((taken, sum(sizes))),
        d.optional(lambda: d.floats((sum(sizes),))),
        mask,
        d.floats((2, batch, heads, past, width)) if past else None,
        addend,
        num_heads=heads,
        qkv_hidden_sizes=sizes if value_width != width or d.flag() else None,
        outputs=2 if past or (value_width == width and d.flag()) else 1,
        **_settings(d, True),
    )


def _hidden(d: Drawing, batch: int, heads: int, queries: int, keys: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A mask of keys, one for all queries or one for each, and an addend of the scores; either may be absent."""
    shape = d.pick((batch, keys), (batch, queries, keys))
    mask = d.optional(lambda: d.integers(shape, 0, 1, np.int32))
    return mask, d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), queries, keys)))


def _settings(d: Drawing, ordered: bool) -> dict[str, Any]:
    """The attributes of both attentions. `ordered`: there are at least as many keys as queries, so each query sees a key."""
    return {
        "scale": d.pick(None, 0.5),
        "mask_filter_value": d.pick(None, -1.5),
        "unidirectional": d.pick(None, 0, 1) if ordered else None,
    }
