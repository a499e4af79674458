"""ONNX Runtime's attentions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import softmax
from refgrad.backends.numpy.kernels.attention import by_heads
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.backends.numpy.memory import need
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.activation import plus
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("MultiHeadAttention", domain=MICROSOFT, in_float32=True)
def multi_head_attention(args: Arguments) -> tuple[Array, ...]:
    """Attention of query (B, S, N·H), or packed (B, S, N, 3, H), to key and value, each head for itself"""
    query, key, value = args.query, args.key, args.value
    if key is None:
        query, key, value = _unpacked(query)
    elif value is None:
        key, value = _unpacked(key)
    q, k, v = _by_heads((query, key, value), args.bias, args.num_heads)
    length = None if args.past_key is None else args.past_sequence_length
    present_key, keys = _extended(args.past_key, k, length, args.cache_indirection)
    present_value, values = _extended(args.past_value, v, length, args.cache_indirection)
    before = keys.shape[2] - k.shape[2]
    shown = None if args.key_padding_mask is None else _shown(args.key_padding_mask, q, keys.shape[2])
    y, scores = _attend(
        q, keys, values, args.scale, shown, args.mask_filter_value, args.attention_bias, before, args.unidirectional
    )
    return y, present_key, present_value, scores


@kernel_of_body("Attention", domain=MICROSOFT, in_float32=True, fresh=True)
def attention(args: Arguments, *, _wanted: tuple[bool, ...]) -> tuple[Array, ...]:
    """Attention of a sequence to itself: query, key and value are the parts of one projection of it"""
    q, k, v = (
        by_heads(x, args.num_heads) for x in projections(args.input, args.weights, args.bias, args.qkv_hidden_sizes)
    )
    length = args.past_sequence_length if args.past_present_share_buffer else None
    if args.past is not None:
        tokens = args.past.shape[3] if length is None else _length(length, args.past.shape[3], k.shape[2])
    before = 0 if args.past is None else tokens
    if args.do_rotary:
        q, k = (_rotated(x, before, args.rotary_embedding_dim or x.shape[3]) for x in (q, k))
    caches = (None, None) if args.past is None else (args.past[0], args.past[1])
    present_key, keys = _extended(caches[0], k, length, None)
    present_value, values = _extended(caches[1], v, length, None)
    shown = None if args.mask_index is None else _shown(args.mask_index, q, keys.shape[2], before)
    y, _ = _attend(
        q, keys, values, args.scale, shown, args.mask_filter_value, args.attention_bias, before, args.unidirectional
    )
    if not any(_wanted[1:]):
        return (y,)
    if k.shape != v.shape:
        raise ValueError(
            f"present has keys of {k.shape[3]} elements and values of {v.shape[3]}, which are not in one tensor; leave it out"
        )
    return y, np.stack([present_key, present_value])


@kernel_of_body("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, in_float32=True)
def decoder_masked_multi_head_attention(args: Arguments) -> tuple[Array | None, ...]:
    """Attention of one query a sequence, to the keys and values of itself and of a cache, or of another sequence"""
    query, key, value = args.query, args.key, args.value
    if key is None:
        width = query.shape[2]
        v_width = width // 3 if args.past_value is None else args.num_heads * args.past_value.shape[-1]
        query, key, value = np.split(query, [(width - v_width) // 2, width - v_width], 2)
    q, k, v = _by_heads((query, key, value), args.bias, args.num_heads)
    length = args.past_sequence_length if args.past_present_share_buffer else None
    present_key, present_value = None, None
    keys, values = k, v
    if key.ndim == 3:
        present_key, keys = _extended(args.past_key, k, length, args.cache_indirection)
        present_value, values = _extended(args.past_value, v, length, args.cache_indirection)
    shown = None
    if args.mask_index is not None:
        shown = _shown(args.mask_index, q, keys.shape[2])
    y, scores = _attend(q, keys, values, args.scale, shown, args.mask_filter_value, args.attention_bias, 0, 0)
    return y, present_key, present_value, scores if args.output_qk else None


@kernel_of_body("DecoderMaskedSelfAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def decoder_masked_self_attention(args: Arguments, *, _output_types: tuple[np.dtype | None, ...]) -> tuple[Array, ...]:
    """Attention of one token a sequence to itself and a cache, whose keys are interleaved where it is a buffer"""
    q, k, v = (by_heads(x, args.num_heads) for x in projections(args.input, args.weights, args.bias, None))
    old_keys, length = args.past[0], None
    if args.past_present_share_buffer:
        length = args.past_sequence_length
        places = _places(args.past.shape[3], k.shape[3], 16 // (_output_types[1] or args.input.dtype).itemsize)
        old_keys = args.past[0].reshape(*k.shape[:2], places.size)[..., places]
    before = args.past.shape[3] if length is None else _length(length, args.past.shape[3], 1)
    if args.do_rotary:
        q, k = (_rotated(x, before, x.shape[3]) for x in (q, k))
    present_key, keys = _extended(old_keys, k, length, args.cache_indirection)
    present_value, values = _extended(args.past[1], v, length, args.cache_indirection)
    if args.past_present_share_buffer:
        interleaved = np.empty((*k.shape[:2], places.size), args.past.dtype)
        interleaved[..., places] = present_key
        present_key = interleaved.reshape(present_key.shape)
    shown = None
    if args.mask_index is not None:
        shown = _shown(args.mask_index, q, keys.shape[2])
    y, _ = _attend(q, keys, values, args.scale, shown, args.mask_filter_value, args.attention_bias, 0, 0)
    return y, np.stack([present_key, present_value])


@kernel_of_body("DecoderAttention", domain=MICROSOFT, in_float32=True)
def decoder_attention(args: Arguments) -> tuple[Array, ...]:
    """Attention of a sequence to itself, to another or to a cache; sequences are along the first axis"""
    width = args.q_weight.shape[-1]
    q = by_heads((args.query @ args.q_weight + args.bias[:width]).swapaxes(0, 1), args.num_heads)
    cached = bool(args.use_past) and bool(args.has_layer_state)
    if cached and (args.key_cache is None or args.value_cache is None):
        raise ValueError("use_past and has_layer_state are true, and key_cache or value_cache is left out")
    k: list[Array] = []
    v: list[Array] = []
    if cached:
        for cache, read in ((args.key_cache, k), (args.value_cache, v)):
            read.append(cache)
    if not (cached and args.static_kv):
        both = (args.key if args.static_kv else args.query) @ args.kv_weight + args.bias[width:]
        k.append(by_heads(both[..., :width].swapaxes(0, 1), args.num_heads))
        v.append(by_heads(both[..., width:].swapaxes(0, 1), args.num_heads))
    keys, values = np.concatenate(k, 2), np.concatenate(v, 2)
    scores = np.einsum("bnsh,bnth->bnst", q, keys) / np.sqrt(q.dtype.type(q.shape[3]))
    if args.has_key_padding_mask:
        if args.key_padding_mask is None:
            raise ValueError("has_key_padding_mask is true, and key_padding_mask is left out")
        check_shape("key_padding_mask", args.key_padding_mask.shape, (q.shape[0], keys.shape[2]))
        scores = np.where(args.key_padding_mask[:, None, None], _lowest(scores), scores)
    y = np.einsum("bnst,bnth->sbnh", softmax(scores, axis=-1), values)
    return y.reshape(args.query.shape), keys, values


@kernel_of_body("LongformerAttention", domain=MICROSOFT, in_float32=True, fresh=True)
def longformer_attention(args: Arguments) -> Array:
    """Token by token: the keys that it sees are picked out before they are weighed"""
    local = projections(args.input, args.weight, args.bias, None)
    return windowed(
        local,
        projections(args.input, args.global_weight, args.global_bias, None),
        args.mask,
        args.global_,
        args.num_heads,
        args.window,
    )


def windowed(
    local: list[Array], overall: list[Array], mask: Array, global_: Array, num_heads: int, window: int
) -> Array:
    """LongformerAttention of queries, keys and values, and of those with which the global tokens attend."""
    shape = local[0].shape
    batch, length, _ = shape
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
    ends = np.cumsum(sizes or [weights.shape[1] // 3] * 3)[:2]
    biases = [None] * 3 if bias is None else np.split(bias, ends)
    return [plus(x @ part, b) for part, b in zip(np.split(weights, ends, 1), biases, strict=True)]


def _unpacked(x: Array) -> list[Array]:
    """(B, L, N, count, H) to as many of (B, L, N·H)"""
    return [x[:, :, :, k].reshape(*x.shape[:2], x.shape[2] * x.shape[4]) for k in range(x.shape[3])]


def _by_heads(parts: tuple[Array, Array, Array], bias: Array | None, num_heads: int) -> list[Array]:
    """Query, key and value with their parts of the bias, as (B, N, L, H); what has four axes is so already."""
    projected = list(parts)
    if bias is not None:
        width = parts[0].shape[-1]
        pieces = np.split(bias, [width, 2 * width])
        projected = [x if x.ndim == 4 else x + b for x, b in zip(parts, pieces, strict=True)]
    q, k, v = (x if x.ndim == 4 else by_heads(x, num_heads) for x in projected)
    return [q, k, v]


def _length(given: Array, room: int, new: int) -> int:
    """How many tokens of a cache there are: with the new ones they fit into its buffer."""
    length = int(given.reshape(()))
    if not 0 <= length <= room - new:
        raise ValueError(f"past_sequence_length is {length}, and {new} are new; the buffer has room for 0 to {room}")
    return length


def _extended(
    past: Array | None, new: Array, length: Array | None, cache_indirection: Array | None
) -> tuple[Array, Array]:
    """The cache with the new keys or values in it, and all that are attended to."""
    if past is None:
        return new, new
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
        seen = number < mask[:batch, None]
        if mask.size == 2 * batch:
            seen &= number >= mask[batch:, None]
        return np.asarray(seen[:, None, None])
    if mask.ndim == 4 and before is not None:
        return np.asarray(mask[:, :, before : before + queries, :keys] > 0)
    return np.asarray((mask[:, None, None] if mask.ndim == 2 else mask[:, None]) > 0)


def _rotated(x: Array, before: int, size: int) -> Array:
    """Element i and i + size/2 of (B, N, S, H), as a complex number, by position/10000^(2i/size)."""
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
