"""ONNX Runtime's attentions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import plus
from refgrad.microsoft.declared import Size, check_shape, divided, first, one_number, product, sizes, total
from refgrad.microsoft.position import check_counts, known_rank, split_heads, turned
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import Ints, UnsupportedFormError, operator

_FILTER = -10000.0  # added to the score of a key that a mask hides
_PAIR = "it needs key and value, or neither of them"
_BENEATH = -1e30  # a score that is added to it is lost, in double too
_BASE = 10000.0  # with do_rotary, pair i of a head turns by position/_BASE^(2i/size)


@operator(
    "MultiHeadAttention",
    "output",
    optional=["present_key", "present_value", "qk"],
    others=("key_padding_mask", "past_sequence_length", "cache_indirection"),
)
def multi_head_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None = None,
    value: str | None = None,
    bias: str | None = None,
    key_padding_mask: str | None = None,
    attention_bias: str | None = None,
    past_key: str | None = None,
    past_value: str | None = None,
    past_sequence_length: str | None = None,
    cache_indirection: str | None = None,
    *,
    mask_filter_value: float = _FILTER,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[str | None, ...]:
    """softmax(scale·Q·Kᵀ + mask + attention_bias)·V, head by head, of query, key and value plus their parts of the bias

    qk is what softmax is taken of. With past_sequence_length the past is a buffer that has room for the new keys and values.
    """
    rank = known_rank(op, "query", query, 5) if key is None else known_rank(op, "key", key, 3, 4, 5)
    if rank != 5 and value is None:
        raise UnsupportedFormError(_PAIR)
    _check_multi_head(op, query, key, value, bias, past_key, past_value, num_heads).check(
        op, "key_padding_mask", key_padding_mask, attention_bias, past_sequence_length
    )
    if key is None or rank == 5:  # (B, L, heads, 3 or 2, H): packed
        packed, count = (query, 3) if key is None else (key, 2)
        split = [op.Gather(packed, op.const(np.array(k)), axis=3) for k in range(count)]
        flat = [op.Reshape(x, _joined(op, x), allowzero=1) for x in split]
        query, key, value = flat if count == 3 else (query, *flat)
    assert key is not None
    assert value is not None
    biases = [None] * 3 if bias is None else parts(op, bias, op.Shape(query, start=2, end=3), 0)
    q = heads_of(op, plus(op, query, biases[0]), num_heads)
    if rank == 4:  # (B, heads, L, H): projected before, and without biases
        k, v = key, value
    else:
        k, v = (heads_of(op, plus(op, x, b), num_heads, query) for x, b in ((key, biases[1]), (value, biases[2])))
    length = None if past_key is None or past_sequence_length is None else _count(op, past_sequence_length)
    keys, present_key = _with_past(op, k, past_key, length, cache_indirection)
    values, present_value = _with_past(op, v, past_value, length, cache_indirection)
    before = op.Sub(_size(op, keys, 2), _size(op, k, 2))
    scores = scores_of(op, q, keys, scale)
    scores = _filtered(op, scores, _hidden(op, key_padding_mask, q, keys), mask_filter_value, attention_bias)
    if unidirectional:
        scores = _causal(op, scores, q, keys, before)
    return mixed(op, scores, values), present_key, present_value, scores


@operator("Attention", "output", optional=["present"], others=("mask_index", "past_sequence_length"))
def attention(
    op: FunctionEmitter,
    input: str,
    weights: str,
    bias: str | None = None,
    mask_index: str | None = None,
    past: str | None = None,
    attention_bias: str | None = None,
    past_sequence_length: str | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = _FILTER,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Ints | None = None,
    rotary_embedding_dim: int = 0,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[str, str | None]:
    """softmax(scale·Q·Kᵀ + mask + attention_bias)·V, head by head; Q, K and V are the parts of input·weights + bias

    With do_rotary, queries and keys are turned by their positions, as RotaryEmbedding does it with 10000^(−2i/size) for pair i.
    """
    q, k, v = (heads_of(op, x, num_heads) for x in projected(op, input, weights, bias, qkv_hidden_sizes))
    asked = _check_attention(op, input, weights, past, num_heads, qkv_hidden_sizes, do_rotary, rotary_embedding_dim)
    asked.check(
        op, "mask_index", mask_index, attention_bias, past_sequence_length if past_present_share_buffer else None
    )
    length = None
    if past_present_share_buffer:
        if past is None or past_sequence_length is None:
            raise UnsupportedFormError("past_present_share_buffer=1 needs past and past_sequence_length; add them")
        length = _count(op, past_sequence_length)
    pasts = [None if past is None else op.Gather(past, op.const(np.array(n)), axis=0) for n in (0, 1)]
    none = op.const([0])
    before = none if pasts[0] is None else _size(op, pasts[0], 2) if length is None else length
    if do_rotary:
        if rotary_embedding_dim not in (0, 32, 64, 128):
            raise UnsupportedFormError(f"rotary_embedding_dim is {rotary_embedding_dim}; it is 0, 32, 64 or 128")
        cos, sin = _angles(op, q, before, rotary_embedding_dim)
        q, k = (turned(op, x, cos, sin, 0, bool(rotary_embedding_dim)) for x in (q, k))
    (keys, present_key), (values, present_value) = (
        _with_past(op, x, old, length, None) for x, old in ((k, pasts[0]), (v, pasts[1]))
    )
    scores = scores_of(op, q, keys, scale)
    scores = _filtered(op, scores, _hidden(op, mask_index, q, keys, before), mask_filter_value, attention_bias)
    if unidirectional:
        scores = _causal(op, scores, q, keys, before)
    if qkv_hidden_sizes and qkv_hidden_sizes[1] != qkv_hidden_sizes[2]:
        return mixed(op, scores, values), None  # keys and values of different sizes are not in one tensor
    present = op.Concat(op.Unsqueeze(present_key, [0]), op.Unsqueeze(present_value, [0]), axis=0)
    return mixed(op, scores, values), present


@operator(
    "DecoderMaskedMultiHeadAttention",
    "output",
    optional=["present_key", "present_value", "qk"],
    others=("mask_index", "past_sequence_length", "beam_width", "cache_indirection"),
)
def decoder_masked_multi_head_attention(
    op: FunctionEmitter,
    query: str,
    key: str | None = None,
    value: str | None = None,
    mask_index: str | None = None,
    attention_bias: str | None = None,
    past_key: str | None = None,
    past_value: str | None = None,
    past_sequence_length: str | None = None,
    beam_width: str | None = None,
    cache_indirection: str | None = None,
    bias: str | None = None,
    *,
    mask_filter_value: float = _FILTER,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
) -> tuple[str | None, ...]:
    """MultiHeadAttention of one query: to itself and the past, or to keys and values that are projected already

    The buffers are read as they are, as the kernel on the CPU does; the one on CUDA wants keys in another order.
    """
    if (key is None) != (value is None):
        raise UnsupportedFormError(_PAIR)
    if key is None:  # (B, 1, widths of query, key and value)
        width = _size(op, query, 2)
        third = op.Div(width, [3])
        if past_value is not None:
            third = op.Div(op.Sub(width, op.Mul(_size(op, past_value, 3), [num_heads])), [2])
        query, key, value = parts(op, query, third, 2)
        crossed = False
    else:
        crossed = known_rank(op, "key", key, 3, 4) == 4
    assert value is not None
    biases = [None] * 3 if bias is None else parts(op, bias, _size(op, query, 2), 0)
    q = heads_of(op, plus(op, query, biases[0]), num_heads)
    present_key = present_value = None
    if crossed:
        keys, values = key, value
    else:
        length = None
        if past_present_share_buffer:
            if past_key is None or past_sequence_length is None:
                raise UnsupportedFormError(
                    "past_present_share_buffer=1 needs a past and past_sequence_length; add them"
                )
            length = _count(op, past_sequence_length)
        k, v = (heads_of(op, plus(op, x, b), num_heads, query) for x, b in ((key, biases[1]), (value, biases[2])))
        keys, present_key = _with_past(op, k, past_key, length, cache_indirection)
        values, present_value = _with_past(op, v, past_value, length, cache_indirection)
    scores = scores_of(op, q, keys, scale)
    if mask_index is not None:
        known_rank(op, "mask_index", mask_index, 2)
    scores = _filtered(op, scores, _hidden(op, mask_index, q, keys), mask_filter_value, attention_bias)
    return mixed(op, scores, values), present_key, present_value, scores if output_qk else None


@operator(
    "DecoderMaskedSelfAttention",
    "output",
    "present",
    others=("mask_index", "past_sequence_length", "beam_width", "cache_indirection"),
)
def decoder_masked_self_attention(
    op: FunctionEmitter,
    input: str,
    weights: str,
    bias: str,
    mask_index: str | None,
    past: str,
    attention_bias: str | None,
    past_sequence_length: str,
    beam_width: str | None = None,
    cache_indirection: str | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = _FILTER,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float | None = None,
) -> tuple[str, str]:
    """Attention of one token to itself and the past

    Keys in a buffer lie as (heads, size/x, length, x), where x elements have 16 bytes.
    """
    q, k, v = (heads_of(op, x, num_heads) for x in projected(op, input, weights, bias, None))
    past_key, past_value = (op.Gather(past, op.const(np.array(n)), axis=0) for n in (0, 1))
    length, before = None, _size(op, past_key, 2)
    packs = op.const([16 // np.dtype(helper.tensor_dtype_to_np_dtype(op.type(past))).itemsize])
    if past_present_share_buffer:
        length = before = _count(op, past_sequence_length)
        past_key = _key_by_key(op, past_key, packs)
    if do_rotary:
        cos, sin = _angles(op, q, before, 0)
        q, k = (turned(op, x, cos, sin, 0, False) for x in (q, k))
    keys, present_key = _with_past(op, k, past_key, length, cache_indirection)
    values, present_value = _with_past(op, v, past_value, length, cache_indirection)
    if past_present_share_buffer:
        present_key = _by_packs(op, present_key, packs)
    scores = scores_of(op, q, keys, scale)
    if mask_index is not None:
        known_rank(op, "mask_index", mask_index, 2)
    scores = _filtered(op, scores, _hidden(op, mask_index, q, keys), mask_filter_value, attention_bias)
    present = op.Concat(op.Unsqueeze(present_key, [0]), op.Unsqueeze(present_value, [0]), axis=0)
    return mixed(op, scores, values), present


@operator(
    "DecoderAttention",
    "output",
    optional=["new_key_cache", "new_value_cache"],
    others=("key_padding_mask", "static_kv", "use_past", "has_layer_state", "has_key_padding_mask"),
)
def decoder_attention(
    op: FunctionEmitter,
    query: str,
    key: str,
    q_weight: str,
    kv_weight: str,
    bias: str,
    key_padding_mask: str | None,
    key_cache: str | None,
    value_cache: str | None,
    static_kv: str,
    use_past: str,
    has_layer_state: str,
    has_key_padding_mask: str,
    *,
    mask_filter_value: float = _FILTER,
    num_heads: int,
) -> tuple[str, str, str]:
    """softmax(Q·Kᵀ/√size)·V, head by head; static_kv and use_past say whether keys and values are of query, of key, or cached

    A key that key_padding_mask names counts for nothing, so there is nothing that mask_filter_value would be added to.
    """
    static, past, state, padded = (
        op.Cast(op.Reshape(flag, [1]), to=TensorProto.INT64)
        for flag in (static_kv, use_past, has_layer_state, has_key_padding_mask)
    )
    cached = op.Mul(past, state)
    own, other = op.Sub(op.const([1]), static), op.Mul(static, op.Sub(op.const([1]), cached))
    width = op.Shape(q_weight, start=1)
    q_bias, kv_bias = op.Slice(bias, [0], width, [0]), op.Slice(bias, width, [END], [0])

    def heads(x: str) -> str:
        return heads_of(op, op.Transpose(x, perm=[1, 0, 2]), num_heads)

    q = heads(op.Add(op.MatMul(query, q_weight), q_bias))
    read_keys: list[str] = []
    read_values: list[str] = []
    for cache, read in ((key_cache, read_keys), (value_cache, read_values)):
        if cache is not None:
            read.append(op.Slice(cache, [0], op.Mul(_size(op, cache, 2), cached), [2]))
    for source, taken in ((query, own), (key, other)):  # as many tokens as are taken, which may be none
        some = op.Slice(source, [0], op.Mul(op.Shape(source, end=1), taken), [0])
        both = op.Add(op.MatMul(some, kv_weight), kv_bias)
        read_keys.append(heads(op.Slice(both, [0], width, [2])))
        read_values.append(heads(op.Slice(both, width, [END], [2])))
    keys, values = (op.Concat(*read, axis=2) for read in (read_keys, read_values))
    scores = scores_of(op, q, keys, None)
    if key_padding_mask is not None:
        mask = op.Slice(
            op.Cast(key_padding_mask, to=TensorProto.INT32), [0], op.Mul(_size(op, key_padding_mask, 1), padded), [1]
        )
        every = op.Sub(op.const([1]), padded)  # without the mask, one column says of all keys that they are shown
        shown = op.Expand(op.const(np.array(0, np.int32)), op.Concat(_size(op, keys, 0), every, axis=0))
        hidden = op.Cast(op.Unsqueeze(op.Concat(mask, shown, axis=1), [1, 2]), to=TensorProto.BOOL)
        scores = op.Where(hidden, lowest(op, scores), scores)
    return op.Transpose(mixed(op, scores, values), perm=[1, 0, 2]), keys, values


@operator("LongformerAttention", "output", others=("global",))
def longformer_attention(
    op: FunctionEmitter,
    input: str,
    weight: str,
    bias: str,
    mask: str,
    global_weight: str,
    global_bias: str,
    global_: str,
    *,
    num_heads: int,
    window: int,
) -> str:
    """Attention of each token to those in its window and to the global ones; a global one attends to all, by other weights

    Scores have the mask of their key added; where it is below 0, the token itself has the result 0, as in Hugging Face's model.
    """
    local = projected(op, input, weight, bias, None)
    overall = projected(op, input, global_weight, global_bias, None)
    return windowed(op, local, overall, mask, global_, num_heads, window)


def windowed(
    op: FunctionEmitter,
    local: list[str],
    overall: list[str],
    mask: str,
    global_: str,
    num_heads: int,
    window: int,
) -> str:
    """LongformerAttention of queries, keys and values, and of those with which the global tokens attend."""
    q, k, v = (heads_of(op, x, num_heads) for x in local)
    number = op.up_to(_size(op, mask, 1))
    away = op.Abs(op.Sub(op.Unsqueeze(number, [1]), number))
    everywhere = op.Cast(global_, to=TensorProto.BOOL)
    unseen = op.And(op.Greater(away, window), op.Not(op.Unsqueeze(everywhere, [1, 2])))
    added = op.Unsqueeze(mask, [1, 2])
    scores = op.Add(scores_of(op, q, k, None), added)
    near = mixed(op, op.Where(unseen, lowest(op, scores), scores), v)
    q, k, v = (heads_of(op, x, num_heads) for x in overall)
    far = mixed(op, op.Add(scores_of(op, q, k, None), added), v)
    y = op.Where(op.Unsqueeze(everywhere, [2]), far, near)
    return str(op.Where(op.Unsqueeze(op.Less(mask, 0.0), [2]), 0.0, y))


@dataclass(frozen=True)
class _Asked:
    """How many samples, heads, queries, new keys and keys of the past an attention has, as far as the model declares it."""

    batch: Size
    heads: int
    queries: Size
    keys: Size
    past: Size  # 0 without a past

    def check(
        self,
        op: FunctionEmitter,
        name: str,
        mask: str | None,
        attention_bias: str | None,
        past_sequence_length: str | None,
    ) -> None:
        """Refuse a mask, called `name`, or a bias of another shape, and tokens for which a buffer has no room."""
        B, S, every = self.batch, self.queries, total(self.past, self.keys)
        if past_sequence_length is not None and self.past != 0:
            length = one_number(op, "past_sequence_length", past_sequence_length)
            room = None if self.past is None or self.keys is None else self.past - self.keys
            if length is not None and (length < 0 or (room is not None and length > room)):
                most = "or more" if room is None else f"to {room}, for the buffer holds the new tokens too"
                raise UnsupportedFormError(f"past_sequence_length is {length}; it is 0 {most}")
            every = total(length, self.keys)
        twice = [(product(2, B),)] if name == "mask_index" else []
        square = first(*sizes(op, mask, 4)[2:])
        due: dict[int | None, list[tuple[Size, ...]]] = {
            1: [(B,), *twice, (total(product(3, B), 2),)],
            2: [(B, every)],
            3: [(B, S, every)],
            4: [(B, 1, square, square)],
        }
        rank = None if mask is None else op.rank(mask)
        if rank in due:
            check_shape(op, name, mask, *due[rank])
        if square is not None and every is not None and square < every:
            raise UnsupportedFormError(f"its input {name} is for {square} tokens; there are {every}")
        check_shape(op, "attention_bias", attention_bias, ((1, B), (1, self.heads), S, every))


def _check_multi_head(
    op: FunctionEmitter,
    query: str,
    key: str | None,
    value: str | None,
    bias: str | None,
    past_key: str | None,
    past_value: str | None,
    num_heads: int,
) -> _Asked:
    """Refuse inputs of MultiHeadAttention that do not fit each other."""
    check_counts(num_heads=num_heads)
    if (past_key is None) != (past_value is None):
        raise UnsupportedFormError("it needs past_key and past_value, or neither of them")
    N = num_heads
    if key is None:
        check_shape(op, "query", query, (None, None, N, 3, None))
        B, S, _, _, H = sizes(op, query, 5)
        T, width = S, H
    else:
        check_shape(op, "query", query, (None, None, None))
        B, S, D = sizes(op, query, 3)
        H = divided("query", D, N, "num_heads")
        if op.rank(key) == 5:
            check_shape(op, "key", key, (B, None, N, 2, H))
            _, T, _, _, width = sizes(op, key, 5)
        elif op.rank(key) == 4:
            check_shape(op, "key", key, (B, N, None, H))
            T = first(sizes(op, key, 4)[2], sizes(op, value, 4)[2])
            check_shape(op, "value", value, (B, N, T, None))
            width = sizes(op, value, 4)[3]
        else:
            check_shape(op, "key", key, (B, None, D))
            T = first(sizes(op, key, 3)[1], sizes(op, value, 3)[1])
            check_shape(op, "value", value, (B, T, None))
            width = divided("value", sizes(op, value, 3)[2], N, "num_heads")
    check_shape(op, "bias", bias, (product(N, total(H, H, width)),))
    check_shape(op, "past_key", past_key, (B, N, None, H))
    P = 0 if past_key is None else first(sizes(op, past_key, 4)[2], sizes(op, past_value, 4)[2])
    check_shape(op, "past_value", past_value, (B, N, P, width))
    return _Asked(B, N, S, T, P)


def _check_attention(
    op: FunctionEmitter,
    input: str,
    weights: str,
    past: str | None,
    num_heads: int,
    qkv_hidden_sizes: Ints | None,
    do_rotary: int,
    rotary_embedding_dim: int,
) -> _Asked:
    """Refuse inputs of Attention that do not fit each other, and heads that are not turned."""
    check_counts(num_heads=num_heads)
    columns = sizes(op, weights, 2)[1]
    thirds: list[Size] = [None if columns is None else columns // 3] * 3
    given = list[Size](qkv_hidden_sizes) if qkv_hidden_sizes else thirds
    H, _, width = (divided("a part of weights", size, num_heads, "num_heads") for size in given)
    if do_rotary and H is not None and (H % 2 or rotary_embedding_dim > H):
        raise UnsupportedFormError(
            f"do_rotary turns {rotary_embedding_dim or H} elements of heads of {H}; it turns an even number, at most {H}"
        )
    B, S, _ = sizes(op, input, 3)
    check_shape(op, "input", input, (None, None, None))
    check_shape(op, "past", past, (2, B, num_heads, None, H))
    check_shape(op, "past", past, (2, B, num_heads, None, width))
    return _Asked(B, num_heads, S, S, 0 if past is None else sizes(op, past, 5)[3])


def _check_projection(
    op: FunctionEmitter, input: str, weights: str, bias: str | None, qkv_hidden_sizes: Ints | None
) -> None:
    """Refuse weights and parts of them that do not fit the input."""
    rank = op.rank(input)
    check_shape(op, "weights", weights, (None if rank is None else sizes(op, input, rank)[-1], None))
    columns = sizes(op, weights, 2)[1]
    check_shape(op, "bias", bias, (columns,))
    if qkv_hidden_sizes:
        q, *others = qkv_hidden_sizes
        fits = len(others) == 2 and min(qkv_hidden_sizes) > 0 and q == others[0]
        if not fits or columns not in (None, sum(qkv_hidden_sizes)):
            of = "" if columns is None else f", of {columns} columns in all"
            raise UnsupportedFormError(
                f"qkv_hidden_sizes is {list(qkv_hidden_sizes)}; it has three sizes above 0, the first two equal{of}"
            )
    elif columns is not None and columns % 3:
        raise UnsupportedFormError(f"weights has {columns} columns, which are not three parts; give qkv_hidden_sizes")


def projected(
    op: FunctionEmitter, input: str, weights: str, bias: str | None, qkv_hidden_sizes: Ints | None
) -> list[str]:
    """The parts of input·weights + bias along its last axis: thirds, unless there are sizes."""
    _check_projection(op, input, weights, bias, qkv_hidden_sizes)
    x = plus(op, op.MatMul(input, weights), bias)
    if not qkv_hidden_sizes:
        return parts(op, x, op.Div(op.Shape(x, start=-1), [3]), -1)
    ends = [0, *np.cumsum(qkv_hidden_sizes).tolist()]
    return [op.Slice(x, [start], [end], [-1]) for start, end in itertools.pairwise(ends)]


def parts(op: FunctionEmitter, x: str, width: str, axis: int) -> list[str]:
    """Twice `width` elements along the axis, and the rest."""
    twice = op.Add(width, width)
    return [
        op.Slice(x, [0], width, [axis]),
        op.Slice(x, width, twice, [axis]),
        op.Slice(x, twice, [END], [axis]),
    ]


def _size(op: FunctionEmitter, x: str, axis: int) -> str:
    """The size of an axis, as one element."""
    return op.Shape(x, start=axis, end=axis + 1)


def _count(op: FunctionEmitter, n: str) -> str:
    """A number of tokens, as one element."""
    return op.Reshape(op.Cast(n, to=TensorProto.INT64), [1])


def _joined(op: FunctionEmitter, x: str) -> str:
    """The shape of (batch, length, heads, size) with the last two axes in one."""
    return op.Concat(op.Shape(x, end=2), op.Mul(_size(op, x, 2), _size(op, x, 3)), axis=0)


def heads_of(op: FunctionEmitter, x: str, num_heads: int, beside: str | None = None) -> str:
    """(B, L, heads·H) to (B, heads, L, H), where B is the batch of `beside`"""
    return op.Transpose(split_heads(op, x, num_heads, beside), perm=[0, 2, 1, 3])


def _with_past(
    op: FunctionEmitter, new: str, past: str | None, length: str | None, cache_indirection: str | None
) -> tuple[str, str]:
    """All keys or values, of which `new` are the last, and the cache that has them.

    Of the `past`, a buffer, the first `length` are read; without `length` it is full, and grows.
    """
    if past is None:
        return new, new
    before = past if length is None else op.Slice(past, [0], length, [2])
    every = op.Concat(before, new, axis=2)
    if length is None:
        present = every
    else:
        end = op.Add(length, _size(op, new, 2))
        present = op.Concat(every, op.Slice(past, end, [END], [2]), axis=2)
    if cache_indirection is not None:
        every = op.Concat(_of_beams(op, before, cache_indirection), new, axis=2)
    return every, present


def _key_by_key(op: FunctionEmitter, buffer: str, packs: str) -> str:
    """(B, heads, L, H) of which the elements lie as (B, heads, H/packs, L, packs), in their order."""
    shape = op.Shape(buffer)
    ends = op.Div(_size(op, buffer, 3), packs), _size(op, buffer, 2), packs
    apart = op.Reshape(buffer, op.Concat(op.Shape(buffer, end=2), *ends, axis=0), allowzero=1)
    return op.Reshape(op.Transpose(apart, perm=[0, 1, 3, 2, 4]), shape, allowzero=1)


def _by_packs(op: FunctionEmitter, keys: str, packs: str) -> str:
    """The way back of `_key_by_key`."""
    shape = op.Shape(keys)
    ends = op.Div(_size(op, keys, 3), packs), packs
    apart = op.Reshape(keys, op.Concat(op.Shape(keys, end=3), *ends, axis=0), allowzero=1)
    return op.Reshape(op.Transpose(apart, perm=[0, 1, 3, 2, 4]), shape, allowzero=1)


def _of_beams(op: FunctionEmitter, before: str, cache_indirection: str) -> str:
    """Each token from the beam that it came from: [i, j, k] is the beam of token k for beam j of batch i."""
    length = _size(op, before, 2)
    taken = op.Cast(op.Slice(cache_indirection, [0], length, [2]), to=TensorProto.INT64)
    groups, beams = _size(op, cache_indirection, 0), _size(op, cache_indirection, 1)
    first = op.Mul(op.Unsqueeze(op.up_to(groups), [1, 2]), beams)
    rows = op.Reshape(op.Add(taken, first), op.Concat(op.Mul(groups, beams), length, axis=0), allowzero=1)
    tokens = op.Expand(op.up_to(length), op.Shape(rows))
    places = op.Concat(op.Unsqueeze(rows, [2]), op.Unsqueeze(tokens, [2]), axis=2)
    return op.Transpose(op.GatherND(op.Transpose(before, perm=[0, 2, 1, 3]), places), perm=[0, 2, 1, 3])


def scores_of(op: FunctionEmitter, q: str, k: str, scale: float | None) -> str:
    """scale·Q·Kᵀ"""
    q = op.Mul(q, scale) if scale else op.Div(q, op.Sqrt(op.CastLike(_size(op, q, 3), q)))
    return op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))


def _hidden(op: FunctionEmitter, mask: str | None, q: str, keys: str, before: str | None = None) -> str | None:
    """A mask that is True at hidden keys, for (B, heads, S, T); None without a mask.

    Forms of masks that Attention alone has need the number of tokens `before` the queries.
    """
    if mask is None:
        return None
    rank = op.rank(mask)
    if rank == 1:
        return _outside(op, mask, q, keys, before is not None)
    if rank == 4 and before is not None:  # (B, 1, M, M), for as many tokens as there may be
        ends = op.Concat(op.Add(before, _size(op, q, 2)), _size(op, keys, 2), axis=0)
        mask = op.Slice(mask, op.Concat(before, op.const([0]), axis=0), ends, [2, 3])
    elif rank in (2, 3):
        mask = op.Unsqueeze(mask, [1, 2] if rank == 2 else [1])
    else:
        known = "unknown" if rank is None else str(rank)
        valid = "1 to 3" if before is None else "1 to 4"
        raise UnsupportedFormError(f"the rank of its mask is {known}; one of {valid} is needed, declared in value_info")
    return op.Not(op.Greater(mask, 0))


def _filtered(
    op: FunctionEmitter, scores: str, hidden: str | None, filter_value: float, attention_bias: str | None
) -> str:
    """The scores and the bias, with `filter_value` added where keys are hidden: a finite one stays finite in their type.

    A sum with a number as low as in masks is that number whatever the score is, so that the score has no derivative.
    """
    if hidden is None:
        return plus(op, scores, attention_bias)
    added = filter_value
    if math.isfinite(filter_value) and op.type(scores):
        added = max(filter_value, float(_finfo(op, scores).min))
    low = op.const(added, like=scores)
    if filter_value <= _BENEATH:
        return op.Where(hidden, low, plus(op, scores, attention_bias))
    return plus(op, op.Add(scores, op.Where(hidden, low, op.const(0.0, like=scores))), attention_bias)


def _outside(op: FunctionEmitter, mask: str, q: str, keys: str, begins: bool) -> str:
    """True at keys that are not before the ends in `mask`. Twice as many numbers are ends, and then beginnings."""
    batch = _size(op, q, 0)
    number = op.Cast(op.up_to(_size(op, keys, 2)), to=TensorProto.INT32)
    ends = op.Unsqueeze(op.Slice(mask, [0], batch, [0]), [1, 2, 3])
    hidden = op.GreaterOrEqual(number, ends)
    if not begins:
        return hidden
    twice = op.Equal(op.Shape(mask), op.Add(batch, batch))
    places = op.Add(op.up_to(batch), op.Mul(op.Cast(twice, to=TensorProto.INT64), batch))
    first = op.Mul(op.Gather(mask, places), op.Cast(twice, to=TensorProto.INT32))
    return op.Or(hidden, op.Less(number, op.Unsqueeze(first, [1, 2, 3])))


def _causal(op: FunctionEmitter, scores: str, q: str, keys: str, before: str) -> str:
    """The lowest number where a key is later than the query, of which there are `before` tokens in front.

    The sizes come from q (B, N, S, H) and the keys (B, N, T, H): only the result reads all scores.
    """
    rows = op.Unsqueeze(op.Add(op.up_to(_size(op, q, 2)), before), [1])
    later = op.Greater(op.up_to(_size(op, keys, 2)), rows)
    return op.Where(later, lowest(op, scores), scores)


def lowest(op: FunctionEmitter, scores: str) -> str:
    """The lowest finite number of their type, or of float where that is wider: softmax makes 0 of it beside any other."""
    return op.const(_finfo(op, scores).min)


def _finfo(op: FunctionEmitter, x: str) -> Any:
    """The `finfo` of the element type of x; of float where x is double, as ONNX Runtime attends to no double."""
    if not op.type(x):
        raise UnsupportedFormError("the element type of what it attends to is unknown; add it to value_info")
    kind = TensorProto.FLOAT if op.type(x) == TensorProto.DOUBLE else op.type(x)
    return ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(kind))  # type: ignore[no-untyped-call]


def mixed(op: FunctionEmitter, scores: str, v: str) -> str:
    """(B, S, heads·Hv)"""
    y = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    return op.Reshape(y, _joined(op, y), allowzero=1)


def _angles(op: FunctionEmitter, q: str, before: str, rotary_embedding_dim: int) -> tuple[str, str]:
    """The cos and sin by which the pairs (element i and i + size/2) of (B, heads, S, H) are turned."""
    size = op.const([rotary_embedding_dim]) if rotary_embedding_dim else _size(op, q, 3)
    kind = TensorProto.FLOAT if op.type(q) in SIXTEEN_BIT else op.type(q)
    pairs = op.Cast(op.up_to(op.Div(size, [2])), to=kind)
    frequencies = op.Pow(op.const(_BASE, like=pairs), op.Div(op.Mul(pairs, -2.0), op.Cast(size, to=kind)))
    positions = op.Cast(op.Add(op.up_to(_size(op, q, 2)), before), to=kind)
    angles = op.Mul(op.Unsqueeze(positions, [1]), frequencies)
    return op.CastLike(op.Cos(angles), q), op.CastLike(op.Sin(angles), q)
