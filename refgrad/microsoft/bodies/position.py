"""ONNX Runtime's rotary embeddings and position biases."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.microsoft.declared import Size, check_flags, check_shape, product, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import FLOATS, Ints, Shapes

_MOST_PAIRS = 2**16  # pairs of a head


def _check_turned(shapes: Shapes, args: Arguments) -> tuple[Size, Size]:
    """Refuse heads and caches that do not fit the input. Returns the batch and the length."""
    heads, dim, rank = args.num_heads, args.rotary_embedding_dim, shapes.rank(args.input)
    if rank not in (None, 3, 4):
        raise UnsupportedFormError(f"its input input is of rank {rank}; it has 3 or 4 axes")
    if heads:
        check_counts(num_heads=heads)
    elif dim:
        raise UnsupportedFormError("rotary_embedding_dim needs num_heads; add it")
    if dim < 0 or dim % 2:
        raise UnsupportedFormError(f"rotary_embedding_dim is {dim}; pairs need an even number from 0 on")
    check_shape(shapes, "cos_cache", args.cos_cache, (None, None))
    check_shape(shapes, "sin_cache", args.sin_cache, sizes(shapes, args.cos_cache, 2))
    if rank is None:
        return None, None
    batch, *_, last = given = sizes(shapes, args.input, rank)
    width = product(2, sizes(shapes, args.cos_cache, 2)[1])
    if rank == 3 and (by := heads or width) and last is not None and last % by:
        raise UnsupportedFormError(
            f"num_heads={heads}, or heads of {width}, do not divide the {last} features of input"
        )
    size = last if rank == 4 else width if not heads else None if last is None else last // heads
    turned = dim or size
    if width is not None and turned is not None and (turned != width or (size is not None and turned > size)):
        raise UnsupportedFormError(
            f"caches of {width // 2} pairs turn {width} elements, and {turned} of {size} are to be turned"
        )
    return batch, given[-2]


def _check_rotary(shapes: Shapes, args: Arguments) -> None:
    check_shape(shapes, "position_ids", args.position_ids, (), (1,), _check_turned(shapes, args))


def _check_sections(shapes: Shapes, args: Arguments) -> None:
    if not args.num_heads and shapes.rank(args.input) == 3:
        raise UnsupportedFormError("an input of rank 3 needs num_heads; add it")
    check_flags(args, "mrope_layout")
    check_shape(shapes, "position_ids", args.position_ids, (3, *_check_turned(shapes, args)))
    given, pairs = list(args.mrope_section), sizes(shapes, args.cos_cache, 2)[1]
    if len(given) != 3 or min(given) < 0 or sum(given) > _MOST_PAIRS:
        raise UnsupportedFormError(
            f"mrope_section is {given}; it has three counts of pairs, of at most {_MOST_PAIRS} together"
        )
    if pairs not in (None, sum(given)):
        raise UnsupportedFormError(f"mrope_section is {given}; its counts of pairs add up to {pairs}")


@body("RotaryEmbedding", "output", others=("position_ids",), check=_check_rotary, domain=MICROSOFT)
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
    """Pairs (a, b) of each head become (a·cos − b·sin, a·sin + b·cos), with the angles of their position

    ONNX Runtime's kernels ignore scale. is_packed_batching only allows more tokens than positions.
    """
    known_rank(op, "position_ids", position_ids)
    if op.rank(position_ids) == 2:  # (batch, sequence)
        positions = position_ids
    else:  # one number: the position of the first token
        rank = known_rank(op, "input", input)
        length = op.Squeeze(op.Shape(input, start=rank - 2, end=rank - 1), [0])
        positions = op.Add(op.Reshape(position_ids, [1, 1]), op.Range(_number(op, 0), length, _number(op, 1)))
    cos, sin = (op.Gather(cache, positions, axis=0) for cache in (cos_cache, sin_cache))
    return _rotated_heads(op, input, cos, sin, num_heads, rotary_embedding_dim, interleaved)


@body("MRotaryEmbedding", "output", others=("position_ids",), check=_check_sections, domain=MICROSOFT)
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
    """RotaryEmbedding times scale, where each pair has the angles of one of three positions: time, height or width"""
    times, heights, widths = mrope_section
    which = np.repeat([0, 1, 2], mrope_section)  # the position of each pair: 0 is time, 1 height, 2 width
    if mrope_layout:  # interleaved: time, height, width, time, height, width, ...
        which = np.zeros(times + heights + widths, np.int64)
        for k in (1, 2):
            which[k : 3 * mrope_section[k] : 3] = k
    cos_and_sin = []
    for cache in (cos_cache, sin_cache):
        of_time, of_height, of_width = (
            op.Gather(cache, op.Gather(position_ids, _number(op, k), axis=0), axis=0) for k in range(3)
        )
        of_space = op.Where(op.const(which == 1), of_height, of_width)
        of_pair = op.Where(op.const(which == 0), of_time, of_space)
        cos_and_sin.append(of_pair if scale == 1 else op.Mul(of_pair, scale))
    cos, sin = cos_and_sin
    return _rotated_heads(op, input, cos, sin, num_heads, rotary_embedding_dim, interleaved)


@body("GemmaRotaryEmbedding", "output1", "output2", types={"emb": FLOATS}, domain=MICROSOFT)
def gemma_rotary_embedding(op: FunctionEmitter, emb: str, q: str, q_rot: str, k: str, k_rot: str) -> tuple[str, str]:
    """q·cos(emb) + q_rot·sin(emb), and the same with k; all heads have the same angles"""
    cos, sin = (op.Unsqueeze(op.CastLike(x, q), [1]) for x in (op.Cos(emb), op.Sin(emb)))
    new_q, new_k = (op.Add(op.Mul(x, cos), op.Mul(rotated, sin)) for x, rotated in ((q, q_rot), (k, k_rot)))
    return new_q, new_k


@body("RelativePositionBias", "output", others=("query_length", "key_length"), domain=MICROSOFT)
def relative_position_bias(
    op: FunctionEmitter,
    bias_table: str,
    query_length: str,
    key_length: str,
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> str:
    """The bias of each head for the bucket of the distance between query and key, as in T5

    The schema declares bias_table as (buckets, heads), but the kernel reads the same memory as (heads, buckets).
    """
    queries, keys = (op.Range(_number(op, 0), op.Reshape(n, []), _number(op, 1)) for n in (query_length, key_length))
    distance = op.Sub(op.Unsqueeze(keys, [0]), op.Unsqueeze(queries, [1]))
    shape = op.Shape(bias_table)
    buckets = op.Gather(shape, _number(op, 0))
    if is_bidirectional:  # the second half of the buckets is for keys after the query
        buckets = op.Div(buckets, 2)
        first = op.Mul(op.Cast(op.Greater(distance, 0), to=TensorProto.INT64), buckets)
        distance = op.Abs(distance)
    else:
        first = _number(op, 0)
        distance = op.Max(op.Neg(distance), _number(op, 0))
    # Each distance below `exact` has a bucket of its own. Larger distances, up to max_distance, share the others: their buckets
    # have equal widths in the logarithm of the distance.
    exact = op.Div(buckets, 2)
    exact_float = op.Cast(exact, to=TensorProto.FLOAT)
    large = op.Max(op.Cast(distance, to=TensorProto.FLOAT), exact_float)
    fraction = op.Div(
        op.Log(op.Div(large, exact_float)),
        op.Log(op.Div(op.const(float(max_distance), like=exact_float), exact_float)),
    )
    steps = op.Cast(op.Mul(fraction, op.Cast(op.Sub(buckets, exact), to=TensorProto.FLOAT)), to=TensorProto.INT64)
    large_bucket = op.Min(op.Add(exact, steps), op.Sub(buckets, 1))
    bucket = op.Add(op.Where(op.Less(distance, exact), distance, large_bucket), first)
    by_head = op.Reshape(  # (heads, buckets), without a transposition
        bias_table, op.Concat(op.Slice(shape, [1], [2]), op.Slice(shape, [0], [1]), axis=0), allowzero=1
    )
    return op.Unsqueeze(op.Gather(by_head, bucket, axis=1), [0])


@body("GatedRelativePositionBias", "output", others=("token_offset",), domain=MICROSOFT)
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
    query = query_layer if token_offset is None else with_padding(op, query_layer, token_offset)
    heads = op.Transpose(split_heads(op, op.Add(query, query_bias), num_heads), perm=[0, 2, 1, 3])
    gates = op.Add(op.MatMul(heads, weight), bias)
    half = op.Div(op.Shape(gates, start=3), [2])
    sums = (op.Slice(gates, [0], half, [3]), op.Slice(gates, half, [END], [3]))
    u, r = (op.Sigmoid(op.ReduceSum(x, [3])) for x in sums)
    return op.Mul(op.Add(op.Mul(u, op.Sub(op.Mul(r, eco_a), 1.0)), 2.0), rel_pos)


_16_BIT = ("tensor(bfloat16)", "tensor(float16)")


def _check_norm_rotary(shapes: Shapes, args: Arguments) -> None:
    check_shape(shapes, "X", args.X, (None,) * 4)
    batch, length, _, stride = sizes(shapes, args.X, 4)
    for name in ("input_start", "input_width"):
        if not 0 <= getattr(args, name) < 2**31:
            raise UnsupportedFormError(f"{name} is {getattr(args, name)}; it is from 0 to {2**31 - 1}")
    width, turned = args.input_width or stride, args.rotary_embedding_dim
    if width is not None and stride is not None and args.input_start + width > stride:
        raise UnsupportedFormError(
            f"input_start={args.input_start} and a width of {width}: a head of X has {stride} elements"
        )
    if turned < 2 or turned % 2 or (width is not None and turned > width):
        most = "" if width is None else f", up to {width}"
        raise UnsupportedFormError(f"rotary_embedding_dim is {turned}; it is even and positive{most}")
    if not 0 <= args.epsilon < math.inf:
        raise UnsupportedFormError(f"epsilon is {args.epsilon}; it is finite and not negative")
    check_shape(shapes, "scale", args.scale, (width,))
    check_shape(shapes, "cosine", args.cosine, (None, turned // 2))
    check_shape(shapes, "sine", args.sine, sizes(shapes, args.cosine, 2))
    check_shape(shapes, "position_ids", args.position_ids, (), (1,), (batch, length))


@body(
    "RMSNormRotary",
    "Y",
    optional=["normalized_fp32"],
    others=("position_ids", "prefill_numerics"),
    types={
        "X": _16_BIT,
        "scale": ("tensor(float)",),
        "cosine": ("tensor(bfloat16)", "tensor(float)"),
        "sine": "cosine",
        "Y": _16_BIT,
        "normalized_fp32": "scale",
    },
    check=_check_norm_rotary,
    domain=MICROSOFT,
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
    """RotaryEmbedding of x/√(mean x² + ε)·scale, where x is a slice of X along its last axis

    If X, Y and the caches are all bfloat16, normalized values are rounded to bfloat16. The products of the rotation are rounded
    too in prefill, or without use_fp32_arithmetic.
    """
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
    in_float = rotated(op, heads, op.Cast(cos, to=TensorProto.FLOAT), op.Cast(sin, to=TensorProto.FLOAT), 0, True)
    y = op.Cast(in_float, to=kind)
    if rounds and (prefill_numerics is not None or not use_fp32_arithmetic):
        rounded = rotated(op, op.Cast(heads, to=kind), cos, sin, 0, True)
        prefill = op.const(np.array(True))
        if use_fp32_arithmetic:
            assert prefill_numerics is not None
            prefill = op.Cast(op.Reshape(prefill_numerics, op.const(np.zeros(0, np.int64))), to=TensorProto.BOOL)
        y = op.Where(prefill, rounded, y)
    width = op.Mul(op.Shape(y, start=2, end=3), op.Shape(y, start=3))
    return op.Reshape(y, op.Concat(shape, width, axis=0), allowzero=1), normalized


def known_rank(op: FunctionEmitter, name: str, value: str, *valid: int) -> int:
    """The rank of the input called `name`.

    :param valid: the ranks that are supported, by default all.
    :raises UnsupportedFormError: the rank is unknown, or not supported.
    """
    rank = op.rank(value)
    if rank is None:
        raise UnsupportedFormError(f"the rank of its input {name} is unknown; add it to value_info")
    if valid and rank not in valid:
        raise UnsupportedFormError(f"its input {name} is of rank {rank}; it has {' or '.join(map(str, valid))} axes")
    return rank


def check_counts(**counts: int) -> None:
    """Refuse counts of heads below 1 or above 2³¹ − 1, since ONNX Runtime stores them in 32 bits."""
    for name, count in counts.items():
        if not 1 <= count < 2**31:
            raise UnsupportedFormError(f"{name} is {count}; it is from 1 to {2**31 - 1}")


def split_heads(op: FunctionEmitter, x: str, num_heads: int, beside: str | None = None) -> str:
    """(batch, length, heads·size) to (batch, length, heads, size). Any size except the number of heads may be 0.

    :param beside: a value with the same batch. If the batch of x differs, the Reshape fails, instead of a later broadcast.
    """
    check_counts(num_heads=num_heads)
    size = op.Div(op.Shape(x, start=2, end=3), [num_heads])
    rows = [op.Shape(x, end=2)]
    if beside is not None:
        rows = [op.Shape(beside, end=1), op.Shape(x, start=1, end=2)]
    return op.Reshape(x, op.Concat(*rows, [num_heads], size, axis=0), allowzero=1)


def with_padding(op: FunctionEmitter, tokens: str, token_offset: str) -> str:
    """(tokens, width) to (batch, sequence, width), with 0 for padding.

    :param token_offset: (batch, sequence). Its first elements are the positions of the tokens in batch·sequence.
    """
    width = op.Shape(tokens, start=1)
    positions = op.Slice(op.Reshape(token_offset, [-1]), [0], op.Shape(tokens, end=1), [0])
    size = op.Concat(op.Reshape(op.Size(token_offset), [1]), width, axis=0)
    empty = op.Expand(op.const(0.0, like=tokens), size)
    padded = op.ScatterND(empty, op.Unsqueeze(op.Cast(positions, to=TensorProto.INT64), [1]), tokens)
    return op.Reshape(padded, op.Concat(op.Shape(token_offset), width, axis=0), allowzero=1)


def rotated(op: FunctionEmitter, x: str, cos: str, sin: str, interleaved: int, partial: bool) -> str:
    """x with the pairs in its last axis rotated by their angles. x has four axes.

    :param interleaved: 0: a pair has one element of the first half and one of the second, 1: two neighbours.
    :param partial: elements may follow the pairs. They stay as they are.
    """
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


def _rotated_heads(
    op: FunctionEmitter, x: str, cos: str, sin: str, num_heads: int, rotary_embedding_dim: int, interleaved: int
) -> str:
    """x with the pairs of each head rotated.

    :param x: (batch, length, heads·size) or (batch, heads, length, size).
    :param cos: and `sin`: (batch, length, pairs).
    """
    if known_rank(op, "input", x) == 4:
        return rotated(op, x, op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1]), interleaved, bool(rotary_embedding_dim))
    if num_heads:
        heads = split_heads(op, x, num_heads)
    else:
        size = op.Mul(op.Shape(cos, start=-1), [2])
        count = op.Div(op.Shape(x, start=2), size)
        heads = op.Reshape(x, op.Concat(op.Shape(x, end=2), count, size, axis=0), allowzero=1)
    y = rotated(op, heads, op.Unsqueeze(cos, [2]), op.Unsqueeze(sin, [2]), interleaved, bool(rotary_embedding_dim))
    return op.Reshape(y, op.Shape(x), allowzero=1)


def _number(op: FunctionEmitter, n: int) -> str:
    """An integer as a scalar."""
    return op.const(np.array(n))
