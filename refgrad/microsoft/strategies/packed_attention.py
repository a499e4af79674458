"""Strategies of ONNX Runtime's packed sequences."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.microsoft.strategies.position import right_padded
from refgrad.protos.domains import MICROSOFT


@strategy("RemovePadding", domain=MICROSOFT, ranked=True)
def remove_padding(d: Drawing) -> Case:
    """Sequences of any lengths, none of them empty."""
    batch, length = d.integer(1, 3), d.integer(1, 3)
    count, _ = right_padded(d, batch, length)
    return d.case(d.floats((batch, length, d.integer(1, 3))), np.array(count, np.int32), outputs=4)


@strategy("RestorePadding", domain=MICROSOFT, ranked=True)
def restore_padding(d: Drawing) -> Case:
    """Tokens of sequences of any lengths."""
    count, offset = right_padded(d, d.integer(1, 3), d.integer(1, 3))
    return d.case(d.floats((sum(count), d.integer(1, 3))), offset)


@strategy("PackedAttention", "PackedMultiHeadAttention", domain=MICROSOFT, ranked=True)
def packed_attention(d: Drawing) -> Case:
    """Inputs that are projected here or were before, separate or packed; with and without a bias and an addend."""
    batch, length, heads, size, value_size = (d.integer(1, 2), d.integer(1, 3), *(d.integer(1, 2) for _ in range(3)))
    count, offset = right_padded(d, batch, length)
    ends = np.cumsum([0, *count]).astype(np.int32)
    addend = d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), length, length)))
    sizes = [heads * size, heads * size, heads * value_size]
    scale = d.pick(None, 0.5)
    if d.op_type == "PackedAttention":
        taken = d.integer(1, 3)
        three = [d.floats((sum(count), taken)), d.floats((taken, sum(sizes))), d.floats((sum(sizes),))]
        uneven = sizes if value_size != size or d.flag() else None
        return d.case(*three, offset, ends, addend, num_heads=heads, scale=scale, qkv_hidden_sizes=uneven)
    inputs: list[np.ndarray | None] = [d.floats((sum(count), n)) for n in sizes]
    if d.flag():
        inputs = [d.floats((sum(count), heads, 3, size)), None, None]
        sizes = [heads * size] * 3
    bias = d.optional(lambda: d.floats((sum(sizes),)))
    return d.case(*inputs, bias, offset, ends, addend, num_heads=heads, scale=scale)
