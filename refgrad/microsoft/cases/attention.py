"""Cases of ONNX Runtime's attentions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.microsoft.cases import case, drawer

BATCH, LENGTH, HEADS, SIZE = 2, 3, 2, 4
WIDTH = HEADS * SIZE


POSITIONS = 6  # of a buffer
FEW = np.array([2], np.int32)  # of which there are so many keys
LOWEST = float(np.finfo(np.float32).min)  # it hides a key as much as being later than the query does


def cases() -> Iterator[Case]:
    """Every attribute, every optional input and output, and every form; static and symbolic shapes."""
    floats = drawer()
    for shapes in ("static", "symbolic"):
        heads: dict[str, Any] = {"shapes": shapes, "num_heads": HEADS}
        yield from _multi_head(floats, heads)
        yield from _caches(floats, heads)
        yield from _self(floats, heads)
        yield from _decoder(floats, heads)
        yield from _one_token(floats, heads)
        yield from _flagged(floats, heads)
        yield from _windowed(floats, heads)


def _multi_head(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    name = "MultiHeadAttention"
    q, k, v = floats(BATCH, LENGTH, WIDTH), floats(BATCH, LENGTH + 1, WIDTH), floats(BATCH, LENGTH + 1, 2 * HEADS)
    bias = floats(2 * WIDTH + 2 * HEADS)
    yield case(name, q, k, v, **heads)
    yield case(name, q, k, v, bias, scale=0.3, **heads)
    hidden = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], np.int32)
    offset = floats(1, HEADS, LENGTH, LENGTH + 1)
    yield case(name, q, k, v, None, hidden, offset, **heads)
    per_query = (np.arange(BATCH * LENGTH * (LENGTH + 1)) % 3 > 0).astype(np.int32).reshape(BATCH, LENGTH, LENGTH + 1)
    yield case(name, q, k, v, None, per_query, mask_filter_value=-1.5, outputs=4, **heads)
    yield case(name, q, k, v, None, np.array([2, 3], np.int32), mask_filter_value=-1.5, **heads)
    offsets = [*range(0, 9, LENGTH)], [*range(0, 12, LENGTH + 1)]
    lengths = np.array([2, 4, *offsets[0], *offsets[1]], np.int32)
    yield case(name, q, k, v, bias, lengths, **heads)
    late = {"outputs": 3, "unidirectional": 1, "mask_filter_value": LOWEST}  # the first query sees no key
    hidden = np.array([[0, 1], [1, 1]], np.int32)
    yield case(name, q, k[:, :2], v[:, :2], None, hidden, offset[:, :, :, :2], **late, **heads)
    yield case(name, q, *(floats(BATCH, HEADS, LENGTH + 1, SIZE) for _ in range(2)), floats(3 * WIDTH), **heads)
    yield case(name, q, floats(BATCH, LENGTH + 1, HEADS, 2, SIZE), **heads)
    yield case(name, floats(BATCH, LENGTH, HEADS, 3, SIZE), **heads)
    yield case(name, floats(BATCH, LENGTH, HEADS, 3, SIZE), None, None, floats(3 * WIDTH), unidirectional=1, **heads)


def _caches(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    """A past that grows, one in a buffer, and one of several beams."""
    name = "MultiHeadAttention"
    three = [floats(BATCH, LENGTH, WIDTH) for _ in range(3)]
    past = [floats(BATCH, HEADS, 2, SIZE) for _ in range(2)]
    yield case(name, *three, None, None, None, *past, outputs=3, unidirectional=1, **heads)
    yield case(name, *three, None, np.array([2, 4], np.int32), None, *past, outputs=3, **heads)
    biases = drawer(1)(3 * WIDTH)  # without a past, softmax does not see the bias of the keys
    yield case(name, *three, biases, None, None, *past, outputs=3, **heads)
    buffers = [floats(BATCH, HEADS, POSITIONS, SIZE) for _ in range(2)]
    yield case(name, *three, None, None, None, *buffers, FEW, outputs=3, unidirectional=1, **heads)
    one = [floats(len(HIDDEN), 1, WIDTH) for _ in range(3)]
    buffers = [floats(len(HIDDEN), HEADS, POSITIONS, SIZE) for _ in range(2)]
    yield case(name, *one, floats(3 * WIDTH), HIDDEN, None, *buffers, FEW, BEAMS, outputs=3, **heads)


# Two beams for each of three prompts: of which beam each token is, and the keys that are hidden
BEAMS = np.array([[[1, 0, 0], [0, 0, 1]], [[0, 1, 1], [1, 1, 0]], [[1, 1, 0], [0, 1, 0]]], np.int32)
BEAMS = np.pad(BEAMS, [(0, 0), (0, 0), (0, POSITIONS - 3)])
HIDDEN = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1]], np.int32)


def _self(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    name = "Attention"
    x, weights, bias = floats(BATCH, LENGTH, 5), floats(5, 3 * WIDTH), floats(3 * WIDTH)
    yield case(name, x, weights, bias, outputs=2, **heads)
    yield case(name, x, weights, bias, np.array([[1, 1, 0], [1, 0, 0]], np.int32), scale=0.3, **heads)
    yield case(name, x, weights, bias, unidirectional=1, **heads)
    sizes = [WIDTH, WIDTH, 2 * HEADS]
    uneven = floats(5, sum(sizes)), floats(sum(sizes))
    yield case(name, x, *uneven, None, None, floats(BATCH, HEADS, LENGTH, LENGTH), qkv_hidden_sizes=sizes, **heads)
    past = floats(2, BATCH, HEADS, 2, SIZE)
    yield case(name, x, weights, bias, None, past, outputs=2, unidirectional=1, **heads)
    for mask in ([1, 3], [2, 3, 1, 0], [1, 2, *[0, 3, 6] * 2]):  # ends; ends and beginnings; ends and offsets
        yield case(name, x, weights, bias, np.array(mask, np.int32), mask_filter_value=-1.5, **heads)
    per_query = (np.arange(BATCH * LENGTH * LENGTH) % 3 > 0).astype(np.int32).reshape(BATCH, LENGTH, LENGTH)
    yield case(name, x, weights, bias, per_query, unidirectional=1, mask_filter_value=LOWEST, **heads)
    square = (np.arange(BATCH * 49) % 5 > 1).astype(np.int32).reshape(BATCH, 1, 7, 7)
    yield case(name, x, weights, bias, square, past, **heads)
    buffer = floats(2, BATCH, HEADS, POSITIONS, SIZE)
    shared: dict[str, Any] = {"past_present_share_buffer": 1, "outputs": 2}
    yield case(name, x, weights, bias, None, buffer, None, FEW, unidirectional=1, **shared, **heads)
    yield case(name, x, weights, bias, square, buffer, None, FEW, do_rotary=1, **shared, **heads)
    long = floats(5, 3 * 68)
    yield case(name, x, long, None, None, None, None, do_rotary=1, rotary_embedding_dim=32, **heads)


def _decoder(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    name = "DecoderMaskedMultiHeadAttention"
    one, bias = [floats(BATCH, 1, WIDTH) for _ in range(3)], floats(3 * WIDTH)
    other = [floats(BATCH, HEADS, LENGTH, SIZE) for _ in range(2)]
    hidden = np.array([[1, 0, 1], [1, 1, 1]], np.int32)
    yield case(name, one[0], *other, **heads)
    yield case(name, one[0], *other, hidden, mask_filter_value=-1.5, scale=0.3, **heads)
    unused: list[np.ndarray | None] = [None] * 7
    yield case(name, one[0], *other, *unused, bias, **heads)
    buffers = [floats(BATCH, HEADS, POSITIONS, SIZE) for _ in range(2)]
    shared: dict[str, Any] = {"past_present_share_buffer": 1, "outputs": 3}
    offset = floats(1, HEADS, 1, LENGTH)
    yield case(name, *one, None, None, *buffers, FEW, **shared, **heads)
    yield case(name, *one, hidden, offset, *buffers, FEW, None, None, bias, **shared, **heads)
    every: dict[str, Any] = {**shared, "outputs": 4, "output_qk": 1, "mask_filter_value": -1.5}
    beams = [floats(len(HIDDEN), 1, WIDTH) for _ in range(3)]
    caches = [floats(len(HIDDEN), HEADS, POSITIONS, SIZE) for _ in range(2)]
    yield case(name, *beams, HIDDEN, offset, *caches, FEW, FEW, BEAMS, bias, **every, **heads)
    packed = floats(BATCH, 1, 2 * WIDTH + 2 * HEADS)
    values = floats(BATCH, HEADS, POSITIONS, 2)
    yield case(name, packed, None, None, None, None, buffers[0], values, FEW, **shared, **heads)
    past = [floats(BATCH, HEADS, 2, SIZE) for _ in range(2)]
    yield case(name, *one, None, None, *past, outputs=3, **heads)
    yield case(name, floats(BATCH, 1, 3 * WIDTH), **heads)


def _one_token(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    """Heads of 8 floats, which are two packs of 16 bytes."""
    name, width = "DecoderMaskedSelfAttention", 8 * HEADS
    three = floats(BATCH, 1, 5), floats(5, 3 * width), floats(3 * width)
    hidden = np.array([[1, 0, 1], [1, 1, 1]], np.int32)
    offset, buffer = floats(1, HEADS, 1, LENGTH), floats(2, BATCH, HEADS, POSITIONS, 8)
    shared: dict[str, Any] = {"past_present_share_buffer": 1, "outputs": 2}
    yield case(name, *three, None, buffer, None, FEW, **shared, **heads)
    yield case(name, *three, hidden, buffer, offset, FEW, mask_filter_value=-1.5, scale=0.3, **shared, **heads)
    beams, caches = floats(len(HIDDEN), 1, 5), floats(2, len(HIDDEN), HEADS, POSITIONS, 8)
    yield case(name, beams, *three[1:], HIDDEN, caches, None, FEW, FEW, BEAMS, do_rotary=1, **shared, **heads)
    past = floats(2, BATCH, HEADS, 2, 8)
    yield case(name, *three, None, past, None, FEW, do_rotary=1, outputs=2, **heads)
    yield case(name, three[0][:0], *three[1:], None, buffer[:, :0], None, FEW, **shared, **heads)


def _flagged(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    """Self and cross attention, with a cache and without; in one case all flags are constant."""
    name = "DecoderAttention"
    query, key = floats(LENGTH, BATCH, WIDTH), floats(LENGTH + 1, BATCH, WIDTH)
    weights = floats(WIDTH, WIDTH), floats(WIDTH, 2 * WIDTH), floats(3 * WIDTH)
    caches = [floats(BATCH, HEADS, 2, SIZE) for _ in range(2)]
    yes, no = np.array([True]), np.array([False])
    for static in (no, yes):
        own = LENGTH + 1 if static[0] else LENGTH
        hidden = np.arange(BATCH * own).reshape(BATCH, own) % 3 == 1
        yield case(name, query, key, *weights, hidden, None, None, static, no, no, yes, **heads)
        yield case(name, query, key, *weights, None, *caches, static, yes, yes, no, outputs=3, **heads)
        unused = (yes, no) if static[0] else (no, yes)
        yield case(name, query, key, *weights, hidden, *caches, static, *unused, no, outputs=3, **heads)
    flags = ["static_kv", "use_past", "has_layer_state", "has_key_padding_mask"]
    hidden = np.array([[False, True], [True, True]])
    last = {"constant": ["key_padding_mask", *flags], "mask_filter_value": -1.5}
    yield case(name, query, key, *weights, hidden, *caches, yes, yes, yes, yes, **last, **heads)
    yield case(name, query[:0], key, *weights, None, None, None, yes, no, no, no, **heads)


def _windowed(floats: Any, heads: dict[str, Any]) -> Iterator[Case]:
    name, length = "LongformerAttention", 6
    x, weights, others = (
        floats(BATCH, length, WIDTH),
        *((floats(WIDTH, 3 * WIDTH), floats(3 * WIDTH)) for _ in range(2)),
    )
    mask = np.array([[0.2, 0.1, 0.1, 0.3, 0.2, -100], [0.1, 0.2, 0.5, 0.1, 0.3, 0.1]], np.float32)  # not 0, a kink
    flags = np.array([[1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]], np.int32)
    yield case(name, x, *weights, mask, *others, flags, window=1, **heads)
    yield case(
        name, x, *weights, 0 * mask, *others, flags, window=3, constant=["global"], wrt=["input", "weight"], **heads
    )
    yield case(name, x[:0], *weights, mask[:0], *others, flags[:0], window=1, **heads)
