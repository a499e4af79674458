"""ONNX Runtime's attentions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.activation import plus
from refgrad.microsoft.bodies.position import check_counts, known_rank, rotated, split_heads
from refgrad.microsoft.declared import Size, check_pairs, check_shape, divided, first, one_number, product, sizes, total
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import Ints, Shapes

_FILTER = -10000.0  # added to the score of a key that a mask hides
_BENEATH = -1e30  # a score that is added to it is lost, in double too
_BASE = 10000.0  # with do_rotary, pair i of a head turns by position/_BASE^(2i/size)


@dataclass(frozen=True)
class _Asked:
    """How many samples, heads, queries, new keys and keys of the past an attention has, as far as it is known."""

    batch: Size
    heads: int
    queries: Size
    keys: Size
    past: Size  # 0 without a past

    def check(
        self,
        shapes: Shapes,
        name: str,
        mask: Any,
        attention_bias: Any,
        past_sequence_length: Any,
    ) -> None:
        """Refuse a mask, called `name`, or a bias of another shape, and tokens for which a buffer has no room."""
        B, S, every = self.batch, self.queries, total(self.past, self.keys)
        if past_sequence_length is not None and self.past != 0:
            length = one_number(shapes, "past_sequence_length", past_sequence_length)
            room = None if self.past is None or self.keys is None else self.past - self.keys
            if length is not None and (length < 0 or (room is not None and length > room)):
                most = "or more" if room is None else f"to {room}, for the buffer holds the new tokens too"
                raise UnsupportedFormError(f"past_sequence_length is {length}; it is 0 {most}")
            every = total(length, self.keys)
        twice = [(product(2, B),)] if name == "mask_index" else []
        square = first(*sizes(shapes, mask, 4)[2:])
        due: dict[int, list[tuple[Size, ...]]] = {
            1: [(B,), *twice, (total(product(3, B), 2),)],
            2: [(B, every)],
            3: [(B, S, every)],
            4: [(B, 1, square, square)],
        }
        rank, axes = None if mask is None else shapes.rank(mask), 4 if name == "mask_index" else 3
        if rank is not None and not 1 <= rank <= axes:
            raise UnsupportedFormError(f"its input {name} is of rank {rank}; it has 1 to {axes} axes")
        if rank is not None:
            check_shape(shapes, name, mask, *due[rank])
        if square is not None and every is not None and square < every:
            raise UnsupportedFormError(f"its input {name} is for {square} tokens; there are {every}")
        check_shape(shapes, "attention_bias", attention_bias, ((1, B), (1, self.heads), S, every))


def check_projection(
    shapes: Shapes, input: Any, weights: Any, bias: Any, qkv_hidden_sizes: Ints | None, num_heads: int
) -> tuple[Size, Size]:
    """Refuse weights and parts of them that do not fit the input. Returns the sizes of a head of keys and of values."""
    check_counts(num_heads=num_heads)
    rank = shapes.rank(input)
    check_shape(shapes, "weights", weights, (None if rank is None else sizes(shapes, input, rank)[-1], None))
    columns = sizes(shapes, weights, 2)[1]
    check_shape(shapes, "bias", bias, (columns,))
    parts: list[Size] = [None if columns is None else columns // 3] * 3
    if qkv_hidden_sizes:
        q, *others = parts = list(qkv_hidden_sizes)
        fits = len(others) == 2 and min(qkv_hidden_sizes) > 0 and q == others[0]
        if not fits or columns not in (None, sum(qkv_hidden_sizes)):
            of = "" if columns is None else f", of {columns} columns in all"
            raise UnsupportedFormError(
                f"qkv_hidden_sizes is {list(qkv_hidden_sizes)}; it has three sizes above 0, the first two equal{of}"
            )
    elif columns is not None and columns % 3:
        raise UnsupportedFormError(f"weights has {columns} columns, which are not three parts; give qkv_hidden_sizes")
    H, _, width = (divided("a part of weights", size, num_heads, "num_heads") for size in parts)
    return H, width


def _check_multi_head(shapes: Shapes, args: Arguments) -> None:
    query, key, value, N = args.query, args.key, args.value, args.num_heads
    check_counts(num_heads=N)
    rank = shapes.rank(query if key is None else key)
    if key is not None and rank not in (None, 5):
        check_pairs(args, "key", "value")
    check_pairs(args, "past_key", "past_value")
    if key is None:
        check_shape(shapes, "query", query, (None, None, N, 3, None))
        B, S, _, _, H = sizes(shapes, query, 5)
        T, width = S, H
    else:
        check_shape(shapes, "query", query, (None, None, None))
        B, S, D = sizes(shapes, query, 3)
        H = divided("query", D, N, "num_heads")
        if rank == 5:
            check_shape(shapes, "key", key, (B, None, N, 2, H))
            _, T, _, _, width = sizes(shapes, key, 5)
        elif rank == 4:
            check_shape(shapes, "key", key, (B, N, None, H))
            T = first(sizes(shapes, key, 4)[2], sizes(shapes, value, 4)[2])
            check_shape(shapes, "value", value, (B, N, T, None))
            width = sizes(shapes, value, 4)[3]
        else:
            check_shape(shapes, "key", key, (B, None, D))
            T = first(sizes(shapes, key, 3)[1], sizes(shapes, value, 3)[1])
            check_shape(shapes, "value", value, (B, T, None))
            width = divided("value", sizes(shapes, value, 3)[2], N, "num_heads")
    check_shape(shapes, "bias", args.bias, (product(N, total(H, H, width)),))
    check_shape(shapes, "past_key", args.past_key, (B, N, None, H))
    P: Size = 0
    if args.past_key is not None:
        P = first(sizes(shapes, args.past_key, 4)[2], sizes(shapes, args.past_value, 4)[2])
    check_shape(shapes, "past_value", args.past_value, (B, N, P, width))
    asked = _Asked(B, N, S, T, P)
    asked.check(shapes, "key_padding_mask", args.key_padding_mask, args.attention_bias, args.past_sequence_length)


def _check_buffer(args: Arguments, past: Any) -> None:
    """Refuse a buffer without a past and the number of its tokens."""
    if args.past_present_share_buffer and (past is None or args.past_sequence_length is None):
        raise UnsupportedFormError("past_present_share_buffer=1 needs a past and past_sequence_length; add them")


def _check_beams(shapes: Shapes, args: Arguments) -> None:
    """Refuse several beams without cache_indirection, or with cache_indirection of another number of beams."""
    beams = 1 if args.beam_width is None else one_number(shapes, "beam_width", args.beam_width)
    if beams is not None and beams > 1 and args.cache_indirection is None:
        raise UnsupportedFormError(
            f"beam_width is {beams}, and cache_indirection, which says where a token is from, is left out"
        )
    check_shape(shapes, "cache_indirection", args.cache_indirection, (None, beams, None))


def _check_one_query(shapes: Shapes, args: Arguments) -> None:
    check_counts(num_heads=args.num_heads)
    check_shape(shapes, "query", args.query, (None, 1, None))
    check_pairs(args, "key", "value")
    check_pairs(args, "past_key", "past_value")
    B, _, columns = sizes(shapes, args.query, 3)
    rank, N, H, width = 3, args.num_heads, None, sizes(shapes, args.past_value, 4)[3]
    if args.key is not None:
        H = divided("query", columns, N, "num_heads")
        check_shape(shapes, "key", args.key, (B, 1, columns), (B, N, None, H))
        rank = shapes.rank(args.key) or 3
        T = sizes(shapes, args.key, 4)[2]
        check_shape(shapes, "value", args.value, (B, N, T, None) if rank == 4 else (B, 1, None))
        of_value = sizes(shapes, args.value, rank)[-1]
        width = of_value if rank == 4 else divided("value", of_value, N, "num_heads")
    elif columns is not None and (args.past_value is None or width is not None):
        of_value = columns // 3 if width is None else N * width
        H, width = divided("query", columns - of_value, 2 * N, "2·num_heads"), of_value // N
    check_shape(shapes, "bias", args.bias, (product(N, total(H, H, width)),))
    if rank == 3:
        _check_buffer(args, args.past_key)
        _check_beams(shapes, args)
    length = args.past_sequence_length if args.past_present_share_buffer else None
    P: Size = 0
    if rank == 3 and args.past_key is not None:
        P = first(sizes(shapes, args.past_key, 4)[2], sizes(shapes, args.past_value, 4)[2])
        check_shape(shapes, "past_key", args.past_key, (B, N, P, H))
        check_shape(shapes, "past_value", args.past_value, (B, N, P, width))
    keys = sizes(shapes, args.key, 4)[2] if rank == 4 else 1
    _check_mask_of_keys(shapes, args, _Asked(B, N, 1, keys, P), length)


def _check_mask_of_keys(shapes: Shapes, args: Arguments, asked: _Asked, length: Any) -> None:
    """Refuse a mask without a number for each key, and every form that `_Asked.check` refuses."""
    check_shape(shapes, "mask_index", args.mask_index, (None, None))
    asked.check(shapes, "mask_index", args.mask_index, args.attention_bias, length)


def _check_masked_self(shapes: Shapes, args: Arguments) -> None:
    check_shape(shapes, "input", args.input, (None, 1, None))
    H, _ = check_projection(shapes, args.input, args.weights, args.bias, None, args.num_heads)
    N, B = args.num_heads, sizes(shapes, args.input, 3)[0]
    check_shape(shapes, "past", args.past, (2, B, N, None, H))
    if args.do_rotary and H is not None and H % 2:
        raise UnsupportedFormError(f"do_rotary turns heads of {H} elements; it turns an even number")
    _check_beams(shapes, args)
    length = args.past_sequence_length if args.past_present_share_buffer else None
    _check_mask_of_keys(shapes, args, _Asked(B, N, 1, 1, sizes(shapes, args.past, 5)[3]), length)


def _check_decoder(shapes: Shapes, args: Arguments) -> None:
    check_counts(num_heads=args.num_heads)
    _, B, D = sizes(shapes, args.query, 3)
    width = sizes(shapes, args.q_weight, 2)[1]
    H = divided("q_weight", width, args.num_heads, "num_heads")
    for name, *shape in (
        ("query", None, None, None),
        ("key", None, B, D),
        ("q_weight", D, width),
        ("kv_weight", width, product(2, width)),
        ("bias", product(3, width)),
        ("key_cache", B, args.num_heads, None, H),
        ("value_cache", B, args.num_heads, None, H),
        ("key_padding_mask", B, None),
    ):
        check_shape(shapes, name, getattr(args, name), shape)


def _check_longformer(shapes: Shapes, args: Arguments) -> None:
    check_shape(shapes, "input", args.input, (None, None, None))
    B, S, _ = sizes(shapes, args.input, 3)
    check_projection(shapes, args.input, args.weight, args.bias, None, args.num_heads)
    check_projection(shapes, args.input, args.global_weight, args.global_bias, None, args.num_heads)
    check_window(shapes, args, B, S)


def check_window(shapes: Shapes, args: Arguments, batch: Size, length: Size) -> None:
    """Refuse a window that does not divide the tokens of LongformerAttention, and masks of another number of tokens."""
    if args.window < 1 or (length is not None and length % (2 * args.window)):
        raise UnsupportedFormError(
            f"its input has {length} tokens; its length is a multiple of 2·{args.window}, twice the window"
        )
    for name, mask in (("mask", args.mask), ("global", args.global_)):
        check_shape(shapes, name, mask, (batch, length))


def check_attention(shapes: Shapes, args: Arguments) -> None:
    """Refuse inputs of Attention that do not fit each other, and heads that are not turned."""
    num_heads, past = args.num_heads, args.past
    H, width = check_projection(shapes, args.input, args.weights, args.bias, args.qkv_hidden_sizes, num_heads)
    turned = args.rotary_embedding_dim
    if args.do_rotary and turned not in (0, 32, 64, 128):
        raise UnsupportedFormError(f"rotary_embedding_dim is {turned}; it is 0, 32, 64 or 128")
    if args.do_rotary and H is not None and (H % 2 or turned > H):
        raise UnsupportedFormError(
            f"do_rotary turns {turned or H} elements of heads of {H}; it turns an even number, at most {H}"
        )
    B, S, _ = sizes(shapes, args.input, 3)
    check_shape(shapes, "input", args.input, (None, None, None))
    check_shape(shapes, "past", past, (2, B, num_heads, None, H))
    check_shape(shapes, "past", past, (2, B, num_heads, None, width))
    length = args.past_sequence_length if args.past_present_share_buffer else None
    _check_buffer(args, past)
    asked = _Asked(B, num_heads, S, S, 0 if past is None else sizes(shapes, past, 5)[3])
    asked.check(shapes, "mask_index", args.mask_index, args.attention_bias, length)


@body(
    "MultiHeadAttention",
    "output",
    optional=["present_key", "present_value", "qk"],
    others=("key_padding_mask", "past_sequence_length", "cache_indirection"),
    check=_check_multi_head,
    domain=MICROSOFT,
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


@body(
    "Attention",
    "output",
    optional=["present"],
    others=("mask_index", "past_sequence_length"),
    check=check_attention,
    domain=MICROSOFT,
)
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
    length = _count(op, past_sequence_length) if past_present_share_buffer and past_sequence_length else None
    pasts = [None if past is None else op.Gather(past, op.const(np.array(n)), axis=0) for n in (0, 1)]
    none = op.const([0])
    before = none if pasts[0] is None else _size(op, pasts[0], 2) if length is None else length
    if do_rotary:
        cos, sin = _angles(op, q, before, rotary_embedding_dim)
        q, k = (rotated(op, x, cos, sin, 0, bool(rotary_embedding_dim)) for x in (q, k))
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


@body(
    "DecoderMaskedMultiHeadAttention",
    "output",
    optional=["present_key", "present_value", "qk"],
    others=("mask_index", "past_sequence_length", "beam_width", "cache_indirection"),
    check=_check_one_query,
    domain=MICROSOFT,
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
        length = _count(op, past_sequence_length) if past_present_share_buffer and past_sequence_length else None
        k, v = (heads_of(op, plus(op, x, b), num_heads, query) for x, b in ((key, biases[1]), (value, biases[2])))
        keys, present_key = _with_past(op, k, past_key, length, cache_indirection)
        values, present_value = _with_past(op, v, past_value, length, cache_indirection)
    scores = scores_of(op, q, keys, scale)
    scores = _filtered(op, scores, _hidden(op, mask_index, q, keys), mask_filter_value, attention_bias)
    return mixed(op, scores, values), present_key, present_value, scores if output_qk else None


@body(
    "DecoderMaskedSelfAttention",
    "output",
    "present",
    others=("mask_index", "past_sequence_length", "beam_width", "cache_indirection"),
    check=_check_masked_self,
    domain=MICROSOFT,
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
        q, k = (rotated(op, x, cos, sin, 0, False) for x in (q, k))
    keys, present_key = _with_past(op, k, past_key, length, cache_indirection)
    values, present_value = _with_past(op, v, past_value, length, cache_indirection)
    if past_present_share_buffer:
        present_key = _by_packs(op, present_key, packs)
    scores = scores_of(op, q, keys, scale)
    scores = _filtered(op, scores, _hidden(op, mask_index, q, keys), mask_filter_value, attention_bias)
    present = op.Concat(op.Unsqueeze(present_key, [0]), op.Unsqueeze(present_value, [0]), axis=0)
    return mixed(op, scores, values), present


@body(
    "DecoderAttention",
    "output",
    optional=["new_key_cache", "new_value_cache"],
    others=("key_padding_mask", "static_kv", "use_past", "has_layer_state", "has_key_padding_mask"),
    check=_check_decoder,
    domain=MICROSOFT,
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


@body("LongformerAttention", "output", others=("global",), check=_check_longformer, domain=MICROSOFT)
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


def projected(
    op: FunctionEmitter, input: str, weights: str, bias: str | None, qkv_hidden_sizes: Ints | None
) -> list[str]:
    """The parts of input·weights + bias along its last axis: thirds, unless there are sizes."""
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
    rank = known_rank(op, "mask", mask)
    if rank == 1:
        return _outside(op, mask, q, keys, before is not None)
    if rank == 4 and before is not None:  # (B, 1, M, M), for as many tokens as there may be
        ends = op.Concat(op.Add(before, _size(op, q, 2)), _size(op, keys, 2), axis=0)
        mask = op.Slice(mask, op.Concat(before, op.const([0]), axis=0), ends, [2, 3])
    else:
        mask = op.Unsqueeze(mask, [1, 2] if rank == 2 else [1])
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
