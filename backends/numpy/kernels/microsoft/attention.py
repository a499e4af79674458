"""ONNX Runtime's attentions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import softmax
from refgrad.backends.numpy.kernels.attention import by_heads
from refgrad.backends.numpy.kernels.microsoft.activation import plus
from refgrad.backends.numpy.kernels.operands import check_expands, check_indices, check_shape
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("MultiHeadAttention", domain=MICROSOFT, in_float32=True)
def multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Array | None = None,
    cache_indirection: Array | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Array, ...]:
    """Attention of query (B, S, N·H), or packed (B, S, N, 3, H), to key and value, each head for itself"""
    if key is None:
        query, key, value = _unpacked("query", query, num_heads, 3)
    elif value is None:
        key, value = _unpacked("key", key, num_heads, 2)
    assert value is not None
    if key.ndim != value.ndim or key.ndim not in (3, 4):
        raise ValueError(f"key has the shape {list(key.shape)} and value {list(value.shape)}; 3 axes, or 4, are needed")
    q, k, v = _by_heads((query, key, value), bias, num_heads)
    length = None if past_key is None else past_sequence_length
    present_key, keys = _extended("past_key", past_key, k, length, cache_indirection)
    present_value, values = _extended("past_value", past_value, v, length, cache_indirection)
    if (past_key is None) != (past_value is None):
        raise ValueError("one of past_key and past_value is left out; they come together")
    before = keys.shape[2] - k.shape[2]
    shown = None if key_padding_mask is None else _shown(key_padding_mask, q, keys.shape[2])
    y, scores = _attend(q, keys, values, scale, shown, mask_filter_value, attention_bias, before, unidirectional)
    return y, present_key, present_value, scores


@kernel("Attention", domain=MICROSOFT, in_float32=True, fresh=True)
def attention(
    input: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    past_sequence_length: Array | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
    _wanted: tuple[bool, ...],
) -> tuple[Array, ...]:
    """Attention of a sequence to itself: query, key and value are the parts of one projection of it"""
    q, k, v = (by_heads(x, num_heads) for x in projections(input, weights, bias, qkv_hidden_sizes))
    length = past_sequence_length if past_present_share_buffer else None
    if past_present_share_buffer and (past is None or length is None):
        raise ValueError("past_present_share_buffer needs past and past_sequence_length, and one is left out")
    if past is not None:
        if past.ndim != 5 or past.shape[0] != 2:
            raise ValueError(f"past has the shape {list(past.shape)}; (2, batch, heads, length, size) is needed")
        tokens = past.shape[3] if length is None else _length(length, past.shape[3], k.shape[2])
    before = 0 if past is None else tokens
    if do_rotary:
        if rotary_embedding_dim not in (0, 32, 64, 128):
            raise ValueError(f"rotary_embedding_dim is {rotary_embedding_dim}; it is 0, 32, 64 or 128")
        q, k = (_rotated(x, before, rotary_embedding_dim or x.shape[3]) for x in (q, k))
    caches = (None, None) if past is None else (past[0], past[1])
    present_key, keys = _extended("past", caches[0], k, length, None)
    present_value, values = _extended("past", caches[1], v, length, None)
    shown = None if mask_index is None else _shown(mask_index, q, keys.shape[2], before)
    y, _ = _attend(q, keys, values, scale, shown, mask_filter_value, attention_bias, before, unidirectional)
    if not any(_wanted[1:]):
        return (y,)
    if k.shape != v.shape:
        raise ValueError(
            f"present has keys of {k.shape[3]} elements and values of {v.shape[3]}, which are not in one tensor; leave it out"
        )
    return y, np.stack([present_key, present_value])


@kernel("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, in_float32=True)
def decoder_masked_multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    mask_index: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Array | None = None,
    beam_width: Array | None = None,
    cache_indirection: Array | None = None,
    bias: Array | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
) -> tuple[Array | None, ...]:
    """Attention of one query a sequence, to the keys and values of itself and of a cache, or of another sequence"""
    if query.ndim != 3 or query.shape[1] != 1:
        raise ValueError(f"query has the shape {list(query.shape)}; (batch, 1, features) is needed, of one token each")
    if key is None:
        width = query.shape[2]
        v_width = width // 3 if past_value is None else num_heads * past_value.shape[-1]
        query, key, value = np.split(query, [(width - v_width) // 2, width - v_width], 2)
    assert value is not None
    if key.ndim not in (3, 4) or key.ndim != value.ndim:
        raise ValueError(f"key has the shape {list(key.shape)} and value {list(value.shape)}; 3 axes, or 4, are needed")
    q, k, v = _by_heads((query, key, value), bias, num_heads)
    length = past_sequence_length if past_present_share_buffer else None
    present_key, present_value = None, None
    keys, values = k, v
    if key.ndim == 3:
        if past_present_share_buffer and (past_key is None or past_value is None or length is None):
            raise ValueError("past_present_share_buffer needs a past and past_sequence_length, and one is left out")
        _check_beams(beam_width, cache_indirection)
        present_key, keys = _extended("past_key", past_key, k, length, cache_indirection)
        present_value, values = _extended("past_value", past_value, v, length, cache_indirection)
    shown = None
    if mask_index is not None:
        check_shape("mask_index", mask_index.shape, (q.shape[0], keys.shape[2]))
        shown = _shown(mask_index, q, keys.shape[2])
    y, scores = _attend(q, keys, values, scale, shown, mask_filter_value, attention_bias, 0, 0)
    return y, present_key, present_value, scores if output_qk else None


@kernel("DecoderMaskedSelfAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def decoder_masked_self_attention(
    input: Array,
    weights: Array,
    bias: Array,
    mask_index: Array | None,
    past: Array,
    attention_bias: Array | None,
    past_sequence_length: Array,
    beam_width: Array | None = None,
    cache_indirection: Array | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
    _output_types: tuple[np.dtype | None, ...],
) -> tuple[Array, ...]:
    """Attention of one token a sequence to itself and a cache, whose keys are interleaved where it is a buffer"""
    if input.ndim != 3 or input.shape[1] != 1:
        raise ValueError(f"input has the shape {list(input.shape)}; (batch, 1, features) is needed, of one token each")
    q, k, v = (by_heads(x, num_heads) for x in projections(input, weights, bias, None))
    check_shape("past", past.shape, (2, *k.shape[:2], past.shape[3] if past.ndim == 5 else 0, k.shape[3]))
    old_keys, length = past[0], None
    if past_present_share_buffer:
        length = past_sequence_length
        places = _places(past.shape[3], k.shape[3], 16 // (_output_types[1] or input.dtype).itemsize)
        old_keys = past[0].reshape(*k.shape[:2], places.size)[..., places]
    before = past.shape[3] if length is None else _length(length, past.shape[3], 1)
    if do_rotary:
        q, k = (_rotated(x, before, x.shape[3]) for x in (q, k))
    _check_beams(beam_width, cache_indirection)
    present_key, keys = _extended("past", old_keys, k, length, cache_indirection)
    present_value, values = _extended("past", past[1], v, length, cache_indirection)
    if past_present_share_buffer:
        interleaved = np.empty((*k.shape[:2], places.size), past.dtype)
        interleaved[..., places] = present_key
        present_key = interleaved.reshape(present_key.shape)
    shown = None
    if mask_index is not None:
        check_shape("mask_index", mask_index.shape, (q.shape[0], keys.shape[2]))
        shown = _shown(mask_index, q, keys.shape[2])
    y, _ = _attend(q, keys, values, scale, shown, mask_filter_value, attention_bias, 0, 0)
    return y, np.stack([present_key, present_value])


@kernel("DecoderAttention", domain=MICROSOFT, in_float32=True)
def decoder_attention(
    query: Array,
    key: Array,
    q_weight: Array,
    kv_weight: Array,
    bias: Array,
    key_padding_mask: Array | None,
    key_cache: Array | None,
    value_cache: Array | None,
    static_kv: Array,
    use_past: Array,
    has_layer_state: Array,
    has_key_padding_mask: Array,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
) -> tuple[Array, ...]:
    """Attention of a sequence to itself, to another or to a cache; sequences are along the first axis"""
    width = q_weight.shape[-1]
    check_shape("q_weight", q_weight.shape, (query.shape[-1], width))
    check_shape("kv_weight", kv_weight.shape, (width, 2 * width))
    check_shape("bias", bias.shape, (3 * width,))
    check_shape("key", key.shape, (key.shape[0], *query.shape[1:]))
    q = by_heads((query @ q_weight + bias[:width]).swapaxes(0, 1), num_heads)
    cached = bool(use_past) and bool(has_layer_state)
    if cached and (key_cache is None or value_cache is None):
        raise ValueError("use_past and has_layer_state are true, and key_cache or value_cache is left out")
    k: list[Array] = []
    v: list[Array] = []
    if cached:
        for what, cache, read in (("key_cache", key_cache, k), ("value_cache", value_cache, v)):
            assert cache is not None
            check_shape(what, cache.shape, (*q.shape[:2], cache.shape[2] if cache.ndim == 4 else 0, q.shape[3]))
            read.append(cache)
    if not (cached and static_kv):
        both = (key if static_kv else query) @ kv_weight + bias[width:]
        k.append(by_heads(both[..., :width].swapaxes(0, 1), num_heads))
        v.append(by_heads(both[..., width:].swapaxes(0, 1), num_heads))
    keys, values = np.concatenate(k, 2), np.concatenate(v, 2)
    scores = np.einsum("bnsh,bnth->bnst", q, keys) / np.sqrt(q.dtype.type(q.shape[3]))
    if has_key_padding_mask:
        if key_padding_mask is None:
            raise ValueError("has_key_padding_mask is true, and key_padding_mask is left out")
        check_shape("key_padding_mask", key_padding_mask.shape, (q.shape[0], keys.shape[2]))
        scores = np.where(key_padding_mask[:, None, None], _lowest(scores), scores)
    y = np.einsum("bnst,bnth->sbnh", softmax(scores, axis=-1), values)
    return y.reshape(query.shape), keys, values


@kernel("LongformerAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def longformer_attention(
    input: Array,
    weight: Array,
    bias: Array,
    mask: Array,
    global_weight: Array,
    global_bias: Array,
    global_: Array,
    *,
    num_heads: int,
    window: int,
) -> Array:
    """Token by token: the keys that it sees are picked out before they are weighed"""
    local = projections(input, weight, bias, None)
    return windowed(local, projections(input, global_weight, global_bias, None), mask, global_, num_heads, window)


def windowed(
    local: list[Array], overall: list[Array], mask: Array, global_: Array, num_heads: int, window: int
) -> Array:
    """LongformerAttention of queries, keys and values, and of those with which the global tokens attend."""
    shape = local[0].shape
    if len(shape) != 3 or window < 1 or shape[1] % (2 * window):
        raise ValueError(f"input has the shape {list(shape)}; its length is a multiple of 2·{window}, twice the window")
    batch, length, _ = shape
    check_shape("mask", mask.shape, (batch, length))
    check_shape("global", global_.shape, (batch, length))
    by_local, by_overall = ([by_heads(x, num_heads) for x in of] for of in (local, overall))
    y = np.zeros((batch, length, num_heads, by_local[2].shape[3]), local[0].dtype)
    for row in range(batch):
        for token in range(length):
            if mask[row, token] < 0:
                continue
            q, k, v = by_overall if global_[row, token] else by_local
            near = np.abs(np.arange(length) - token) <= window
            seen = np.flatnonzero(near | (global_[row] != 0) | bool(global_[row, token]))
            scores = np.einsum("nh,nth->nt", q[row, :, token], k[row][:, seen]) / np.sqrt(q.dtype.type(q.shape[3]))
            y[row, token] = np.einsum("nt,nth->nh", softmax(scores + mask[row, seen], axis=-1), v[row][:, seen])
    return y.reshape(shape)


def projections(x: Array, weights: Array, bias: Array | None, sizes: list[int] | None) -> list[Array]:
    """The queries, keys and values of `x`, whose weights lie beside each other."""
    if weights.ndim != 2:
        raise ValueError(f"weights has the shape {list(weights.shape)}; a matrix is needed")
    check_shape("weights", weights.shape, (x.shape[-1], weights.shape[1]))
    if bias is not None:
        check_shape("bias", bias.shape, weights.shape[1:])
    if sizes and (len(sizes) != 3 or min(sizes) < 1 or sizes[0] != sizes[1] or sum(sizes) != weights.shape[1]):
        raise ValueError(
            f"qkv_hidden_sizes is {list(sizes)}; three are needed, the first two equal, of {weights.shape[1]} columns in all"
        )
    if not sizes and weights.shape[1] % 3:
        raise ValueError(f"weights has {weights.shape[1]} columns, which are not three parts; give qkv_hidden_sizes")
    ends = np.cumsum(sizes or [weights.shape[1] // 3] * 3)[:2]
    biases = [None] * 3 if bias is None else np.split(bias, ends)
    return [plus(x @ part, b) for part, b in zip(np.split(weights, ends, 1), biases, strict=True)]


def _unpacked(what: str, x: Array, num_heads: int, count: int) -> list[Array]:
    """(B, L, N, count, H) to as many of (B, L, N·H)"""
    if x.ndim != 5 or x.shape[2:4] != (num_heads, count):
        raise ValueError(
            f"{what} has the shape {list(x.shape)}; packed it is (batch, length, {num_heads}, {count}, size)"
        )
    return [x[:, :, :, k].reshape(*x.shape[:2], x.shape[2] * x.shape[4]) for k in range(count)]


def _by_heads(parts: tuple[Array, Array, Array], bias: Array | None, num_heads: int) -> list[Array]:
    """Query, key and value with their parts of the bias, as (B, N, L, H); what has four axes is so already."""
    projected = list(parts)
    if bias is not None:
        query, _, value = parts
        v_width = value.shape[2] if value.ndim == 3 else value.shape[1] * value.shape[3]
        check_shape("bias", bias.shape, (2 * query.shape[-1] + v_width,))
        pieces = np.split(bias, [query.shape[-1], 2 * query.shape[-1]])
        projected = [x if x.ndim == 4 else x + b for x, b in zip(parts, pieces, strict=True)]
    q, k, v = (x if x.ndim == 4 else by_heads(x, num_heads) for x in projected)
    check_shape("key, by heads,", k.shape, (q.shape[0], q.shape[1], k.shape[2], q.shape[3]))
    check_shape("value, by heads,", v.shape, (*k.shape[:3], v.shape[3]))
    return [q, k, v]


def _length(given: Array, room: int, new: int) -> int:
    """How many tokens of a cache there are: with the new ones they fit into its buffer."""
    if given.size != 1:
        raise ValueError(f"past_sequence_length has the shape {list(given.shape)}; one number is needed")
    length = int(given.reshape(()))
    if not 0 <= length <= room - new:
        raise ValueError(f"past_sequence_length is {length}, and {new} are new; the buffer has room for 0 to {room}")
    return length


def _extended(
    what: str, past: Array | None, new: Array, length: Array | None, cache_indirection: Array | None
) -> tuple[Array, Array]:
    """The cache with the new keys or values in it, and all that are attended to."""
    if past is None:
        return new, new
    if past.ndim != 4:
        raise ValueError(f"{what} has the shape {list(past.shape)}; (batch, heads, length, size) is needed")
    check_shape(what, past.shape, (*new.shape[:2], past.shape[2], new.shape[3]))
    count, old = new.shape[2], past.shape[2] if length is None else _length(length, past.shape[2], new.shape[2])
    present = np.empty((*past.shape[:2], old + count, past.shape[3]), past.dtype) if length is None else past.copy()
    present[:, :, :old] = past[:, :, :old]
    present[:, :, old : old + count] = new
    every = present[:, :, : old + count]
    if cache_indirection is not None:
        groups, beams = cache_indirection.shape[:2] if cache_indirection.ndim == 3 else (0, 0)
        if groups * beams != len(new) or cache_indirection.shape[2] < old:
            shape = list(cache_indirection.shape)
            raise ValueError(
                f"cache_indirection has the shape {shape}; (batch, beams, at least {old}) of {len(new)} are needed"
            )
        check_indices(cache_indirection[:, :, :old], beams, "cache_indirection", lowest=0)
        every = every.copy()
        for row in range(len(new)):
            for token in range(old):
                group, beam = divmod(row, beams)
                every[row, :, token] = past[group * beams + cache_indirection[group, beam, token], :, token]
    return present, every


def _check_beams(beam_width: Array | None, cache_indirection: Array | None) -> None:
    """Raise ValueError if there are several beams without cache_indirection, or if it has another number of beams."""
    beams = 1 if beam_width is None else int(beam_width.reshape(()))
    if beams > 1 and cache_indirection is None:
        raise ValueError(f"beam_width is {beams}, and cache_indirection, which says where a token is from, is left out")
    if cache_indirection is not None and cache_indirection.shape[1:2] != (beams,):
        raise ValueError(f"cache_indirection has the shape {list(cache_indirection.shape)}; it is of {beams} beams")


def _places(length: int, size: int, packs: int) -> Array:
    """The place of each element (token, feature) in a head's buffer, which is laid out as (size/packs, length, packs)."""
    if size % packs:
        raise ValueError(f"heads of {size} elements are no multiple of {packs}, which have 16 bytes and lie together")
    token, feature = np.indices((length, size))
    return np.asarray((feature // packs * length + token) * packs + feature % packs)


def _shown(mask: Array, q: Array, keys: int, before: int | None = None) -> Array:
    """A mask of the keys that a query sees, as (B, 1, 1 or S, T); `before` is given if every form of Attention is allowed."""
    batch, queries = q.shape[0], q.shape[2]
    number = np.arange(keys)
    if mask.ndim == 1:
        sizes = [batch, 3 * batch + 2] if before is None else [batch, 2 * batch, 3 * batch + 2]
        if mask.size not in sizes:
            raise ValueError(
                f"the mask has {mask.size} numbers; for {batch} sequences it has {' or '.join(map(str, sizes))}"
            )
        seen = number < mask[:batch, None]
        if mask.size == 2 * batch:
            seen &= number >= mask[batch:, None]
        return np.asarray(seen[:, None, None])
    if mask.ndim == 4 and before is not None:
        largest = mask.shape[3]
        check_shape("the mask", mask.shape, (batch, 1, largest, largest))
        if largest < max(keys, before + queries):
            raise ValueError(f"the mask is for {largest} tokens, and there are {keys}")
        return np.asarray(mask[:, :, before : before + queries, :keys] > 0)
    if mask.ndim not in (2, 3):
        raise ValueError(
            f"the mask has the shape {list(mask.shape)}; {'1 to 3' if before is None else '1 to 4'} axes are needed"
        )
    check_shape("the mask", mask.shape, (batch, keys) if mask.ndim == 2 else (batch, queries, keys))
    return np.asarray((mask[:, None, None] if mask.ndim == 2 else mask[:, None]) > 0)


def _rotated(x: Array, before: int, size: int) -> Array:
    """Element i and i + size/2 of (B, N, S, H), as a complex number, by position/10000^(2i/size)."""
    if size > x.shape[3] or size % 2:
        raise ValueError(f"{size} elements of heads of {x.shape[3]} are to be turned; an even number of them is needed")
    half = size // 2
    angle = np.outer(before + np.arange(x.shape[2]), 10000.0 ** (-np.arange(half) / max(half, 1)))
    product = (x[..., :half] + 1j * x[..., half:size]) * np.exp(1j * angle)
    return np.concatenate([product.real, product.imag, x[..., size:]], 3, dtype=x.dtype, casting="same_kind")


def _attend(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    shown: Array | None,
    filter_value: float,
    attention_bias: Array | None,
    before: int,
    unidirectional: int,
) -> tuple[Array, Array]:
    """The result, and the scores: of a key that is not shown lower by `filter_value`, of a later one the lowest number."""
    need(4 * q.size // max(q.shape[3], 1) * k.shape[2] * q.itemsize)
    scores = np.einsum("bnsh,bnth->bnst", q, k) * q.dtype.type(scale or 1 / math.sqrt(q.shape[3]))
    queries, keys = scores.shape[2:]
    if shown is not None:
        scores = scores + np.where(shown, scores.dtype.type(0), scores.dtype.type(filter_value))
    if attention_bias is not None:
        if attention_bias.ndim != 4:
            raise ValueError(f"attention_bias has the shape {list(attention_bias.shape)}; 4 axes are needed")
        check_expands("attention_bias", attention_bias.shape, scores.shape)
        check_shape("attention_bias", attention_bias.shape[2:], scores.shape[2:])
        scores = scores + attention_bias
    if unidirectional:
        later = np.arange(keys) > np.arange(before, before + queries)[:, None]
        scores = np.where(later, _lowest(scores), scores)
    mixed = np.einsum("bnst,bnth->bsnh", softmax(scores, axis=-1), v)
    return np.asarray(mixed.reshape(*mixed.shape[:2], mixed.shape[2] * mixed.shape[3])), scores


def _lowest(scores: Array) -> Any:
    """The lowest number of their type, or of float where that is wider: ONNX Runtime attends to no double."""
    kind = np.float32 if scores.dtype == np.float64 else scores.dtype
    return scores.dtype.type(np.finfo(kind).min)
