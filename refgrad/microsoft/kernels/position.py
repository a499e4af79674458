"""ONNX Runtime's rotary embeddings and position biases."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("RotaryEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def rotary_embedding(args: Arguments) -> Array:
    """Complex numbers, a pair each, times those on the unit circle that their positions name"""
    batch, length = _tokens(args.input)
    if args.position_ids.size == 1 and args.position_ids.ndim < 2:
        positions = np.broadcast_to(args.position_ids.reshape(()) + np.arange(length), (batch, length))
    else:
        positions = args.position_ids
    circle = _circle(args.cos_cache, args.sin_cache)
    if length > len(circle) and not args.is_packed_batching:
        raise ValueError(f"a sequence of {length} is longer than the caches, which have {len(circle)} positions")
    check_indices(positions, len(circle), "position_ids", lowest=0)
    return _turned(args.input, circle[positions], args.num_heads, args.interleaved)


@kernel_of_body("MRotaryEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def multimodal_rotary_embedding(args: Arguments) -> Array:
    """As RotaryEmbedding, where position_ids has three positions of each token, and each pair reads one of them"""
    _, length = _tokens(args.input)
    circle = _circle(args.cos_cache, args.sin_cache)
    pairs = circle.shape[1]
    if length > len(circle) and not args.is_packed_batching:
        raise ValueError(f"a sequence of {length} is longer than the caches, which have {len(circle)} positions")
    check_indices(args.position_ids, len(circle), "position_ids", lowest=0)
    reads = []
    for pair in range(pairs):
        section = next(k for k in range(3) if pair < sum(args.mrope_section[: k + 1]))
        if args.mrope_layout:
            section = pair % 3 if pair < 3 * args.mrope_section[pair % 3] else 0
        reads.append(circle[args.position_ids[section], pair])
    turns = args.scale * (np.stack(reads, 2) if reads else circle[args.position_ids[0]])
    return _turned(args.input, turns, args.num_heads, args.interleaved)


@kernel_of_body("GemmaRotaryEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def gemma_rotary_embedding(args: Arguments) -> tuple[Array, Array]:
    """The same angles for every head"""
    if args.q.ndim != 4:
        raise ValueError(f"q has the shape {list(args.q.shape)}; (batch, heads, sequence, size) is needed")
    check_shape("emb", args.emb.shape, (args.q.shape[0], *args.q.shape[2:]))
    check_shape("q_rot", args.q_rot.shape, args.q.shape)
    check_shape("k", args.k.shape, args.q.shape)
    check_shape("k_rot", args.k_rot.shape, args.k.shape)
    cos, sin = np.cos(args.emb).astype(args.q.dtype), np.sin(args.emb).astype(args.q.dtype)
    one, two = (
        np.einsum("bnsd,bsd->bnsd", x, cos) + np.einsum("bnsd,bsd->bnsd", rotated, sin)
        for x, rotated in ((args.q, args.q_rot), (args.k, args.k_rot))
    )
    return one, two


def _tokens(x: Array) -> tuple[int, int]:
    """The batch and the length of an input that is split into heads already, or is not."""
    return x.shape[0], x.shape[x.ndim - 2]


def _circle(cos: Array, sin: Array) -> Array:
    """cos + i·sin"""
    return np.asarray(cos + 1j * sin)


def _turned(x: Array, turns: Array, num_heads: int, interleaved: int) -> Array:
    """Each head of `x` by `turns` (batch, sequence, pairs)"""
    width = 2 * turns.shape[2]
    size = x.shape[3] if x.ndim == 4 else x.shape[2] // num_heads if num_heads else width
    y = np.array(x)
    heads = y if x.ndim == 4 else y.reshape(*x.shape[:2], -1 if y.size else 0, size).swapaxes(1, 2)
    first = slice(0, width, 2) if interleaved else slice(0, width // 2)
    second = slice(1, width, 2) if interleaved else slice(width // 2, width)
    product = (heads[..., first] + 1j * heads[..., second]) * turns[:, None]
    heads[..., first], heads[..., second] = product.real, product.imag
    return y


@kernel_of_body("RelativePositionBias", domain=MICROSOFT, fresh=True)
def relative_position_bias(args: Arguments) -> Array:
    """A number of the table for each head, query and key: near distances have their own, far ones share by logarithm"""
    if args.bias_table.ndim != 2:
        raise ValueError(f"bias_table has the shape {list(args.bias_table.shape)}; (buckets, heads) is needed")
    for what, given in (("query_length", args.query_length), ("key_length", args.key_length)):
        if given.size != 1 or given.reshape(()) < 0:
            raise ValueError(f"{what} is {given.tolist()}; one number from 0 on is needed")
    queries, keys = int(args.query_length.reshape(())), int(args.key_length.reshape(()))
    if queries != keys:
        raise ValueError(f"query_length is {queries} and key_length {keys}; they are equal")
    buckets = args.bias_table.shape[0] // 2 if args.is_bidirectional else args.bias_table.shape[0]
    exact = buckets // 2
    if exact < 1 or args.max_distance <= exact:
        raise ValueError(
            f"{len(args.bias_table)} buckets and max_distance={args.max_distance}: at least 1 distance, "
            f"and fewer than that, are exact"
        )
    rows = args.bias_table.reshape(args.bias_table.shape[1], args.bias_table.shape[0])
    y = np.empty((1, len(rows), queries, keys), args.bias_table.dtype)
    for query in range(queries):
        for key in range(keys):
            distance = query - key if not args.is_bidirectional else abs(query - key)
            bucket = max(distance, 0)
            if bucket >= exact:
                share = np.log(np.float32(bucket) / np.float32(exact)) / np.log(
                    np.float32(args.max_distance) / np.float32(exact)
                )
                bucket = min(exact + int(share * np.float32(buckets - exact)), buckets - 1)
            y[0, :, query, key] = rows[:, bucket + (buckets if args.is_bidirectional and key > query else 0)]
    return y


@kernel_of_body("GatedRelativePositionBias", domain=MICROSOFT, in_float32=True, fresh=True)
def gated_relative_position_bias(args: Arguments) -> Array:
    """A bias of positions times a gate of each head and query, which its own features open"""
    query = args.query_layer if args.token_offset is None else padded(args.query_layer, args.token_offset)
    if query.ndim != 3 or args.num_heads < 1 or query.shape[2] % args.num_heads:
        raise ValueError(
            f"query_layer has the shape {list(args.query_layer.shape)}; its features are of {args.num_heads} heads"
        )
    batch, length, width = query.shape
    if args.weight.ndim != 2 or args.weight.shape[1] % 2:
        raise ValueError(f"weight has the shape {list(args.weight.shape)}; it has an even number of columns")
    check_shape("query_bias", args.query_bias.shape, (width,))
    check_shape("rel_pos", args.rel_pos.shape, (1, args.num_heads, length, length))
    check_shape("weight", args.weight.shape, (width // args.num_heads, args.weight.shape[1]))
    check_shape("bias", args.bias.shape, args.weight.shape[1:])
    check_shape("eco_a", args.eco_a.shape, (1, args.num_heads, 1, 1))
    heads = (query + args.query_bias).reshape(batch, length, args.num_heads, width // args.num_heads)
    halves = (np.arange(args.weight.shape[1]) >= args.weight.shape[1] // 2).astype(args.weight.dtype)
    opened = [
        sigmoid(np.einsum("bsnh,hd,d->bns", heads, args.weight, half) + args.bias @ half)
        for half in (1 - halves, halves)
    ]
    gate = opened[0] * (opened[1] * args.eco_a.reshape(1, args.num_heads, 1) - 1) + 2
    return np.asarray(np.einsum("bns,nst->bnst", gate, args.rel_pos[0]))


def padded(tokens: Array, token_offset: Array) -> Array:
    """(tokens, width) as (batch, sequence, width), with 0 where there is no token."""
    if tokens.ndim != 2 or token_offset.ndim != 2 or len(tokens) > token_offset.size:
        raise ValueError(
            f"token_offset has the shape {list(token_offset.shape)} and the tokens {list(tokens.shape)}; "
            "(batch, sequence) and (tokens, width) are needed, of no more tokens than places"
        )
    check_indices(token_offset, token_offset.size, "token_offset", lowest=0)
    y = np.zeros((token_offset.size, tokens.shape[1]), tokens.dtype)
    for token, place in enumerate(token_offset.reshape(-1)[: len(tokens)]):
        y[place] = tokens[token]
    return y.reshape(*token_offset.shape, tokens.shape[1])


@kernel_of_body("RMSNormRotary", domain=MICROSOFT, fresh=True)
def rms_norm_rotary(args: Arguments, *, _wide: bool) -> tuple[Array, Array]:
    """A part of each head is normalized and turned, in float32 or with rounding to bfloat16 between the steps"""
    width = args.input_width or args.X.shape[3]
    prefill = 0 if args.prefill_numerics is None else int(args.prefill_numerics.reshape(()))
    if prefill not in (0, 1):
        raise ValueError(f"prefill_numerics is {prefill}; it is 0 or 1")
    batch, length, heads, _ = args.X.shape
    count = (1, batch * length) if args.flatten_batch else (batch, length)
    if args.position_ids.size == 1 and args.position_ids.ndim < 2:
        positions = np.broadcast_to(args.position_ids.reshape(()) + np.arange(count[1]), count)
    else:
        positions = args.position_ids.reshape(count)
    check_indices(positions, len(args.cosine), "position_ids", lowest=0)
    short = np.dtype(ml_dtypes.bfloat16)
    rounds = not args.output_fp16 and args.X.dtype == short and args.cosine.dtype == short
    wide = np.dtype(np.float64 if _wide else np.float32)
    x = args.X[..., args.input_start : args.input_start + width].astype(wide)
    normalized = x * args.scale / np.sqrt(np.mean(np.square(x), 3, keepdims=True) + wide.type(args.epsilon))
    if rounds:
        normalized = normalized.astype(short).astype(wide)
    y = normalized.reshape(*count, heads, width).copy()
    half = args.rotary_embedding_dim // 2
    cos, sin = (cache[positions][:, :, None].astype(wide) for cache in (args.cosine, args.sine))
    a, b = y[..., :half].copy(), y[..., half : args.rotary_embedding_dim].copy()
    products = [a * cos, b * sin, b * cos, a * sin]
    if rounds and (prefill or not args.use_fp32_arithmetic):
        products = [product.astype(short).astype(wide) for product in products]
    y[..., :half], y[..., half : args.rotary_embedding_dim] = products[0] - products[1], products[2] + products[3]
    kind = wide if _wide else np.dtype(np.float16) if args.output_fp16 else short
    return y.reshape(*count, heads * width).astype(kind), normalized
