"""Strategies of ONNX Runtime's attentions."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("MultiHeadAttention", domain=MICROSOFT, ranked=True)
def multi_head_attention(d: Drawing) -> Case:
    """Keys and values apart, already projected, and packed; a bias, a mask, an addend, and a past that grows or has room."""
    batch, heads, queries, width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    form = d.pick("apart", "projected", "two", "three")
    keys = queries if form == "three" else d.integer(1, 3)
    value_width = d.integer(1, 3) if form == "apart" else width
    past = d.integer(1, 2) if form == "apart" and d.flag() else 0
    room = d.optional(lambda: d.integer(0, 2)) if past else None
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
        stored = past if room is None else past + keys + room
        inputs += [d.floats((batch, heads, stored, of)) for of in (width, value_width)]
        if room is not None:
            inputs.append(np.array([past], np.int32))
            inputs.append(d.optional(lambda: _beams(d, batch, stored)) if queries == 1 else None)
    outputs = 3 if past or (form == "apart" and d.flag()) else 1
    return d.case(*inputs, num_heads=heads, outputs=outputs, unidirectional=d.pick(None, 0, 1), **_settings(d))


@strategy("Attention", domain=MICROSOFT, ranked=True)
def attention(d: Drawing) -> Case:
    """Values as wide as the keys or not, with and without a bias, a mask, an addend, angles, and a past of either kind."""
    batch, heads, length, width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 2)
    past = d.optional(lambda: d.integer(1, 2)) or 0
    room = d.optional(lambda: d.integer(0, 2)) if past else None
    value_width = width if past else d.integer(1, 2)
    sizes = [heads * width, heads * width, heads * value_width]
    taken = d.integer(1, 3)
    mask, addend = _hidden(d, batch, heads, length, past + length, every=True)
    stored = past if room is None else past + length + room
    return d.case(
        d.floats((batch, length, taken)),
        d.floats((taken, sum(sizes))),
        d.optional(lambda: d.floats((sum(sizes),))),
        mask,
        d.floats((2, batch, heads, stored, width)) if past else None,
        addend,
        None if room is None else np.array([past], np.int32),
        num_heads=heads,
        do_rotary=d.pick(None, 0, 1) if width == 2 else None,
        past_present_share_buffer=None if room is None else 1,
        qkv_hidden_sizes=sizes if value_width != width or d.flag() else None,
        outputs=2 if past or (value_width == width and d.flag()) else 1,
        unidirectional=d.pick(None, 0, 1),
        **_settings(d),
    )


@strategy("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, ranked=True)
def decoder_masked_multi_head_attention(d: Drawing) -> Case:
    """One query, with keys that are projected or its own, apart or packed, and a past of either kind."""
    batch, heads, width, value_width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    form = d.pick("apart", "packed", "projected")
    past = d.integer(0, 2)
    widths = [heads * width, heads * width, heads * value_width]
    bias = d.optional(lambda: d.floats((sum(widths),)))
    settings: dict[str, Any] = {"num_heads": heads, **_settings(d)}
    if form == "projected":
        keys = d.integer(1, 3)
        mask = d.optional(lambda: d.integers((batch, keys), 0, 1, np.int32))
        addend = d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), 1, keys)))
        rest: list[np.ndarray | None] = [None] * 5
        given = [d.floats((batch, 1, widths[0])), *(d.floats((batch, heads, keys, n)) for n in (width, value_width))]
        return d.case(*given, mask, addend, *rest, bias, **settings)
    shared = d.flag()
    parts: list[np.ndarray | None] = [d.floats((batch, 1, n)) for n in widths]
    if form == "packed":
        parts = [np.concatenate([x for x in parts if x is not None], 2), None, None]
        shared = True
    mask = d.optional(lambda: d.integers((batch, past + 1), 0, 1, np.int32))
    addend = d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), 1, past + 1)))
    stored = past + 1 + d.integer(0, 2) if shared else past
    caches = [d.floats((batch, heads, stored, n)) for n in (width, value_width)]
    beams: list[np.ndarray | None] = [None, None]
    if shared and d.flag():
        indirection = _beams(d, batch, stored)
        beams = [np.array([indirection.shape[1]], np.int32), indirection]
    return d.case(
        *parts,
        mask,
        addend,
        *caches,
        np.array([past], np.int32) if shared else None,
        *beams,
        bias,
        past_present_share_buffer=int(shared),
        outputs=3,
        **settings,
    )


@strategy("DecoderMaskedSelfAttention", domain=MICROSOFT, ranked=True)
def decoder_masked_self_attention(d: Drawing) -> Case:
    """One token a sequence, heads of one pack of 16 bytes or several, and a past of either kind."""
    batch, heads, size, taken = d.integer(1, 2), d.integer(1, 2), d.pick(8, 16), d.integer(1, 3)
    past, shared = d.integer(0, 2), d.flag()
    mask = d.optional(lambda: d.integers((batch, past + 1), 0, 1, np.int32))
    addend = d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), 1, past + 1)))
    stored = past + 1 + d.integer(0, 2) if shared else past
    beams: list[np.ndarray | None] = [None, None]
    if shared and d.flag():
        indirection = _beams(d, batch, stored)
        beams = [np.array([indirection.shape[1]], np.int32), indirection]
    return d.case(
        d.floats((batch, 1, taken)),
        d.normal((taken, 3 * heads * size)),
        d.normal((3 * heads * size,)),
        mask,
        d.normal((2, batch, heads, stored, size)),
        addend,
        np.array([past], np.int32),
        *beams,
        num_heads=heads,
        do_rotary=d.pick(None, 0, 1),
        past_present_share_buffer=int(shared),
        outputs=2,
        **_settings(d),
    )


@strategy("DecoderAttention", domain=MICROSOFT, ranked=True)
def decoder_attention(d: Drawing) -> Case:
    """Attention to itself, to another sequence or to a cache, as flags say that are fed or initializers."""
    batch, heads, size = d.integer(1, 2), d.integer(1, 2), d.integer(1, 2)
    queries, others, past, width = d.integer(1, 3), d.integer(1, 3), d.integer(1, 2), heads * size
    static, use_past, state, masked = d.flag(), d.flag(), d.flag(), d.flag()
    cached = use_past and state
    keys = past * cached + (0 if cached and static else others if static else queries)
    mask = d.bools((batch, keys)) if masked or d.flag() else None
    caches: list[np.ndarray | None] = [None, None]
    if cached or d.flag():
        caches = [d.floats((batch, heads, past, size)) for _ in range(2)]
    return d.case(
        d.floats((queries, batch, width)),
        d.floats((others, batch, width)),
        d.floats((width, width)),
        d.floats((width, 2 * width)),
        d.floats((3 * width,)),
        mask,
        *caches,
        *(np.array([flag]) for flag in (static, use_past, state, masked)),
        fixed=("static_kv", "use_past", "has_layer_state", "has_key_padding_mask"),
        num_heads=heads,
        mask_filter_value=d.pick(None, -1.5),
        outputs=3 if state else 1,
    )


@strategy("LongformerAttention", domain=MICROSOFT, ranked=True)
def longformer_attention(d: Drawing) -> Case:
    """Tokens that see a window, all tokens, or nothing; no element of the mask is 0, from where on a token sees something."""
    batch, heads, size, window = d.integer(1, 2), d.integer(1, 2), d.integer(1, 2), d.integer(1, 2)
    length, width = 2 * window * d.integer(1, 2), heads * size
    mask = np.where(d.bools((batch, length)), -100, d.floats((batch, length), 0.125, 1)).astype(d.dtype)
    flags = d.integers((batch, length), 0, 1, np.int32)
    weights, others = ((d.floats((width, 3 * width)), d.floats((3 * width,))) for _ in range(2))
    return d.case(
        *(d.floats((batch, length, width)), *weights, mask, *others, flags),
        fixed=("global",),
        num_heads=heads,
        window=window,
    )


def _beams(d: Drawing, batch: int, tokens: int) -> np.ndarray:
    """Of which beam each token is; the batch is so many beams of one sequence, or one of so many."""
    shape = d.pick((1, batch), (batch, 1))
    return d.integers((*shape, tokens), 0, shape[1] - 1, np.int32)


def _hidden(
    d: Drawing, batch: int, heads: int, queries: int, keys: int, *, every: bool = False
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A mask of keys and an addend of the scores, either absent or not. `every`: also the masks that Attention alone has."""
    form = d.pick("none", "keys", "queries", "ends", "offsets", *(("beginnings", "square") if every else ()))
    mask = None
    if form in ("keys", "queries", "square"):
        shapes = {"keys": (batch, keys), "queries": (batch, queries, keys), "square": (batch, 1, keys + 1, keys + 1)}
        mask = d.integers(shapes[form], 0, 1, np.int32)
    elif form != "none":
        ends = d.integers((batch,), 0, keys, np.int32)
        behind = {"ends": [], "beginnings": [0] * batch, "offsets": [0] * (2 * batch + 2)}[form]
        mask = np.concatenate([ends, np.array(behind, np.int32)])
    return mask, d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), queries, keys)))


def _settings(d: Drawing) -> dict[str, Any]:
    """The attributes that all attentions have."""
    return {"scale": d.pick(None, 0.5), "mask_filter_value": d.pick(None, -1.5)}
