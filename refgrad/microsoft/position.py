"""ONNX Runtime's rotary embeddings and position biases."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.tables.definitions import FLOATS, Ints, UnsupportedFormError, operator

_MOST_PAIRS = 2**16  # of a head


@operator("RotaryEmbedding", "output", others=("position_ids",))
def rotary_embedding(
    op: FunctionEmitter,
    input: str,
    position_ids: str,
    cos_cache: str,
    sin_cache: str,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> str:
    """Pairs (a, b) of each head turned to (a·cos − b·sin, a·sin + b·cos), by the angles of their position

    Kernels read is_packed_batching only to allow more tokens than positions, and do not read scale at all.
    """
    known_rank(op, "position_ids", position_ids)
    if op.rank(position_ids) == 2:  # (batch, sequence)
        positions = position_ids
    else:  # the position of the first token
        rank = known_rank(op, "input", input, 3, 4)
        length = op.Squeeze(op.Shape(input, start=rank - 2, end=rank - 1), [0])
        positions = op.Add(op.Reshape(position_ids, [1, 1]), op.Range(_number(op, 0), length, _number(op, 1)))
    cos, sin = (op.Gather(cache, positions, axis=0) for cache in (cos_cache, sin_cache))
    return _in_heads(op, input, cos, sin, num_heads, rotary_embedding_dim, interleaved)


@operator("MRotaryEmbedding", "output", others=("position_ids",))
def multimodal_rotary_embedding(
    op: FunctionEmitter,
    input: str,
    position_ids: str,
    cos_cache: str,
    sin_cache: str,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    mrope_section: Ints,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> str:
    """RotaryEmbedding where each pair has one of three positions, of time, height and width; what is turned times scale"""
    if not num_heads and known_rank(op, "input", input, 3, 4) == 3:
        raise UnsupportedFormError("an input of rank 3 needs num_heads; add it")
    if len(mrope_section) != 3 or min(mrope_section) < 0 or sum(mrope_section) > _MOST_PAIRS:
        given = list(mrope_section)
        raise UnsupportedFormError(
            f"mrope_section is {given}; it has three counts of pairs, of at most {_MOST_PAIRS} together"
        )
    times, heights, widths = mrope_section
    stream = np.repeat([0, 1, 2], mrope_section)
    if mrope_layout:
        stream = np.zeros(times + heights + widths, np.int64)
        for k in (1, 2):
            stream[k : 3 * mrope_section[k] : 3] = k
    chosen = []
    for cache in (cos_cache, sin_cache):
        of_time, of_height, of_width = (
            op.Gather(cache, op.Gather(position_ids, _number(op, k), axis=0), axis=0) for k in range(3)
        )
        by_space = op.Where(op.const(stream == 1), of_height, of_width)
        each = op.Where(op.const(stream == 0), of_time, by_space)
        chosen.append(each if scale == 1 else op.Mul(each, scale))
    cos, sin = chosen
    return _in_heads(op, input, cos, sin, num_heads, rotary_embedding_dim, interleaved)


@operator("GemmaRotaryEmbedding", "output1", "output2", types={"emb": FLOATS})
def gemma_rotary_embedding(op: FunctionEmitter, emb: str, q: str, q_rot: str, k: str, k_rot: str) -> tuple[str, str]:
    """q·cos(emb) + q_rot·sin(emb), and the same of k: the angles of all heads are equal"""
    cos, sin = (op.Unsqueeze(op.CastLike(x, q), [1]) for x in (op.Cos(emb), op.Sin(emb)))
    one, two = (op.Add(op.Mul(x, cos), op.Mul(rotated, sin)) for x, rotated in ((q, q_rot), (k, k_rot)))
    return one, two


@operator("RelativePositionBias", "output", others=("query_length", "key_length"))
def relative_position_bias(
    op: FunctionEmitter,
    bias_table: str,
    query_length: str,
    key_length: str,
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> str:
    """bias_table at the bucket of each key's distance from the query, as T5 does it; the table holds a row of buckets a head"""
    queries, keys = (op.Range(_number(op, 0), op.Reshape(n, []), _number(op, 1)) for n in (query_length, key_length))
    distance = op.Sub(op.Unsqueeze(keys, [0]), op.Unsqueeze(queries, [1]))
    shape = op.Shape(bias_table)
    buckets = op.Gather(shape, _number(op, 0))
    if is_bidirectional:
        buckets = op.Div(buckets, 2)
        first = op.Mul(op.Cast(op.Greater(distance, 0), to=TensorProto.INT64), buckets)
        distance = op.Abs(distance)
    else:
        first = _number(op, 0)
        distance = op.Max(op.Neg(distance), _number(op, 0))
    exact = op.Div(buckets, 2)  # distances with a bucket of their own
    wide = op.Cast(exact, to=TensorProto.FLOAT)
    beyond = op.Max(op.Cast(distance, to=TensorProto.FLOAT), wide)
    share = op.Div(op.Log(op.Div(beyond, wide)), op.Log(op.Div(op.const(float(max_distance), like=wide), wide)))
    more = op.Cast(op.Mul(share, op.Cast(op.Sub(buckets, exact), to=TensorProto.FLOAT)), to=TensorProto.INT64)
    far = op.Min(op.Add(exact, more), op.Sub(buckets, 1))
    bucket = op.Add(op.Where(op.Less(distance, exact), distance, far), first)
    by_head = op.Reshape(
        bias_table, op.Concat(op.Slice(shape, [1], [2]), op.Slice(shape, [0], [1]), axis=0), allowzero=1
    )
    return op.Unsqueeze(op.Gather(by_head, bucket, axis=1), [0])


@operator("GatedRelativePositionBias", "output", others=("token_offset",))
def gated_relative_position_bias(
    op: FunctionEmitter,
    query_layer: str,
    query_bias: str,
    rel_pos: str,
    weight: str,
    bias: str,
    eco_a: str,
    token_offset: str | None = None,
    *,
    num_heads: int,
) -> str:
    """rel_pos·(u·(r·eco_a − 1) + 2), with a gate (u, r) for each head and query

    u and r are the sigmoids of the sums of the first and the second half of (query_layer + query_bias)·weight + bias.
    """
    query = query_layer if token_offset is None else restored(op, query_layer, token_offset)
    heads = op.Transpose(split_heads(op, op.Add(query, query_bias), num_heads), perm=[0, 2, 1, 3])
    gates = op.Add(op.MatMul(heads, weight), bias)
    half = op.Div(op.Shape(gates, start=3), [2])
    sums = (op.Slice(gates, [0], half, [3]), op.Slice(gates, half, [END], [3]))
    u, r = (op.Sigmoid(op.ReduceSum(x, [3])) for x in sums)
    return op.Mul(op.Add(op.Mul(u, op.Sub(op.Mul(r, eco_a), 1.0)), 2.0), rel_pos)


_SHORT = ("tensor(bfloat16)", "tensor(float16)")


@operator(
    "RMSNormRotary",
    "Y",
    optional=["normalized_fp32"],
    others=("position_ids", "prefill_numerics"),
    types={
        "X": _SHORT,
        "scale": ("tensor(float)",),
        "cosine": ("tensor(bfloat16)", "tensor(float)"),
        "sine": "cosine",
        "Y": _SHORT,
        "normalized_fp32": "scale",
    },
)
def rms_norm_rotary(
    op: FunctionEmitter,
    X: str,
    scale: str,
    position_ids: str,
    cosine: str,
    sine: str,
    prefill_numerics: str | None = None,
    *,
    epsilon: float = 1e-6,
    flatten_batch: int = 0,
    input_start: int = 0,
    input_width: int = 0,
    output_fp16: int = 0,
    rotary_embedding_dim: int,
    use_fp32_arithmetic: int = 1,
) -> tuple[str, str]:
    """RotaryEmbedding of x/√(mean x² + ε)·scale, of which x is a part of X along its last axis

    Where X, Y and the caches are all of bfloat16, normalized values are rounded to it, as are the products that turn them in
    prefill, or without use_fp32_arithmetic.
    """
    if rotary_embedding_dim < 2 or rotary_embedding_dim % 2:
        raise UnsupportedFormError(f"rotary_embedding_dim is {rotary_embedding_dim}; it is even and positive")
    for name, given in (("input_start", input_start), ("input_width", input_width)):
        if not 0 <= given < 2**31:
            raise UnsupportedFormError(f"{name} is {given}; it is from 0 to {2**31 - 1}")
    kind = TensorProto.FLOAT16 if output_fp16 else TensorProto.BFLOAT16
    rounds = all(k == TensorProto.BFLOAT16 for k in (op.type(X), op.type(cosine), kind))
    x = op.Cast(
        op.Slice(X, [input_start], [input_start + input_width if input_width else END], [3]), to=TensorProto.FLOAT
    )
    r = op.Sqrt(op.Add(op.reduce("ReduceMean", op.Mul(x, x), [3]), epsilon))
    normalized = op.Mul(op.Div(x, r), scale)
    if rounds:
        normalized = op.Cast(op.Cast(normalized, to=kind), to=TensorProto.FLOAT)
    shape = op.Shape(X, end=2)
    if flatten_batch:
        shape = op.Concat(op.const([1]), op.Mul(op.Shape(X, end=1), op.Shape(X, start=1, end=2)), axis=0)
    if known_rank(op, "position_ids", position_ids) == 2:
        positions = op.Reshape(position_ids, shape, allowzero=1)
    else:
        length = op.Gather(shape, _number(op, 1))
        positions = op.Add(op.Reshape(position_ids, [1, 1]), op.Range(_number(op, 0), length, _number(op, 1)))
    heads = op.Reshape(normalized, op.Concat(shape, op.Shape(normalized, start=2), axis=0), allowzero=1)
    cos, sin = (op.Unsqueeze(op.Gather(cache, positions, axis=0), [2]) for cache in (cosine, sine))
    wide = turned(op, heads, op.Cast(cos, to=TensorProto.FLOAT), op.Cast(sin, to=TensorProto.FLOAT), 0, True)
    y = op.Cast(wide, to=kind)
    if rounds and (prefill_numerics is not None or not use_fp32_arithmetic):
        rounded = turned(op, op.Cast(heads, to=kind), cos, sin, 0, True)
        prefill = op.const(np.array(True))
        if use_fp32_arithmetic:
            assert prefill_numerics is not None
            prefill = op.Cast(op.Reshape(prefill_numerics, op.const(np.zeros(0, np.int64))), to=TensorProto.BOOL)
        y = op.Where(prefill, rounded, y)
    width = op.Mul(op.Shape(y, start=2, end=3), op.Shape(y, start=3))
    return op.Reshape(y, op.Concat(shape, width, axis=0), allowzero=1), normalized


def known_rank(op: FunctionEmitter, name: str, value: str, *valid: int) -> int:
    """The rank of the input called `name`, which is one of `valid` where any are given."""
    rank = op.rank(value)
    if rank is None:
        raise UnsupportedFormError(f"the rank of its input {name} is unknown; add it to value_info")
    if valid and rank not in valid:
        raise UnsupportedFormError(f"its input {name} is of rank {rank}; it has {' or '.join(map(str, valid))} axes")
    return rank


def check_counts(**counts: int) -> None:
    """Refuse counts of heads below 1 or above 2³¹ − 1: ONNX Runtime reads them as 32 bits."""
    for name, count in counts.items():
        if not 1 <= count < 2**31:
            raise UnsupportedFormError(f"{name} is {count}; it is from 1 to {2**31 - 1}")


def split_heads(op: FunctionEmitter, x: str, num_heads: int, beside: str | None = None) -> str:
    """(batch, length, heads·size) to (batch, length, heads, size), where any size except the number of heads may be 0.

    :param beside: a value whose batch x has to have: the Reshape fails where x would be broadcast.
    """
    check_counts(num_heads=num_heads)
    size = op.Div(op.Shape(x, start=2, end=3), [num_heads])
    rows = [op.Shape(x, end=2)]
    if beside is not None:
        rows = [op.Shape(beside, end=1), op.Shape(x, start=1, end=2)]
    return op.Reshape(x, op.Concat(*rows, [num_heads], size, axis=0), allowzero=1)


def restored(op: FunctionEmitter, tokens: str, token_offset: str) -> str:
    """(tokens, width) to (batch, sequence, width): of token_offset, the first are the places of the tokens."""
    width = op.Shape(tokens, start=1)
    places = op.Slice(op.Reshape(token_offset, [-1]), [0], op.Shape(tokens, end=1), [0])
    size = op.Concat(op.Reshape(op.Size(token_offset), [1]), width, axis=0)
    empty = op.Expand(op.const(0.0, like=tokens), size)
    padded = op.ScatterND(empty, op.Unsqueeze(op.Cast(places, to=TensorProto.INT64), [1]), tokens)
    return op.Reshape(padded, op.Concat(op.Shape(token_offset), width, axis=0), allowzero=1)


def turned(op: FunctionEmitter, x: str, cos: str, sin: str, interleaved: int, partial: bool) -> str:
    """Pairs in the last of four axes by their angles; `partial`: there may be elements after them, which stay."""
    half = op.Shape(cos, start=-1)
    width = op.Add(half, half)
    if interleaved:
        a, b = op.Slice(x, [0], width, [3], [2]), op.Slice(x, [1], width, [3], [2])
    else:
        a, b = op.Slice(x, [0], half, [3]), op.Slice(x, half, width, [3])
    pair = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(a, sin), op.Mul(b, cos))
    if interleaved:
        y = op.Concat(*(op.Unsqueeze(part, [4]) for part in pair), axis=4)
        y = op.Reshape(y, op.Concat(op.Shape(x, end=3), width, axis=0), allowzero=1)
    else:
        y = op.Concat(*pair, axis=3)
    return op.Concat(y, op.Slice(x, width, [END], [3]), axis=3) if partial else y


def _in_heads(
    op: FunctionEmitter, x: str, cos: str, sin: str, num_heads: int, rotary_embedding_dim: int, interleaved: int
) -> str:
    """x (batch, length, heads·size) or (batch, heads, length, size) by the cos and sin of (batch, length, pairs)."""
    if rotary_embedding_dim and not num_heads:
        raise UnsupportedFormError("rotary_embedding_dim needs num_heads; add it")
    if known_rank(op, "input", x, 3, 4) == 4:
        return turned(op, x, op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1]), interleaved, bool(rotary_embedding_dim))
    if num_heads:
        heads = split_heads(op, x, num_heads)
    else:
        size = op.Mul(op.Shape(cos, start=-1), [2])
        count = op.Div(op.Shape(x, start=2), size)
        heads = op.Reshape(x, op.Concat(op.Shape(x, end=2), count, size, axis=0), allowzero=1)
    y = turned(op, heads, op.Unsqueeze(cos, [2]), op.Unsqueeze(sin, [2]), interleaved, bool(rotary_embedding_dim))
    return op.Reshape(y, op.Shape(x), allowzero=1)


def _number(op: FunctionEmitter, n: int) -> str:
    """An integer without axes."""
    return op.const(np.array(n))
