"""Strategies of ONNX Runtime's rotary embeddings and position biases."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("RotaryEmbedding", "MRotaryEmbedding", domain=MICROSOFT, ranked=True)
def rotary_embedding(d: Drawing) -> Case:
    """Heads apart or not, turned whole or in part, with a position of each token, of the first, or three of each."""
    batch, length, heads, pairs, positions = (d.integer(1, most) for most in (2, 3, 2, 3, 4))
    positions = max(positions, length)
    kept = 2 * d.integer(0, 1)
    size = 2 * pairs + kept
    apart = d.flag()
    x = d.floats((batch, heads, length, size) if apart else (batch, length, heads * size))
    attributes: dict[str, Any] = {
        "interleaved": d.pick(None, 0, 1),
        "is_packed_batching": d.pick(None, 0, 1),
        "scale": d.pick(None, 0.5),
        "num_heads": heads if kept or (d.op_type == "MRotaryEmbedding" and not apart) or d.flag() else None,
        "rotary_embedding_dim": 2 * pairs if kept else None,
    }
    if d.op_type == "MRotaryEmbedding":
        shape: tuple[int, ...] = (3, batch, length)
        section = [d.integer(0, pairs)]
        section.append(d.integer(0, pairs - section[0]))
        attributes |= {"mrope_section": [*section, pairs - sum(section)], "mrope_layout": d.pick(None, 0, 1)}
    else:
        shape = d.pick((batch, length), (1,))
    ids = d.integers(shape, 0, positions - length if shape == (1,) else positions - 1)
    return d.case(x, ids, d.floats((positions, pairs)), d.floats((positions, pairs)), **attributes)


@strategy("GemmaRotaryEmbedding", domain=MICROSOFT)
def gemma_rotary_embedding(d: Drawing) -> Case:
    """Any number of heads."""
    batch, heads, length, size = (d.integer(1, 3) for _ in range(4))
    states = [d.floats((batch, heads, length, size)) for _ in range(4)]
    return d.case(d.floats((batch, length, size)), *states, outputs=2)


@strategy("RMSNormRotary", domain=MICROSOFT, ranked=True)
def rms_norm_rotary(d: Drawing) -> Case:
    """A part of each head or the whole, in either of the short types."""
    batch, length, heads, pairs = d.integer(1, 2), d.integer(1, 3), d.integer(1, 2), d.integer(1, 2)
    start, kept, behind = d.integer(0, 1), d.integer(0, 1), d.integer(0, 1)
    width = 2 * pairs + kept
    x, scale = d.floats((batch, length, heads, start + width + behind)), d.floats((width,)).astype(np.float32)
    caches = [d.floats((6, pairs)).astype(np.float32) for _ in range(2)]
    return d.case(
        x.astype(d.pick(np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))),
        scale,
        d.integers(d.pick((batch, length), (1,)), 0, 0),
        *caches,
        rotary_embedding_dim=2 * pairs,
        input_start=start,
        input_width=width,
        flatten_batch=d.pick(None, 0, 1),
        output_fp16=d.pick(None, 0, 1),
        outputs=d.pick(1, 2),
    )


@strategy("RelativePositionBias", domain=MICROSOFT)
def relative_position_bias(d: Drawing) -> Case:
    """Buckets for both directions or one; the distances reach the last of them or not."""
    both = d.flag()
    table = d.floats((d.integer(4, 8) if both else d.integer(2, 6), d.integer(1, 3)))
    length = np.array([d.integer(1, 6)])
    return d.case(table, length, length, max_distance=d.integer(4, 9), is_bidirectional=int(both))


@strategy("GatedRelativePositionBias", domain=MICROSOFT, ranked=True)
def gated_relative_position_bias(d: Drawing) -> Case:
    """With all tokens in their places, or with the tokens of right-padded sequences behind one another."""
    batch, length, heads, size, half = (
        d.integer(1, 2),
        d.integer(1, 3),
        d.integer(1, 2),
        d.integer(1, 3),
        d.integer(1, 2),
    )
    rest = ((heads * size,), (1, heads, length, length), (size, 2 * half), (2 * half,), (1, heads, 1, 1))
    inputs: list[np.ndarray | None] = [d.floats((batch, length, heads * size)), *map(d.floats, rest)]
    if d.flag():
        count, offset = right_padded(d, batch, length)
        inputs[0] = d.floats((sum(count), heads * size))
        inputs.append(offset)
    return d.case(*inputs, num_heads=heads)


def right_padded(d: Drawing, batch: int, length: int) -> tuple[list[int], np.ndarray]:
    """The number of tokens of each sequence, and where they are, followed by where the padding is."""
    count = [d.integer(1, length) for _ in range(batch)]
    places = np.arange(batch * length).reshape(batch, length)
    real = np.arange(length) < np.array(count)[:, None]
    return count, np.concatenate([places[real], places[~real]]).reshape(batch, length).astype(np.int32)
