"""Strategies of ONNX Runtime's attentions whose query heads share keys and values."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("GroupQueryAttention", domain=MICROSOFT, ranked=True)
def group_query_attention(d: Drawing) -> Case:
    """First prompts, prompts after a past and single tokens; caches that grow and that are longer than their tokens."""
    shared, group, size = d.integer(1, 2), d.integer(1, 2), d.pick(8, 16)
    heads = shared * group
    step = d.pick("first", "later", "token")
    batch = 1 if step == "later" else d.integer(1, 2)
    length = d.integer(1, 3) if step == "first" else d.integer(2, 3) if step == "later" else 1
    before = 0 if step == "first" else d.integer(1, 3)
    total = before + length
    room = d.pick(before, total + 1) if before else 0
    past = [d.floats((batch, shared, room, size)) if room else None for _ in range(2)]
    if d.flag():
        new = [d.floats((batch, length, (heads + 2 * shared) * size)), None, None]
    else:
        new = [d.floats((batch, length, n * size)) for n in (heads, shared, shared)]
    rotary = size == 16 and d.flag()
    caches = [d.floats((total + 2, 8)) if rotary else None for _ in range(2)]
    positions = d.integers((batch, length), 0, total - length) if rotary and d.flag() else None
    bias = d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), length, total)))
    sink = d.optional(lambda: d.floats((heads,)))
    causal = d.pick(1, 0)
    return d.case(
        *new, *past, np.full(batch, total - 1, np.int32), np.array(total, np.int32), *caches, positions, bias, sink,
        num_heads=heads,
        kv_num_heads=shared,
        causal=causal,
        do_rotary=1 if rotary else None,
        rotary_interleaved=d.pick(None, 1) if rotary else None,
        local_window_size=d.pick(None, 1, 2) if causal else None,
        scale=d.pick(None, 0.5),
        softcap=d.pick(None, 2.0),
        smooth_softmax=d.pick(None, 1),
        outputs=d.pick(1, 3),
    )  # fmt: skip
